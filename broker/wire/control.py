"""What owners and operators ask the leading broker (`ctl.>`), and what it answers."""

from enum import StrEnum

from broker.wire.fields import Band, Count, LongText, Model, Seconds, ShortText, Token
from broker.wire.messages import Attempt, Record


class CancelRequest(Record, frozen=True, kw_only=True):
    """Ask for a job's cancellation, wherever it is.

    `stream` and `stream_sequence` (from the publish acknowledgement) find a job that the broker has
    not pulled yet; without them only held and running jobs can be cancelled.
    """

    job: Token
    stream: ShortText = ""
    stream_sequence: Count = 0
    client: ShortText = ""
    """Only if this caller submitted it; empty: whoever did."""


class Leaving(Record, frozen=True, kw_only=True):
    """A gateway's question to the others: its last reader of a job has left; has any of you one?

    Whoever has answers, with nothing, and may cancel the job from then on.
    """

    job: Token
    gateway: Token
    """Who asks: it hears its own question."""


class ControlReply(Record, frozen=True, kw_only=True):
    """Answer to a control request. `data` is JSON for people and scripts."""

    ok: bool
    message: LongText = ""
    data: bytes = b""


class DrainRequest(Record, frozen=True, kw_only=True):
    """Drain a worker by name."""

    worker: Token
    draining: bool = True


class WhyRequest(Record, frozen=True, kw_only=True):
    """Ask what holds a job."""

    job: Token


class ResultRequest(Record, frozen=True, kw_only=True):
    """Ask for a job's terminal record: the answer's `data` is that, in JSON."""

    job: Token


class EstimateRequest(Record, frozen=True, kw_only=True):
    """Ask how long a job that comes now would wait: the answer's `data` has its queue's state.

    `band`, `model`, `queued_jobs`, `queued_jobs_max` (0: bounded by its stream only),
    `inflight_jobs`, `wait_s`, `pending_jobs` (of those queued, not pulled by the broker yet).
    """

    band: Band
    model: Model


class JobRequest(Record, frozen=True, kw_only=True):
    """Ask where a job stands.

    `stream` and `stream_sequence` find one that the broker has not pulled yet.
    """

    job: Token
    stream: ShortText = ""
    stream_sequence: Count = 0


class JobPhase(StrEnum):
    """How far a job has come, as the broker knows it."""

    QUEUED = "queued"
    STARTED = "started"
    ENDING = "ending"
    """Its record is being written, or stands."""
    UNKNOWN = "unknown"
    """Neither held nor running, nor at the place that was named."""


class JobState(Record, frozen=True, kw_only=True):
    """Where a job stands now: `data` of the answer to a JobRequest, as JSON."""

    job: Token
    phase: JobPhase
    position: Count = 0
    """Jobs of its queue before it, those not pulled included; 0 = next."""
    wait_s: Seconds = 0.0
    """Expected wait from now on."""
    held_by: ShortText = ""
    """What it waits for, in the words of `why`; empty while it is not pulled."""
    worker: ShortText = ""
    attempt: Attempt | None = None


class StreamSpan(Record, frozen=True, kw_only=True):
    """What of a stream of jobs a lane's cancellation has still to look at."""

    stream: ShortText
    next_sequence: Count
    last_sequence: Count
    """Jobs stored behind it came later than the cancellation, and stay."""


class LaneCancelRequest(Record, frozen=True, kw_only=True):
    """Cancel jobs of a lane, queued and running, one bounded step at a time.

    Without spans: count what would be hit, and learn the spans to begin with. The asker sends each
    answer's spans again until there are none, so a new leader goes on where the last one stopped.
    """

    bands: tuple[Band, ...] = ()
    """Empty: all."""
    model: ShortText = ""
    """Empty: all."""
    spans: tuple[StreamSpan, ...] = ()


class LaneCancelStep(Record, frozen=True, kw_only=True):
    """What one step did, or what all would do: `data` of the answer, as JSON."""

    jobs: Count = 0
    """Cancelled by this step; before the first, all that wait or run."""
    running: Count = 0
    """Of these, leased to workers."""
    spans: tuple[StreamSpan, ...] = ()
    """What is left."""
