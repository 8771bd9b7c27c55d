"""What an earlier runner left in the cluster: messages of lines that have not ended.

A line whose message is still queued, or runs, is taken up by its place in the stream and not
submitted again.
"""

from dataclasses import dataclass

import msgspec

from broker.bus.base import Bus, NotFound
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.ids import BATCH_BAND
from producers.batches.records import Batch


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a line's job stands."""

    submission: int
    sequence: int


class _JobName(msgspec.Struct):
    """The fields of a stored job that are looked at; its body is passed over."""

    id: str
    submission: int = 0


async def find_traces(bus: Bus, batch: Batch) -> dict[int, Trace]:
    """Messages of a batch's lines that are in the lane's stream, by line number; the newest each.

    Reads the stream from where the last runner's oldest unfinished job may stand, so its cost is
    what came into the lane since then. Raises BusError.
    """
    found: dict[int, Trace] = {}
    stream = subjects.jobs_stream(batch.lane, BATCH_BAND)
    prefix = f"{batch.id}-"
    try:
        async for message in bus.messages(
            stream, first_sequence=batch.place.jobs_after_sequence + 1
        ):
            try:
                job = decode(message.data, _JobName)
            except MalformedMessage:
                continue
            number = job.id.removeprefix(prefix)
            if job.id.startswith(prefix) and number.isdecimal():
                found[int(number)] = Trace(job.submission, message.sequence)
    except NotFound:
        return {}
    return found


class OldestJob:
    """A bound below which no unfinished job of a batch stands in its stream.

    A job that is being stored will stand after every message that was stored before: so its bound
    is the highest sequence that was known when it began.
    """

    def __init__(self, after_sequence: int) -> None:
        self._highest = after_sequence
        self._bounds: dict[int, int] = {}

    def begin(self, number: int) -> None:
        """A line's job is about to be stored."""
        self._bounds[number] = self._highest

    def stored(self, number: int, sequence: int) -> None:
        """It stands there now. It may be stored anew later, and then stands after it."""
        self._highest = max(self._highest, sequence)
        if number in self._bounds and sequence:
            self._bounds[number] = sequence - 1

    def end(self, number: int) -> None:
        """It has ended."""
        self._bounds.pop(number, None)

    @property
    def after_sequence(self) -> int:
        """All unfinished jobs stand after this."""
        return min(self._bounds.values(), default=self._highest)
