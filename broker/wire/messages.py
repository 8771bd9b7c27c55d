"""Every message of the system, typed. Decoded and validated once, at the edge (`codec`).

Field order is the wire format of the array-like records (`InFlight`, `Finished`): append only.
Times named `_at_s` are Unix seconds (float); durations `_s` are seconds.
"""

from enum import StrEnum

from msgspec import Struct

from broker.wire.fields import Band, Count, LongText, Model, Seconds, ShortText, Token

BODY_BYTES_MAX = 7_900_000
"""Largest request or response body: the server's 8 MB `max_payload`, less room for the record
around it."""


class Kind(StrEnum):
    """How a job ended, once and for all."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead_lettered"
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why a job did not complete; stable words that callers may branch on."""

    QUEUE_FULL = "queue_full"
    QUOTA_EXCEEDED = "quota_exceeded"
    RESULTS_FULL = "results_full"
    """The lane's results take all the room they may."""
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    DEADLINE_EXPIRED = "deadline_expired"
    WAIT_EXPIRED = "wait_expired"
    CANCELLED = "cancelled"
    NO_WORKERS = "no_workers"
    DRAINING = "draining"
    LANE_PAUSED = "lane_paused"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNKNOWN_MODEL = "unknown_model"
    MALFORMED = "malformed"
    DUPLICATE = "duplicate"
    WORKER_LOST = "worker_lost"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_FAILED = "engine_failed"
    ENGINE_GARBAGE = "engine_garbage"
    ENGINE_TIMEOUT = "engine_timeout"
    STALLED = "stalled"
    RUN_TIME_EXCEEDED = "run_time_exceeded"
    HANDED_BACK = "handed_back"


class Record(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Base of all messages: immutable, defaults not sent, unknown fields ignored (newer peers)."""


class Attempt(Struct, frozen=True, array_like=True, order=True, gc=False):
    """Which run of a job: the leader's epoch, then a number unique in it. Later is greater."""

    epoch: Count
    number: Count


class Job(Record, frozen=True, kw_only=True):
    """A request as its producer published it. The broker never looks into `body`."""

    id: Token
    lane: Token
    band: Band
    model: Model
    client: Token
    body: bytes
    endpoint: ShortText = "/v1/chat/completions"
    session: ShortText = ""
    adapter: ShortText = ""
    stream: bool = False
    restart_visible: bool = False
    """The caller wants a rerun after the first token (and will see the attempt change)."""
    submission: Count = 0
    submitted_at_s: Seconds = 0.0
    deadline_at_s: Seconds | None = None
    prompt_tokens: Count = 1
    """Estimate by the producer; the engine's `usage` corrects it at the end."""
    output_tokens_max: Count = 256
    blocks: bytes = b""
    """Chained prefix-block hashes, `prefix.pack_hashes`."""
    cluster_scope: bool = False
    """Where the broker computes `blocks`: in `prefix.CLUSTER_SCOPE`, to share a cached prefix with
    jobs of other lanes that do so too."""
    request_id: ShortText = ""
    api_key_name: ShortText = ""
    """Who asked inside the lane, for its accounts: a name, never the secret."""
    reads_bundles: bool = False
    """The caller reads Bundles, on `subjects.out_bundles`: its tokens may come in these."""
    jobs_behind: Count = 0
    """Of a batch: how many of the same client follow that are not published yet. A broker sees by
    it that a deadline is at risk before they come."""


class Usage(Struct, frozen=True, array_like=True):
    """Tokens as the engine counted them."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    output_tokens: Count = 0


class Failure(Struct, frozen=True, array_like=True):
    """One attempt that came to nothing: kept in ATTEMPTS and shown in a dead letter's history."""

    attempt: Attempt
    worker: Token
    reason: Reason
    at_s: Seconds
    detail: LongText = ""
    charged: bool = True
    """Counts towards the cap. A job handed back by a draining worker isn't charged."""


class TerminalRecord(Record, frozen=True, kw_only=True):
    """The one durable answer to a job. Written by compare-and-set: the first wins."""

    job: Token
    lane: Token
    kind: Kind
    ended_at_s: Seconds
    band: Band = 2
    model: ShortText = ""
    client: ShortText = ""
    reason: Reason | None = None
    message: LongText = ""
    """For people: what happened and what to do."""
    status_code: Count = 0
    """HTTP status of the engine's answer; 0 when no engine answered."""
    body: bytes = b""
    """The engine's answer (JSON of the endpoint), untouched."""
    usage: Usage = Usage()
    attempt: Attempt | None = None
    worker: ShortText = ""
    submitted_at_s: Seconds = 0.0
    dispatched_at_s: Seconds = 0.0
    first_token_at_s: Seconds = 0.0
    retry_after_s: Seconds = 0.0
    failures: tuple[Failure, ...] = ()
    request_id: ShortText = ""
    row: ShortText = ""
    """Of a rejection: the quota row that refused, as people call it (`lane=acme band=1`)."""
    api_key_name: ShortText = ""
    """As the job said it."""


class DeadLetter(Record, frozen=True, kw_only=True):
    """A job that could not be run, with all that is needed to read or replay it."""

    job: bytes
    """The job message exactly as it was published."""
    subject: ShortText
    record: TerminalRecord


class JobAttempts(Record, frozen=True, kw_only=True):
    """What KV ATTEMPTS holds of a job; written only when an attempt fails."""

    failures: tuple[Failure, ...] = ()


# ---- to a worker, on work.<worker>; each is answered with a WorkReply
# -------------------------------


class Dispatch(Record, frozen=True, kw_only=True, tag="dispatch"):
    """Run this job. `number` counts all orders of this broker to this worker, from 1."""

    epoch: Count
    number: Count
    attempt: Attempt
    lane: Token
    stream: ShortText
    stream_sequence: Count
    ack_subject: ShortText
    """Where the agent renews and acknowledges the job's message."""
    job: bytes
    """The job whole, in msgpack; the agent decodes it."""
    run_s_max: Seconds
    stall_s: Seconds
    predicted_hit_tokens: Count = 0
    enqueued_at_s: Seconds = 0.0
    failures: tuple[Failure, ...] = ()
    speaks_json: bool = False
    """The caller reads JSON: tokens, record and end."""
    deadline_left_s: Seconds | None = None
    """Until the job's deadline, by the broker's clock when it sent this: it counts, and not the
    instant in the job, for the worker's clock may be minutes off. None: the job has none, or the
    broker is of an older version."""


class Abort(Record, frozen=True, kw_only=True, tag="abort"):
    """Stop this attempt, if it runs. Record says what to write; without one, nothing is written."""

    epoch: Count
    number: Count
    key: ShortText
    attempt: Attempt
    reason: Reason
    record: TerminalRecord | None = None


class Probe(Record, frozen=True, kw_only=True, tag="probe"):
    """Are you there?

    Epoch 0 is no leader's: an agent asks before it serves whether another one has its name. It is
    answered `draining` by one that is about to end, else `accepted`, and with where it runs.
    """

    epoch: Count
    number: Count


class DrainWorker(Record, frozen=True, kw_only=True, tag="drain"):
    """Take nothing new, finish what runs, then say `drained`. `draining` False takes it back."""

    epoch: Count
    number: Count
    draining: bool = True


Order = Dispatch | Abort | Probe | DrainWorker


class Answer(StrEnum):
    """What a worker answers to an order."""

    ACCEPTED = "accepted"
    BUSY = "busy"
    DUPLICATE = "duplicate"
    STALE_EPOCH = "stale_epoch"
    DRAINING = "draining"
    UNKNOWN = "unknown"
    """An abort of what doesn't run here; a dispatch that can't be read or served here."""


class WorkReply(Record, frozen=True, kw_only=True):
    """Answer to an order; `epoch` is the highest the agent has seen."""

    answer: Answer
    epoch: Count
    incarnation: Count
    detail: ShortText = ""


class Inventory(Record, frozen=True, kw_only=True):
    """Broadcast by a broker: adopt my epoch, send a full heartbeat now. `worker`: only that one."""

    epoch: Count
    worker: ShortText = ""


# ---- from a worker
# ----------------------------------------------------------------------------------


class InFlight(Struct, frozen=True, array_like=True):
    """One running attempt, with enough for a new broker to adopt it."""

    key: ShortText
    attempt: Attempt
    stream_sequence: Count
    band: Band
    model: Model
    prompt_tokens: Count
    cached_tokens: Count
    """As predicted until the engine says."""
    output_tokens_max: Count
    output_tokens: Count
    prefilled: bool
    enqueued_at_s: Seconds
    started_at_s: Seconds
    ack_subject: ShortText
    client: ShortText = ""
    adapter: ShortText = ""
    speaks_json: bool = False


class Outcome(StrEnum):
    """How an attempt ended on the worker."""

    SETTLED = "settled"
    """The job's terminal record stands: written here, or found."""
    RETRY = "retry"
    """Came to nothing, and another worker may do better."""


class Finished(Struct, frozen=True, array_like=True):
    """An attempt that ended; repeated in heartbeats until its job's message is acknowledged."""

    key: ShortText
    attempt: Attempt
    outcome: Outcome
    kind: Kind | None = None
    """Of the record that stands, when settled."""
    reason: Reason | None = None
    charged: bool = True
    detail: LongText = ""
    usage: Usage = Usage()
    predicted_hit_tokens: Count = 0
    ttft_s: Seconds = 0.0
    run_s: Seconds = 0.0
    acknowledged: bool = False
    ran: bool = True
    """False when an older record was found and the engine never asked."""
    stream_sequence: Count = 0
    cache_source: ShortText = ""
    """Whose word on the engine's cache the agent went by: `model`, its own guess, or `events`."""


class Load(Struct, frozen=True, array_like=True):
    """How loaded an engine is. 0: not known; of `decode_tokens_s`, not since the last report."""

    running: Count = 0
    waiting: Count = 0
    kv_tokens_used: Count = 0
    kv_tokens_max: Count = 0
    prefill_tokens_s: Seconds = 0.0
    decode_tokens_s: Seconds = 0.0
    gpu_utilisation_ratio: Seconds = 0.0
    gpu_memory_ratio: Seconds = 0.0


class CacheSummary(Record, frozen=True, kw_only=True):
    """What changed in a worker's prefix cache since report `sequence` - 1 of this incarnation.

    A full one replaces all earlier ones. A gap in `sequence` makes the broker ask for a full one.
    """

    sequence: Count
    full: bool = False
    added: bytes = b""
    """Block hashes stored (or used again), parents before children, `prefix.pack_hashes`."""
    removed: bytes = b""


class Heartbeat(Record, frozen=True, kw_only=True):
    """A worker's word, each second, on all it does."""

    worker: Token
    incarnation: Count
    """Unix milliseconds of the agent's start; a greater one is a new life: all it ran is gone."""
    sequence: Count
    epoch: Count
    echo: Count
    """Number of the last order processed of this epoch's broker."""
    at_s: Seconds
    models: tuple[Model, ...]
    slots: Count
    ready: bool = True
    draining: bool = False
    drained: bool = False
    inflight: tuple[InFlight, ...] = ()
    finished: tuple[Finished, ...] = ()
    load: Load = Load()
    summary: CacheSummary | None = None
    engine_incarnation: Count = 0
    """Rises when the engine restarts under the same agent: its cache is empty then."""
    version: ShortText = ""
    notice: ShortText = ""
    """What keeps it from ending jobs, for people: a full results stream, unconfirmed acks."""
    engine_faults: Count = 0
    """Different jobs that its engine failed in a row, none completed between."""
    cache_sequences: Count = 0
    """Whole sequences that its engine caches, one a slot (llama.cpp); 0: it caches blocks."""


class FirstToken(Record, frozen=True, kw_only=True, tag="first_token"):
    """A job's prefill is done: this is what frees prefill room."""

    worker: Token
    incarnation: Count
    key: ShortText
    attempt: Attempt
    ttft_s: Seconds
    cached_tokens: Count | None = None


class AttemptEnded(Record, frozen=True, kw_only=True, tag="ended"):
    """A slot is free."""

    worker: Token
    incarnation: Count
    finished: Finished


WorkerNote = FirstToken | AttemptEnded


# ---- to a client, on out.<lane>.<client>.<job>
# ------------------------------------------------------


class Queued(Record, frozen=True, kw_only=True, tag="queued"):
    """The job waits. Position 0 is next; `wait_s` is an estimate."""

    job: Token
    position: Count
    wait_s: Seconds


class Started(Record, frozen=True, kw_only=True, tag="started"):
    """An attempt was given to a worker."""

    job: Token
    attempt: Attempt
    worker: Token


class Tokens(Record, frozen=True, kw_only=True, tag="tokens", gc=False):
    """Some of the answer, as streamed; (attempt, index) says where it belongs, index from 0."""

    job: Token
    attempt: Attempt
    index: Count
    data: bytes
    """One server-sent event's data (JSON) of the endpoint."""


class Bundle(Record, frozen=True, kw_only=True, tag="bundle"):
    """Tokens of several jobs of one caller that came at one moment; those of a job in order."""

    tokens: tuple[Tokens, ...]


class End(Record, frozen=True, kw_only=True, tag="end"):
    """The job ended, and this is its record (encoded TerminalRecord), the same that is stored."""

    job: Token
    record: bytes


class StoredEnd(Record, frozen=True, kw_only=True, tag="stored"):
    """The job ended; its record is too large to repeat here and stands in RESULTS."""

    job: Token


OfOneJob = Queued | Started | Tokens | End | StoredEnd
OutEvent = OfOneJob | Bundle


# ---- leadership and queue state
# ------------------------------------------------------------------------


class Leader(Record, frozen=True, kw_only=True):
    """Value of the leader key. The epoch is the revision at which the key was created.

    `epoch` 0 means that this very revision created it; renewals, which raise the revision, carry
    the number.
    """

    broker: Token
    epoch: Count = 0


class QueueState(Record, frozen=True, kw_only=True):
    """One queue (band, model) of a lane, now."""

    band: Band
    model: Model
    queued_jobs: Count
    queued_jobs_max: Count
    inflight_jobs: Count
    wait_s: Seconds


class LaneState(Record, frozen=True, kw_only=True):
    """Sent on `q.<lane>` each second."""

    lane: Token
    epoch: Count
    at_s: Seconds
    queues: tuple[QueueState, ...]


class LaneOffer(Record, frozen=True, kw_only=True):
    """What CONFIG says of a lane, so that clients can tell an unknown model from an election."""

    lane: Token
    models: tuple[Model, ...]
    bands: tuple[Band, ...] = (0, 1, 2, 3)
    body_bytes_max: Count = BODY_BYTES_MAX
    bytes_per_token: dict[str, float] = {}
    aliases: dict[ShortText, ShortText] = {}
    """Other names of models and adapters; also of such as this lane does not offer, to say what is
    meant."""
    adapters: dict[ShortText, tuple[ShortText, ...]] = {}
    """Adapters that may be asked for, by model; empty: any."""
