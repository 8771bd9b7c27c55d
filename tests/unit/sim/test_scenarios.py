"""What the shipped policy must reach in three scenarios, in the small; the report has the large.

Each is a bound that a change of the policy must keep, not a record of its present figures.
"""

import random
from functools import cache

import pytest
from msgspec.structs import replace

from broker.engine_model.profile import DEMO, REFERENCE, Profile
from broker.sim.contestants import contestant
from broker.sim.figures import Figures
from broker.sim.load import ALL_AT_ONCE_SPEED
from broker.sim.network import Network
from broker.sim.request import Workload
from broker.sim.runs import Setting, run
from broker.sim.workload.generated import alternating, shared_prompts
from broker.sim.workload.loading import load

OURS = ("first_token", "weighted")


def figures_of(label: str, workload: Workload, setting: Setting, *, seed: int = 0) -> Figures:
    """Run a policy and return its figures."""
    return run(workload, contestant(label), setting, seed=seed).figures


# ---- shared system prompts -----------------------------------------------------------------------

PROMPTS = 20
PROMPT_TOKENS = 2000
QUESTION_TOKENS = 50
ROOM_PROMPTS = 5
SEQUENCE_TOKENS = 2304
"""A system prompt, its longest question and answer, in whole blocks."""

SHARED_PROMPTS = Setting(
    workers=8,
    blocks_per_worker=ROOM_PROMPTS * SEQUENCE_TOKENS // DEMO.block_tokens,
    profile=DEMO,
)


def first_token_s(profile: Profile, uncached_tokens: int) -> float:
    """Return how long the first token of a prompt takes on an engine with nothing else to do."""
    return profile.prefill_alone_s(uncached_tokens) + profile.decode_s.at(0.0)


@cache
def shared_load() -> Workload:
    """Return short questions behind one of 20 prompts, at 60 % of what round robin can do."""
    workload = shared_prompts(
        random.Random(1),
        prompts=PROMPTS,
        prompt_tokens=PROMPT_TOKENS,
        question_tokens=QUESTION_TOKENS,
        requests=1000,
        requests_per_s=1.0,
    )
    full = replace(SHARED_PROMPTS, speed=ALL_AT_ONCE_SPEED)
    capacity = figures_of("round-robin", workload, full)
    speed = 0.6 * capacity.requests / capacity.span_s
    requests = [replace(one, at_s=one.at_s / speed) for one in workload.requests]
    return replace(workload, requests=requests)


def test_a_cached_prompt_is_worth_eight_times_its_first_token() -> None:
    """On this engine the first token of a whole prompt takes at least 8 times that of a question.

    And the cluster has room for the prompts, while no worker has.
    """
    cold_s = first_token_s(DEMO, PROMPT_TOKENS + QUESTION_TOKENS)
    warm_tokens = PROMPT_TOKENS % DEMO.block_tokens + QUESTION_TOKENS
    assert cold_s / first_token_s(DEMO, warm_tokens) >= 8
    kv_tokens_max = SHARED_PROMPTS.fleet()[0].kv_tokens_max
    assert kv_tokens_max // SEQUENCE_TOKENS == ROOM_PROMPTS
    assert ROOM_PROMPTS < PROMPTS <= ROOM_PROMPTS * SHARED_PROMPTS.workers


@pytest.mark.parametrize("label", OURS)
@pytest.mark.parametrize("seed", [0, 1])
def test_shared_prompts_answer_five_times_sooner_than_in_turn(label: str, seed: int) -> None:
    """TTFT p50 is at least five times better than round robin's, and the mean with it."""
    in_turn = figures_of("round-robin", shared_load(), SHARED_PROMPTS, seed=seed)
    ours = figures_of(label, shared_load(), SHARED_PROMPTS, seed=seed)
    assert in_turn.ttft_s.p50 >= 5 * ours.ttft_s.p50
    assert in_turn.ttft_s.mean >= 5 * ours.ttft_s.mean
    assert ours.cached_token_ratio > 0.9


# ---- late reports --------------------------------------------------------------------------------


@cache
def at_lag(label: str, lag_s: float) -> Figures:
    """Run the shipped excerpt three times as fast as recorded, with heartbeats that come late."""
    setting = Setting(speed=3.0, network=Network(report_lag_s=lag_s))
    return figures_of(label, load("excerpt:conversation"), setting)


@pytest.mark.parametrize("label", OURS)
@pytest.mark.parametrize("lag_s", [1.0, 5.0])
def test_late_reports_cost_little(label: str, lag_s: float) -> None:
    """TTFT p99 is within 15 % of that without lag: the mind counts what it gave by itself."""
    timely, late = at_lag(label, 0.0), at_lag(label, lag_s)
    assert late != timely
    assert late.ttft_s.p99 <= 1.15 * timely.ttft_s.p99
    assert late.reruns == 0


# ---- alternating equal loads ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "prompts", "requests_per_s"),
    [
        (REFERENCE, 2, 10.0),
        (REFERENCE, 2, 80.0),
        (REFERENCE, 8, 40.0),
        (DEMO, 2, 10.0),
        (DEMO, 8, 20.0),
    ],
    ids=lambda value: value.name if isinstance(value, Profile) else f"{value:g}",
)
def test_a_hot_prefix_stays_while_its_worker_has_room(
    profile: Profile, prompts: int, requests_per_s: float
) -> None:
    """Prompts in strict turns, loads that stay equal: under 1 % of requests switch worker."""
    workload = alternating(
        random.Random(1), prompts=prompts, requests=1000, requests_per_s=requests_per_s
    )
    setting = Setting(
        workers=8,
        blocks_per_worker=profile.kv_tokens_max // profile.block_tokens,
        profile=profile,
    )
    figures = figures_of("first_token", workload, setting)
    assert figures.hot_switch_ratio < 0.01
    assert figures.cached_token_ratio > 0.9


def test_equal_loads_do_make_others_switch() -> None:
    """The load tempts: where only the counts decide, most requests of a hot prefix switch."""
    workload = alternating(random.Random(1), requests=1000, requests_per_s=80.0)
    assert figures_of("least-requests", workload, Setting()).hot_switch_ratio > 0.5
    assert figures_of("lmetric", workload, Setting()).hot_switch_ratio > 0.5
