"""A batch, as its one record in the bucket BATCHES says it."""

import secrets
from enum import StrEnum

from msgspec import field

from broker.wire.fields import Count, LongText, Seconds, ShortText, Token
from broker.wire.ids import line_job_id
from broker.wire.messages import Record, Usage


class Status(StrEnum):
    """How far a batch is, in the words of its users."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


ENDED = frozenset((Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED))
"""Nothing happens to such a batch any more."""


class Counts(Record, frozen=True, kw_only=True):
    """Lines: all of them (0 until the input was looked over), and how many ended either way."""

    total: Count = 0
    completed: Count = 0
    failed: Count = 0

    @property
    def ended(self) -> int:
        """Lines that stand in one of the result files."""
        return self.completed + self.failed


class Fault(Record, frozen=True, kw_only=True):
    """Why a batch failed; `line` is 1-based, 0 where no line is to blame."""

    code: ShortText
    message: LongText
    param: ShortText = ""
    line: Count = 0


class Lease(Record, frozen=True, kw_only=True):
    """A runner's right to a batch until an instant; `number` rises with each new runner."""

    runner: Token
    until_s: Seconds
    number: Count


class Forecast(Record, frozen=True, kw_only=True):
    """What is left of a batch, at the capacity of `at_s`."""

    at_s: Seconds
    takes_s: Seconds
    """Until the last line ended."""
    miss_ratio: Seconds
    """Chance (0..1) that the window ends before."""
    lane_lines_s: Seconds = 0.0
    """Lines like its own that all its lane's batches end in a second; 0: not known."""


class Place(Record, frozen=True, kw_only=True):
    """What a runner must know of the one before it, beside what stands in the result files."""

    read_to: Count = 0
    """No line beyond was ever submitted."""
    jobs_inflight: Count = 0
    """Jobs in the cluster: for people."""
    jobs_after_sequence: Count = 0
    """Messages of its unfinished lines come after this one of the lane's batch stream."""
    cleared_output: Count = 0
    cleared_errors: Count = 0
    """Up to these chunks of its files, records of its lines have left RESULTS."""


class Batch(Record, frozen=True, kw_only=True):
    """One batch."""

    id: Token
    lane: Token
    endpoint: ShortText
    input_file_id: Token
    completion_window: ShortText
    """As it was given."""
    window_s: Seconds
    created_at_s: Seconds
    status: Status = Status.VALIDATING
    in_progress_at_s: Seconds = 0.0
    finalizing_at_s: Seconds = 0.0
    completed_at_s: Seconds = 0.0
    failed_at_s: Seconds = 0.0
    expired_at_s: Seconds = 0.0
    cancelling_at_s: Seconds = 0.0
    cancelled_at_s: Seconds = 0.0
    api_key_name: ShortText = ""
    """Whose API key asked for it: its jobs are in that key's accounts."""
    metadata: dict[ShortText, str] = field(default_factory=dict[str, str])
    lines: Count = 0
    """Of the input, blank ones included."""
    counts: Counts = Counts()
    usage: Usage = Usage()
    errors: tuple[Fault, ...] = ()
    output_file_id: ShortText = ""
    """Empty while no line completed; ..."""
    error_file_id: ShortText = ""
    """... while none failed."""
    results_life_s: Seconds
    """Life of the result files once they are whole."""
    place: Place = Place()
    lease: Lease | None = None
    forecast: Forecast | None = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing happens to it any more."""
        return self.status in ENDED

    @property
    def deadline_at_s(self) -> float:
        """Unix time when its window is over."""
        return self.created_at_s + self.window_s

    def job_id(self, number: int) -> str:
        """Id of a line's job, the same for every runner: what ran already is found by it."""
        return line_job_id(self.id, number)

    @property
    def output_id(self) -> str:
        """Id that its output file has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-output"

    @property
    def errors_id(self) -> str:
        """Id that its error file has, or will have."""
        return f"file-{self.id.removeprefix('batch_')}-error"


def new_batch_id() -> str:
    """Make a batch id that nobody else will make."""
    return f"batch_{secrets.token_hex(12)}"
