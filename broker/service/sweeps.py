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
    """Of the step under way: messages whose jobs were ended at the door."""


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
            sweep.ended = before.ended

    def end_step(self, stream: str, *, is_last: bool) -> int:
        """Count the jobs that were ended at the door since the last step; `is_last`: no more."""
        sweep = self._sweeps.get(stream)
        if sweep is None:
            return 0
        ended_jobs = len(sweep.ended)
        sweep.ended.clear()
        sweep.until_s = time.monotonic() + SWEEP_S
        if is_last:
            del self._sweeps[stream]
        return ended_jobs

    def has_ended(self, stream: str, sequence: int) -> bool:
        """Say whether a job was ended at the door since the last step."""
        sweep = self._sweeps.get(stream)
        return sweep is not None and sequence in sweep.ended

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
        if is_meant:
            sweep.ended.add(sequence)
        return is_meant
