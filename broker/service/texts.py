"""What a record says to people: what happened, and what to do about it."""

from collections.abc import Sequence

from broker.wire.messages import Failure, Kind, Reason

TEXT_CHARS_MAX = 4096
"""Longest text of a record, `LongText` on the wire."""

CAUSE_CHARS_MAX = 500
"""Of the last failure's own words; a dead letter has all of them in full."""

_TEXTS = {
    Reason.QUEUE_FULL: "The queue is full; try again after retry_after_s.",
    Reason.QUOTA_EXCEEDED: "The job is larger than a quota row allows; make it smaller.",
    Reason.RESULTS_FULL: (
        "The lane's results take all the room they may: delete some, wait until they expire, or "
        "have an operator raise result_bytes_max, or streams.results_bytes_max."
    ),
    Reason.DEADLINE_INFEASIBLE: "The deadline can't be met at today's load; allow more time.",
    Reason.DEADLINE_EXPIRED: "The deadline passed before the job could run; allow more time.",
    Reason.WAIT_EXPIRED: "The job waited as long as its band allows; try later or a lower band.",
    Reason.CANCELLED: "Cancelled by its owner.",
    Reason.NO_WORKERS: "No worker serves this model now; see `inferlane workers`.",
    Reason.DRAINING: "The cluster is draining; try again later.",
    Reason.LANE_PAUSED: "The lane is paused by an operator; try again later.",
    Reason.UNKNOWN_MODEL: (
        "The lane may not use this model, adapter or band, or is no more; ask for another one."
    ),
    Reason.MALFORMED: "The message can't be read as a job; ops/docs/protocol.md has its fields.",
    Reason.PAYLOAD_TOO_LARGE: "The request is too large to be handed to a worker; send less.",
}


def ending_text(
    key: str, kind: Kind, reason: Reason, *, failures: Sequence[Failure] = (), detail: str = ""
) -> str:
    """Tell why the broker ended a job. `key` is `<lane>.<job>`; `detail` follows the text."""
    match kind:
        case Kind.DEAD_LETTERED:
            text = (
                f"Given up after {len(failures)} failed attempts{_last(failures)} Submit it again "
                f"under a new id, or run it again as an operator: `inferlane dlq replay {key}`."
            )
        case Kind.FAILED:
            text = (
                f"The answer broke off after its first token{_last(failures)} What was streamed is "
                "no answer; submit the request again under a new id."
            )
        case _:
            text = _TEXTS.get(reason, "The job could not be run.")
    return f"{text} {detail}".strip()[:TEXT_CHARS_MAX]


def _last(failures: Sequence[Failure]) -> str:
    """Tell the last failure, as the end of a sentence."""
    if not failures:
        return ": its worker was lost."
    last = failures[-1]
    cause = (last.detail or last.reason.replace("_", " "))[:CAUSE_CHARS_MAX]
    return f", the last on {last.worker}: {cause.rstrip('.')}."
