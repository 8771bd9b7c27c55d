"""Takes records out of RESULTS whose lines stand in a batch's files.

A record is what keeps a job from running twice while its message may still be delivered. So it goes
only once the message has left its stream, which happens within milliseconds of the record; a
message that is still there is looked for again. Where all of the stream's messages are newer, no
look is needed. And it goes only once the lane's accounts have it, or they would lack it for good.

This is slower than running where the server is busy, and nothing waits for it: lines that wait for
it take 16 bytes each.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

from broker.bus.base import Bus, BusError, NotFound
from broker.bus.usage import counted_sequence
from broker.wire import subjects
from broker.wire.codec import MalformedMessage
from broker.wire.ids import BATCH_BAND
from producers.batches.copies import Copies

WAITING_MAX = 1_000_000
"""Records that wait to leave; then results are stored no faster than records go. 16 MB."""

AT_ONCE_MAX = 128
"""Removals under way: a server at ease answers in a millisecond, a busy one in a second."""

LOOK_S = 0.5
"""The stream's oldest message is asked for no more often."""


@dataclass(slots=True)
class _Chunk:
    """Records of the lines that one chunk brought."""

    is_output: bool
    sequence: int
    due_s: float
    numbers: "array[int]"
    job_sequences: "array[int]"
    counted_sequence: int
    """Its records stand up to here in RESULTS: the accounts must have come so far."""
    left: int
    next: int = 0


class Clearing:
    """The records of one batch that may go."""

    def __init__(
        self,
        bus: Bus,
        lane: str,
        job_id: Callable[[int], str],
        *,
        after_s: float,
        copies: Copies,
    ) -> None:
        """`job_id`: of a line, by its number; `after_s`: a record is left alone so long first.

        `copies`: those of the batch, which go with their records.
        """
        self.cleared_output = 0
        self.cleared_errors = 0
        """Chunks up to which all records have gone."""
        self.removed = 0
        self._bus = bus
        self._lane = lane
        self._job_id = job_id
        self._after_s = after_s
        self._copies = copies
        self._chunks: deque[_Chunk] = deque()
        """In order; the first one may have been begun."""
        self._again: deque[tuple[float, _Chunk, int]] = deque()
        """Places of lines that were looked at and could not go yet, and when to look again."""
        self._waiting = 0
        self._under_way = 0
        self._counted_sequence = 0
        self._oldest_sequence = 0
        self._oldest_at_s = 0.0
        self._changed = asyncio.Event()

    async def add(
        self, records: Iterable[tuple[int, int]], *, is_output: bool, sequence: int
    ) -> None:
        """Take the records of a chunk that stands: line numbers, each with its job's message.

        A message's sequence is 0 when it is known to have left. Waits while too many wait to go.
        Raises BusError.
        """
        while self._waiting > WAITING_MAX:
            self._changed.clear()
            await self._changed.wait()
        numbers, job_sequences = array("Q"), array("Q")
        for number, job_sequence in records:
            numbers.append(number)
            job_sequences.append(job_sequence)
        state = await self._bus.stream_state(subjects.results_stream(self._lane))
        chunk = _Chunk(
            is_output,
            sequence,
            time.monotonic() + self._after_s,
            numbers,
            job_sequences,
            counted_sequence=state.last_sequence,
            left=len(numbers),
        )
        self._chunks.append(chunk)
        self._waiting += chunk.left
        self._note()

    async def drained(self) -> None:
        """Wait until all have gone."""
        while self._waiting:
            self._changed.clear()
            await self._changed.wait()

    async def run(self) -> None:
        """Let records go as they come, until cancelled."""
        slots = asyncio.Semaphore(AT_ONCE_MAX)
        async with asyncio.TaskGroup() as removals:
            while True:
                await slots.acquire()
                chunk, place = await self._next()
                removals.create_task(self._try(chunk, place, slots))

    async def _next(self) -> tuple[_Chunk, int]:
        """The next record that is due; waits for it."""
        while True:
            now_s = time.monotonic()
            if self._again and self._again[0][0] <= now_s:
                _, chunk, place = self._again.popleft()
                return chunk, place
            fresh = next((one for one in self._chunks if one.next < len(one.numbers)), None)
            if fresh is not None and fresh.due_s <= now_s:
                if await self._is_counted(fresh.counted_sequence):
                    fresh.next += 1
                    return fresh, fresh.next - 1
                fresh.due_s = time.monotonic() + self._after_s
            due_s = [self._again[0][0]] if self._again else []
            due_s += [fresh.due_s] if fresh is not None else []
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(due_s) - now_s if due_s else None):
                    await self._changed.wait()

    async def _is_counted(self, sequence: int) -> bool:
        """Say whether the accounts have all records up to here."""
        if sequence > self._counted_sequence:
            with suppress(BusError, MalformedMessage):
                self._counted_sequence = await counted_sequence(self._bus, self._lane)
        return sequence <= self._counted_sequence

    async def _try(self, chunk: _Chunk, place: int, slots: asyncio.Semaphore) -> None:
        gone = False
        try:
            with suppress(BusError):
                gone = await self._remove(chunk.numbers[place], chunk.job_sequences[place])
        finally:
            slots.release()
        if gone:
            chunk.left -= 1
            self._waiting -= 1
        else:
            self._again.append((time.monotonic() + self._after_s, chunk, place))
        self._note()

    async def _remove(self, number: int, job_sequence: int) -> bool:
        """Let a record go; False while its job's message is there."""
        if job_sequence and await self._is_stored(job_sequence):
            return False
        removed = await self._bus.purge(
            subjects.results_stream(self._lane), subjects.result(self._lane, self._job_id(number))
        )
        await self._copies.remove(number)
        self.removed += removed
        return True

    async def _is_stored(self, sequence: int) -> bool:
        stream = subjects.jobs_stream(self._lane, BATCH_BAND)
        if sequence >= self._oldest_sequence and time.monotonic() > self._oldest_at_s + LOOK_S:
            self._oldest_at_s = time.monotonic()
            state = await self._bus.stream_state(stream)
            self._oldest_sequence = state.first_sequence
        if sequence < self._oldest_sequence:
            return False
        try:
            await self._bus.message_at(stream, sequence)
        except NotFound:
            return False
        return True

    def _note(self) -> None:
        while self._chunks and not self._chunks[0].left:
            chunk = self._chunks.popleft()
            if chunk.is_output:
                self.cleared_output = chunk.sequence
            else:
                self.cleared_errors = chunk.sequence
        self._changed.set()
