"""Which failures say something of the engine, and how many of them there were in a row.

A 4xx is the caller's fault; busy, draining, handed back, cancelled, out of time and found twice are
nobody's. What counts is an engine that failed, answered garbage or nothing, or stood still.
"""

from broker.wire.messages import Finished, Kind, Outcome, Reason

ENGINE_FAULTS = (
    Reason.ENGINE_FAILED,
    Reason.ENGINE_GARBAGE,
    Reason.ENGINE_TIMEOUT,
    Reason.STALLED,
)
"""What counts against a worker. Not `run_time_exceeded`: that job wrote tokens all along."""

FAULTS_TOLD_MAX = 64
"""Jobs in a row that are counted: more than any breaker waits for."""


def is_fault(reason: Reason, *, charged: bool) -> bool:
    """Say whether a failure counts against the worker; an engine without room (429) is uncharged.

    Source: `worker_agent.attempt` charges all but busy, handed back and stopped.
    """
    return charged and reason in ENGINE_FAULTS


class FaultRun:
    """Different jobs that an engine failed, none completed between."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}

    @property
    def jobs(self) -> int:
        """How many, `FAULTS_TOLD_MAX` at most."""
        return len(self._keys)

    def ended(self, finished: Finished) -> None:
        """Take the end of an attempt."""
        if finished.outcome is Outcome.SETTLED:
            if finished.ran and finished.kind is Kind.COMPLETED:
                self._keys.clear()
            return
        reason = finished.reason or Reason.ENGINE_FAILED
        if len(self._keys) < FAULTS_TOLD_MAX and is_fault(reason, charged=finished.charged):
            self._keys[finished.key] = None

    def clear(self) -> None:
        """Begin anew: another engine."""
        self._keys.clear()
