"""What the broker holds of each job: where its message is, and (as far as memory allows) its bytes.

A body is a cache of the stream: it can be dropped at any time and read again by sequence. So memory
is
bounded whatever is queued, and a job whose body was dropped is dispatched a little later, never
lost.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from broker.bus.base import Pull


class Stage(Enum):
    """Where a held job stands."""

    WAITING = auto()
    SENT = auto()
    """Offered to a worker, not accepted yet."""
    RUNNING = auto()
    """Accepted: the agent renews and acknowledges the message now."""
    CLOSING = auto()
    """Its end is being recorded here."""


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A second message of a known job: acknowledged once the first one's record stands."""

    client: str
    sequence: int
    ack_subject: str


@dataclass(slots=True)
class Held:
    """One job the broker knows."""

    key: str
    lane: str
    band: int
    model: str
    job_id: str
    client: str
    stream: str
    subject: str
    sequence: int
    ack_subject: str
    enqueued_at_s: float
    body: bytes | None = None
    """The job message as published; None when it has to be read from the stream."""
    request_id: str = ""
    submitted_at_s: float = 0.0
    prompt_blocks: int = 0
    """Whole prefix blocks of its prompt; 0 when not known."""
    stage: Stage = Stage.WAITING
    pull: Pull | None = None
    """Whose window it occupies; given back when it is handed on."""
    renewed_at_s: float = 0.0
    duplicates: dict[int, Duplicate] = field(default_factory=dict[int, Duplicate])
    """By sequence of their message."""


DUPLICATES_MAX = 16
"""Duplicates remembered per job; a further one is acknowledged when it comes again."""


class Shelf:
    """All held jobs, with their bytes counted against a budget."""

    def __init__(self, *, bytes_max: int, reserve_ratios: tuple[float, ...]) -> None:
        """Make an empty shelf; each band has a share of `bytes_max` that no other may fill."""
        self._jobs: dict[str, Held] = {}
        self._bytes_max = bytes_max
        self._reserves = [int(bytes_max * ratio) for ratio in reserve_ratios]
        self._bytes_of_band = [0] * len(reserve_ratios)

    @property
    def held_bytes(self) -> int:
        """Sum the bytes of all bodies held."""
        return sum(self._bytes_of_band)

    def __len__(self) -> int:
        """Count the jobs."""
        return len(self._jobs)

    def __contains__(self, key: str) -> bool:
        """Say whether a job is here."""
        return key in self._jobs

    def get(self, key: str) -> Held | None:
        """Return a job, or None."""
        return self._jobs.get(key)

    def jobs(self) -> list[Held]:
        """Return all jobs, oldest first taken."""
        return list(self._jobs.values())

    def put(self, held: Held, body: bytes | None) -> None:
        """Take a new job in; its body only if the budget allows."""
        self._jobs[held.key] = held
        if body is not None:
            self.give_body(held, body)

    def give_body(self, held: Held, body: bytes) -> bool:
        """Keep a body; False when the budget is spent (it will be read again when needed)."""
        if held.body is not None:
            return True
        used = self._bytes_of_band
        reserved = sum(
            max(0, reserve - used[band])
            for band, reserve in enumerate(self._reserves)
            if band != held.band
        )
        if self.held_bytes + len(body) > self._bytes_max - reserved:
            return False
        held.body = body
        used[held.band] += len(body)
        return True

    def drop_body(self, held: Held) -> None:
        """Free a body."""
        if held.body is not None:
            self._bytes_of_band[held.band] -= len(held.body)
            held.body = None

    def remove(self, key: str) -> Held | None:
        """Forget a job, giving back its bytes and its place in the window."""
        held = self._jobs.pop(key, None)
        if held is not None:
            self.drop_body(held)
            hand_on(held)
        return held


def hand_on(held: Held) -> None:
    """Give back the job's place in its pull's window, once."""
    if held.pull is not None:
        held.pull.release()
        held.pull = None
