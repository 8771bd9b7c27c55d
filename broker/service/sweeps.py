"""Lanes that are being cancelled: what is pulled of them meanwhile ends at the door.

A cancellation walks its streams from their beginning, and as it makes room in the windows the pulls
bring what comes next. Without this such a job would be admitted, told its place, dispatched, and
cancelled then. A sweep is forgotten when its asker no longer comes for the next step: what it then
leaves is an ordinary queue again.
"""

import time
from dataclasses import dataclass, field

from broker.wire import subjects
from broker.wire.control import LaneCancelRequest, StreamSpan
from broker.wire.subjects import JobAddress

SWEEP_S = 3.0
"""How long after a step a sweep goes on: its asker comes again at once, or is gone."""

SWEEPS_MAX = 64
"""Sweeps at once; of more, the oldest is one step at a time only."""


@dataclass(slots=True)
class _Sweep:
    """A cancellation of one stream."""

    request: LaneCancelRequest
    last_sequence: int
    until_s: float
    ended: set[int] = field(default_factory=set[int])
    """Of the step under way: messages whose jobs were ended, at the door or where they stood."""
    ended_before: set[int] = field(default_factory=set[int])
    """Of the step before: a message that the walk has ended may be on its way to the door yet."""
    at_door: int = 0
    """Jobs ended at the door since the last step."""

    def count(self, sequence: int) -> bool:
        """Count a job as ended; say whether it is the first time."""
        if sequence in self.ended or sequence in self.ended_before:
            return False
        self.ended.add(sequence)
        return True


class Sweeps:
    """Says of a pulled job whether its lane is being cancelled."""

    def __init__(self) -> None:
        self._sweeps: dict[str, _Sweep] = {}

    def begin(self, request: LaneCancelRequest, span: StreamSpan, *, for_s: float) -> None:
        """A step of a cancellation begins, which takes so long at most."""
        before = self._sweeps.pop(span.stream, None)
        if len(self._sweeps) >= SWEEPS_MAX:
            self._sweeps.pop(next(iter(self._sweeps)))
        until_s = time.monotonic() + for_s + SWEEP_S
        sweep = self._sweeps[span.stream] = _Sweep(request, span.last_sequence, until_s)
        if before is not None:
            sweep.ended, sweep.ended_before = before.ended, before.ended_before
            sweep.at_door = before.at_door

    def end_step(self, stream: str, *, is_last: bool) -> int:
        """Count the jobs that were ended at the door since the last step; `is_last`: no more."""
        sweep = self._sweeps.get(stream)
        if sweep is None:
            return 0
        at_door, sweep.at_door = sweep.at_door, 0
        sweep.ended, sweep.ended_before = set(), sweep.ended
        sweep.until_s = time.monotonic() + SWEEP_S
        if is_last:
            del self._sweeps[stream]
        return at_door

    def has_ended(self, stream: str, sequence: int) -> bool:
        """Say whether a job was ended in this step or the one before."""
        sweep = self._sweeps.get(stream)
        return sweep is not None and (sequence in sweep.ended or sequence in sweep.ended_before)

    def count(self, stream: str, sequence: int) -> bool:
        """Count a job that was ended where it stood; say whether nobody has counted it."""
        sweep = self._sweeps.get(stream)
        return sweep is None or sweep.count(sequence)

    def takes(self, address: JobAddress, *, sequence: int) -> bool:
        """Say whether a job that was just pulled is to be cancelled; it counts as ended then."""
        if not self._sweeps:
            return False
        stream = subjects.jobs_stream(address.lane, address.band)
        sweep = self._sweeps.get(stream)
        if sweep is None:
            return False
        if time.monotonic() >= sweep.until_s:
            del self._sweeps[stream]
            return False
        request = sweep.request
        is_meant = (
            sequence <= sweep.last_sequence
            and (not request.bands or address.band in request.bands)
            and request.model in ("", address.model)
        )
        if is_meant and sweep.count(sequence):
            sweep.at_door += 1
        return is_meant
