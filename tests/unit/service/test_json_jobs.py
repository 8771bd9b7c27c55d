"""A job in JSON from its queue to its record: every word that its caller gets is JSON."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from broker.service.reading import INLINE_BYTES_MAX
from broker.wire.codec import decode
from broker.wire.messages import DeadLetter, Job, Kind
from producers.request import Wish, build_job
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE
from tests.clusters import Cluster, a_chat, a_cluster, until
from tests.json_callers import CONTENT_TYPE, JsonCaller, a_body, a_json_job, packed
from tests.leaders import QUICK_LEASES, a_delivery, a_desk, a_listing
from worker_agent.engine.base import EngineFailed


@asynccontextmanager
async def a_caller(folder: Path, **cluster: Any) -> AsyncGenerator[tuple[Cluster, JsonCaller]]:
    """A cluster, and a caller who listens."""
    async with a_cluster(folder, **cluster) as running:
        caller = JsonCaller(running.bus.connection())
        await caller.listen()
        yield running, caller


async def test_a_streamed_job_comes_back_as_json(tmp_path: Path) -> None:
    """Receipts, tokens that are the endpoint's own events, an end with the record as stored."""
    async with a_caller(tmp_path) as (cluster, caller):
        await caller.submit(a_json_job(body=a_body(stream=True)))
        end = await caller.first("end")
        assert (await caller.stored("job-1")).headers["Content-Type"] == "application/json"
        assert end["record"] == await caller.record("job-1")
        assert end["record"]["kind"] == "completed"
        assert end["record"]["body"]["object"] == "chat.completion"
        assert end["record"]["usage"]["output_tokens"] == 8
        assert caller.of("started")[0]["worker"] == "w1"
        tokens = caller.of("tokens")
        assert [event["index"] for event in tokens] == list(range(len(tokens)))
        objects = [event["data"]["object"] for event in tokens if isinstance(event["data"], dict)]
        assert set(objects) == {"chat.completion.chunk"}
        await cluster.until_empty()


async def test_a_content_type_is_not_needed_where_the_message_is_json(tmp_path: Path) -> None:
    """`nats pub` sends no headers."""
    async with a_caller(tmp_path) as (_, caller):
        await caller.submit(a_json_job(), headers=False)
        assert (await caller.first("end"))["record"]["kind"] == "completed"


async def test_a_long_job_is_held_once_it_is_read(tmp_path: Path) -> None:
    """Read in a thread, it ends as any other; its caller sees no difference."""
    async with a_caller(tmp_path) as (cluster, caller):
        await caller.submit(a_json_job(body=a_body("x" * INLINE_BYTES_MAX)))
        assert (await caller.first("end"))["record"]["kind"] == "completed"
        await cluster.until_empty()


async def test_the_broker_ends_a_job_in_json_too(tmp_path: Path) -> None:
    """Nobody serves it and its deadline passes: record and end are the broker's."""
    async with a_caller(tmp_path, workers=0) as (_, caller):
        await caller.submit(a_json_job(deadline_at_s=1.0))
        record = (await caller.first("end"))["record"]
        assert (record["kind"], record["reason"]) == ("expired", "deadline_expired")
        assert record == await caller.record("job-1")
        assert (await caller.stored("job-1")).headers["Content-Type"] == "application/json"


async def test_a_queued_job_is_told_its_place_in_json(tmp_path: Path) -> None:
    """The receipt says position and wait."""
    async with a_caller(tmp_path, workers=0) as (_, caller):
        await caller.submit(a_json_job())
        queued = await caller.first("queued")
        assert queued["job"] == "job-1"
        assert queued["position"] == 0


@pytest.mark.parametrize("fields", [{"prompt_tokens": -1}, {"blocks": "AAA="}, {"body": 7}])
async def test_a_malformed_job_has_its_record_in_json(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """It stands under `bad-…`; a caller that the message names hears of it, and what is wrong."""
    async with a_caller(tmp_path) as (cluster, caller):
        await caller.submit(a_json_job(**fields))
        record = (await caller.first("end"))["record"]
        assert (record["kind"], record["reason"]) == ("rejected", "malformed")
        assert await caller.record("bad-j1") == record
        await cluster.until_empty()


async def test_garbage_that_says_it_is_json_is_refused_in_json(tmp_path: Path) -> None:
    """Its record is for a reader of JSON; nobody is named to be told."""
    async with a_caller(tmp_path) as (cluster, caller):
        await cluster.bus.append("jobs.acme.2.tiny", b"\xc1", headers=CONTENT_TYPE)
        assert (await caller.record("bad-j1"))["reason"] == "malformed"
        await cluster.until_empty()
        assert not caller.heard


async def test_both_forms_are_read_by_our_own_client(tmp_path: Path) -> None:
    """A record in JSON is a result like any other: `client.find_record`, and a submit of its id."""
    async with a_caller(tmp_path) as (cluster, caller):
        await caller.submit(a_json_job(), message_id="job-1.0")
        await caller.first("end")
        async with cluster.client() as client:
            found = await client.find_record("job-1")
            assert found is not None
            assert found.kind is Kind.COMPLETED
            ticket = await client.submit(a_chat(), job_id="job-1")
            assert await ticket.result() == found


async def test_our_own_client_finds_a_queued_job_that_came_in_json(tmp_path: Path) -> None:
    """By its sequence: so it is not lost, and not stored a second time."""
    async with (
        a_caller(tmp_path, workers=0) as (cluster, caller),
        cluster.client() as client,
    ):
        stored = await caller.submit(a_json_job())
        job = build_job(a_chat(), Wish(job_id="job-1"), lane=LANE, client="client-1")
        ticket = await client.submit_job(job, known=True, sequence=stored.sequence)
        assert await client._watchdog.is_stored(ticket)
        assert await cluster.queued() == 1


async def test_a_second_message_of_a_job_is_answered_in_its_own_form(tmp_path: Path) -> None:
    """The first one's record is in its form; each caller gets its own."""
    engine = ScriptedEngine()
    async with (
        a_caller(tmp_path, engine=engine) as (cluster, caller),
        cluster.client() as client,
    ):
        ticket = await client.submit(a_chat(), job_id="job-1", band=2)
        await until(lambda: bool(engine.running))
        await caller.submit(a_json_job())
        leader = cluster.members[0].leader
        await until(lambda: any(held.duplicates for held in leader.shelf.jobs()))
        engine.say("job-1", an_answer())
        assert (await ticket.result()).kind is Kind.COMPLETED
        await cluster.until_empty()
        assert await caller.first("stored") == {"type": "stored", "job": "job-1"}


async def test_a_new_leader_still_knows_who_reads_json() -> None:
    """From the worker's list, before the job's message comes again."""
    listing = a_listing(client="js", speaks_json=True)
    async with a_desk("outbox", "closer") as desk:
        desk.beat(inflight=(listing,))
        assert desk.held().speaks_json


async def test_a_dropped_body_is_made_whole_again_for_the_worker(tmp_path: Path) -> None:
    """`held_bytes_max` 1: every dispatch reads its job from the stream, hashes and all."""
    engine = ScriptedEngine()
    async with a_caller(tmp_path, held_bytes_max=1, engine=engine) as (cluster, caller):
        await caller.submit(a_json_job(body=a_body("long " * 200)))
        await until(lambda: bool(engine.running))
        (running,) = cluster.hands[0].agent.ledger.running.values()
        assert running.job.prompt_tokens > 1
        assert running.job.blocks
        assert running.order.speaks_json
        engine.say("job-1", an_answer())
        assert (await caller.first("end"))["record"]["kind"] == "completed"


async def test_a_dead_letter_keeps_a_job_as_it_was_published(tmp_path: Path) -> None:
    """In JSON, and its record too; whoever reads the letter reads both."""
    engine = ScriptedEngine()
    once = {"leases": replace(QUICK_LEASES, failures_max=1)}
    async with a_caller(tmp_path, engine=engine, policy=once) as (cluster, caller):
        data = packed(a_json_job())
        await caller.submit(data)
        await until(lambda: bool(engine.running))
        engine.say("job-1", EngineFailed("broken"))
        record = (await caller.first("end"))["record"]
        assert record["kind"] == "dead_lettered"
        await cluster.until_empty()
        stored = await cluster.bus.last_message("DLQ_acme", "dlq.acme.job-1")
        letter = decode(stored.data, DeadLetter)
        assert letter.job == data
        assert decode(letter.job, Job).id == letter.record.job == "job-1"


async def test_a_job_is_cancelled_in_json_wherever_it_is(tmp_path: Path) -> None:
    """Running: in its engine. The answer, the record and the end are JSON."""
    engine = ScriptedEngine()
    async with a_caller(tmp_path, engine=engine) as (_, caller):
        await caller.submit(a_json_job())
        await until(lambda: bool(engine.running))
        assert await caller.ask("cancel", job="job-1") == {"ok": True, "message": "cancelling"}
        assert (await caller.first("end"))["record"]["kind"] == "cancelled"
        assert (await caller.record("job-1"))["kind"] == "cancelled"
        assert engine.aborted == ["job-1"]


async def test_a_job_that_no_broker_pulled_is_cancelled_in_json() -> None:
    """Found by its sequence, as the publish acknowledgement told it."""
    async with a_desk("control", "closer") as desk:
        caller = JsonCaller(desk.bus)
        await caller.listen()
        stored = await caller.submit(a_json_job())
        answer = await caller.ask(
            "cancel", job="job-1", stream=stored.stream, stream_sequence=stored.sequence
        )
        assert answer["ok"]
        assert (await caller.first("end"))["record"]["kind"] == "cancelled"


async def test_what_holds_a_job_is_told_in_json(tmp_path: Path) -> None:
    """`why` has its view as JSON inside the answer."""
    async with a_caller(tmp_path, workers=0) as (_, caller):
        await caller.submit(a_json_job())
        await caller.first("queued")
        answer = await caller.ask("why", job="job-1")
        assert answer["ok"]
        assert isinstance(answer["data"], dict)


async def test_where_a_job_stands_is_told_in_json(tmp_path: Path) -> None:
    """Queued with its place, then started with its worker."""
    engine = ScriptedEngine()
    async with a_caller(tmp_path, engine=engine) as (_, caller):
        await caller.submit(a_json_job())
        await until(lambda: bool(engine.running))
        assert (await caller.ask("job", job="job-1"))["data"]["phase"] == "started"
        engine.say("job-1", an_answer())
        await caller.first("end")


async def test_a_lanes_jobs_are_cancelled_in_json(tmp_path: Path) -> None:
    """Counted, then cancelled a step at a time; each caller hears it in its form."""
    async with a_caller(tmp_path, workers=0) as (cluster, caller):
        for number in range(3):
            await caller.submit(a_json_job(id=f"job-{number}"))
        step = (await caller.ask("cancel_lane"))["data"]
        assert step["jobs"] == 3
        while step.get("spans"):
            step = (await caller.ask("cancel_lane", spans=step["spans"]))["data"]
        await cluster.until_empty()
        assert [(await caller.record(f"job-{n}"))["kind"] for n in range(3)] == ["cancelled"] * 3
        assert {event["type"] for event in caller.heard} == {"queued", "end"}


async def test_jobs_that_no_broker_pulled_are_cancelled_with_their_lane_in_json() -> None:
    """Their records are written where they stand."""
    async with a_desk("control", "closer") as desk:
        caller = JsonCaller(desk.bus)
        await caller.submit(a_json_job())
        spans = (await caller.ask("cancel_lane"))["data"]["spans"]
        assert (await caller.ask("cancel_lane", spans=spans))["data"]["jobs"] == 1
        assert (await caller.record("job-1"))["kind"] == "cancelled"


async def test_what_ended_while_nobody_led_is_told_in_json() -> None:
    """Its record stands and its caller may not know: the new leader says so, in its form."""
    async with a_desk("closer") as desk:
        caller = JsonCaller(desk.bus)
        await caller.listen()
        data = packed(a_json_job())
        desk.leader.endings.ended_before(a_delivery(data), decode(data, Job))
        assert await caller.first("stored") == {"type": "stored", "job": "job-1"}


async def test_a_question_that_cannot_be_read_is_answered_in_json(tmp_path: Path) -> None:
    """With what is wrong in it."""
    async with a_caller(tmp_path, workers=0) as (_, caller):
        answer = await caller.ask("cancel", job="a.b")
        assert not answer["ok"]
        assert "$.job" in answer["message"]
