"""After a failed attempt the second-best holder of the prefix is next, not just anybody else."""

import pytest

from broker.core.decisions import Dispatch, HeldBy
from broker.core.policy import PolicyName
from broker.wire.messages import Reason
from tests.unit.core.breaker_world import COMPLETED, BreakerWorld, retried
from tests.unit.core.routing_builders import BLOCK_TOKENS, CACHE_AWARE, chain

FAILED = retried(Reason.ENGINE_FAILED)
PREFIX = 40


def ask(world: BreakerWorld, name: str = "ask") -> Dispatch:
    """Let a job with the whole prefix come; it goes at once."""
    blocks = chain(("system", PREFIX), (name, 2))
    world.submit(prompt_tokens=(len(blocks)) * BLOCK_TOKENS + 32, blocks=blocks)
    return world.running[f"acme.j{world.jobs}"]


def again(world: BreakerWorld, dispatch: Dispatch) -> Dispatch:
    """Let its attempt fail, and the back-off pass."""
    world.end(dispatch.key, **FAILED)
    world.wait(0.5)
    return world.running[dispatch.key]


def a_fleet(routing: PolicyName = "first_token", **fields: int) -> BreakerWorld:
    """Four idle workers: w0 holds the whole prefix, w1 three quarters of it, w2 and w3 nothing."""
    world = BreakerWorld(**{"workers": 4, "slots": 2, **fields}, routing=routing)
    world.warm("w0", chain(("system", PREFIX)))
    world.warm("w1", chain(("system", 30)))
    return world


@pytest.mark.parametrize("routing", CACHE_AWARE)
def test_a_retry_goes_to_the_second_best_holder(routing: PolicyName) -> None:
    """The best fails: the next in depth, then the others, and nobody twice."""
    world = a_fleet(routing)
    first = ask(world)
    assert (first.worker, first.predicted_hit_tokens) == ("w0", PREFIX * BLOCK_TOKENS)
    second = again(world, first)
    assert (second.worker, second.predicted_hit_tokens) == ("w1", 30 * BLOCK_TOKENS)
    third = again(world, second)
    fourth = again(world, third)
    assert {third.worker, fourth.worker} == {"w2", "w3"}


@pytest.mark.parametrize("routing", CACHE_AWARE)
@pytest.mark.parametrize("holders", [3, 6, 30])
def test_among_many_equal_holders_a_retry_stays_among_them(
    routing: PolicyName, holders: int
) -> None:
    """A few, more than are listed, or a crowd: as long as one is left, it is a holder."""
    world = BreakerWorld(workers=40, slots=2, routing=routing)
    warm = {f"w{2 * n % 39}" for n in range(holders)}
    for name in sorted(warm):
        world.warm(name, chain(("system", PREFIX)))
    dispatch = ask(world)
    seen = [dispatch.worker]
    for _ in range(min(holders, 6) - 1):
        dispatch = again(world, dispatch)
        seen.append(dispatch.worker)
    assert set(seen) <= warm
    assert len(set(seen)) == len(seen)
    if holders == len(seen):
        assert again(world, dispatch).worker not in warm


def test_a_retry_waits_for_the_second_best_holder() -> None:
    """Without room it is held for, as any best worker is, while two cold ones are idle."""
    world = a_fleet()
    first = ask(world)
    world.submit(prompt_tokens=1500, blocks=chain(("system", 22)))
    while not world.keys_at("w1"):
        world.submit(prompt_tokens=2000)
    world.end(first.key, **FAILED)
    world.wait(0.25)
    why = world.scheduler.views.why(first.key)
    assert why is not None
    assert (why.leased, why.held_by, why.excluded) == (False, HeldBy.AFFINITY, ("w0",))
    for key in world.keys_at("w1"):
        world.end(key, **COMPLETED)
    assert world.running[first.key].worker == "w1"


@pytest.mark.parametrize("routing", CACHE_AWARE)
def test_with_the_best_holders_breaker_open_the_second_best_serves(routing: PolicyName) -> None:
    """Of a sick holder's prefix the next holder takes the jobs, not whoever is idle."""
    world = a_fleet(routing, failures_max=1)
    second = again(world, ask(world))
    assert second.worker == "w1"
    world.end(second.key, **COMPLETED)
    fresh = ask(world, "another")
    assert (fresh.worker, fresh.predicted_hit_tokens) == ("w1", PREFIX * BLOCK_TOKENS)
