"""What the mind wants done. Service and simulator carry decisions out in order.

`number` counts the orders to one worker, from 1 within an epoch: heartbeats echo the last one
processed.
"""

from dataclasses import dataclass
from enum import StrEnum

from broker.wire.messages import Attempt, Failure, Reason


class HeldBy(StrEnum):
    """What kept a job from being dispatched until now."""

    NOTHING = "nothing"
    QUOTA = "quota"
    """A quota row (step one)."""
    FLOOR = "floor"
    """Batch, and only the slots are free that are kept for online jobs."""
    PRESSURE = "pressure"
    """Batch, and online jobs wait too long."""
    ROOM = "room"
    """No worker with room (step two)."""
    AFFINITY = "affinity"
    """It waits for a worker that is better than any with room: by its cache, or otherwise."""
    BATCH_SHARE = "batch_share"
    """Workers with room hold people's prefixes, and batch has its share of those."""
    ORDER = "order"
    """Others were before it."""
    BACK_OFF = "back_off"
    NO_WORKERS = "no_workers"
    BREAKER = "breaker"
    """Every worker that serves it failed its last jobs, and is tried with one from time to time."""
    START = "start"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker that was scored; lower is better."""

    worker: str
    score: float
    hit_tokens: int
    backlog_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why this worker: what the decision log and `why` show."""

    policy: str
    candidates: tuple[Candidate, ...]
    previous_worker: str
    """Of this prefix (or session); empty if none within the sticky time."""
    predicted_hit_tokens: int
    """What its engine should find cached, be it too little to count in a score."""
    predicted_ttft_s: float
    queue_s: float
    held_by: HeldBy
    is_probe: bool = False
    """Its worker's breaker is half-open: the job shows whether it may close."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Give the job to the worker. The lease is taken already."""

    key: str
    worker: str
    attempt: Attempt
    number: int
    stream_sequence: int
    predicted_hit_tokens: int
    enqueued_at_s: float
    failures: tuple[Failure, ...]
    run_s_max: float
    stall_s: float
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Queued:
    """Tell the caller that its job waits."""

    key: str
    position: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse the job: write its record (living `retry_after_s`), answer, remove the message."""

    key: str
    reason: Reason
    row: str
    used: float
    limit: float
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Expire:
    """A queued job's time is over: write its record, answer, remove the message."""

    key: str
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cancel:
    """A queued job was cancelled: write its record, answer, remove the message."""

    key: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell a worker to stop an attempt.

    For `cancelled` and `deadline_expired` the agent writes the job's record; for any other reason
    (a revoked
    attempt, a duplicate run) it writes nothing.
    """

    key: str
    worker: str
    attempt: Attempt
    number: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Requeue:
    """An attempt came to nothing and the job waits again. Persist `failure` where there is one."""

    key: str
    failure: Failure | None
    not_before_s: float


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """Too many failures: write the record, publish the dead letter, remove the message."""

    key: str
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class FailStream:
    """A streamed job's worker was lost after its first token: end it as failed, `worker_lost`."""

    key: str
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """The job ended and is forgotten here: drop its body, stop renewing, answer its duplicates."""

    key: str


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask a silent worker whether it lives."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """Tell a worker to drain, or to work again."""

    worker: str
    number: int
    draining: bool


@dataclass(frozen=True, slots=True)
class Drained:
    """A draining worker has finished all it had: said once."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's leases were revoked; its credit in the prefix index is gone."""

    worker: str
    cause: str
    draining: bool = False
    """It took nothing new any more: it left, or was about to."""
    restarted: bool = False
    """A new life of it has begun."""
    jobs: int = 0
    """Leases that it had."""
    requeued_jobs: int = 0
    """Of these, jobs that wait again; the others end."""


@dataclass(frozen=True, slots=True)
class Resync:
    """Ask a worker for a full heartbeat: its reports have a gap."""

    worker: str


class DifferenceKind(StrEnum):
    """Kinds of disagreement between the ledger and the workers' lists."""

    RUNS_UNLEASED = "runs_unleased"
    """Listed by a worker, unknown here: adopted."""
    LEASED_NOT_RUNNING = "leased_not_running"
    """Leased here, processed and not listed there: requeued."""
    RUNS_TWICE = "runs_twice"
    """Two workers list it: the older attempt is aborted."""
    STALE_ATTEMPT = "stale_attempt"
    """A worker runs an attempt that was revoked: aborted."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A disagreement was found and repaired: count it, log it."""

    kind: DifferenceKind
    key: str
    worker: str
    detail: str


Decision = (
    Dispatch
    | Queued
    | Reject
    | Expire
    | Cancel
    | Abort
    | Requeue
    | DeadLetter
    | FailStream
    | Release
    | Probe
    | DrainOrder
    | Drained
    | WorkerGone
    | Resync
    | Difference
)
