"""Who leads: one at a time, found again after a crash, given up in time."""

import asyncio

import pytest

from broker.bus.base import BucketSpec, BusError, LinkDown, Timeout
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.election import STEP_DOWN_SHARE, STUCK_LIVES, Election, Term, leader_now
from broker.wire.codec import encode
from broker.wire.messages import Leader
from broker.wire.subjects import LEADER_BUCKET, LEADER_KEY
from tests.crashing import Failing, Gate, faulty
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


async def test_a_key_that_cannot_be_read_tells_of_no_leader() -> None:
    """Garbage in the bucket is nobody's leadership, and runs out as any key."""
    clock = ManualClock()
    bus = await a_bus(clock)
    await bus.kv_create(LEADER_BUCKET, LEADER_KEY, b"\xc1", ttl_s=TTL_S)
    assert await leader_now(bus) is None


async def test_an_election_that_the_server_does_not_answer_is_held_again() -> None:
    """The bus is away at the first try."""
    clock = ManualClock()
    bus = await a_bus(clock)
    failing = Failing("kv_create", Timeout("slow"))
    election = Election(faulty(bus, failing), broker="b1", ttl_s=TTL_S, now=clock.now_s)
    term = await asyncio.wait_for(election.win(), 5)
    assert (failing.raised, term.epoch > 0) == (1, True)


@pytest.mark.parametrize("error", [Timeout("slow"), BusError("the server's own trouble")])
async def test_a_renewal_that_fails_once_is_tried_again(error: BusError) -> None:
    """Two tries may fail before the key is lost."""
    clock = ManualClock()
    bus = await a_bus(clock)
    failing = Failing("kv_update", error)
    election = Election(faulty(bus, failing), broker="b1", ttl_s=0.3, now=clock.now_s)
    term = await election.win()
    keeping = asyncio.create_task(election.keep(term))
    await asyncio.wait_for(until(lambda: renewed(bus, term)), 5)
    assert failing.raised == 1
    keeping.cancel()


async def test_a_key_that_is_gone_is_a_lost_leadership() -> None:
    """Deleted by hand, say: the leader steps down, and all stand again."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    term = await election.win()
    await bus.kv_delete(LEADER_BUCKET, LEADER_KEY)
    await asyncio.wait_for(election.keep(term), 10)


async def test_a_leader_that_cannot_look_keeps_its_key_until_its_time_is_over() -> None:
    """Lost or not is unknown: 0.8 T decides, not a failed look."""
    clock = ManualClock()
    bus = await a_bus(clock)
    failing = Failing("kv_get", Timeout("slow"), times=999)
    election = Election(faulty(bus, failing), broker="b1", ttl_s=0.3, now=clock.now_s)
    term = await election.win()
    await bus.kv_put(LEADER_BUCKET, LEADER_KEY, b"\xc1")
    keeping = asyncio.create_task(election.keep(term))
    await asyncio.wait_for(until(lambda: failing.raised > 1), 5)
    assert not keeping.done()
    clock.advance(0.3)
    await asyncio.wait_for(keeping, 5)


async def test_a_resignation_that_cannot_be_sent_leaves_the_key_to_run_out() -> None:
    """The link is down: nothing else can be done."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    await election.win()
    link = faulty(bus, Failing("kv_delete", LinkDown("cut")))
    election._bus = link
    await election.resign()
    assert await leader_now(bus) is not None


async def test_a_stop_in_the_midst_of_a_renewal_hands_over_at_once() -> None:
    """The renewal is stored, its answer never heard: the key at its new revision is freed.

    Chaos, seed 203: two of seven leaders that were asked to end left their key to run out.
    """
    clock = ManualClock()
    bus = await a_bus(clock)
    gate = Gate("kv_update", when="after")
    election = Election(faulty(bus, gate), broker="b1", ttl_s=TTL_S, now=clock.now_s)
    term = await election.win()
    keeping = asyncio.create_task(election.keep(term))
    await gate.reached.wait()
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await election.resign()
    assert await leader_now(bus) is None


async def test_a_resignation_leaves_the_key_of_another_alone() -> None:
    """Who lost it has nothing to hand over."""
    clock = ManualClock()
    bus = await a_bus(clock)
    election = an_election(bus, clock)
    await election.win()
    clock.advance(TTL_S + 0.1)
    other = await an_election(bus, clock, broker="b2").win()
    await election.resign()
    leads = await leader_now(bus)
    assert leads is not None
    assert leads == (Leader(broker="b2"), other.epoch)


async def test_a_renewals_time_is_told_while_it_lasts_and_after_it() -> None:
    """It is what the `store` watchdog looks at; whoever leads no more says nothing of it."""
    clock = ManualClock()
    bus = await a_bus(clock)
    gate = Gate("kv_update")
    election = Election(faulty(bus, gate), broker="b1", ttl_s=TTL_S, now=clock.now_s)
    term = await election.win()
    assert election.write_s == 0.0
    keeping = asyncio.create_task(election.keep(term))
    await gate.reached.wait()
    clock.advance(0.7)
    assert election.write_s == pytest.approx(0.7)
    clock.advance(0.2)
    gate.open.set()
    await until(lambda: election._writing_since_s is None)
    assert election.write_s == pytest.approx(0.9)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    await election.resign()
    assert election.write_s == 0.0


async def test_a_key_that_is_neither_renewed_nor_freed_is_told() -> None:
    """A server that was full stores nothing and frees nothing; a standby says so, and since when.

    A tmpfs filled up under nats-server 2.15: no broker led again, and none said why.
    """
    clock = ManualClock()
    bus = await a_bus(clock)
    await bus.kv_put(LEADER_BUCKET, LEADER_KEY, encode(Leader(broker="dead", epoch=1)))
    election = an_election(bus, clock)
    waiting = asyncio.create_task(election.win())
    for _ in range(STUCK_LIVES):
        await until(lambda: election._seen.look_at_s > clock.now_s())
        assert election.stuck == ""
        clock.advance(TTL_S)
    await until(lambda: bool(election.stuck))
    assert "neither renewed nor freed" in election.stuck
    await bus.kv_delete(LEADER_BUCKET, LEADER_KEY)
    await asyncio.wait_for(waiting, 5)
    assert election.stuck == ""


async def test_a_key_that_is_renewed_is_no_trouble() -> None:
    """A standby looks for many lives of a living leader's key."""
    clock = ManualClock()
    bus = await a_bus(clock)
    await bus.kv_put(LEADER_BUCKET, LEADER_KEY, encode(Leader(broker="b2", epoch=1)))
    election = an_election(bus, clock)
    waiting = asyncio.create_task(election.win())
    for _ in range(3 * STUCK_LIVES):
        await until(lambda: election._seen.look_at_s > clock.now_s())
        await bus.kv_put(LEADER_BUCKET, LEADER_KEY, encode(Leader(broker="b2", epoch=1)))
        clock.advance(TTL_S)
    assert election.stuck == ""
    waiting.cancel()


async def test_a_key_that_can_not_be_made_is_told() -> None:
    """The bucket is there, and the server answers no write to it for two lives of the key."""
    clock = ManualClock()
    bus = await a_bus(clock)
    failing = Failing("kv_create", Timeout("no answer"), times=999)
    election = Election(faulty(bus, failing), broker="b1", ttl_s=TTL_S, now=clock.now_s)
    waiting = asyncio.create_task(election.win())
    await until(lambda: failing.raised > 0)
    assert election.stuck == ""
    clock.advance(STUCK_LIVES * TTL_S)
    await until(lambda: bool(election.stuck))
    assert "stores no leader's key (no answer)" in election.stuck
    waiting.cancel()
