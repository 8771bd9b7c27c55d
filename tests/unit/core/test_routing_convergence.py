"""Prompts find a home: engines with one sequence a slot, 20 system prompts, 4 workers of 6
slots.
"""

import pytest

from broker.core.policy import PolicyName, RoutingPolicy
from tests.unit.core.slot_world import Outcome, SlotWorld


def _run(policy: PolicyName, seed: int) -> Outcome:
    return SlotWorld(RoutingPolicy(policy=policy), seed=seed).run()


@pytest.mark.parametrize("policy", ["first_token", "weighted"])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_prompt_comes_to_live_on_one_or_two_workers(policy: PolicyName, seed: int) -> None:
    """Against round robin the cached share at least doubles and the median first token comes in
    half the time, while no worker gets half as much again as its share.
    """
    ours, theirs = _run(policy, seed), _run("round_robin", seed)
    assert ours.cached_ratio >= 2 * theirs.cached_ratio
    assert sorted(ours.ttft_s)[120] <= 0.5 * sorted(theirs.ttft_s)[120]
    homes = [len(workers) for workers in ours.homes.values()]
    assert sum(homes) / len(homes) <= 1.6
    assert max(ours.jobs.values()) <= 1.5 * 240 / 4


def test_round_robin_shares_evenly() -> None:
    """The baseline gives each worker the same number of jobs."""
    assert set(_run("round_robin", 1).jobs.values()) == {60}
