"""Deletes what a lane stored of ended jobs: results with their answers, dead letters with prompts.

A record is more than an answer: while the job's message is still in its stream, it keeps the job
from running again; and until it is counted, the lane's accounts need it. So a record leaves only if
the accounts have it, and only if the job's message was absent from the lane's streams *after* the
record was seen there: by the rule of removal it is gone for good then.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, replace

from broker.bus.base import Bus, NoStream, NotFound, StoredMessage
from broker.bus.usage import counted_sequence
from broker.wire import subjects
from broker.wire.ids import BANDS, parse_line_job_id
from producers.looking import names

RECORDS_AT_ONCE_MAX = 100_000
"""Records whose jobs are looked for in one walk through the lane's streams: about 20 MB of ids."""

DELETES_AT_ONCE_MAX = 16
"""Erasing writes each byte anew: more at once would only queue up in the server."""


@dataclass(frozen=True, slots=True)
class Erased:
    """What was deleted, and what had to stay for now."""

    results: int = 0
    dead_letters: int = 0
    uncounted: int = 0
    """Results that stay until the accounts have them: a leading broker counts within seconds."""
    unsettled: int = 0
    """Results that stay because their job's message has not left its stream yet."""

    def plus(self, other: "Erased") -> "Erased":
        """Add up."""
        return Erased(
            self.results + other.results,
            self.dead_letters + other.dead_letters,
            self.uncounted + other.uncounted,
            self.unsettled + other.unsettled,
        )


class Eraser:
    """Deletes in one lane."""

    def __init__(self, bus: Bus, lane: str) -> None:
        """Delete on this bus."""
        self._bus = bus
        self._lane = lane

    async def erase_job(self, job_id: str) -> Erased:
        """Delete the result of a job, its copy, and its dead letter. Raises BusError."""
        results = self._one(
            subjects.results_stream(self._lane), subjects.result(self._lane, job_id)
        )
        erased = await self._erase_results([one async for one in results])
        if line := parse_line_job_id(job_id):
            stream = subjects.files_stream(self._lane)
            copies = self._one(stream, subjects.line_copy(self._lane, *line))
            gone = await self._delete(stream, [one.sequence async for one in copies])
            erased = replace(erased, results=max(erased.results, gone))
        letters = subjects.dead_letters_stream(self._lane)
        subject = subjects.dead_letter(self._lane, job_id)
        return replace(erased, dead_letters=await self._erase_letters(letters, subject, None))

    async def erase_before(
        self,
        before_s: float,
        *,
        results: bool = True,
        dead_letters: bool = True,
        progress: Callable[[Erased], None] = lambda _: None,
    ) -> Erased:
        """Delete what was stored before an instant (Unix seconds). Raises BusError.

        Interrupted and called again, it goes on with what is left.
        """
        total = Erased()
        if results:
            some: list[StoredMessage] = []
            async for stored in self._stored(subjects.results_stream(self._lane), before_s):
                # Only where it stands and whose it is: answers are large.
                some.append(replace(stored, data=b""))
                if len(some) >= RECORDS_AT_ONCE_MAX:
                    total = total.plus(await self._erase_results(some))
                    progress(total)
                    some = []
            total = total.plus(await self._erase_results(some))
            progress(total)
        if dead_letters:
            stream = subjects.dead_letters_stream(self._lane)
            gone = await self._erase_letters(stream, ">", before_s)
            total = replace(total, dead_letters=gone)
        return total

    async def _erase_results(self, found: Collection[StoredMessage]) -> Erased:
        """Delete records that nobody needs any more."""
        if not found:
            return Erased()
        counted = await counted_sequence(self._bus, self._lane)
        by_job = {one.subject.rpartition(".")[2]: one for one in found if one.sequence <= counted}
        uncounted = len(found) - len(by_job)
        total = len(by_job)
        for stream in dict.fromkeys(subjects.jobs_stream(self._lane, band) for band in BANDS):
            async for _, job_id in names(self._bus, stream):
                by_job.pop(job_id, None)
        stream = subjects.results_stream(self._lane)
        gone = await self._delete(stream, [one.sequence for one in by_job.values()])
        return Erased(results=gone, uncounted=uncounted, unsettled=total - len(by_job))

    async def _erase_letters(self, stream: str, subject: str, before_s: float | None) -> int:
        found = [one.sequence async for one in self._stored(stream, before_s, subject=subject)]
        return await self._delete(stream, found)

    async def _delete(self, stream: str, sequences: Collection[int]) -> int:
        """Erase messages, some at once; return how many were still there."""
        room = asyncio.Semaphore(DELETES_AT_ONCE_MAX)

        async def delete_one(sequence: int) -> bool:
            async with room:
                return await self._bus.delete_message(stream, sequence, erase=True)

        return sum(await asyncio.gather(*(delete_one(sequence) for sequence in sequences)))

    async def _one(self, stream: str, subject: str) -> AsyncIterator[StoredMessage]:
        try:
            yield await self._bus.last_message(stream, subject)
        except (NotFound, NoStream):
            return

    async def _stored(
        self, stream: str, before_s: float | None, *, subject: str = ">"
    ) -> AsyncIterator[StoredMessage]:
        """Walk what a stream stored before an instant; nothing without such a stream."""
        try:
            async for stored in self._bus.messages(stream, subject=subject):
                if before_s is not None and stored.at_s >= before_s:
                    return
                yield stored
        except (NotFound, NoStream):
            return
