"""One worker's breaker: closed, open after a run of failures, half-open when time has passed.

A worker whose engine fails each job at once is always idle and always looks best: it draws jobs in
like a black hole. So after `failures_max` failures of different jobs, with none completed between,
nothing new goes there. After `open_s` one job is tried there, the *probe*: completed, it closes the
breaker; failed, the breaker stays open for twice as long, up to `open_s_max`.

    CLOSED --failures_max jobs failed in a row--> OPEN --until_s--> HALF_OPEN (one probe)
      ^  ^------------- they are forgiven --------'  ^----probe failed----'  |
      '------------------------------- probe completed ----------------------'

Only what says something of the engine counts: `wire.faults.ENGINE_FAULTS`, each charged to its
attempt, and a completed job. A 4xx is the caller's fault; busy, draining, handed back, cancelled,
out of time and found twice are nobody's. A worker's death is none either: whoever comes back after
it is another engine, with a breaker of its own, and `blame` looks for the job that did it. A probe
that ends so frees its place, and the next job is the probe.

An attempt that was given before the breaker opened says nothing of the engine once it has: it
neither closes nor keeps it open, and after the breaker closed it does not count.

It knows whose jobs failed: where those were all of one lane, that lane may be to blame, and a job
of another need not wait to be the probe (`breakers`).

The three states are Nygard's ("Release It!"); a run that one success ends and a longer time after
each opening are Envoy's outlier detection (5 in a row, 30 s times the openings).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from broker.core.policy import BreakerPolicy
from broker.wire.messages import Attempt

DOUBLINGS_MAX = 60
"""2.0**60 seconds are beyond any `open_s_max` already."""


class BreakerState(StrEnum):
    """Whether a worker gets new jobs."""

    CLOSED = "closed"
    """It does."""
    OPEN = "open"
    """It does not, until time has passed."""
    HALF_OPEN = "half_open"
    """One at a time, to see how that ends."""


def open_s(openings: int, policy: BreakerPolicy) -> float:
    """Tell how long the nth opening in a row lasts, from 1."""
    return min(policy.open_s_max, policy.open_s * 2.0 ** min(openings - 1, DOUBLINGS_MAX))


@dataclass(slots=True)
class Breaker:
    """The breaker of one life of an engine."""

    state: BreakerState = BreakerState.CLOSED
    failed: dict[str, str] = field(default_factory=dict[str, str])
    """Jobs that failed here since one completed, and their lanes: fewer than `failures_max` while
    it is closed."""
    lanes_failed_at_s: dict[str, float] = field(default_factory=dict[str, float])
    """Lanes with failures here, since when: until a job of theirs completes here, or one of another
    lane that was given later. Earliest first."""
    lane: str | None = None
    """While not closed: the one lane whose failures opened it and kept it open, if there is one."""
    openings: int = 0
    """In a row: since a probe completed."""
    openings_all: int = 0
    """Since the worker joined."""
    until_s: float = 0.0
    """While open: when it is half-open."""
    counts_from_s: float = -math.inf
    """Attempts that were given earlier say nothing any more."""
    completed_at_s: float = -math.inf
    """When a job was last completed here."""
    probe: Attempt | None = None
    """While half-open: the attempt that is tried."""

    @property
    def takes_new(self) -> bool:
        """Whether a new job may go there."""
        if self.state is BreakerState.HALF_OPEN:
            return self.probe is None
        return self.state is BreakerState.CLOSED

    def doubt(self, at_s: float) -> None:
        """Try one job first: the engine failed the last ones, as its agent says."""
        self.state, self.probe, self.lane = BreakerState.HALF_OPEN, None, None
        self.counts_from_s = at_s

    def given(self, attempt: Attempt) -> bool:
        """Note a dispatch; while half-open it is the probe, which is said."""
        is_probe = self.state is BreakerState.HALF_OPEN and self.probe is None
        if is_probe:
            self.probe = attempt
        return is_probe

    def left(self, attempt: Attempt) -> None:
        """Note that an attempt is over, however it ended: a probe frees its place."""
        if self.probe == attempt:
            self.probe = None

    def fails(
        self,
        key: str,
        attempt: Attempt,
        *,
        lane: str,
        given_at_s: float,
        at_s: float,
        policy: BreakerPolicy,
        doubtful: bool = False,
    ) -> None:
        """Count a fault of the engine.

        `doubtful`: the job failed at another worker, too, or its lane is to blame. Then it is not
        counted, and a failed probe is repeated after the same time, not twice that.
        """
        self.lanes_failed_at_s.setdefault(lane, at_s)
        if self.probe == attempt:
            if lane != self.lane and not doubtful:
                self.lane = None
            self._open(at_s, policy, longer=not doubtful)
        elif self.state is BreakerState.CLOSED and policy.failures_max and not doubtful:
            if given_at_s < self.counts_from_s:
                return
            self.failed[key] = lane
            if len(self.failed) >= policy.failures_max:
                lanes = frozenset(self.failed.values())
                self.lane = lane if len(lanes) == 1 else None
                self._open(at_s, policy)

    def completes(self, attempt: Attempt, *, at_s: float) -> None:
        """Count a completed job."""
        self.completed_at_s = at_s
        if self.state is BreakerState.CLOSED:
            self.failed.clear()
        elif self.probe == attempt:
            self.close(at_s)

    def outlived(self, lane: str, *, given_at_s: float) -> Iterator[tuple[str, float]]:
        """Take out the lanes that failed here before a job of another was given that completed now.

        Yields each with when its failures began; usually none.
        """
        self.lanes_failed_at_s.pop(lane, None)
        while self.lanes_failed_at_s:
            other, failed_at_s = next(iter(self.lanes_failed_at_s.items()))
            if failed_at_s > given_at_s:
                return
            del self.lanes_failed_at_s[other]
            yield other, failed_at_s

    def forgives(self, key: str, *, at_s: float, policy: BreakerPolicy) -> None:
        """Take back a job's failure, for which the job is to blame; it may close the breaker.

        What a probe has shown since stands.
        """
        if key not in self.failed:
            return
        del self.failed[key]
        is_first = self.state is BreakerState.OPEN and self.openings == 1
        if is_first and len(self.failed) < policy.failures_max:
            failed = self.failed
            self.close(at_s)
            self.failed = failed

    def half_opens(self, at_s: float, *, lane: str | None = None) -> bool:
        """Let a probe in if the time has come; say whether it has.

        For a lane that has nothing to do with the failures it always has, if one other has all.
        """
        is_time = at_s >= self.until_s or (lane is not None and self.lane not in (None, lane))
        if self.state is not BreakerState.OPEN or not is_time:
            return False
        self.state, self.probe = BreakerState.HALF_OPEN, None
        return True

    def close(self, at_s: float) -> None:
        """Trust the engine again: what was given before does not count against it."""
        self.state, self.probe = BreakerState.CLOSED, None
        self.failed = {}
        self.lane = None
        self.openings = 0
        self.counts_from_s = at_s

    def _open(self, at_s: float, policy: BreakerPolicy, *, longer: bool = True) -> None:
        self.state, self.probe = BreakerState.OPEN, None
        self.openings += int(longer)
        self.openings_all += 1
        self.until_s = at_s + open_s(self.openings, policy)
