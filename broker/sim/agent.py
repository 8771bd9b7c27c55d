"""A worker's agent as the broker knows it: what it runs, what it answers, what it reports.

It follows the agent's protocol (`worker_agent`): orders are numbered and echoed, a stale epoch and
an overtaken order are refused, first tokens and ends are told at once and ends are repeated in the
next heartbeat.
"""

from dataclasses import dataclass

from broker.core.decisions import Dispatch
from broker.core.events import JobSpec
from broker.engine_model.decode_meter import DecodeMeter
from broker.sim.host import Host
from broker.sim.request import Request
from broker.wire.faults import FaultRun
from broker.wire.messages import (
    Answer,
    Attempt,
    CacheSummary,
    Finished,
    FirstToken,
    Heartbeat,
    InFlight,
    Kind,
    Load,
    Outcome,
    Reason,
    Usage,
)
from broker.wire.prefix import pack_hashes

ENGINE_START_S = 1.0
"""How long a dead engine takes to serve again: short, and longer than an order is on its way."""

FINISHED_MAX = 4096
"""Ends that wait for the next heartbeat to be told again."""


@dataclass(slots=True)
class Run:
    """An attempt on this worker."""

    request: Request
    job: JobSpec
    attempt: Attempt
    started_at_s: float
    cached_tokens: int
    """As predicted until the engine says."""
    prefilled: bool = False


class Agent:
    """One life of an agent; a restart is a new one with a greater incarnation."""

    def __init__(self, host: Host, *, models: tuple[str, ...], incarnation: int) -> None:
        """Serve a model, and the adapters that follow it."""
        self.host = host
        self.incarnation = incarnation
        self.echo = 0
        self.epoch = 0
        self.draining = False
        self.ready_at_s = 0.0
        """When its engine serves: one that died takes a while to start anew."""
        self.runs: dict[str, Run] = {}
        self._models = models
        self._sequence = 0
        self._summaries = 0
        self._finished: list[Finished] = []
        self._faults = FaultRun()
        self._meter = DecodeMeter()
        self._decoded = (host.lives, 0, 0.0)
        """Of the engine when it was last looked at: its life, tokens and seconds of its answers."""
        self._wants_full = True
        profile = host.profile
        step_tokens = profile.step_tokens_max
        self._prefill_tokens_s = step_tokens / profile.prefill_s.at(step_tokens)

    def take(self, order: Dispatch, request: Request, job: JobSpec, *, at_s: float) -> Answer:
        """Answer an order to run; when accepted, the caller gives it to the engine."""
        if order.attempt.epoch < self.epoch:
            return Answer.STALE_EPOCH
        is_overtaken = not self.processed(order.attempt.epoch, order.number)
        if order.key in self.runs:
            return Answer.DUPLICATE
        if is_overtaken:
            return Answer.BUSY
        if self.draining:
            return Answer.DRAINING
        if at_s < self.ready_at_s or len(self.runs) >= self.host.profile.slots:
            return Answer.BUSY
        hit_tokens = order.predicted_hit_tokens
        self.runs[order.key] = Run(request, job, order.attempt, at_s, hit_tokens)
        return Answer.ACCEPTED

    def processed(self, epoch: int, number: int) -> bool:
        """Note an order processed: the next report echoes it. False if a later one was before."""
        self.learn(epoch)
        is_next = number > self.echo
        self.echo = max(self.echo, number)
        return is_next

    def learn(self, epoch: int) -> None:
        """Obey a new leader: its orders are numbered anew."""
        if epoch > self.epoch:
            self.epoch, self.echo = epoch, 0

    def first_token(self, key: str, *, cached_tokens: int, at_s: float) -> FirstToken:
        """Note a first token; returns what is told at once."""
        run = self.runs[key]
        run.prefilled, run.cached_tokens = True, cached_tokens
        return FirstToken(
            worker=self.host.name,
            incarnation=self.incarnation,
            key=key,
            attempt=run.attempt,
            ttft_s=at_s - run.started_at_s,
            cached_tokens=cached_tokens,
        )

    def end(self, key: str, *, kind: Kind, usage: Usage, at_s: float, ran: bool = True) -> Finished:
        """Note that a run ended with its record written; returns what is told at once.

        `ran` is False where an older record was found and the engine never asked.
        """
        run = self.runs.pop(key)
        finished = Finished(
            key,
            run.attempt,
            Outcome.SETTLED,
            kind=kind,
            usage=usage,
            predicted_hit_tokens=run.cached_tokens,
            run_s=at_s - run.started_at_s,
            acknowledged=True,
            ran=ran,
        )
        return self._keep(finished)

    def fail(self, key: str, reason: Reason) -> Finished:
        """Note that a run came to nothing; returns what is told at once."""
        run = self.runs.pop(key)
        return self._keep(Finished(key, run.attempt, Outcome.RETRY, reason=reason))

    def engine_died(self, *, at_s: float) -> list[Finished]:
        """Note that the engine died, and what ran there with it; returns what is told at once."""
        self.ready_at_s = at_s + ENGINE_START_S
        self._wants_full = True
        lost = [self.fail(key, Reason.WORKER_LOST) for key in list(self.runs)]
        self._faults.clear()
        return lost

    def _keep(self, finished: Finished) -> Finished:
        self._faults.ended(finished)
        if len(self._finished) < FINISHED_MAX:
            self._finished.append(finished)
        return finished

    def ask_full(self) -> None:
        """Make the next report's summary a full one."""
        self._wants_full = True

    def heartbeat(self, *, at_s: float) -> Heartbeat:
        """Report; what ended since the last report is told again."""
        host, profile = self.host, self.host.profile
        engine = host.model
        self._sequence += 1
        finished, self._finished = tuple(self._finished), []
        used = engine.kv.used_tokens
        return Heartbeat(
            worker=host.name,
            incarnation=self.incarnation,
            sequence=self._sequence,
            epoch=self.epoch,
            echo=self.echo,
            at_s=at_s,
            models=self._models,
            slots=profile.slots,
            ready=at_s >= self.ready_at_s,
            draining=self.draining,
            inflight=tuple(self._entry(key, run) for key, run in self.runs.items()),
            finished=finished,
            load=Load(
                running=engine.running,
                waiting=engine.waiting,
                kv_tokens_used=used,
                kv_tokens_max=profile.kv_tokens_max,
                prefill_tokens_s=self._prefill_tokens_s,
                decode_tokens_s=self._decode_tokens_s(),
            ),
            summary=self._summary(),
            engine_incarnation=host.lives,
            engine_faults=self._faults.jobs,
        )

    def _decode_tokens_s(self) -> float:
        """Tell what an agent sees of the answers: how they grew while nothing was prefilled."""
        lives, tokens, seconds = self._decoded
        engine = self.host.model
        self._decoded = (self.host.lives, engine.decoded_tokens, engine.decoded_s)
        if self.host.lives != lives:
            tokens, seconds = 0, 0.0
        self._meter.add(tokens=engine.decoded_tokens - tokens, seconds=engine.decoded_s - seconds)
        return self._meter.read()

    def _entry(self, key: str, run: Run) -> InFlight:
        job = run.job
        return InFlight(
            key,
            run.attempt,
            job.stream_sequence,
            job.band,
            job.model,
            job.prompt_tokens,
            run.cached_tokens,
            job.output_tokens_max,
            self.host.model.output_tokens(str(run.request.index)),
            run.prefilled,
            job.enqueued_at_s,
            run.started_at_s,
            "",
            adapter=job.adapter,
        )

    def _summary(self) -> CacheSummary | None:
        journal = self.host.model.kv.journal
        assert journal is not None, "the mind's engines keep a journal"
        full, self._wants_full = self._wants_full, False
        if not journal and not full:
            return None
        self._summaries += 1
        if full:
            added, removed = list(self.host.model.kv.blocks()), list[int]()
        else:
            added = [block for block, stored in journal.items() if stored]
            removed = [block for block, stored in journal.items() if not stored]
        journal.clear()
        return CacheSummary(
            sequence=self._summaries,
            full=full,
            added=pack_hashes(added),
            removed=pack_hashes(removed),
        )
