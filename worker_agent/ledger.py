"""What runs here, what ended and is not confirmed yet, what was revoked. Pure: times passed in.

The broker rebuilds its own ledger from this one: heartbeats carry `inflight` and `finished` as they
stand here. Every list is bounded. Ends whose job message is not acknowledged are never dropped;
they can't pile up either, because at `unacknowledged_max` of them the worker is `full` and takes
nothing new.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from msgspec.structs import replace

from broker.wire.faults import FaultRun
from broker.wire.ids import job_key
from broker.wire.messages import (
    Attempt,
    Dispatch,
    Finished,
    InFlight,
    Job,
    Outcome,
    Reason,
    TerminalRecord,
)


class Step(Enum):
    """How far an attempt is."""

    CHECKING = auto()
    """Looks whether the job's record stands already."""
    ENGINE = auto()
    RECORDING = auto()
    """Its answer is being written: no longer to be stopped."""


@dataclass(frozen=True, slots=True)
class Stop:
    """An attempt is to be stopped. `record` is what to write, where the order brought one."""

    reason: Reason
    record: TerminalRecord | None = None


@dataclass(slots=True)
class Running:
    """One attempt that holds a slot."""

    order: Dispatch
    """Without the job's bytes: `job` has them."""
    job: Job
    accepted_at_s: float
    renewed_tick_s: float
    """Of the monotonic clock: a step of the wall clock may not delay a renewal, ..."""
    accepted_tick_s: float
    """... nor count as the time that a job took: the broker learns how fast work goes from that."""
    deadline_tick_s: float | None = None
    """Of the monotonic clock; None when the order does not tell what is left of the deadline."""
    step: Step = Step.CHECKING
    stop: Stop | None = None
    cached_tokens: int | None = None
    """As the engine told; until then the prediction counts."""
    cache_source: str = ""
    """Whose word on the engine's cache counted when it was given to it, `CacheSource`."""
    engine_incarnation: int = 0
    """Of the engine it was given to; 0 before."""
    output_tokens: int = 0
    first_token_at_s: float = 0.0
    first_token_tick_s: float = 0.0

    @property
    def key(self) -> str:
        """Name of the job across lanes."""
        return job_key(self.job.lane, self.job.id)

    @property
    def ack_subject(self) -> str:
        """Where its message is renewed and acknowledged."""
        return self.order.ack_subject

    @property
    def attempt(self) -> Attempt:
        """Which run of the job."""
        return self.order.attempt

    @property
    def ttft_s(self) -> float:
        """From acceptance to the first token; 0 before it."""
        return self.first_token_tick_s - self.accepted_tick_s if self.first_token_at_s else 0.0

    def run_s(self, *, tick_s: float) -> float:
        """Tell how long it has run."""
        return tick_s - self.accepted_tick_s

    def listed(self) -> InFlight:
        """Entry of the heartbeat's in-flight list."""
        known = self.cached_tokens
        return InFlight(
            key=self.key,
            attempt=self.attempt,
            stream_sequence=self.order.stream_sequence,
            band=self.job.band,
            model=self.job.model,
            prompt_tokens=self.job.prompt_tokens,
            cached_tokens=self.order.predicted_hit_tokens if known is None else known,
            output_tokens_max=self.job.output_tokens_max,
            output_tokens=self.output_tokens,
            prefilled=self.first_token_at_s > 0.0,
            enqueued_at_s=self.order.enqueued_at_s,
            started_at_s=self.accepted_at_s,
            ack_subject=self.order.ack_subject,
            client=self.job.client,
            adapter=self.job.adapter,
            speaks_json=self.order.speaks_json,
        )


@dataclass(slots=True)
class Ended:
    """One attempt that ended, until its end is surely known to the broker."""

    finished: Finished
    ack_subject: str
    """Of the job's message; empty when it is not ours to acknowledge."""
    renewed_tick_s: float
    beats: int = 0
    """Heartbeats that went out with it since it was confirmed."""
    is_carried: bool = False
    """It stands, confirmed, in the report that is on its way."""

    @property
    def unacknowledged(self) -> bool:
        """Its record stands and its message is still in the stream."""
        return bool(self.ack_subject) and not self.finished.acknowledged


@dataclass(slots=True)
class Ledger:
    """All attempts of this agent's life that still matter."""

    unacknowledged_max: int
    finished_max: int
    seen_max: int
    finished_beats: int
    running: dict[str, Running] = field(init=False, default_factory=dict[str, Running])
    """By job key: a job runs at most once here."""
    _ended: OrderedDict[tuple[str, Attempt], Ended] = field(
        init=False, default_factory=OrderedDict[tuple[str, Attempt], Ended]
    )
    _seen: OrderedDict[tuple[str, Attempt], None] = field(
        init=False, default_factory=OrderedDict[tuple[str, Attempt], None]
    )
    """Attempts accepted or revoked, oldest first: none of them may start (again)."""
    _unacknowledged: int = field(init=False, default=0)
    faults: FaultRun = field(init=False, default_factory=FaultRun)
    """What its engine failed in a row."""

    @property
    def full(self) -> bool:
        """Too many records wait for their ack: nothing new until the bus confirms some."""
        return self._unacknowledged >= self.unacknowledged_max

    @property
    def unacknowledged(self) -> int:
        """Jobs with a record whose message is not acknowledged."""
        return self._unacknowledged

    def seen(self, key: str, attempt: Attempt) -> bool:
        """Say whether this attempt was accepted or revoked before."""
        return (key, attempt) in self._seen

    def accept(self, order: Dispatch, job: Job, *, at_s: float, tick_s: float) -> Running:
        """Take a job in; it holds a slot from now on. It may not run already."""
        left_s = order.deadline_left_s
        running = Running(
            order=order,
            job=job,
            accepted_at_s=at_s,
            renewed_tick_s=tick_s,
            accepted_tick_s=tick_s,
            deadline_tick_s=None if left_s is None else tick_s + left_s,
        )
        assert running.key not in self.running, "a job runs at most once here"
        self.running[running.key] = running
        self._remember(running.key, running.attempt)
        return running

    def revoke(self, key: str, attempt: Attempt) -> None:
        """Remember that this attempt may not start, should its order still arrive."""
        self._remember(key, attempt)

    def find(self, key: str, attempt: Attempt) -> Running | None:
        """Return this very attempt, if it runs."""
        running = self.running.get(key)
        return running if running is not None and running.attempt == attempt else None

    def end(self, running: Running, finished: Finished) -> None:
        """Free the slot. A settled job waits for its ack from here on."""
        self.drop(running)
        self.faults.ended(finished)
        settled = finished.outcome is Outcome.SETTLED
        ack_subject = running.order.ack_subject if settled else ""
        ended = Ended(finished, ack_subject, renewed_tick_s=running.renewed_tick_s)
        self._ended[running.key, running.attempt] = ended
        self._unacknowledged += ended.unacknowledged
        self._trim()

    def drop(self, running: Running) -> None:
        """Free the slot and forget the attempt. Dropping twice does nothing."""
        if self.running.get(running.key) is running:
            del self.running[running.key]

    def acknowledged(self, key: str, attempt: Attempt) -> None:
        """Note that the job's message is gone from its stream."""
        ended = self._ended.get((key, attempt))
        if ended is None or not ended.unacknowledged:
            return
        ended.finished = replace(ended.finished, acknowledged=True)
        self._unacknowledged -= 1
        self._trim()

    def reported(self) -> None:
        """Note that the last report went out: confirmed ends are repeated a few times only."""
        for name, ended in list(self._ended.items()):
            if ended.is_carried:
                ended.beats += 1
                if ended.beats >= self.finished_beats:
                    del self._ended[name]

    def inflight(self) -> tuple[InFlight, ...]:
        """List what runs."""
        return tuple(running.listed() for running in self.running.values())

    def finished(self) -> tuple[Finished, ...]:
        """List, for a report, what ended and is not surely known to the broker."""
        for ended in self._ended.values():
            ended.is_carried = not ended.unacknowledged
        return tuple(ended.finished for ended in self._ended.values())

    def renewals_due(self, *, before_tick_s: float) -> Iterator[Running | Ended]:
        """Yield what holds a job's message and was last renewed before then."""
        for running in list(self.running.values()):
            if running.renewed_tick_s < before_tick_s:
                yield running
        for ended in list(self._ended.values()):
            if ended.unacknowledged and ended.renewed_tick_s < before_tick_s:
                yield ended

    def _remember(self, key: str, attempt: Attempt) -> None:
        self._seen[key, attempt] = None
        if len(self._seen) > self.seen_max:
            self._seen.popitem(last=False)

    def _trim(self) -> None:
        """Keep at most `finished_max` confirmed ends."""
        surplus = len(self._ended) - self._unacknowledged - self.finished_max
        if surplus > 0:
            confirmed = (name for name, ended in self._ended.items() if not ended.unacknowledged)
            for name in [name for name, _ in zip(confirmed, range(surplus), strict=False)]:
                del self._ended[name]
