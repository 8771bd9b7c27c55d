"""Copies records of batch lines to where they outlive the batch's window.

A line's record in RESULTS is all there is of its answer until a runner has written it into the
batch's output, and RESULTS keeps records for days, while a window may be weeks. The server gives
no message a longer life than its stream has (a TTL above the stream's age is not heeded, and one
that says `never` is forgotten at the server's restart). So whoever counts a record first copies it
to the stream of the lane's files, if its batch may need it for longer: the accounts' mark moves
behind it only then, and a runner takes no record away before the mark is there. So no copy comes
after its record was taken away, but for a deposed leader's, which is swept.
"""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from broker.bus.base import (
    Bus,
    BusError,
    NotFound,
    PayloadTooLarge,
    StoredMessage,
    StreamFull,
    WrongSequence,
)
from broker.wire import subjects
from broker.wire.batches import BatchOutline, is_needed_longer
from broker.wire.codec import MalformedMessage, decode
from broker.wire.ids import parse_line_job_id

PATIENCE_S = 120.0
"""The accounts wait so long for copies that can't be stored (a takeover or an election takes
seconds); then they go on, and that batch has its records for as long as RESULTS keeps them."""

DEADLINES_MAX = 4096
"""Batches whose deadlines are remembered; of more, the oldest are read again."""

_log = structlog.get_logger(__name__)


def is_of_line(stored: StoredMessage) -> bool:
    """Say whether a record is of a line of a batch that the cluster runs, by its name alone."""
    return parse_line_job_id(_job_id(stored)) is not None


class LineCopies:
    """The copying, for one leadership."""

    def __init__(self, bus: Bus, *, now: Callable[[], float]) -> None:
        self.copied = 0
        self._bus = bus
        self._now = now
        self._deadlines_at_s: dict[tuple[str, str], float] = {}
        self._failing_since_s: dict[str, float] = {}

    async def copy(self, lane: str, lines: Sequence[StoredMessage], *, age_s: float) -> int:
        """Copy those that are needed for longer than RESULTS keeps them, `age_s`.

        Returns how many had to be left without a copy: the lane's files are full, or nothing could
        be stored for PATIENCE_S. Raises BusError before: then all of `lines` are to be given again.
        """
        async with asyncio.TaskGroup() as group:
            tries = [group.create_task(self._try(lane, one, age_s)) for one in lines]
        failed = [error for one in tries if (error := one.result()) is not None]
        passing = [error for error in failed if not isinstance(error, StreamFull | PayloadTooLarge)]
        if passing:
            since_s = self._failing_since_s.setdefault(lane, self._now())
            if self._now() - since_s < PATIENCE_S:
                raise passing[0]
        elif lines:
            self._failing_since_s.pop(lane, None)
        if failed:
            _log.error("lines.not_copied", lane=lane, records=len(failed), error=str(failed[0]))
        return len(failed)

    async def _try(self, lane: str, stored: StoredMessage, age_s: float) -> BusError | None:
        """Copy one record if that is needed; return what went wrong."""
        line = parse_line_job_id(_job_id(stored))
        assert line is not None, "only lines are given"
        batch_id, number = line
        try:
            deadline_at_s = await self._deadline_at_s(lane, batch_id)
            if not is_needed_longer(
                stored_at_s=stored.at_s, age_s=age_s, deadline_at_s=deadline_at_s
            ):
                return None
            await self._bus.append(
                subjects.line_copy(lane, batch_id, number),
                stored.data,
                expected_last_subject_sequence=0,
                headers=stored.headers,
            )
        except WrongSequence:
            return None  # It stands: this record was read before, by us or another leader.
        except BusError as error:
            return error
        self.copied += 1
        return None

    async def _deadline_at_s(self, lane: str, batch_id: str) -> float:
        """End of a batch's window; 0 of one that isn't known. Raises BusError."""
        known = self._deadlines_at_s.get((lane, batch_id))
        if known is not None:
            return known
        key = subjects.batch_key(lane, batch_id)
        try:
            entry = await self._bus.kv_get(subjects.BATCHES_BUCKET, key)
            deadline_at_s = decode(entry.value, BatchOutline).deadline_at_s
        except (NotFound, MalformedMessage):
            return 0.0
        while len(self._deadlines_at_s) >= DEADLINES_MAX:
            del self._deadlines_at_s[next(iter(self._deadlines_at_s))]
        self._deadlines_at_s[lane, batch_id] = deadline_at_s
        return deadline_at_s


def _job_id(stored: StoredMessage) -> str:
    return stored.subject.rpartition(".")[2]
