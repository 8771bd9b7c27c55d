"""Every subject, stream, consumer and bucket name: built here, parsed here, nowhere else."""

from dataclasses import dataclass

from broker.wire.ids import BANDS, BATCH_BAND, MalformedName, escape_model, is_token, unescape_model

INVENTORY = "wrk.inventory"
"""The broker asks all workers at once: "tell me what you run" (and: this is my epoch)."""

HEARTBEATS = "wrk.*.hb"
WORKER_NOTES = "wrk.*.note"
QUEUE_STATES = "q.*"
"""What the leader says of all lanes' queues: for tools inside the core account."""

ALL_OUT = "out.>"
"""All that all callers hear: for an auditor inside the core account."""

CLUSTER_CONTROL = "ctl.cluster.*"
LANE_CONTROL = "ctl.lane.*.*"

LEADER_BUCKET = "LEADER"
LEADER_KEY = "leader"
CONFIG_BUCKET = "CONFIG"
ATTEMPTS_BUCKET = "ATTEMPTS"
FILES_BUCKET = "FILES"
BATCHES_BUCKET = "BATCHES"
USAGE_BUCKET = "USAGE"

_OURS = frozenset(
    ("jobs", "results", "dlq", "files", "kept", "work", "wrk", "out", "q", "ctl", "gateways")
)
"""How our own subjects begin."""

_JOB_SUBJECT_TOKENS = 4
_USAGE_DAY_TOKENS = 3
_LINE_COPY_TOKENS = 4


@dataclass(frozen=True, slots=True)
class JobAddress:
    """What a job's subject says: whose it is, how urgent, and which model it needs."""

    lane: str
    band: int
    model: str


def may_be_answered(reply: str) -> bool:
    """Say whether an asker may have his answer there: on no subject of ours, nor the server's.

    Or he would have it said in the name of whoever answers, to a stream or another program.
    """
    first = reply.partition(".")[0]
    return bool(first) and first not in _OURS and not first.startswith("$")


def jobs(lane: str, band: int, model: str) -> str:
    """Subject to publish a job on: `jobs.<lane>.<band>.<escaped model>`."""
    return f"jobs.{lane}.{band}.{escape_model(model)}"


def parse_jobs(subject: str) -> JobAddress:
    """Undo `jobs`. Raises MalformedName when the subject isn't one of ours."""
    parts = subject.split(".")
    if len(parts) != _JOB_SUBJECT_TOKENS or parts[0] != "jobs" or not is_token(parts[1]):
        message = f"{subject!r} is not jobs.<lane>.<band>.<model>"
        raise MalformedName(message)
    if not (parts[2].isdecimal() and parts[2].isascii() and int(parts[2]) in BANDS):
        message = f"{subject!r} names no band of {BANDS}"
        raise MalformedName(message)
    return JobAddress(lane=parts[1], band=int(parts[2]), model=unescape_model(parts[3]))


def jobs_stream(lane: str, band: int) -> str:
    """Name the stream of a lane's jobs; batch has its own, so that it can't fill the door."""
    return f"BATCH_{lane}" if band == BATCH_BAND else f"JOBS_{lane}"


def job_consumer(band: int, model: str) -> str:
    """Name the durable consumer of one queue (band, model) of a lane's stream."""
    return f"b{band}-{escape_model(model)}"


def results_stream(lane: str) -> str:
    """Name the stream of a lane's terminal records."""
    return f"RESULTS_{lane}"


def result(lane: str, job_id: str) -> str:
    """Subject of a job's one terminal record."""
    return f"results.{lane}.{job_id}"


def bad_message_id(stream: str, sequence: int) -> str:
    """Job id under which the record of an unreadable message stands.

    The stream's kind is part of it: a lane has two streams of jobs, each with sequences of its own.
    """
    return f"bad-{'b' if stream.startswith('BATCH_') else 'j'}{sequence}"


def dead_letters_stream(lane: str) -> str:
    """Name the stream of a lane's dead letters."""
    return f"DLQ_{lane}"


def dead_letter(lane: str, job_id: str) -> str:
    """Subject of a dead letter."""
    return f"dlq.{lane}.{job_id}"


def work(worker: str) -> str:
    """Subject on which one worker takes orders (dispatch, abort, probe, drain), each answered."""
    return f"work.{worker}"


def heartbeat(worker: str) -> str:
    """Subject of a worker's heartbeats."""
    return f"wrk.{worker}.hb"


def worker_note(worker: str) -> str:
    """Subject of what a worker says at once, between heartbeats: first tokens and ends."""
    return f"wrk.{worker}.note"


def out(lane: str, client: str, job_id: str) -> str:
    """Subject on which a client hears of its job: receipts, tokens, end."""
    return f"out.{lane}.{client}.{job_id}"


def out_bundles(lane: str, client: str) -> str:
    """Subject of tokens of several jobs of a client in one message: a name that no job can have."""
    return f"out.{lane}.{client}.:tokens"


def out_of_client(lane: str, client: str) -> str:
    """Wildcard under which a client hears of all its jobs."""
    return f"out.{lane}.{client}.*"


def queue_state(lane: str) -> str:
    """Subject of a lane's queue state, sent each second."""
    return f"q.{lane}"


def queue_state_json(lane: str) -> str:
    """Subject of the same in JSON, for clients in any language."""
    return f"q.{lane}.json"


def lane_control(lane: str, verb: str) -> str:
    """Subject of a request that concerns one lane: `cancel`, `why`, `result`, `estimate`."""
    return f"ctl.lane.{lane}.{verb}"


def gateways_leaving(lane: str) -> str:
    """Subject on which a gateway asks the others who reads a job of the lane; `*`: of any lane."""
    return f"gateways.{lane}.leaving"


def cluster_control(verb: str) -> str:
    """Subject of an operator's request: `workers`, `lanes`, `drain`, `reconcile`."""
    return f"ctl.cluster.{verb}"


def usage_day_key(lane: str, day: str) -> str:
    """Key of a lane's sums of one day (`2026-11-30`) in the USAGE bucket."""
    return f"day.{lane}.{day}"


def parse_usage_day_key(key: str) -> tuple[str, str] | None:
    """Undo `usage_day_key`: (lane, day); None for any other key."""
    parts = key.split(".")
    return (parts[1], parts[2]) if len(parts) == _USAGE_DAY_TOKENS and parts[0] == "day" else None


def usage_mark_key(lane: str) -> str:
    """Key of how far a lane is counted, in the USAGE bucket."""
    return f"mark.{lane}"


def lane_offer_key(lane: str) -> str:
    """Key of a lane's offer in the CONFIG bucket."""
    return f"lane.{lane}"


def files_stream(lane: str) -> str:
    """Name the stream that holds the chunks of a lane's files."""
    return f"FILES_{lane}"


def file_chunks(lane: str, file_id: str) -> str:
    """Subject of a file's chunks, in order; `*` as the id stands for all files of the lane."""
    return f"files.{lane}.{file_id}"


def line_copy(lane: str, batch_id: str, number: int | str) -> str:
    """Subject of the copy of a line's record, in the stream of the lane's files; `*` for all."""
    return f"kept.{lane}.{batch_id}.{number}"


def batch_of_copy(subject: str) -> str:
    """Id of the batch whose line's copy stands on a subject of `line_copy`; empty on any other."""
    parts = subject.split(".")
    return parts[2] if len(parts) == _LINE_COPY_TOKENS and parts[0] == "kept" else ""


def file_key(lane: str, file_id: str) -> str:
    """Key of what is known of a file, in the FILES bucket."""
    return f"{lane}.{file_id}"


def batch_key(lane: str, batch_id: str) -> str:
    """Key of a batch's record in the BATCHES bucket; `*` as either stands for all."""
    return f"batch.{lane}.{batch_id}"


def batch_request_key(lane: str, fingerprint: str) -> str:
    """Key, in the BATCHES bucket, under which a repeated request finds its first one's batch."""
    return f"request.{lane}.{fingerprint}"
