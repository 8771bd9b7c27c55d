"""Takes records out of RESULTS whose lines stand in a batch's files.

A record is what keeps a job from running twice while its message may still be delivered. So it goes
only once the message has left its stream, which happens within milliseconds of the record; a
message that is still there is looked for again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from broker.bus.base import Bus, BusError, NotFound
from broker.wire import subjects
from broker.wire.ids import BATCH_BAND

WAITING_MAX = 20_000
"""Records that wait to leave; then results are stored no faster than records go."""

AT_ONCE_MAX = 32
"""Looks and removals under way: the server does some thousand a second."""


@dataclass(slots=True)
class _Chunk:
    """Records of the lines that one chunk brought."""

    is_output: bool
    sequence: int
    left: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record that may go."""

    job_id: str
    sequence: int
    """Of the job's message; 0 when it is known to have left."""


class Clearing:
    """The records of one batch that may go."""

    def __init__(self, bus: Bus, lane: str, *, after_s: float) -> None:
        """`after_s`: a record is left alone so long, and again while its message is there."""
        self.cleared_output = 0
        self.cleared_errors = 0
        """Chunks up to which all records have gone."""
        self.removed = 0
        self._bus = bus
        self._lane = lane
        self._after_s = after_s
        self._chunks: deque[_Chunk] = deque()
        self._waiting: deque[tuple[float, _Chunk, Record]] = deque()
        self._under_way = 0
        self._changed = asyncio.Event()

    async def add(self, records: Iterable[Record], *, is_output: bool, sequence: int) -> None:
        """Take the records of a chunk that stands; waits while too many wait to go."""
        while len(self._waiting) > WAITING_MAX:
            self._changed.clear()
            await self._changed.wait()
        found = list(records)
        chunk = _Chunk(is_output, sequence, len(found))
        self._chunks.append(chunk)
        due_s = time.monotonic() + self._after_s
        self._waiting.extend((due_s, chunk, record) for record in found)
        self._note()

    async def drained(self) -> None:
        """Wait until all have gone."""
        while self._waiting or self._under_way:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Let records go as they come, until cancelled."""
        async with asyncio.TaskGroup() as removals:
            for _ in range(AT_ONCE_MAX):
                removals.create_task(self._remove_all())

    async def _remove_all(self) -> None:
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            due_s, chunk, record = self._waiting.popleft()
            self._under_way += 1
            await asyncio.sleep(due_s - time.monotonic())
            gone = False
            with suppress(BusError):
                gone = await self._remove(record)
            self._under_way -= 1
            if gone:
                chunk.left -= 1
            else:
                self._waiting.append((time.monotonic() + self._after_s, chunk, record))
            self._note()

    async def _remove(self, record: Record) -> bool:
        """Let a record go; False while its job's message is there."""
        if record.sequence:
            stream = subjects.jobs_stream(self._lane, BATCH_BAND)
            with suppress(NotFound):
                await self._bus.message_at(stream, record.sequence)
                return False
        self.removed += await self._bus.purge(
            subjects.results_stream(self._lane), subjects.result(self._lane, record.job_id)
        )
        return True

    def _note(self) -> None:
        while self._chunks and not self._chunks[0].left:
            chunk = self._chunks.popleft()
            if chunk.is_output:
                self.cleared_output = chunk.sequence
            else:
                self.cleared_errors = chunk.sequence
        self._changed.set()
