"""What operators and owners may ask: every verb, garbage, and too much at once."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from broker.bus.base import LinkDown, Message, Timeout
from broker.core.events import CancelRequested, DrainRequested
from broker.service.closer import Ending
from broker.service.control import AT_ONCE_MAX, REQUESTS_MAX, RESULT_BYTES_MAX
from broker.service.snapshot import LanesView, ReconcileView, StatusView, WorkersView
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import decode, encode, encode_for
from broker.wire.control import (
    CancelRequest,
    ControlReply,
    DrainRequest,
    EstimateRequest,
    ResultRequest,
    WhyRequest,
)
from broker.wire.messages import Kind, TerminalRecord
from tests.builders import LANE, MODEL, a_job
from tests.crashing import Failing, Gate
from tests.leaders import WORKER, Desk, a_desk
from tests.turns import until

GARBAGE = {"nothing": b"", "no msgpack": b"\xc1", "no fields": b"\x80", "a list": b"\x91\x01"}


async def ask(desk: Desk, subject: str, request: msgspec.Struct | bytes = b"") -> ControlReply:
    """Ask, and let the loop run until the answer is there."""
    data = request if isinstance(request, bytes) else encode(request)
    asking = asyncio.create_task(desk.bus.request(subject, data, timeout_s=60.0))
    while not asking.done():
        desk.turn()
        await asyncio.sleep(0)
    desk.turn()
    return decode(asking.result().data, ControlReply)


async def ask_cluster(desk: Desk, verb: str, request: msgspec.Struct | bytes = b"") -> ControlReply:
    """Ask as an operator."""
    return await ask(desk, subjects.cluster_control(verb), request)


async def ask_lane(desk: Desk, verb: str, request: msgspec.Struct | bytes = b"") -> ControlReply:
    """Ask as an owner."""
    return await ask(desk, subjects.lane_control(LANE, verb), request)


def a_record(**fields: Any) -> TerminalRecord:
    """A completed job's record."""
    defaults: dict[str, Any] = {
        "job": "job-1",
        "lane": LANE,
        "kind": Kind.COMPLETED,
        "ended_at_s": 1.0,
    }
    return TerminalRecord(**{**defaults, **fields})


def told(desk: Desk, kind: type[Any]) -> list[Any]:
    """Events of a kind."""
    return [event for event in desk.seen.events if isinstance(event, kind)]


def endings(desk: Desk) -> list[Ending]:
    """Endings the closer was given."""
    work = desk.leader.closer._work
    return [one for one in (work.get_nowait() for _ in range(work.qsize())) if type(one) is Ending]


# ---- views ----


async def test_workers_lanes_and_status_are_told_as_json() -> None:
    """The same records that metrics and the page show."""
    async with a_desk("control", worker=True) as desk:
        await desk.hold(a_job())
        workers = msgspec.json.decode((await ask_cluster(desk, "workers")).data, type=WorkersView)
        assert [worker.worker for worker in workers.workers] == [WORKER]
        lanes = msgspec.json.decode((await ask_cluster(desk, "lanes")).data, type=LanesView)
        assert [lane.lane for lane in lanes.lanes] == [LANE, "beta"]
        queued = [queue.queued_jobs for queue in lanes.lanes[0].queues]
        assert queued == [0, 0, 1, 0]
        status = msgspec.json.decode((await ask_cluster(desk, "status")).data, type=StatusView)
        assert (status.epoch, status.leader, status.held_jobs) == (1, True, 1)


async def test_why_tells_what_holds_a_job() -> None:
    """Or that it is not here."""
    async with a_desk("control") as desk:
        await desk.hold(a_job())
        reply = await ask_lane(desk, "why", WhyRequest(job="job-1"))
        assert msgspec.json.decode(reply.data)["held_by"] == "start"
        unknown = await ask_lane(desk, "why", WhyRequest(job="other"))
        assert (unknown.ok, "other" in unknown.message) == (False, True)


async def test_why_of_no_lane_is_refused() -> None:
    """A wildcard is no lane."""
    async with a_desk("control") as desk:
        reply = await ask(desk, "ctl.lane.a b.why", WhyRequest(job="job-1"))
        assert not reply.ok


# ---- results and estimates ----


async def test_a_result_is_told_once_it_stands() -> None:
    """As JSON in the answer, whatever form it stands in; before that, that there is none."""
    async with a_desk("control") as desk:
        missing = await ask_lane(desk, "result", ResultRequest(job="job-1"))
        assert (missing.ok, "job-1" in missing.message) == (False, True)
        record = a_record(body=b'{"a": 1}')
        for job_id, speaks_json in (("job-1", True), ("job-2", False)):
            data = encode_for(replace(record, job=job_id), speaks_json=speaks_json)
            await desk.bus.append(subjects.result(LANE, job_id), data)
            reply = await ask_lane(desk, "result", ResultRequest(job=job_id))
            assert reply.ok
            told = json.loads(reply.data)
            assert (told["job"], told["kind"], told["body"]) == (job_id, "completed", {"a": 1})


async def test_a_large_result_is_not_repeated() -> None:
    """RESULT_BYTES_MAX: its reader is told where it stands."""
    async with a_desk("control") as desk:
        for job_id, over in (("fits", 0), ("large", 1)):
            record = a_record(job=job_id)
            room = RESULT_BYTES_MAX - len(encode(replace(record, body=b"x" * 100_000))) + 100_000
            record = replace(record, body=b"x" * (room + over))
            await desk.bus.append(subjects.result(LANE, job_id), encode(record))
        assert (await ask_lane(desk, "result", ResultRequest(job="fits"))).ok
        refused = await ask_lane(desk, "result", ResultRequest(job="large"))
        assert not refused.ok
        assert "results.acme.large in RESULTS_acme" in refused.message


async def test_an_estimate_tells_the_queue_that_a_job_would_come_to() -> None:
    """Its length, its bound and the wait of a job that comes now."""
    async with a_desk("control") as desk:
        await desk.hold(a_job())
        reply = await ask_lane(desk, "estimate", EstimateRequest(band=2, model=MODEL))
        told = json.loads(reply.data)
        assert (told["band"], told["model"], told["queued_jobs"]) == (2, MODEL, 1)
        assert told["wait_s"] >= 0


@pytest.mark.parametrize(
    ("lane", "model", "said"), [(LANE, "other", "tiny in band 2"), ("nobody", MODEL, "no lane")]
)
async def test_an_estimate_for_what_no_queue_takes_says_what_there_is(
    lane: str, model: str, said: str
) -> None:
    """A foreign client tells an unknown model from an election by it."""
    async with a_desk("control") as desk:
        subject = subjects.lane_control(lane, "estimate")
        reply = await ask(desk, subject, EstimateRequest(band=2, model=model))
        assert (reply.ok, said in reply.message) == (False, True)


# ---- drain and reconcile ----


@pytest.mark.parametrize("draining", [True, False])
async def test_a_known_worker_is_drained_or_taken_back(draining: bool) -> None:
    """The mind gives the order."""
    async with a_desk("control", worker=True) as desk:
        reply = await ask_cluster(desk, "drain", DrainRequest(worker=WORKER, draining=draining))
        assert reply.ok
        assert told(desk, DrainRequested) == [DrainRequested(desk.clock.now_s(), WORKER, draining)]


async def test_an_unknown_worker_is_not_drained() -> None:
    """A typing error is told as one."""
    async with a_desk("control", worker=True) as desk:
        reply = await ask_cluster(desk, "drain", DrainRequest(worker="w9"))
        assert (reply.ok, "w9" in reply.message) == (False, True)
        assert not told(desk, DrainRequested)


async def test_a_reconcile_on_demand_tells_what_it_repaired() -> None:
    """Checked, found, repaired."""
    async with a_desk("control") as desk:
        desk.leader.reconciler.look_again_s = 0.0
        held = await desk.hold(a_job())
        await desk.bus.delete_message(held.stream, held.sequence)
        reply = await ask_cluster(desk, "reconcile")
        view = msgspec.json.decode(reply.data, type=ReconcileView)
        assert (view.checked_jobs, view.repaired) == (1, 1)
        assert view.differences[0].kind == "held_gone"


# ---- cancel ----


async def test_a_held_job_is_cancelled_by_the_mind() -> None:
    """Once or twice."""
    async with a_desk("control") as desk:
        await desk.hold(a_job())
        assert (await ask_lane(desk, "cancel", CancelRequest(job="job-1"))).ok
        assert len(told(desk, CancelRequested)) == 1
        assert desk.held().stage is Stage.CLOSING
        again = await ask_lane(desk, "cancel", CancelRequest(job="job-1"))
        assert (again.ok, "ending" in again.message) == (False, True)


async def test_an_unpulled_job_is_cancelled_where_it_waits() -> None:
    """Found by the sequence that its publisher was given."""
    async with a_desk("control") as desk:
        sequence = await desk.publish(a_job())
        request = CancelRequest(job="job-1", stream=f"JOBS_{LANE}", stream_sequence=sequence)
        assert (await ask_lane(desk, "cancel", request)).ok
        (ending,) = endings(desk)
        assert (ending.sequence, ending.ack_subject, ending.client) == (sequence, "", "client-1")


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_caller_who_means_only_his_own_job_cancels_no_other(*, is_held: bool) -> None:
    """Held, or unpulled; without a caller in the request it is whoever's."""
    async with a_desk("control") as desk:
        if is_held:
            await desk.hold(a_job())
            request = CancelRequest(job="job-1", client="client-2")
        else:
            request = CancelRequest(
                job="job-1",
                client="client-2",
                stream=f"JOBS_{LANE}",
                stream_sequence=await desk.publish(a_job()),
            )
        reply = await ask_lane(desk, "cancel", request)
        assert (reply.ok, "another caller" in reply.message) == (False, True)
        assert not endings(desk)
        assert not told(desk, CancelRequested)
        own = msgspec.structs.replace(request, client="client-1")
        assert (await ask_lane(desk, "cancel", own)).ok


UNFOUND = {
    "no place given": CancelRequest(job="job-1"),
    "another sequence": CancelRequest(job="job-1", stream=f"JOBS_{LANE}", stream_sequence=9),
    "another job's sequence": CancelRequest(job="x", stream=f"JOBS_{LANE}", stream_sequence=1),
    "another lane's stream": CancelRequest(job="job-1", stream="JOBS_beta", stream_sequence=1),
    "a stream of no jobs": CancelRequest(job="job-1", stream=f"RESULTS_{LANE}", stream_sequence=1),
    "garbage there": CancelRequest(job="job-1", stream=f"JOBS_{LANE}", stream_sequence=2),
}


@pytest.mark.parametrize("request_", UNFOUND.values(), ids=UNFOUND)
async def test_what_is_not_there_is_not_cancelled(request_: CancelRequest) -> None:
    """Nobody cancels another's job by a sequence."""
    async with a_desk("control") as desk:
        await desk.publish(a_job())
        await desk.bus.append(subjects.jobs(LANE, 2, "tiny"), b"\xc1")
        reply = await ask_lane(desk, "cancel", request_)
        assert (reply.ok, bool(reply.message)) == (False, True)
        assert not endings(desk)


async def test_a_job_pulled_while_it_is_looked_for_is_cancelled_as_a_held_one() -> None:
    """It moved between the two looks."""
    gate = Gate("message_at", "after")
    async with a_desk("control", fault=gate) as desk:
        delivery = await desk.deliver(a_job())
        request = CancelRequest(
            job="job-1", stream=f"JOBS_{LANE}", stream_sequence=delivery.sequence
        )
        asking = asyncio.create_task(ask_lane(desk, "cancel", request))
        await gate.reached.wait()
        desk.take(delivery)
        gate.open.set()
        assert (await asking).ok
        assert len(told(desk, CancelRequested)) == 1


async def test_a_job_cancelled_in_its_stream_while_it_is_delivered_leaves_the_mind_too() -> None:
    """Delivered, waiting in the loop, cancelled by sequence, then held: no lease is left behind."""
    async with a_desk("control", "closer") as desk:
        delivery = await desk.deliver(a_job())
        request = CancelRequest(
            job="job-1", stream=f"JOBS_{LANE}", stream_sequence=delivery.sequence
        )
        assert (await ask_lane(desk, "cancel", request)).ok
        desk.take(delivery)

        def forgotten() -> bool:
            desk.turn()
            return bool(desk.seen.ended)

        await until(forgotten)
        desk.turn()
        assert f"{LANE}.job-1" not in desk.shelf
        assert not desk.leader.scheduler.is_known(f"{LANE}.job-1")
        assert await desk.queued() == 0
        assert desk.window.released == 1


# ---- garbage, faults and bounds ----


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
@pytest.mark.parametrize("verb", ["cancel", "why", "drain"])
async def test_garbage_is_refused_in_a_sentence(verb: str, data: bytes) -> None:
    """And the next request is answered."""
    async with a_desk("control") as desk:
        asker = ask_cluster if verb == "drain" else ask_lane
        assert (await asker(desk, verb, data)).ok is False
        assert (await ask_cluster(desk, "status")).ok


@pytest.mark.parametrize(
    "subject", ["ctl.cluster.nothing", "ctl.cluster.cancel", f"ctl.lane.{LANE}.drain"]
)
async def test_an_unknown_request_is_named(subject: str) -> None:
    """An owner has no operator's verbs, nor the other way round."""
    async with a_desk("control") as desk:
        reply = await ask(desk, subject)
        assert (reply.ok, subject in reply.message) == (False, True)


async def test_a_server_that_fails_is_told() -> None:
    """The job may be there: try again."""
    async with a_desk("control", fault=Failing("message_at", Timeout("slow"))) as desk:
        request = CancelRequest(job="job-1", stream=f"JOBS_{LANE}", stream_sequence=1)
        reply = await ask_lane(desk, "cancel", request)
        assert (reply.ok, "slow" in reply.message) == (False, True)


async def test_a_surprise_is_survived() -> None:
    """A fault of ours costs one request."""
    async with a_desk("control", fault=Failing("message_at", RuntimeError("bug"))) as desk:
        request = CancelRequest(job="job-1", stream=f"JOBS_{LANE}", stream_sequence=1)
        assert not (await ask_lane(desk, "cancel", request)).ok
        assert (await ask_cluster(desk, "status")).ok


async def test_an_answer_that_cannot_be_sent_costs_itself() -> None:
    """The link was cut meanwhile; and nobody wants an answer to a request without a reply."""
    async with a_desk("control", fault=Failing("publish", LinkDown("cut"))) as desk:
        lost = asyncio.create_task(desk.bus.request("ctl.cluster.status", b"", timeout_s=1.0))
        await until(desk.leader.control._of_operators.empty)
        await desk.bus.publish("ctl.cluster.status", b"")
        assert (await ask_cluster(desk, "status")).ok
        lost.cancel()


async def test_requests_beyond_the_bound_are_told_to_try_again() -> None:
    """REQUESTS_MAX wait; the next is answered at once."""
    async with a_desk() as desk:
        control = desk.leader.control
        for _ in range(REQUESTS_MAX):
            await control._take(control._of_owners, Message("ctl.lane.acme.why", b""))
        heard: list[ControlReply] = []
        ours = desk.bus.connection()
        await ours.subscribe("me", lambda one: heard.append(decode(one.data, ControlReply)))
        await control._take(control._of_owners, Message("ctl.lane.acme.why", b"", reply="me"))
        await control._take(control._of_owners, Message("ctl.lane.acme.why", b""))
        await until(lambda: bool(heard))
        assert (heard[0].ok, "try again" in heard[0].message) == (False, True)


async def test_no_cancel_waits_behind_reconciles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 35: operators' slow requests and owners' are worked on apart."""
    async with a_desk("control") as desk:
        monkeypatch.setattr(desk.link, "subject_counts", _for_ever)
        monkeypatch.setattr(desk.link, "consumer_state", _for_ever)
        slow_ones = [
            asyncio.create_task(desk.bus.request("ctl.cluster.reconcile", b"", timeout_s=9.0))
            for _ in range(AT_ONCE_MAX + 1)
        ]
        await desk.hold(a_job())
        assert (await ask_lane(desk, "cancel", CancelRequest(job="job-1"))).ok
        for one in slow_ones:
            one.cancel()


async def _for_ever(*_: object, **__: object) -> None:
    await asyncio.Event().wait()
