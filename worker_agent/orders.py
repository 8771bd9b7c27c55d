"""What becomes of an order: judged, answered at once, and handed on. No I/O, no waiting."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

import structlog
from msgspec.structs import replace

from broker.wire import codec
from broker.wire.ids import job_key
from broker.wire.messages import (
    Abort,
    Answer,
    Dispatch,
    DrainWorker,
    Job,
    Order,
    Probe,
    WorkReply,
)
from worker_agent.engine_watch import EngineWatch
from worker_agent.fence import Fence, Verdict
from worker_agent.ledger import Ledger, Running, Stop
from worker_agent.models import ModelNames
from worker_agent.namesake import own_place

_log = structlog.get_logger(__name__)

DETAIL_CHARS_MAX = 256
"""Of a reply's detail, `ShortText` on the wire."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer and its reason."""

    answer: Answer
    detail: str = ""


ACCEPTED = Said(Answer.ACCEPTED)
STALE = Said(Answer.STALE_EPOCH, "an order of a broker that is no longer leader")


@dataclass(frozen=True, slots=True)
class Effects:
    """What orders set in motion."""

    begin: Callable[[Running], None]
    """Run an accepted attempt."""
    stop: Callable[[Running, Stop], None]
    """Stop an attempt."""
    drain: Callable[[], None]
    """The drain state was ordered anew."""


class OrderDesk:
    """Takes the orders of one worker."""

    def __init__(
        self,
        *,
        fence: Fence,
        ledger: Ledger,
        watch: EngineWatch,
        names: ModelNames,
        incarnation: int,
        effects: Effects,
        now_s: Callable[[], float],
        tick_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fence = fence
        self._ledger = ledger
        self._watch = watch
        self._names = names
        self._incarnation = incarnation
        self._effects = effects
        self._now_s = now_s
        self._tick_s = tick_s
        self.is_draining = False
        """By order of the broker."""
        self.is_leaving = False
        """The process is about to end: no order takes that back."""

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self.is_draining or self.is_leaving

    def take(self, data: bytes) -> WorkReply:
        """Obey or refuse one order."""
        is_order = True
        try:
            order = codec.decode_order(data)
            # Epoch 0: another agent of this name asks, before it serves.
            is_order = not isinstance(order, Probe) or order.epoch > 0
            said = self._obey(order) if is_order else self._tell_namesake()
        except codec.MalformedMessage as error:
            said = Said(Answer.UNKNOWN, f"not an order: {error}")
        if is_order and said.answer not in (Answer.ACCEPTED, Answer.BUSY):
            _log.info("order refused", answer=said.answer, detail=said.detail)
        return WorkReply(
            answer=said.answer,
            epoch=self._fence.epoch,
            incarnation=self._incarnation,
            detail=said.detail[:DETAIL_CHARS_MAX],
        )

    def _tell_namesake(self) -> Said:
        return Said(Answer.DRAINING if self.is_leaving else Answer.ACCEPTED, own_place())

    def _obey(self, order: Order) -> Said:
        verdict = self._fence.judge(epoch=order.epoch, number=order.number)
        if verdict is Verdict.STALE_EPOCH:
            return STALE
        match order:
            case Dispatch():
                return self._dispatch(order, overtaken=verdict is Verdict.OVERTAKEN)
            case Abort():
                return self._abort(order)
            case DrainWorker():
                if verdict is Verdict.NEXT:
                    self.is_draining = order.draining
                    self._effects.drain()
                return ACCEPTED
            case Probe():
                return ACCEPTED
            case _:
                assert_never(order)

    def _dispatch(self, order: Dispatch, *, overtaken: bool) -> Said:
        try:
            job = codec.decode(order.job, Job)
        except codec.MalformedMessage as error:
            return Said(Answer.UNKNOWN, f"the job can't be read: {error}")
        if not order.ack_subject:
            return Said(Answer.UNKNOWN, "the order does not say where to acknowledge")
        if job.lane != order.lane:
            return Said(
                Answer.UNKNOWN, f"the job is of lane {job.lane}, its stream of {order.lane}"
            )
        refusal = self._refusal(order, job, overtaken=overtaken)
        if refusal is None:
            kept = replace(order, job=b"")
            running = self._ledger.accept(kept, job, at_s=self._now_s(), tick_s=self._tick_s())
            self._effects.begin(running)
        return refusal or ACCEPTED

    def _refusal(self, order: Dispatch, job: Job, *, overtaken: bool) -> Said | None:
        """Say why a job can't be taken; None when it can. That it is here comes first."""
        key = job_key(job.lane, job.id)
        if key in self._ledger.running or self._ledger.seen(key, order.attempt):
            return Said(Answer.DUPLICATE, "the job runs here, or this attempt did")
        if overtaken:
            return Said(Answer.BUSY, f"order {order.number} came after order {self._fence.echo}")
        if self.draining:
            return Said(Answer.DRAINING)
        if not self._watch.readiness.ready:
            return Said(Answer.BUSY, f"the engine is not ready: {self._watch.readiness.detail}")
        if job.model not in self._names.served:
            return Said(Answer.UNKNOWN, f"model {job.model} is not served here")
        if job.adapter and job.adapter not in self._names.served:
            return Said(Answer.UNKNOWN, f"adapter {job.adapter} is not served here")
        slots = self._watch.facts.slots
        if len(self._ledger.running) >= slots:
            return Said(Answer.BUSY, f"all {slots} slots are taken")
        if self._ledger.full:
            return Said(Answer.BUSY, f"{self._ledger.unacknowledged} acks are not confirmed")
        return None

    def _abort(self, order: Abort) -> Said:
        running = self._ledger.find(order.key, order.attempt)
        self._ledger.revoke(order.key, order.attempt)
        if running is None:
            return Said(Answer.UNKNOWN, "this attempt does not run here")
        self._effects.stop(running, Stop(order.reason, order.record))
        return ACCEPTED
