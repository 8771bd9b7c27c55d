"""What can go wrong for a producer. Each message is one sentence and says what to do."""

from dataclasses import dataclass

from broker.wire.messages import Kind, Reason, TerminalRecord


class ProducerError(Exception):
    """Root of everything the producer library raises."""


class Unreachable(ProducerError):
    """The cluster could not be reached. Whether a job is stored is unknown: reuse its id."""


class BadLink(Unreachable):
    """The URL or the credentials can't be: no server was asked, and another try helps nothing."""


class ClientClosed(ProducerError):
    """The client was closed while somebody waited on it; the jobs go on."""


class ResultTimeout(ProducerError):
    """The result did not come in the time given; the job goes on, and may be waited for again."""


class Refused(ProducerError):
    """The job was not accepted, and nothing of it is stored."""

    def __init__(self, reason: Reason, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    """The lane's queue has no room: try again after `retry_after_s`, with the same job id."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(Reason.QUEUE_FULL, message, retry_after_s=retry_after_s)


class UnknownModel(Refused):
    """The lane doesn't offer this model (or this band of it)."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.UNKNOWN_MODEL, message)


class UnknownLane(UnknownModel):
    """The cluster has no such lane."""


class BodyTooLarge(Refused):
    """The request body is larger than a message may be."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.PAYLOAD_TOO_LARGE, message)


class BadRequest(Refused):
    """The request can't be a job: no JSON object, no model, an impossible field."""

    def __init__(self, message: str) -> None:
        super().__init__(Reason.MALFORMED, message)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why the broker turned a job away, and when another try may succeed."""

    reason: Reason
    row: str
    """Quota row that refused; empty when no row did."""
    retry_after_s: float
    """0 when another try will not help."""
    message: str


def rejection_of(record: TerminalRecord) -> Rejection | None:
    """Read a record as a rejection; None when the job was not rejected."""
    if record.kind is not Kind.REJECTED:
        return None
    return Rejection(
        reason=record.reason or Reason.QUOTA_EXCEEDED,
        row=record.row,
        retry_after_s=record.retry_after_s,
        message=record.message,
    )


class JobFailed(ProducerError):
    """The job ended other than completed; `record` has all that is known."""

    def __init__(self, record: TerminalRecord) -> None:
        reason = f" ({record.reason})" if record.reason else ""
        said = f": {record.message}" if record.message else ""
        super().__init__(f"job {record.job} ended {record.kind}{reason}{said}")
        self.record = record


class JobRejected(JobFailed):
    """The broker turned the job away; `rejection` says why and when to come again."""

    def __init__(self, record: TerminalRecord, rejection: Rejection) -> None:
        super().__init__(record)
        self.rejection = rejection


def failure_of(record: TerminalRecord) -> JobFailed | None:
    """Make the error for a record that is no success; None for a completed job."""
    if record.kind is Kind.COMPLETED:
        return None
    rejection = rejection_of(record)
    return JobRejected(record, rejection) if rejection else JobFailed(record)
