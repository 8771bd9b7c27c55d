"""Records leave RESULTS once their lines stand and their messages are gone."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from broker.bus import topology
from broker.bus.base import Bus, Timeout
from broker.bus.memory import MemoryBus
from broker.bus.topology import DAY_S, Bounds, LanePlan
from broker.wire import subjects
from producers.batches import clearing
from producers.batches.clearing import Clearing
from producers.batches.copies import Copies
from tests.builders import LANE, MODEL
from tests.crashing import Failing, faulty
from tests.lanes import until
from tests.stored_batches import a_batch, count_all, count_up_to

RESULTS = subjects.results_stream(LANE)

BATCH = "batch_1"


@asynccontextmanager
async def a_clearing(bus: Bus) -> AsyncGenerator[Clearing]:
    """A clearing at work on a lane that is set up."""
    await topology.apply(bus, topology.of([LanePlan(LANE, (MODEL,))], Bounds()))
    await count_all(bus)
    copies = Copies(bus, a_batch(id=BATCH, window_s=30 * DAY_S, created_at_s=time.time()))
    await copies.look()
    made = Clearing(bus, LANE, lambda number: f"b-{number}", after_s=0.01, copies=copies)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(made.run())
        yield made
        running.cancel()


async def a_record(bus: Bus, number: int) -> None:
    """The record of a line's job."""
    await bus.append(subjects.result(LANE, f"b-{number}"), b"record")


async def a_message(bus: Bus) -> int:
    """A job's message; its sequence."""
    return (await bus.append(subjects.jobs(LANE, 3, MODEL), b"job")).sequence


async def left(bus: Bus) -> int:
    """Records that stand."""
    return (await bus.stream_state(RESULTS)).messages


async def test_records_of_a_chunk_leave() -> None:
    """Those, and no others; then the chunk is done with."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        for number in range(1, 6):
            await a_record(bus, number)
        await cleared.add([(1, 0), (2, 0)], is_output=True, sequence=7)
        await cleared.add([(3, 0), (9, 0)], is_output=False, sequence=8)
        await cleared.drained()
        assert (cleared.cleared_output, cleared.cleared_errors, cleared.removed) == (7, 8, 3)
        assert await left(bus) == 2


async def test_copies_go_with_their_records() -> None:
    """Also where the record is gone already; other lines' stay."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        for number in (1, 2, 3):
            await bus.append(subjects.line_copy(LANE, BATCH, number), b"record")
        await a_record(bus, 1)
        await cleared.add([(1, 0), (2, 0)], is_output=True, sequence=7)
        await cleared.drained()
        stream = subjects.files_stream(LANE)
        assert list(await bus.subject_counts(stream)) == [subjects.line_copy(LANE, BATCH, 3)]


async def test_a_record_stays_while_its_message_is_there() -> None:
    """Its job might run again: only once the message has left may the record go."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        for number in (1, 2):
            await a_record(bus, number)
        older, message = await a_message(bus), await a_message(bus)
        gone = await a_message(bus)
        stream = subjects.jobs_stream(LANE, 3)
        await bus.delete_message(stream, gone)
        await cleared.add([(1, message), (2, gone)], is_output=True, sequence=7)
        await until(lambda: cleared.removed == 1)
        await asyncio.sleep(0.05)
        assert (cleared.removed, cleared.cleared_output) == (1, 0)
        await bus.delete_message(stream, message)
        await cleared.drained()
        assert (cleared.cleared_output, await left(bus)) == (7, 0)
        assert (await bus.message_at(stream, older)).data == b"job"


async def test_a_record_stays_until_the_accounts_have_it() -> None:
    """Counted up to the one before, it stays; counted, it goes."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        await count_up_to(bus, 1)
        await a_record(bus, 1)
        await cleared.add([(1, 0)], is_output=True, sequence=7)
        await cleared.drained()
        await a_record(bus, 2)
        await cleared.add([(2, 0)], is_output=True, sequence=8)
        await asyncio.sleep(0.05)
        assert (cleared.cleared_output, await left(bus)) == (7, 1)
        await count_up_to(bus, 2)
        await cleared.drained()
        assert await left(bus) == 0


async def test_a_server_in_trouble_is_asked_again() -> None:
    """No record is left behind for an answer that was lost."""
    bus = MemoryBus()
    failing = Failing("purge", Timeout("lost"), times=3)
    async with a_clearing(faulty(bus, failing)) as cleared:
        await a_record(bus, 1)
        await cleared.add([(1, 0)], is_output=True, sequence=7)
        await cleared.drained()
        assert (failing.raised, await left(bus)) == (3, 0)


async def test_chunks_are_done_with_in_order() -> None:
    """A later one whose records left first does not hide the earlier one from the next runner."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        message = await a_message(bus)
        await cleared.add([(1, message)], is_output=True, sequence=7)
        await cleared.add([(2, 0)], is_output=True, sequence=8)
        await asyncio.sleep(0.05)
        assert cleared.cleared_output == 0
        await bus.delete_message(subjects.jobs_stream(LANE, 3), message)
        await cleared.drained()
        assert cleared.cleared_output == 8


async def test_so_many_wait_at_most() -> None:
    """Then whoever brings more waits too."""
    bus = MemoryBus()
    async with a_clearing(bus) as cleared:
        message = await a_message(bus)
        many = clearing.WAITING_MAX + 1
        await cleared.add(((1, message) for _ in range(many)), is_output=True, sequence=7)
        adding = asyncio.create_task(cleared.add([(2, 0)], is_output=True, sequence=8))
        done, _ = await asyncio.wait([adding], timeout=0.05)
        assert not done
        adding.cancel()
