"""Records leave RESULTS once they are counted, and not while their job may run again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from broker.bus.memory import MemoryBus
from broker.bus.usage import Counted
from broker.service.accounting import Accounting
from broker.wire import subjects
from broker.wire.codec import encode
from producers.batches.clearing import Clearing, Record
from tests.accounts import Clerk, a_terminal_record, accounts, set_up, store, total
from tests.builders import LANE, MODEL, a_job
from tests.turns import until


@asynccontextmanager
async def a_clearing(bus: MemoryBus) -> AsyncGenerator[Clearing]:
    """At work."""
    clearing = Clearing(bus, LANE, after_s=0.001)
    working = asyncio.create_task(clearing.run())
    yield clearing
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)


def an_accountant(bus: MemoryBus, clerk: Clerk) -> Accounting:
    """A leader's duty, done by hand."""
    return Accounting(bus, results_age_s_max={LANE: 1e6}, hears=clerk, now=lambda: 0.0)


async def left(bus: MemoryBus) -> int:
    """Records that stand."""
    return (await bus.stream_state(subjects.results_stream(LANE))).messages


async def test_a_record_goes_once_it_is_counted() -> None:
    """All of a chunk's: and the chunk is told as cleared."""
    bus = MemoryBus()
    await set_up(bus)
    clerk = Clerk(bus)
    for job in ("a", "b"):
        await store(bus, a_terminal_record(job))
    async with a_clearing(bus) as clearing:
        await clearing.add([Record("a", 0), Record("b", 0)], is_output=True, sequence=7)
        # Many looks of the clearing later, nothing has gone: nobody has counted.
        asked = bus.server.stream("KV_USAGE")
        await until(lambda: clearing._counted._asked_at_s > 0)
        assert asked.last_sequence == 0
        assert (await left(bus), clearing.cleared_output) == (2, 0)
        await an_accountant(bus, clerk).count(LANE)
        await clearing.drained()
        assert (await left(bus), clearing.cleared_output) == (0, 7)
    assert total(await accounts(bus)) == 2
    await an_accountant(bus, clerk).count(LANE)
    assert clerk.gone == 0


async def test_a_record_stays_while_its_jobs_message_does() -> None:
    """Counted or not."""
    bus = MemoryBus()
    await set_up(bus)
    stored = await bus.append(subjects.jobs(LANE, 3, MODEL), encode(a_job(id="a", band=3)))
    await store(bus, a_terminal_record("a"))
    await an_accountant(bus, Clerk(bus)).count(LANE)
    async with a_clearing(bus) as clearing:
        await clearing.add([Record("a", stored.sequence)], is_output=False, sequence=3)
        await until(lambda: clearing._chunks[0].stands_at is not None)
        assert await left(bus) == 1
        await bus.delete_message(stored.stream, stored.sequence)
        await clearing.drained()
        assert (await left(bus), clearing.cleared_errors) == (0, 3)


async def test_without_accounts_nothing_is_waited_for() -> None:
    """Where no broker has made their bucket, nobody will ever count."""
    bus = MemoryBus()
    assert await Counted(bus, LANE, every_s=0.0).has(10**9)
    await set_up(bus)
    assert not await Counted(bus, LANE, every_s=0.0).has(1)


async def test_the_server_is_asked_no_more_often_than_told() -> None:
    """And not at all for what is known to be counted."""
    bus = MemoryBus()
    await set_up(bus)
    await store(bus, a_terminal_record("a"))
    counted = Counted(bus, LANE, every_s=1e6)
    assert not await counted.has(1)
    await an_accountant(bus, Clerk(bus)).count(LANE)
    assert not await counted.has(1)
    later = Counted(bus, LANE, every_s=0.0)
    assert await later.has(1)
    assert await later.last_sequence() == 1
