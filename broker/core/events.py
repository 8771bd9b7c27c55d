"""What the world tells the mind. Each event has its time, `at_s` (Unix s, never going back)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from broker.core.policy import Policy
from broker.wire.messages import Answer, Attempt, Failure, Finished, FirstToken, Heartbeat


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the mind knows of a job: all but its body."""

    key: str
    """`<lane>.<job id>`, `ids.job_key`."""
    lane: str
    band: int
    model: str
    client: str = ""
    session: str = ""
    adapter: str = ""
    prompt_tokens: int = 1
    output_tokens_max: int = 256
    blocks: Sequence[int] = ()
    """Chained prefix-block hashes, first block first."""
    block_tokens: float = 0.0
    """Prompt tokens that each block stands for; 0: not known, estimated from the wire's blocks."""
    enqueued_at_s: float = 0.0
    """When its stream stored it; retries keep it."""
    deadline_at_s: float | None = None
    stream_sequence: int = 0
    jobs_behind: int = 0
    """Of its client, those that it has not published yet."""
    streamed: bool = False
    restart_visible: bool = False
    failures: tuple[Failure, ...] = ()
    """Of earlier epochs, from ATTEMPTS."""
    bare: bool = False
    """Known from a worker's list alone: deadline, stream, session and blocks are not known yet."""


@dataclass(frozen=True, slots=True)
class JobHeld:
    """A job was pulled from its queue. A key known already changes nothing, unless it is bare."""

    at_s: float
    job: JobSpec


@dataclass(frozen=True, slots=True)
class JobEnded:
    """A terminal record of this job stands: forget the job, free what it holds."""

    at_s: float
    key: str


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Its owner wants the job stopped: queued -> Cancel, leased -> Abort."""

    at_s: float
    key: str


class Unanswered(StrEnum):
    """What became of an order that no worker answered."""

    NO_RESPONDERS = "no_responders"
    """Surely not delivered."""
    TIMEOUT = "timeout"
    """May run: only the worker's echo can tell."""
    UNSENT = "unsent"
    """Never left this process: the job's body could not be had, or the link is down."""


@dataclass(frozen=True, slots=True)
class DispatchAnswered:
    """The worker's answer to a Dispatch, or the lack of one."""

    at_s: float
    worker: str
    key: str
    attempt: Attempt
    answer: Answer | Unanswered


@dataclass(frozen=True, slots=True)
class WorkerReported:
    """A heartbeat arrived."""

    at_s: float
    heartbeat: Heartbeat


@dataclass(frozen=True, slots=True)
class FirstTokenSeen:
    """A job's prefill is done."""

    at_s: float
    note: FirstToken


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """A worker says at once that an attempt ended; the same stands in its next heartbeats."""

    at_s: float
    worker: str
    incarnation: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class ProbeAnswered:
    """Answer to a Probe: `incarnation` when alive, else how it was missed."""

    at_s: float
    worker: str
    incarnation: int | None
    missed: Unanswered | None = None


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """The broker's own link to the bus was lost or is back."""

    at_s: float
    up: bool


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """An operator wants a worker emptied (or taken back)."""

    at_s: float
    worker: str
    draining: bool = True


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How many messages of a queue the broker has not pulled yet."""

    at_s: float
    lane: str
    band: int
    model: str
    pending_jobs: int


@dataclass(frozen=True, slots=True)
class ResultsStand:
    """How many bytes of a lane's results stand, and how large one of them is on average."""

    at_s: float
    lane: str
    stored_bytes: int
    mean_bytes: float
    bytes_max: float = math.inf
    """What may stand at most, whatever the rows say: their stream holds little more."""


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """A new configuration, whole. An equal one changes nothing."""

    at_s: float
    policy: Policy


@dataclass(frozen=True, slots=True)
class DispatchAllowed:
    """What runs has been adopted. Before, nothing is dispatched, revoked or rejected."""

    at_s: float
    allowed: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Deadlines, ageing, leases and back-offs are looked at."""

    at_s: float


Event = (
    JobHeld
    | JobEnded
    | CancelRequested
    | DispatchAnswered
    | WorkerReported
    | FirstTokenSeen
    | AttemptEnded
    | ProbeAnswered
    | LinkChanged
    | DrainRequested
    | QueueDepth
    | ResultsStand
    | PolicyChanged
    | DispatchAllowed
    | Tick
)
