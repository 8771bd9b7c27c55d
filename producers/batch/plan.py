"""What the user asked for, and the bounds within which a batch is run."""

from dataclasses import dataclass
from pathlib import Path

from broker.wire.ids import BATCH_BAND
from producers.batch.source import STDIN

WINDOW_S = 24 * 3600.0
"""Default time for the whole batch: what the hosted services give."""

CONCURRENCY = 1000
"""Jobs in the cluster at once: enough for ten workers of twenty slots five times over, so that the
broker can choose among lines that share a prefix."""


OUTAGE_S = 600.0
"""A cluster out of reach for longer ends the run, which can be gone on with: a restart takes
less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of a batch."""

    input: str
    """Path, or STDIN."""
    output: Path
    errors: Path
    lane: str
    window_s: float | None = None
    """None: as the batch was begun, or WINDOW_S."""
    endpoint: str = ""
    """Empty: the first good line's."""
    concurrency: int = CONCURRENCY
    band: int = BATCH_BAND
    api_key_name: str = ""
    """In whose accounts its jobs stand."""

    @property
    def state(self) -> Path:
        """The state file beside the output."""
        return state_of(self.output)

    @property
    def input_name(self) -> str:
        """The input as a path that means the same from anywhere; STDIN where it comes but once.

        Empty where its name is no UTF-8, as old systems have them: it can't be noted then.
        """
        return STDIN if self.is_pipe else noted(str(Path(self.input).resolve()))

    @property
    def errors_name(self) -> str:
        """The error file, for whoever takes the batch up: seen from the output, so both can move.

        Empty where it is the output's own, by its name.
        """
        if self.errors == default_errors(self.output):
            return ""
        is_beside = self.errors.parent == self.output.parent
        return noted(self.errors.name if is_beside else str(self.errors))

    @property
    def files_beside(self) -> tuple[Path, ...]:
        """What a run writes beside its results: the state, and the error file's next one."""
        state = (Path(f"{self.state}{ending}") for ending in ("", "-wal", "-shm", "-journal"))
        return next_errors(self.errors), *state

    @property
    def is_pipe(self) -> bool:
        """Whether the input can be read only once."""
        return self.input == STDIN or (Path(self.input).exists() and not Path(self.input).is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a run holds at most, whatever the size of the batch."""

    lookahead_lines: int = 4096
    """Lines read ahead, so that those that share a prefix can be put together; ..."""
    lookahead_bytes: int = 32_000_000
    """... and their bytes. One window is being submitted while the next is being read."""
    gather_s: float = 0.2
    """A window that isn't full is gone on with when the input pauses for so long."""
    inflight_bytes: int = 64_000_000
    """Bodies of the jobs that are under way."""
    unwritten_bytes: int = 32_000_000
    """Results that wait for the disk; then no further job is taken out of flight."""
    write_s: float = 0.1
    """Results are written this often at the least, ..."""
    checkpoint_s: float = 1.0
    """... and brought to disk and noted this often: what a power cut may cost to collect again."""
    grace_s: float = 5.0
    """After the window the cluster has this long to say itself which jobs expired."""


def state_of(output: Path) -> Path:
    """Name the state file of an output: `out.jsonl` gives `out.jsonl.state`."""
    return output.with_name(f"{output.name}.state")


def next_errors(errors: Path) -> Path:
    """Name the file that takes an error file's place when failed lines are run again."""
    return errors.with_name(f"{errors.name}.new")


def noted(name: str) -> str:
    """Return a file's name if it can be noted as text, else nothing."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return ""
    return name


def default_errors(output: Path) -> Path:
    """Name the error file of an output: `out.jsonl` gives `out.errors.jsonl`."""
    return output.with_name(f"{output.stem}.errors{output.suffix or '.jsonl'}")
