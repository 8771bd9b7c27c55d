"""Orders on their way to workers: their order, their answers, and every way to get none."""

import asyncio
from typing import Any

import msgspec
import pytest

from broker.bus.base import BusError, LinkDown, NoResponders, PayloadTooLarge, Timeout
from broker.core import decisions as do
from broker.core.events import DispatchAnswered, JobEnded, ProbeAnswered, Unanswered
from broker.service.outbox import MAIL_MAX, MAIL_PER_TURN_MAX
from broker.service.stages import Stage
from broker.wire import messages as wire
from broker.wire.codec import MESSAGE_BYTES_MAX, encode
from broker.wire.messages import Answer, Attempt, Kind, Reason
from tests.builders import LANE, a_job
from tests.crashing import Failing, Gate
from tests.leaders import WORKER, Desk, Worker, a_desk
from tests.turns import until

KEY = f"{LANE}.job-1"


def a_dispatch(job_id: str = "job-1", *, number: int = 1, **fields: Any) -> do.Dispatch:
    """The mind gives a job to worker `w1`."""
    explanation = do.Explanation("round_robin", (), "", 0, 0.0, 0.0, do.HeldBy.NOTHING)
    defaults: dict[str, Any] = {
        "key": f"{LANE}.{job_id}",
        "worker": WORKER,
        "attempt": Attempt(1, number),
        "number": number,
        "stream_sequence": 1,
        "predicted_hit_tokens": 0,
        "enqueued_at_s": 1000.0,
        "failures": (),
        "run_s_max": 60.0,
        "stall_s": 10.0,
        "explanation": explanation,
    }
    return do.Dispatch(**{**defaults, **fields})


async def a_worker(desk: Desk) -> Worker:
    """Worker `w1`, listening."""
    worker = Worker(desk.bus.connection())
    await worker.listen()
    return worker


def answers(desk: Desk) -> list[Any]:
    """What the mind was told of its orders."""
    desk.turn()
    kinds = (DispatchAnswered, ProbeAnswered, JobEnded)
    return [event for event in desk.seen.events if isinstance(event, kinds)]


async def test_an_accepted_job_leaves_body_window_and_renewals_to_its_agent() -> None:
    """And its caller hears that it started."""
    async with a_desk("outbox") as desk:
        worker = await a_worker(desk)
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        assert held.stage is Stage.SENT
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is Answer.ACCEPTED
        assert (held.stage, held.body, desk.window.released) == (Stage.RUNNING, None, 1)
        assert desk.shelf.renewal_due(before_s=1e12) is None
        (order,) = worker.of(wire.Dispatch)
        assert (order.job, order.number, order.epoch) == (encode(a_job()), 1, 1)
        assert order.ack_subject == held.ack_subject
        await until(lambda: any(isinstance(one, wire.Started) for one in desk.out))


@pytest.mark.parametrize(
    "answer", [Answer.BUSY, Answer.DRAINING, Answer.STALE_EPOCH, Answer.UNKNOWN]
)
async def test_a_refused_job_waits_again_with_its_place(answer: Answer) -> None:
    """It was surely not run; its body is still here."""
    async with a_desk("outbox") as desk:
        (await a_worker(desk)).answer = answer
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is answer
        assert (held.stage, held.body, desk.window.released) == (
            Stage.WAITING,
            encode(a_job()),
            0,
        )


UNANSWERED = {
    "nobody there": (NoResponders(""), Unanswered.NO_RESPONDERS),
    "no answer": (Timeout(""), Unanswered.TIMEOUT),
    "link down": (LinkDown(""), Unanswered.TIMEOUT),
    "the server's own trouble": (BusError(""), Unanswered.TIMEOUT),
    "a fault of ours": (RuntimeError(""), Unanswered.TIMEOUT),
}


@pytest.mark.parametrize(("error", "told"), UNANSWERED.values(), ids=UNANSWERED)
async def test_an_order_without_an_answer_is_told_as_what_is_known(
    error: Exception, told: Unanswered
) -> None:
    """Only "nobody there" proves that it does not run; all else is left to the worker's echo."""
    async with a_desk("outbox", fault=Failing("request", error, times=2)) as desk:
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        desk.leader.outbox.probe(do.Probe(WORKER, 2))
        await until(lambda: len(answers(desk)) == 2)
        order, probe = answers(desk)
        assert order.answer is told
        assert (probe.incarnation, probe.missed) == (None, told)
        runs = told is Unanswered.TIMEOUT
        assert held.stage is (Stage.SENT if runs else Stage.WAITING)


async def test_an_answer_that_cannot_be_read_is_none() -> None:
    """The order arrived, so it may run: the echo tells."""
    async with a_desk("outbox") as desk:
        garbler = desk.bus.connection()
        await garbler.subscribe(
            f"work.{WORKER}", lambda message: garbler.publish(message.reply, b"\xc1")
        )
        await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is Unanswered.TIMEOUT


async def test_a_silent_worker_is_waited_for_no_longer_than_dispatch_answer_s() -> None:
    """Then the mind is told, and the job stays as sent."""
    async with a_desk("outbox") as desk:
        worker = await a_worker(desk)
        worker.answer = None
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: bool(worker.orders))
        desk.clock.advance(desk.config.policy.leases.dispatch_answer_s)
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is Unanswered.TIMEOUT
        assert held.stage is Stage.SENT


async def test_orders_without_a_reader_never_leave() -> None:
    """Before the outbox runs, or after: unsent, and the mind knows at once."""
    async with a_desk() as desk:
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        desk.leader.outbox.probe(do.Probe(WORKER, 2))
        assert [one.answer for one in answers(desk)[:1]] == [Unanswered.UNSENT]
        assert held.stage is Stage.WAITING


async def test_an_order_behind_a_body_that_is_read_keeps_its_turn() -> None:
    """Numbers to one worker leave in order; another worker's orders do not wait."""
    gate = Gate("message_at")
    async with a_desk("outbox", fault=gate) as desk:
        worker = await a_worker(desk)
        other = Worker(desk.bus.connection(), "w2")
        await other.listen()
        for job_id in ("a", "b", "c"):
            await desk.hold(a_job(id=job_id))
        desk.shelf.drop_body(desk.held("a"))
        outbox = desk.leader.outbox
        outbox.dispatch(a_dispatch("a", number=1))
        outbox.dispatch(a_dispatch("b", number=2))
        outbox.abort(do.Abort(f"{LANE}.a", WORKER, Attempt(1, 1), 3, Reason.CANCELLED))
        outbox.drain(do.DrainOrder(WORKER, 4, draining=True))
        outbox.dispatch(a_dispatch("c", number=1, worker="w2"))
        await gate.reached.wait()
        await until(lambda: bool(other.orders))
        assert not worker.orders
        gate.open.set()
        await until(lambda: len(worker.orders) == 4)
        assert [order.number for order in worker.orders] == [1, 2, 3, 4]
        assert worker.orders[0].job == encode(a_job(id="a"))
        outbox.probe(do.Probe(WORKER, 5))
        await until(lambda: len(worker.orders) == 5)


async def test_a_body_whose_message_is_gone_ends_its_job() -> None:
    """It left its stream, so its record stands: the mind forgets it, nothing is sent."""
    async with a_desk("outbox") as desk:
        worker = await a_worker(desk)
        held = await desk.hold(a_job())
        desk.shelf.drop_body(held)
        await desk.bus.delete_message(held.stream, held.sequence)
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: len(answers(desk)) == 2)
        ended, order = answers(desk)
        assert (ended.key, order.answer) == (KEY, Unanswered.UNSENT)
        assert not worker.orders


async def test_a_body_that_cannot_be_read_now_is_tried_again_later() -> None:
    """The server did not answer: nothing was sent, and the job waits."""
    async with a_desk("outbox", fault=Failing("message_at", Timeout(""))) as desk:
        held = await desk.hold(a_job())
        desk.shelf.drop_body(held)
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is Unanswered.UNSENT
        assert held.stage is Stage.WAITING


async def test_an_offer_taken_back_while_its_body_is_read_is_not_sent() -> None:
    """The worker was lost meanwhile and the job is elsewhere: no second run is started."""
    gate = Gate("message_at")
    async with a_desk("outbox", fault=gate) as desk:
        worker = await a_worker(desk)
        held = await desk.hold(a_job())
        desk.shelf.drop_body(held)
        desk.leader.outbox.dispatch(a_dispatch())
        await gate.reached.wait()
        held.sent = Attempt(1, 9)
        gate.open.set()
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].answer is Unanswered.UNSENT
        assert not worker.orders


async def test_the_late_answer_to_an_offer_taken_back_says_nothing() -> None:
    """Requeued and offered elsewhere: the first worker's `accepted` is not the second's."""
    async with a_desk("outbox") as desk:
        slow = await a_worker(desk)
        slow.answer = None
        second = Worker(desk.bus.connection(), "w2")
        second.answer = None
        await second.listen()
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch(number=1))
        await until(lambda: bool(slow.held_back))
        desk.leader.loop._carry(do.Requeue(KEY, None, 0.0), 0.0)
        desk.leader.outbox.dispatch(a_dispatch(number=2, worker="w2"))
        await until(lambda: bool(second.held_back))
        await slow.reply(slow.held_back[0], Answer.ACCEPTED)
        await until(lambda: bool(answers(desk)))
        assert held.stage is Stage.SENT
        assert not any(isinstance(one, wire.Started) for one in desk.out)
        await second.reply(second.held_back[0], Answer.ACCEPTED)
        await until(lambda: held.stage is Stage.RUNNING)


async def test_a_job_that_fits_a_message_but_no_order_is_refused() -> None:
    """Neither worker nor retry can help: its record says so, its lease is freed."""
    async with a_desk("outbox") as desk:
        small = a_job(body=b"{}")
        room = MESSAGE_BYTES_MAX - len(encode(small)) - 100
        job = msgspec.structs.replace(small, body=b"x" * room, prompt_tokens=1000)
        held = await desk.hold(job)
        desk.leader.outbox.dispatch(a_dispatch())
        await until(lambda: bool(answers(desk)))
        ending: Any = desk.leader.closer._work.get_nowait()
        assert (ending.record.kind, ending.record.reason) == (
            Kind.REJECTED,
            Reason.PAYLOAD_TOO_LARGE,
        )
        assert ending.ttl_s == 0
        assert held.stage is Stage.CLOSING
        assert [type(one) for one in answers(desk)] == [JobEnded]


async def test_an_order_too_large_for_the_server_is_refused_the_same_way() -> None:
    """The server's own limit may be lower than ours; a probe it refuses is told as unsent."""
    error = PayloadTooLarge("")
    async with a_desk("outbox", fault=Failing("request", error, times=3)) as desk:
        held = await desk.hold(a_job())
        desk.leader.outbox.dispatch(a_dispatch())
        desk.leader.outbox.probe(do.Probe(WORKER, 2))
        await until(lambda: len(answers(desk)) == 2)
        assert held.stage is Stage.CLOSING
        ended, probe = answers(desk)
        assert isinstance(ended, JobEnded)
        assert probe.missed is Unanswered.UNSENT


async def test_a_job_that_is_not_held_is_forgotten_not_offered_for_ever() -> None:
    """Its bytes can't be had here: if its message is still there, it comes again."""
    async with a_desk("outbox") as desk:
        worker = await a_worker(desk)
        desk.leader.outbox.dispatch(a_dispatch("ghost"))
        held = await desk.hold(a_job())
        held.stage = Stage.CLOSING
        desk.leader.outbox.dispatch(a_dispatch())
        assert [(type(one), one.key) for one in answers(desk)] == [
            (JobEnded, f"{LANE}.ghost"),
            (JobEnded, KEY),
        ]
        assert not worker.orders


async def test_a_probes_answer_tells_the_workers_life() -> None:
    """Its incarnation: a new one has lost what ran before."""
    async with a_desk("outbox") as desk:
        await a_worker(desk)
        desk.leader.outbox.probe(do.Probe(WORKER, 1))
        await until(lambda: bool(answers(desk)))
        assert answers(desk)[0].incarnation == 1


async def test_an_abort_or_a_drain_that_nobody_answers_is_no_event() -> None:
    """The mind repeats it for as long as the worker's list needs it."""
    async with a_desk("outbox", fault=Failing("request", Timeout(""), times=9)) as desk:
        desk.leader.outbox.abort(do.Abort(KEY, WORKER, Attempt(1, 1), 1, Reason.CANCELLED))
        desk.leader.outbox.drain(do.DrainOrder(WORKER, 2, draining=True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not answers(desk)


async def test_receipts_beyond_their_bound_are_dropped_and_counted() -> None:
    """MAIL_MAX: nobody depends on a receipt."""
    async with a_desk() as desk:
        for _ in range(MAIL_MAX + 3):
            desk.leader.outbox.mail("out.x", b"")
        assert desk.leader.outbox.mail_dropped == 3


async def test_mail_leaves_in_slices_and_a_lost_link_only_costs_it() -> None:
    """A backlog of receipts holds up nothing: the loop has its turn after MAIL_PER_TURN_MAX."""
    async with a_desk("outbox") as desk:
        heard: list[int] = []
        ours = desk.bus.connection()
        await ours.subscribe("mail", lambda message: heard.append(len(message.data)))
        for _ in range(MAIL_PER_TURN_MAX * 2 + 1):
            desk.leader.outbox.mail("mail", b"x")
        await asyncio.sleep(0)
        assert len(desk.leader.outbox._mail) == MAIL_PER_TURN_MAX + 1
        await until(lambda: len(heard) == MAIL_PER_TURN_MAX * 2 + 1)
        desk.link.disconnect()
        desk.leader.outbox.mail("mail", b"x")
        await until(lambda: desk.leader.outbox.mail_dropped == 1)


async def test_a_job_without_a_client_gets_no_receipt() -> None:
    """Adopted from a list that names none: there is no subject to tell it on."""
    async with a_desk() as desk:
        held = await desk.hold(a_job())
        held.client = ""
        desk.leader.outbox.receipt(held, wire.Queued(job="job-1", position=0, wait_s=0.0))
        assert not desk.leader.outbox._mail
