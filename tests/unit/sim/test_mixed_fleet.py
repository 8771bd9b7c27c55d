"""Workers that differ: each gets what it can do, through the settings of a run."""

import random

import pytest

from broker.engine_model.profile import A100_QWEN_32B, H100X2_LLAMA_70B
from broker.sim.contestants import contestant, run_world
from broker.sim.request import Request
from broker.sim.runs import Setting
from broker.sim.world import World

FAST, SLOW = 0, 2
MIXED = Setting(
    profiles=(H100X2_LLAMA_70B, H100X2_LLAMA_70B, A100_QWEN_32B, A100_QWEN_32B),
)


def some_requests(count: int, *, per_s: float, system_prompts: int) -> list[Request]:
    """Prompts of 2,000 tokens, three quarters of them shared, at random instants."""
    rng = random.Random(7)
    at_s = 0.0
    made: list[Request] = []
    for index in range(count):
        at_s += rng.expovariate(per_s)
        system = rng.randrange(system_prompts)
        made.append(
            Request(
                index=index,
                at_s=at_s,
                prompt_tokens=2_000,
                output_tokens=100,
                output_tokens_max=200,
                blocks=(*range(10 * system, 10 * system + 3), 1_000_000 + index),
                block_tokens=500,
            )
        )
    return made


def a_run(label: str, *, per_s: float) -> World:
    """Run some requests on the mixed fleet."""
    requests = some_requests(800, per_s=per_s, system_prompts=20)
    world = World(requests, profiles=MIXED.fleet(), journal=contestant(label).is_ours)
    run_world(world, contestant(label), lanes=("main",), seed=1, network=MIXED.network)
    return world


def given_to(world: World) -> list[int]:
    """Count the requests of each worker."""
    return [list(world.records.host).count(host.number) for host in world.hosts]


@pytest.mark.parametrize("label", ["first_token", "weighted"])
@pytest.mark.parametrize("per_s", [2.0, 20.0, 40.0])
def test_fast_workers_get_more(label: str, per_s: float) -> None:
    """At any load each fast worker is given more than any slow one."""
    given = given_to(a_run(label, per_s=per_s))
    assert min(given[FAST:SLOW]) > 2 * max(given[SLOW:])


@pytest.mark.parametrize("label", ["first_token", "weighted"])
def test_no_worker_starves(label: str) -> None:
    """With more to do than the fast ones can, the slow ones compute all the time, too."""
    world = a_run(label, per_s=40.0)
    assert all(host.busy_s > 0.85 * world.at_s for host in world.hosts)


def test_slow_workers_hold_nobody_up() -> None:
    """Where turns in order queue for half a minute at the slow workers, ours takes under two."""
    ours, in_turn = a_run("first_token", per_s=20.0), a_run("round-robin", per_s=20.0)
    assert _worst_ttft_s(ours) < 2.0
    assert _worst_ttft_s(in_turn) > 30.0


def _worst_ttft_s(world: World) -> float:
    records = world.records
    return max(
        first_s - arrived_s
        for first_s, arrived_s in zip(records.first_token_s, records.arrived_s, strict=True)
    )
