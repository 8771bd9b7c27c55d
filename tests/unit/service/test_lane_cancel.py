"""Cancelling a whole lane: what is queued, held and running, step by step, and nothing else."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from typing import Any

import pytest

from broker.bus.base import Message, NoResponders, StreamFull
from broker.core.decisions import Dispatch
from broker.core.events import CancelRequested, JobHeld
from broker.service import lane_cancel, loop
from broker.service.endings import JobHead
from broker.service.lane_cancel import ENDED_AT_ONCE_MAX
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.control import LaneCancelRequest, LaneCancelStep, StreamSpan
from broker.wire.messages import Abort, Bundle, Kind, Reason, TerminalRecord
from producers import lane_control
from producers.client import Client
from producers.errors import Unreachable
from tests.builders import LANE, MODEL, a_job
from tests.crashing import Failing, Gate
from tests.lanes import QUICK
from tests.leaders import ADDRESS, Desk, Worker, a_beat, a_delivery, a_desk
from tests.turns import until

OTHER = "other"


@asynccontextmanager
async def a_desk_and_client(*parts: str, **fields: Any) -> AsyncGenerator[tuple[Desk, Client]]:
    """A leader that answers and ends jobs, and an owner of its lane."""
    async with a_desk("control", "closer", *parts, **fields) as desk:
        own = desk.bus.connection()
        async with Client(own, lane=LANE, client_id="owner", config=QUICK) as client:
            yield desk, client
        await own.close()


async def cancelled(desk: Desk, client: Client, **which: Any) -> LaneCancelStep:
    """Cancel, while the loop has its turns."""
    cancelling = asyncio.create_task(client.cancel_jobs(**which))
    while not cancelling.done():
        desk.turn()
        await asyncio.sleep(0)
    desk.turn()
    return cancelling.result()


async def records(desk: Desk) -> dict[str, TerminalRecord]:
    """What stands in RESULTS, by job."""
    stream = subjects.results_stream(LANE)
    found = [decode(one.data, TerminalRecord) async for one in desk.bus.messages(stream)]
    return {record.job: record for record in found}


async def left(desk: Desk) -> set[str]:
    """Subjects that still have jobs."""
    streams = (f"JOBS_{LANE}", f"BATCH_{LANE}")
    return {at for stream in streams for at in await desk.bus.subject_counts(stream)}


async def test_all_of_a_lane_ends_wherever_it_is() -> None:
    """Unpulled, held and running, online and batch: each has its record, and is told."""
    async with a_desk_and_client("outbox", worker=True) as (desk, client):
        worker = Worker(desk.bus)
        await worker.listen()
        desk.allow()
        await desk.hold(a_job(id="runs"))
        await until(lambda: desk.held("runs").stage is Stage.RUNNING)
        desk.beat(slots=1)
        await desk.hold(a_job(id="held"))
        await desk.publish(a_job(id="far", api_key_name="alice"))
        await desk.publish(a_job(id="line", band=3))
        await desk.publish(a_job(id="theirs", lane="beta"))

        counting = asyncio.create_task(client.count_jobs())
        while not counting.done():
            desk.turn()
            await asyncio.sleep(0)
        assert (counting.result().jobs, counting.result().running) == (4, 1)

        done = await cancelled(desk, client)
        assert (done.jobs, done.running, done.spans) == (4, 1, ())
        await until(lambda: bool(worker.of(Abort)))
        (abort,) = worker.of(Abort)
        assert (abort.key, abort.reason) == (f"{LANE}.runs", Reason.CANCELLED)

        async def ended() -> bool:
            desk.turn()
            return set(await records(desk)) == {"held", "far", "line"}

        await until(ended)
        assert {one.kind for one in (await records(desk)).values()} == {Kind.CANCELLED}
        assert (await records(desk))["far"].api_key_name == "alice"
        # Its agent writes the running one's record; the other lane's job is its own.
        assert await desk.queued() == 1
        assert await desk.queued("JOBS_beta") == 1
        told = [event for event in desk.out if not isinstance(event, Bundle)]
        assert {event.job for event in told} == {"held", "far", "line", "runs"}


CHOICES: dict[str, tuple[dict[str, Any], Collection[tuple[int, str]]]] = {
    "a band": ({"bands": [1]}, {(2, MODEL), (2, OTHER), (3, MODEL)}),
    "bands of both streams": ({"bands": [1, 3]}, {(2, MODEL), (2, OTHER)}),
    "a model": ({"model": OTHER}, {(1, MODEL), (2, MODEL), (3, MODEL)}),
    "a model in a band": ({"model": MODEL, "bands": [2]}, {(1, MODEL), (2, OTHER), (3, MODEL)}),
    "a model that is not there": (
        {"model": "nobody/has:it"},
        {(1, MODEL), (2, MODEL), (2, OTHER), (3, MODEL)},
    ),
}


@pytest.mark.parametrize(("which", "stays"), CHOICES.values(), ids=CHOICES)
async def test_only_what_is_meant_ends(
    which: dict[str, Any], stays: Collection[tuple[int, str]]
) -> None:
    """By band, by model, by both."""
    async with a_desk_and_client(policy={"models": (MODEL, OTHER)}) as (desk, client):
        for number, (band, model) in enumerate(
            [(1, MODEL), (2, MODEL), (2, OTHER), (3, MODEL), (2, MODEL)]
        ):
            await desk.publish(a_job(id=f"job-{number}", band=band, model=model))
        await cancelled(desk, client, **which)
        assert await left(desk) == {subjects.jobs(LANE, *at) for at in stays}


async def test_steps_are_bounded_and_later_jobs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """STEP_JOBS_MAX messages a step; what was published behind the beginning is not meant."""
    monkeypatch.setattr(lane_cancel, "STEP_JOBS_MAX", 10)
    async with a_desk_and_client() as (desk, _):
        for number in range(35):
            await desk.publish(a_job(id=f"job-{number}"))
        step_of = desk.leader.control._lane_cancel.step
        request = LaneCancelRequest(spans=(await step_of(LANE, LaneCancelRequest())).spans)
        await desk.publish(a_job(id="late"))
        done = 0
        while request.spans:
            step = await step_of(LANE, request)
            assert step.jobs <= 10
            done += step.jobs
            request = LaneCancelRequest(spans=step.spans)
        assert done == 35
        assert await desk.queued() == 1


async def test_what_is_pulled_meanwhile_ends_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseen by the mind, which would place and dispatch it; it is counted, and others are not."""
    monkeypatch.setattr(lane_cancel, "STEP_JOBS_MAX", 2)
    async with a_desk_and_client("outbox") as (desk, _):
        jobs = [a_job(id=f"job-{number}") for number in range(6)]
        for job in jobs:
            await desk.publish(job)
        step_of = desk.leader.control._lane_cancel.step
        request = LaneCancelRequest(spans=(await step_of(LANE, LaneCancelRequest())).spans)
        first = await step_of(LANE, request)
        await desk.publish(a_job(id="late"))
        desk.take(a_delivery(jobs[5], sequence=6, ack_subject=""))
        desk.take(a_delivery(a_job(id="late"), sequence=7))
        desk.turn()
        held = [one.job.key for one in desk.seen.events if isinstance(one, JobHeld)]
        assert held == [f"{LANE}.late"]

        def ended() -> bool:
            desk.turn()
            return f"{LANE}.job-5" not in desk.shelf

        await until(ended)
        second = await step_of(LANE, LaneCancelRequest(spans=first.spans))
        third = await step_of(LANE, LaneCancelRequest(spans=second.spans))
        assert (first.jobs, second.jobs, third.jobs, third.spans) == (2, 3, 1, ())
        found = await records(desk)
        assert {name: one.kind for name, one in found.items()} == {
            f"job-{number}": Kind.CANCELLED for number in range(6)
        }


async def test_a_job_that_is_pulled_while_it_ends_is_not_dispatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left its stream: the mind forgets it before it hears of a worker that has room."""
    monkeypatch.setattr(loop, "SLICE_S", 0.0)
    async with a_desk_and_client("outbox") as (desk, _):
        desk.allow()
        job = a_job()
        sequence = await desk.publish(job)
        desk.take(a_delivery(job, sequence=sequence))
        head = JobHead(id=job.id, client=job.client)
        assert await desk.leader.endings.end_unpulled_now(head, ADDRESS, sequence=sequence)
        desk.leader.loop.heartbeat(a_beat())  # Behind the closer's word.
        desk.turn()
        assert not desk.seen.of(Dispatch)
        assert not len(desk.shelf)


async def test_a_step_ends_some_at_once_and_keeps_no_bodies() -> None:
    """Its 500 jobs may be 8 MB each; and a task for each would take the loop's turn for long."""
    gate = Gate("append", "before", prefix="results.")
    body = b'{"model": "tiny", "x": "%s"}' % (b"x" * BODY_BYTES)
    async with a_desk_and_client(fault=gate) as (desk, client):
        for number in range(JOBS):
            await desk.publish(a_job(id=f"job-{number}", body=body))
        tasks = len(asyncio.all_tasks())
        gc.collect()
        tracemalloc.start()
        cancelling = asyncio.create_task(cancelled(desk, client))
        await gate.reached.wait()
        assert len(asyncio.all_tasks()) <= tasks + ENDED_AT_ONCE_MAX + 4
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held_bytes < JOBS * BODY_BYTES / 10
        gate.open.set()
        assert (await cancelling).jobs == JOBS


JOBS, BODY_BYTES = 100, 200_000


async def test_a_step_looks_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """WALK_S_MAX, however few messages that are: at least one, so that it comes to an end."""
    monkeypatch.setattr(lane_cancel, "WALK_S_MAX", 0.0)
    async with a_desk_and_client() as (desk, client):
        for number in range(5):
            await desk.publish(a_job(id=f"job-{number}"))
        told: list[int] = []
        done = await cancelled(desk, client, progress=lambda step: told.append(step.jobs))
        assert (told, done.jobs) == ([1, 2, 3, 4, 5], 5)


async def test_the_steps_tell_how_far_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums so far, for whoever watches."""
    monkeypatch.setattr(lane_cancel, "STEP_JOBS_MAX", 4)
    async with a_desk_and_client() as (desk, client):
        for number in range(10):
            await desk.publish(a_job(id=f"job-{number}"))
        told: list[int] = []
        done = await cancelled(desk, client, progress=lambda step: told.append(step.jobs))
        assert (told, done.jobs) == ([4, 8, 10], 10)


async def test_an_empty_lane_has_nothing_to_cancel() -> None:
    """No step at all."""
    async with a_desk_and_client() as (desk, client):
        assert await cancelled(desk, client) == LaneCancelStep()


async def test_a_message_that_can_not_be_read_is_left_to_the_intake() -> None:
    """It ends with a record of its own when it is pulled."""
    async with a_desk_and_client() as (desk, client):
        await desk.bus.append(subjects.jobs(LANE, 2, MODEL), b"\xc1")
        await desk.publish(a_job())
        assert (await cancelled(desk, client)).jobs == 1
        assert await desk.queued() == 1


async def test_a_job_that_is_ending_is_not_cancelled_twice() -> None:
    """Its record is on the way."""
    async with a_desk("control") as desk:
        await desk.hold(a_job())
        step = desk.leader.control._lane_cancel.step
        spans = (await step(LANE, LaneCancelRequest())).spans
        assert (await step(LANE, LaneCancelRequest(spans=spans))).jobs == 1
        desk.turn()
        assert (await step(LANE, LaneCancelRequest(spans=spans))).jobs == 0
        events = [one for one in desk.seen.events if isinstance(one, CancelRequested)]
        assert len(events) == 1


async def test_another_lanes_stream_is_not_touched() -> None:
    """Whatever the request says."""
    async with a_desk_and_client() as (desk, _):
        await desk.publish(a_job(id="theirs", lane="beta"))
        span = StreamSpan(stream="JOBS_beta", next_sequence=1, last_sequence=9)
        step = desk.leader.control._lane_cancel.step
        assert await step(LANE, LaneCancelRequest(spans=(span,))) == LaneCancelStep()
        assert await desk.queued("JOBS_beta") == 1


async def test_a_lane_whose_results_are_full_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule of removal nothing leaves without its record; the jobs stay."""
    monkeypatch.setattr(lane_cancel, "STEP_S_MAX", 0.05)
    full = Failing("append", StreamFull("full"), times=10**6, prefix="results.")
    async with a_desk_and_client(fault=full) as (desk, client):
        await desk.publish(a_job())
        with pytest.raises(Unreachable, match="results full"):
            await cancelled(desk, client)
        assert await desk.queued() == 1


async def test_without_a_broker_it_says_so() -> None:
    """After `cancel_s` of asking: a takeover takes seconds."""
    async with a_desk() as desk:
        own = desk.bus.connection()
        async with Client(own, lane=LANE, config=QUICK) as client:
            await desk.publish(a_job())
            with pytest.raises(Unreachable, match="no broker"):
                await client.cancel_jobs()
        await own.close()


async def test_whoever_is_left_in_the_midst_learns_how_far_it_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps were carried out, and then no broker is there: run again, it goes on."""
    monkeypatch.setattr(lane_cancel, "STEP_JOBS_MAX", 4)
    monkeypatch.setattr(lane_control, "STEP_S_MAX", 0.1)
    async with a_desk_and_client() as (desk, client):
        for number in range(10):
            await desk.publish(a_job(id=f"job-{number}"))
        request, steps = client._bus.request, 0

        async def two_steps(subject: str, data: bytes, **fields: Any) -> Message:
            nonlocal steps
            steps += subject.endswith("cancel_lane")
            if steps > 1 + 2:
                raise NoResponders(subject)
            return await request(subject, data, **fields)

        monkeypatch.setattr(client._bus, "request", two_steps)
        with pytest.raises(Unreachable, match=r"^8 jobs were cancelled before this: no broker"):
            await cancelled(desk, client)
        monkeypatch.undo()
        assert (await cancelled(desk, client)).jobs == 2
