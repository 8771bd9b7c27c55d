"""Carries decisions out: orders to workers, word to callers, endings to the closer.

Orders to one worker leave in the order of their numbers: agents refuse a number that is not above
the last, so that "echo ≥ n and not listed" proves that order n does not run.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog

from broker.bus.base import (
    Bus,
    BusError,
    NoResponders,
    NotFound,
    PayloadTooLarge,
)
from broker.core import decisions as do
from broker.core.events import DispatchAnswered, Event, ProbeAnswered, Unanswered
from broker.service.endings import Endings
from broker.service.held import Held, Shelf
from broker.service.reading import Reader
from broker.service.stages import Stage
from broker.wire import messages as wire
from broker.wire import subjects
from broker.wire.codec import MESSAGE_BYTES_MAX, MalformedMessage, decode, encode, encode_for
from broker.wire.messages import Answer, Reason, WorkReply
from broker.wire.subjects import JobAddress

MAIL_MAX = 20_000
"""Receipts waiting to be sent; beyond this the newest are dropped (callers need none of them)."""

MAIL_PER_TURN_MAX = 128
"""Receipts sent without giving way: about half a millisecond of work."""

ABORT_ANSWER_S = 2.0
"""How long an abort, probe or drain may go unanswered: a round trip takes milliseconds."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Order:
    """One order on its way to a worker."""

    worker: str
    message: wire.Order
    dispatch: do.Dispatch | None = None


class Outbox:
    """Sends what was decided."""

    def __init__(
        self,
        bus: Bus,
        shelf: Shelf,
        endings: Endings,
        *,
        epoch: int,
        answer_s: float,
        tell: Callable[[Event], None],
        now: Callable[[], float],
        reader: Reader,
    ) -> None:
        """Answers of workers come back as events through `tell`."""
        self._bus = bus
        self._shelf = shelf
        self._endings = endings
        self._epoch = epoch
        self._answer_s = answer_s
        self._tell = tell
        self._now = now
        self._reader = reader
        self._group: asyncio.TaskGroup | None = None
        self._behind: dict[str, deque[_Order]] = {}
        """Orders that wait behind one whose job's body is being read, per worker."""
        self._mail: deque[tuple[str, bytes]] = deque()
        self._mail_ready = asyncio.Event()
        self.mail_dropped = 0

    async def run(self) -> None:
        """Send until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._send_mail()

    # ---- decisions ----

    def dispatch(self, decision: do.Dispatch) -> None:
        """Offer a job to its worker."""
        held = self._shelf.get(decision.key)
        if held is None or held.stage is Stage.CLOSING:
            # Nothing can be sent of it: if its message is still there, it comes again.
            _log.warning("outbox.dispatch_unheld", job=decision.key)
            self._endings.forget(decision.key)
            return
        held.enter(Stage.SENT)
        held.sent = decision.attempt
        order = wire.Dispatch(
            epoch=self._epoch,
            number=decision.number,
            attempt=decision.attempt,
            lane=held.lane,
            stream=held.stream,
            stream_sequence=held.sequence,
            ack_subject=held.ack_subject,
            job=held.body or b"",
            run_s_max=decision.run_s_max,
            stall_s=decision.stall_s,
            predicted_hit_tokens=decision.predicted_hit_tokens,
            enqueued_at_s=decision.enqueued_at_s,
            failures=decision.failures,
            speaks_json=held.speaks_json,
            deadline_left_s=self._deadline_left_s(held),
        )
        self._post(_Order(decision.worker, order, decision))

    def _deadline_left_s(self, held: Held) -> float | None:
        deadline_at_s = None if held.spec is None else held.spec.deadline_at_s
        return None if deadline_at_s is None else max(0.0, deadline_at_s - self._now())

    def abort(self, decision: do.Abort) -> None:
        """Tell a worker to stop an attempt."""
        order = wire.Abort(
            epoch=self._epoch,
            number=decision.number,
            key=decision.key,
            attempt=decision.attempt,
            reason=decision.reason,
        )
        self._post(_Order(decision.worker, order))

    def probe(self, decision: do.Probe) -> None:
        """Ask a worker whether it lives."""
        self._post(_Order(decision.worker, wire.Probe(epoch=self._epoch, number=decision.number)))

    def drain(self, decision: do.DrainOrder) -> None:
        """Tell a worker to drain or to work again."""
        order = wire.DrainWorker(
            epoch=self._epoch, number=decision.number, draining=decision.draining
        )
        self._post(_Order(decision.worker, order))

    def receipt(self, held: Held, event: wire.OutEvent) -> None:
        """Send a receipt to a job's caller."""
        if held.client:
            data = encode_for(event, speaks_json=held.speaks_json)
            self.mail(subjects.out(held.lane, held.client, held.job_id), data)

    def mail(self, subject: str, data: bytes) -> None:
        """Send a message that nobody depends on."""
        if len(self._mail) >= MAIL_MAX:
            self.mail_dropped += 1
            return
        self._mail.append((subject, data))
        self._mail_ready.set()

    # ---- orders ----

    def _post(self, order: _Order) -> None:
        group = self._group
        if group is None:
            self._undelivered(order, Unanswered.UNSENT)
            return
        waiting = self._behind.get(order.worker)
        if waiting is not None:
            waiting.append(order)
        elif order.dispatch is not None and not _has_job(order):
            self._behind[order.worker] = deque([order])
            group.create_task(self._send_in_turn(order.worker))
        else:
            group.create_task(self._send(order))

    async def _send_in_turn(self, worker: str) -> None:
        """Read the missing body, then send all that gathered behind it, in order."""
        waiting = self._behind[worker]
        while waiting:
            order = waiting[0]
            complete = await self._with_job(order)
            waiting.popleft()
            if complete is None:
                self._undelivered(order, Unanswered.UNSENT)
            elif self._group is not None:
                self._group.create_task(self._send(complete))
                await asyncio.sleep(0)
        del self._behind[worker]

    async def _with_job(self, order: _Order) -> _Order | None:
        """Complete a dispatch with its job's bytes; None when they can't be had."""
        message = order.message
        if not isinstance(message, wire.Dispatch) or order.dispatch is None or message.job:
            return order
        held = self._shelf.get(order.dispatch.key)
        if held is None or not _is_of(held, order.dispatch):
            return None
        try:
            stored = await self._bus.message_at(held.stream, held.sequence)
            address = JobAddress(held.lane, held.band, held.model)
            job = await self._reader.message_of(stored, address)
        except NotFound:
            self._endings.message_gone(held)
            return None
        except (BusError, MalformedMessage) as error:
            _log.warning("outbox.body_unread", job=held.key, error=str(error))
            return None
        if not _is_of(held, order.dispatch):
            return None
        whole = msgspec.structs.replace(message, job=job)
        return _Order(order.worker, whole, order.dispatch)

    async def _send(self, order: _Order) -> None:
        timeout_s = self._answer_s if order.dispatch is not None else ABORT_ANSWER_S
        try:
            data = encode(order.message)
            if len(data) > MESSAGE_BYTES_MAX:
                # The server would take it, and every worker refuse it.
                self._too_large(order)
                return
            reply = await self._bus.request(subjects.work(order.worker), data, timeout_s=timeout_s)
            answer = decode(reply.data, WorkReply)
        except NoResponders:
            self._undelivered(order, Unanswered.NO_RESPONDERS)
        except PayloadTooLarge:
            self._too_large(order)
        except (BusError, MalformedMessage) as error:
            # It may have arrived, also where the link was lost: only the worker's echo can tell.
            _log.info("outbox.unanswered", worker=order.worker, error=str(error))
            self._undelivered(order, Unanswered.TIMEOUT)
        except Exception:  # noqa: BLE001 - the edge of one order: the others go on
            _log.exception("outbox.surprise", worker=order.worker)
            self._undelivered(order, Unanswered.TIMEOUT)
        else:
            self._replied(order, answer)

    def _replied(self, order: _Order, reply: WorkReply) -> None:
        if order.dispatch is not None:
            self._answered(order.dispatch, reply.answer)
        elif isinstance(order.message, wire.Probe):
            self._tell(ProbeAnswered(self._now(), order.worker, reply.incarnation))

    def _undelivered(self, order: _Order, missed: Unanswered) -> None:
        if order.dispatch is not None:
            self._answered(order.dispatch, missed)
        elif isinstance(order.message, wire.Probe):
            self._tell(ProbeAnswered(self._now(), order.worker, None, missed))

    def _answered(self, dispatch: do.Dispatch, answer: Answer | Unanswered) -> None:
        held = self._shelf.get(dispatch.key)
        if held is not None and _is_of(held, dispatch):
            if answer in (Answer.ACCEPTED, Answer.DUPLICATE):
                self._accepted(held, dispatch)
            elif answer is not Unanswered.TIMEOUT:
                self._shelf.waits(held)
        self._tell(
            DispatchAnswered(self._now(), dispatch.worker, dispatch.key, dispatch.attempt, answer)
        )

    def _accepted(self, held: Held, dispatch: do.Dispatch) -> None:
        self._shelf.runs(held)
        started = wire.Started(job=held.job_id, attempt=dispatch.attempt, worker=dispatch.worker)
        self.receipt(held, started)

    def _too_large(self, order: _Order) -> None:
        """The job fits a message but not the order around it: end it, nothing else can help."""
        dispatch = order.dispatch
        held = self._shelf.get(dispatch.key) if dispatch is not None else None
        if held is None or dispatch is None or not _is_of(held, dispatch):
            self._undelivered(order, Unanswered.UNSENT)
            return
        self._endings.end(held, wire.Kind.REJECTED, reason=Reason.PAYLOAD_TOO_LARGE)
        self._endings.forget(held.key)

    async def _send_mail(self) -> None:
        while True:
            await self._mail_ready.wait()
            self._mail_ready.clear()
            while self._mail:
                for _ in range(min(len(self._mail), MAIL_PER_TURN_MAX)):
                    await self._send_letter(*self._mail.popleft())
                await asyncio.sleep(0)

    async def _send_letter(self, subject: str, data: bytes) -> None:
        try:
            await self._bus.publish(subject, data)
        except BusError:
            self.mail_dropped += 1


def _has_job(order: _Order) -> bool:
    return isinstance(order.message, wire.Dispatch) and bool(order.message.job)


def _is_of(held: Held, dispatch: do.Dispatch) -> bool:
    """Say whether this is the offer that the job waits on; one that was taken back says nothing."""
    return held.stage is Stage.SENT and held.sent == dispatch.attempt
