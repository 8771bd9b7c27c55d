"""An auditor beside a real cluster: hears all callers' subjects, then reads all that is durable."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Self

from broker.bus.base import Bus, BusError, Message
from broker.wire import subjects
from broker.wire.codec import decode, decode_out
from broker.wire.ids import BANDS
from broker.wire.messages import End, Kind, Started, StoredEnd, TerminalRecord


@dataclass(slots=True)
class Audit:
    """What was told, and what stands."""

    bus: Bus
    started: Counter[str] = field(default_factory=Counter[str])
    """Dispatches accepted, per caller's subject."""
    ended: Counter[str] = field(default_factory=Counter[str])
    first_start: asyncio.Event = field(default_factory=asyncio.Event)

    async def begin(self) -> Self:
        """Start hearing."""
        await self.bus.subscribe(subjects.ALL_OUT, self._hear)
        return self

    def _hear(self, message: Message) -> None:
        match decode_out(message.data):
            case Started():
                self.started[message.subject] += 1
                self.first_start.set()
            case End() | StoredEnd():
                self.ended[message.subject] += 1
            case _:
                pass

    @property
    def reruns(self) -> int:
        """Dispatches beyond each job's first."""
        return sum(count - 1 for count in self.started.values())

    async def records(self, lane: str) -> dict[str, TerminalRecord]:
        """Read a lane's terminal records; a second one for a job fails."""
        found: dict[str, TerminalRecord] = {}
        async for stored in self.bus.messages(subjects.results_stream(lane)):
            record = decode(stored.data, TerminalRecord)
            assert record.job not in found, f"{record.job} has two records"
            found[record.job] = record
        return found

    async def queued(self, lane: str) -> int:
        """Job messages still in the lane's streams."""
        streams = sorted({subjects.jobs_stream(lane, band) for band in BANDS})
        states = [await self.bus.stream_state(name) for name in streams]
        return sum(state.messages for state in states)

    async def until_empty(self, lane: str, *, timeout_s: float = 30.0) -> None:
        """Wait until every job's message has left its stream."""
        async with asyncio.timeout(timeout_s):
            while await self._left(lane):
                await asyncio.sleep(0.05)

    async def _left(self, lane: str) -> int:
        try:
            return await self.queued(lane)
        except BusError:
            return 1


def all_completed(records: dict[str, TerminalRecord], job_ids: list[str]) -> None:
    """Fail unless exactly these jobs have a record, and each completed."""
    assert sorted(records) == sorted(job_ids)
    odd = {job: record.kind for job, record in records.items() if record.kind is not Kind.COMPLETED}
    assert not odd
