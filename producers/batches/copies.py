"""Copies of a batch's line records, which outlive RESULTS: found, taken away, swept.

The broker makes them (`service/line_copies`) where a window is longer than RESULTS keeps records. A
copy is taken away with its record, once its line stands in a file and both can't be needed again.
"""

import time
from contextlib import suppress

from broker.bus.base import Bus, BusError, NotFound, StoredMessage
from broker.bus.files import ABANDONED_S
from broker.wire import subjects
from broker.wire.batches import is_needed_longer
from broker.wire.ids import parse_line_job_id
from producers.batches.errors import NoSuchBatch
from producers.batches.records import Batch
from producers.batches.shelf import Shelf

SWEPT_AFTER_S = ABANDONED_S
"""Copies of a batch that is gone, or has ended, are left alone for so long: whoever reads that it
is gone may read a server that is behind."""


class Copies:
    """The copies of one batch."""

    def __init__(self, bus: Bus, batch: Batch) -> None:
        self._bus = bus
        self._batch = batch
        self._stream = subjects.files_stream(batch.lane)
        self._expected = True

    async def look(self) -> None:
        """Learn whether there can be any: where none can, taking one away costs nothing.

        Raises BusError.
        """
        state = await self._bus.stream_state(subjects.results_stream(self._batch.lane))
        self._expected = is_needed_longer(
            stored_at_s=self._batch.created_at_s,
            age_s=state.age_s_max,
            deadline_at_s=self._batch.deadline_at_s,
        )

    async def find(self, job_id: str) -> StoredMessage | None:
        """Read the copy of a line's record; None without one. Raises BusError."""
        line = parse_line_job_id(job_id)
        if line is None:
            return None
        try:
            return await self._bus.last_message(
                self._stream, subjects.line_copy(self._batch.lane, *line)
            )
        except NotFound:
            return None

    async def remove(self, number: int) -> None:
        """Take a line's copy away, where there may be one. Raises BusError."""
        if self._expected:
            await self._purge(number)

    async def remove_all(self) -> None:
        """Take all away: the batch has ended. What can't be taken now is swept."""
        with suppress(BusError):
            await self._purge("*")

    async def _purge(self, number: int | str) -> None:
        subject = subjects.line_copy(self._batch.lane, self._batch.id, number)
        await self._bus.purge(self._stream, subject)


async def sweep_copies(bus: Bus, shelf: Shelf, *, swept_after_s: float = SWEPT_AFTER_S) -> int:
    """Take away the copies of a lane's batches that have ended, or are no more; say of how many.

    So go those that came after their batch's end, and those of a batch that nobody came back to:
    once its record has left BATCHES. Raises BusError.
    """
    stream = subjects.files_stream(shelf.lane)
    counts = await bus.subject_counts(stream, subject=subjects.line_copy(shelf.lane, "*", "*"))
    one_of = {subjects.batch_of_copy(subject): subject for subject in counts}
    swept = 0
    for batch_id, subject in one_of.items():
        try:
            if not (await shelf.get(batch_id)).has_ended:
                continue
        except NoSuchBatch:
            pass
        with suppress(NotFound):
            copy = await bus.last_message(stream, subject)
            if copy.at_s < time.time() - swept_after_s:
                await bus.purge(stream, subjects.line_copy(shelf.lane, batch_id, "*"))
                swept += 1
    return swept
