"""What comes again after a takeover: recorded jobs are acknowledged, the rest keeps its order."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.bus.base import Bus, Timeout
from broker.bus.memory import MemoryBus
from broker.service import redelivered as module
from broker.service.redelivered import Redelivered
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Kind, StoredEnd, TerminalRecord
from tests.builders import LANE, a_job
from tests.clusters import a_chat, a_cluster, until
from tests.crashing import Failing, Gate, faulty
from tests.leaders import ADDRESS, OTHER_LANE, a_delivery, a_desk


class Door:
    """Takes what `Redelivered` hands on."""

    def __init__(self, bus: Bus, *, mark: int) -> None:
        self.taken: list[int] = []
        self.settled: list[str] = []
        self.looking = Redelivered(
            bus,
            take=lambda _, delivery: self.taken.append(delivery.sequence),
            settled=lambda _, __, job, ___: self.settled.append(job.id),
        )
        self.looking.expect({ADDRESS: mark})

    def came(self, *sequences: int) -> None:
        """Bring messages of jobs `j<sequence>`."""
        self.looking.came(
            ADDRESS,
            [a_delivery(a_job(id=f"j{number}"), sequence=number) for number in sequences],
        )


async def recorded(bus: Bus, job_id: str, kind: Kind = Kind.COMPLETED) -> None:
    """Let a job's record stand."""
    record = TerminalRecord(job=job_id, lane=LANE, kind=kind, ended_at_s=1.0)
    await bus.append(subjects.result(LANE, job_id), encode(record))


@asynccontextmanager
async def a_door(*, mark: int, fault: Gate | Failing | None = None) -> AsyncGenerator[Door]:
    """A lane's streams, and a door that looks at what comes up to `mark`."""
    async with a_desk() as desk:
        bus: MemoryBus = desk.bus
        door = Door(faulty(bus, fault) if fault else bus, mark=mark)
        await recorded(bus, "j2")
        await recorded(bus, "j9")
        work = asyncio.create_task(door.looking.run())
        yield door
        work.cancel()


async def test_only_what_was_delivered_before_is_looked_for() -> None:
    """A job beyond the mark is new: nothing of it can stand."""
    async with a_door(mark=3) as door:
        door.came(1, 2, 3, 9)
        await until(lambda: door.taken == [1, 3, 9])
        assert door.settled == ["j2"]
        door.came(9)
        assert door.taken[-1] == 9


async def test_what_comes_behind_waits_for_its_turn() -> None:
    """Older jobs go first, however long their look takes."""
    gate = Gate("last_message")
    async with a_door(mark=3, fault=gate) as door:
        door.came(1)
        await gate.reached.wait()
        door.came(3, 8)
        await asyncio.sleep(0)
        assert door.taken == []
        gate.open.set()
        await until(lambda: door.taken == [1, 3, 8])


async def test_more_than_are_looked_for_at_once_are_all_handed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LOOKS_AT_ONCE_MAX bounds the burst, not the jobs."""
    monkeypatch.setattr(module, "LOOKS_AT_ONCE_MAX", 3)
    async with a_door(mark=20) as door:
        door.came(*range(1, 21))
        await until(lambda: len(door.taken) == 18)
        assert door.taken == [number for number in range(1, 21) if number not in (2, 9)]


async def test_a_server_that_does_not_tell_keeps_no_job_back() -> None:
    """Its agent looks for the record, too."""
    async with a_door(mark=3, fault=Failing("last_message", Timeout("slow"), times=9)) as door:
        door.came(1, 2)
        await until(lambda: door.taken == [1, 2])
        assert door.settled == []


async def test_what_is_no_job_and_dead_letters_go_the_usual_way() -> None:
    """The intake ends the one, and knows whether the other's letter was written."""
    async with a_desk() as desk:
        door = Door(desk.bus, mark=9)
        await recorded(desk.bus, "j1", Kind.DEAD_LETTERED)
        work = asyncio.create_task(door.looking.run())
        door.looking.came(ADDRESS, [a_delivery(b"garbage", sequence=5)])
        door.looking.came(ADDRESS, [a_delivery(a_job(lane=OTHER_LANE, id="j"), sequence=6)])
        door.came(1)
        await until(lambda: door.taken == [5, 6, 1])
        assert door.settled == []
        work.cancel()


async def test_a_job_recorded_while_nobody_led_is_acknowledged_by_the_next_leader(
    tmp_path: Path,
) -> None:
    """Its worker died before the ack: nobody has to run it again, and its caller is told."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        told: list[bytes] = []
        ticket = await client.submit(a_chat(), band=2, job_id="j2")
        waits = await client.submit(a_chat(), band=2, job_id="waits")
        first = cluster.members[0]
        await until(lambda: len(first.leader.shelf) == 2)
        await first.kill()
        await recorded(cluster.bus, "j2")
        await cluster.bus.subscribe(
            subjects.out(LANE, "client-1", "j2"), lambda message: told.append(message.data)
        )
        second = await cluster.start_broker("b2")
        await second.ready()
        async with asyncio.timeout(10):
            assert (await ticket.result()).kind is Kind.COMPLETED
            while await cluster.queued() != 1:
                await asyncio.sleep(0.005)
        assert told == [encode(StoredEnd(job="j2"))]
        assert [held.job_id for held in second.leader.shelf.jobs()] == ["waits"]
        assert await waits.cancel()
