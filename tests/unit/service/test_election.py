"""Who leads: one at a time, found again after a crash, given up in time."""

import asyncio

import pytest

from broker.bus.base import BucketSpec
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.election import STEP_DOWN_SHARE, Election, Term, leader_now
from broker.wire.subjects import LEADER_BUCKET, LEADER_KEY
from tests.turns import until

TTL_S = 5.0


async def a_bus(clock: ManualClock) -> MemoryBus:
    """A bus with the leader's bucket."""
    bus = MemoryBus(clock=clock)
    await bus.ensure_bucket(BucketSpec(name=LEADER_BUCKET))
    return bus


def an_election(bus: MemoryBus, clock: ManualClock, *, broker: str = "b1") -> Election:
    """A candidate on the bus's own clock."""
    return Election(bus, broker=broker, ttl_s=TTL_S, now=clock.now_s)


async def renewed(bus: MemoryBus, term: Term) -> bool:
    """Whether the key was renewed since it was won."""
    return (await bus.kv_get(LEADER_BUCKET, LEADER_KEY)).revision > term.epoch


async def test_the_first_wins_and_its_epoch_is_the_revision_of_its_key() -> None:
    """The epoch is unique and rises: the server made it."""
    clock = ManualClock()
    bus = await a_bus(clock)
    term = await an_election(bus, clock).win()
    entry = await bus.kv_get(LEADER_BUCKET, LEADER_KEY)
    assert term.epoch == entry.revision
    now = await leader_now(bus)
    assert now is not None
    assert (now[0].broker, now[1]) == ("b1", term.epoch)


async def test_renewals_keep_the_epoch() -> None:
    """The revision rises with each renewal; the epoch in the value does not."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    term = await election.win()
    keeping = asyncio.create_task(election.keep(term))
    await until(lambda: renewed(bus, term))
    now = await leader_now(bus)
    assert now is not None
    assert now[1] == term.epoch
    keeping.cancel()


async def test_a_second_candidate_wins_when_the_first_resigns() -> None:
    """A graceful stop hands over at once, to a higher epoch."""
    clock = ManualClock()
    bus = await a_bus(clock)
    first = an_election(bus, clock)
    term = await first.win()
    waiting = asyncio.create_task(an_election(bus, clock, broker="b2").win())
    await asyncio.sleep(0)
    assert not waiting.done()
    await first.resign()
    assert (await waiting).epoch > term.epoch


async def test_the_key_of_a_dead_leader_runs_out_after_its_life() -> None:
    """No renewal for T, and the key is free."""
    clock = ManualClock()
    bus = await a_bus(clock)
    await an_election(bus, clock).win()
    clock.advance(TTL_S + 0.1)
    assert await leader_now(bus) is None


async def test_a_leader_cut_off_steps_down_before_its_key_is_free() -> None:
    """At 0.8 T without a renewal it stops by itself: nobody else can have won yet."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    term = await election.win()
    bus.disconnect()
    clock.advance(TTL_S * STEP_DOWN_SHARE)
    keeping = asyncio.create_task(election.keep(term))
    await asyncio.sleep(0)
    clock.advance(TTL_S * STEP_DOWN_SHARE)
    await asyncio.wait_for(keeping, 10)


async def test_a_leader_whose_key_was_taken_steps_down() -> None:
    """A paused leader that wakes after another won leads no more."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    term = await election.win()
    clock.advance(TTL_S + 0.1)
    await an_election(bus, clock, broker="b2").win()
    await asyncio.wait_for(election.keep(term), 10)


async def test_a_lost_answer_to_a_renewal_is_not_a_lost_leadership() -> None:
    """The renewal was stored and its answer lost: the newer revision is found to be our own."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    term = await election.win()
    keeping = asyncio.create_task(election.keep(term))
    await until(lambda: renewed(bus, term))
    keeping.cancel()
    entry = await bus.kv_get(LEADER_BUCKET, LEADER_KEY)
    await bus.kv_update(
        LEADER_BUCKET, LEADER_KEY, entry.value, revision=entry.revision, ttl_s=TTL_S
    )
    again = asyncio.create_task(election.keep(term))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(again), 0.05)
    again.cancel()
