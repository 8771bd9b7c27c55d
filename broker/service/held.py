"""What the broker holds of each job: where its message is, and (as far as memory allows) its bytes.

A body is a cache of the stream: it can be dropped at any time and read again by sequence. So memory
is bounded whatever is queued, and a job whose body was dropped is dispatched a little later, never
lost.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from broker.bus.base import Delivery, Pull
from broker.core.events import JobSpec
from broker.service.stages import Stage, is_possible
from broker.wire.messages import Attempt


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A second message of a known job: acknowledged once the first one's record stands."""

    client: str
    stream: str
    subject: str
    sequence: int
    ack_subject: str
    speaks_json: bool = False


@dataclass(frozen=True, slots=True)
class Behind:
    """A message that came while the job of its id was being closed: a job of its own, afterwards.

    It keeps its place in the window until then.
    """

    delivery: Delivery
    pull: Pull


MessageId = tuple[str, int]
"""Stream and sequence: a lane's two streams number their messages each for itself."""


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
    """The job message as a worker gets it; None when it has to be read from the stream."""
    speaks_json: bool = False
    """Its caller reads JSON: receipts, tokens, record and end."""
    request_id: str = ""
    api_key_name: str = ""
    submitted_at_s: float = 0.0
    prompt_blocks: int = 0
    """Whole prefix blocks of its prompt; 0 when not known."""
    spec: JobSpec | None = None
    """What the mind was told of it, the same object; None when known from a worker's list only."""
    stage: Stage = Stage.WAITING
    sent: Attempt | None = None
    """The attempt last offered to a worker: the answer to an earlier one says nothing now."""
    unread: bool = False
    """Known from a worker's list only; its message has not come yet."""
    pull: Pull | None = None
    """Whose window it occupies; given back when it is handed on."""
    renewed_at_s: float = 0.0
    duplicates: dict[MessageId, Duplicate] = field(default_factory=dict[MessageId, Duplicate])
    behind: dict[MessageId, Behind] = field(default_factory=dict[MessageId, Behind])

    def enter(self, stage: Stage | None) -> None:
        """Move to a stage, by the table of moves; None: the broker lets go of it."""
        assert is_possible(self.stage, stage), f"{self.key} can't go from {self.stage} to {stage}"
        if stage is not None:
            self.stage = stage

    @property
    def message_id(self) -> MessageId:
        """Where its message is."""
        return self.stream, self.sequence


DUPLICATES_MAX = 16
"""Duplicates remembered per job; a further one is acknowledged when it comes again."""

BEHIND_MAX = 1
"""Messages kept behind a job that is being closed: a client tries again once at a time."""


class Shelf:
    """All held jobs, with their bytes counted against a budget."""

    def __init__(self, *, bytes_max: int, reserve_ratios: tuple[float, ...]) -> None:
        """Make an empty shelf; each band has a share of `bytes_max` that no other may fill."""
        self._jobs: dict[str, Held] = {}
        self._renewals: OrderedDict[str, Held] = OrderedDict()
        """Jobs whose ack-wait is ours to renew, the one renewed longest ago first."""
        self._bytes_max = bytes_max
        self._reserves = [int(bytes_max * ratio) for ratio in reserve_ratios]
        self._reserved_bytes = sum(self._reserves)
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
        assert is_possible(None, held.stage), f"{held.key} begins as {held.stage}"
        self._jobs[held.key] = held
        if held.stage is not Stage.RUNNING:
            self._renewals[held.key] = held
        if body is not None:
            self.give_body(held, body)

    def runs(self, held: Held) -> None:
        """Leave a job to the worker that has it: body, window and renewals are needed no more."""
        held.enter(Stage.RUNNING)
        self.drop_body(held)
        hand_on(held)
        self._renewals.pop(held.key, None)

    def waits(self, held: Held) -> None:
        """Take a job back from a worker; its ack-wait is renewed next, for nobody knows its age."""
        held.enter(Stage.WAITING)
        if held.key not in self._renewals and self._jobs.get(held.key) is held:
            self._renewals[held.key] = held
            held.renewed_at_s = 0.0
            self._renewals.move_to_end(held.key, last=False)

    def renewal_due(self, *, before_s: float) -> Held | None:
        """Return the job renewed longest ago, if that was before `before_s`."""
        held = next(iter(self._renewals.values()), None)
        return held if held is not None and held.renewed_at_s <= before_s else None

    def renewed(self, held: Held, *, at_s: float) -> None:
        """Note that a job's ack-wait begins anew."""
        held.renewed_at_s = at_s
        if held.key in self._renewals:
            self._renewals.move_to_end(held.key)

    def give_body(self, held: Held, body: bytes) -> bool:
        """Keep a body; False when the budget is spent (it will be read again when needed)."""
        if held.body is not None:
            return True
        used = self._bytes_of_band
        total = self.held_bytes + len(body)
        # What fits beside all reserves needs no look at what is left of each.
        if total > self._bytes_max - self._reserved_bytes and total > self._room_for(held.band):
            return False
        held.body = body
        used[held.band] += len(body)
        return True

    def _room_for(self, band: int) -> int:
        """Bytes that all bodies may take with one more of this band."""
        return self._bytes_max - sum(
            max(0, reserve - self._bytes_of_band[other])
            for other, reserve in enumerate(self._reserves)
            if other != band
        )

    def drop_body(self, held: Held) -> None:
        """Free a body."""
        if held.body is not None:
            self._bytes_of_band[held.band] -= len(held.body)
            held.body = None

    def remove(self, key: str) -> Held | None:
        """Forget a job, giving back its bytes and its place in the window."""
        held = self._jobs.pop(key, None)
        if held is not None:
            held.enter(None)
            self.drop_body(held)
            hand_on(held)
            self._renewals.pop(key, None)
            for behind in held.behind.values():
                behind.pull.release()
            held.behind.clear()
        return held


def hand_on(held: Held) -> None:
    """Give back the job's place in its pull's window, once."""
    if held.pull is not None:
        held.pull.release()
        held.pull = None
