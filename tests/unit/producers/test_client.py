"""Submitting: what a client takes, refuses, waits out and leaves behind."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import orjson
import pytest
import structlog

from broker.bus.memory import MemoryBus
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import (
    Bundle,
    Job,
    Kind,
    LaneOffer,
    QueueState,
    Reason,
    Tokens,
)
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import (
    BadRequest,
    BodyTooLarge,
    ClientClosed,
    QueueFull,
    UnknownLane,
    UnknownModel,
    Unreachable,
)
from producers.request import NESTING_MAX, Wish, build_job
from producers.ticket import TicketState
from tests.builders import LANE, MODEL, a_chat_body
from tests.lanes import QUICK, a_lane, link_of, listeners_of
from tests.responder import ATTEMPT, Responder, a_rejection, an_answer


async def test_a_submitted_job_gives_its_record() -> None:
    """The result is the terminal record, with the answer untouched."""
    async with a_lane() as (client, responder):
        ticket = await client.submit(a_chat_body(), job_id="job-1")
        record = await ticket.result(5)
        assert record.kind is Kind.COMPLETED
        assert record.body == an_answer(responder.seen[0])
        assert ticket.state is TicketState.ENDED
        assert client.open_tickets == 0


async def test_the_job_carries_what_the_broker_decides_by() -> None:
    """Prefix blocks, estimates, band, session, deadline and the answer's address are filled in."""
    async with a_lane() as (client, responder):
        body = a_chat_body(system="x" * 1000)
        ticket = await client.submit(body, band=1, session="s", deadline_s=60.0)
        await ticket.result(5)
        job = responder.seen[0]
        assert (job.band, job.session, job.client) == (1, "s", "client-1")
        assert len(job.blocks) == 3 * 8
        assert job.prompt_tokens > 250
        assert job.output_tokens_max == 16
        assert job.deadline_at_s is not None
        assert job.deadline_at_s == pytest.approx(job.submitted_at_s + 60.0)
        assert job.body == body


async def test_a_rejected_job_is_tried_again_within_the_time_given() -> None:
    """With `queue_full_wait_s` a transient rejection is waited out, under the next submission."""
    async with a_lane() as (client, responder):
        turned_away: list[Job] = []

        def reject_twice(job: Job) -> Any:
            if len(turned_away) < 2:
                turned_away.append(job)
                return a_rejection(job, retry_after_s=0.01)
            return None

        responder.reject = reject_twice
        ticket = await client.submit(a_chat_body(), queue_full_wait_s=30.0)
        record = await ticket.result(20)
        assert record.kind is Kind.COMPLETED
        assert [job.submission for job in responder.seen][:3] == [0, 1, 2]
        assert responder.runs[ticket.job_id] == 1


@pytest.mark.parametrize("step_s", [1e6, -1e6])
async def test_a_clock_step_is_no_wait_for_room(
    step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time given is a length: a clock that is set meanwhile neither ends nor prolongs it."""
    stepped = SimpleNamespace(time=lambda: time.time() + step_s, monotonic=time.monotonic)
    async with a_lane() as (client, responder):

        def reject(job: Job) -> Any:
            monkeypatch.setattr("producers.ticket.time", stepped)
            return a_rejection(job, retry_after_s=0.01) if len(responder.seen) < 2 else None

        responder.reject = reject
        ticket = await client.submit(a_chat_body(), queue_full_wait_s=30.0)
        assert (await ticket.result(20)).kind is Kind.COMPLETED
        responder.reject = lambda job: a_rejection(job, retry_after_s=0.01)
        given_up = await client.submit(a_chat_body(), queue_full_wait_s=0.05)
        assert (await given_up.result(20)).kind is Kind.REJECTED


async def test_a_final_rejection_is_not_tried_again() -> None:
    """A reason that no second try escapes ends the ticket at once, whatever time was given."""
    async with a_lane() as (client, responder):
        responder.reject = lambda job: a_rejection(job, Reason.DEADLINE_INFEASIBLE)
        ticket = await client.submit(a_chat_body(), queue_full_wait_s=30.0)
        assert (await ticket.result(5)).reason is Reason.DEADLINE_INFEASIBLE
        assert len(responder.seen) == 1


async def test_a_full_queue_is_an_error_with_retry_after() -> None:
    """The stream's refusal is told at once; the pause is the queue's own wait."""
    async with a_lane(jobs_max=1) as (client, responder):
        responder.may_run.clear()
        first = await client.submit(a_chat_body())
        queue = QueueState(
            band=2, model=MODEL, queued_jobs=1, queued_jobs_max=1, inflight_jobs=0, wait_s=5.0
        )
        await responder.tell_state(queue)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as refused:
            await client.submit(a_chat_body())
        assert refused.value.reason is Reason.QUEUE_FULL
        assert 5.0 <= refused.value.retry_after_s <= 6.0
        assert client.open_tickets == 1
        responder.may_run.set()
        await first.result(5)


async def test_a_full_queue_is_waited_out_within_the_time_given() -> None:
    """With `queue_full_wait_s` the call returns when there is room."""
    async with a_lane(jobs_max=1) as (client, responder):
        responder.may_run.clear()
        await client.submit(a_chat_body())
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.submit(a_chat_body(), queue_full_wait_s=30.0))
            await responder.started.wait()
            responder.may_run.set()
        assert (await waiting.result().result(5)).kind is Kind.COMPLETED


async def test_an_unknown_model_is_told_from_the_offer() -> None:
    """No stream takes it and CONFIG doesn't name it: said at once, with what the lane offers."""
    async with a_lane() as (client, _):
        with pytest.raises(UnknownModel, match="it offers: tiny"):
            await client.submit({"model": "huge", "messages": []})


async def offers(client: Client, **fields: Any) -> None:
    """Let a broker write another offer; the client has read the one before."""
    offer = LaneOffer(lane=LANE, models=(MODEL,), **fields)
    await link_of(client).kv_put(subjects.CONFIG_BUCKET, f"lane.{LANE}", encode(offer))


@pytest.mark.parametrize("name", ["gpt-4o-mini", "tiny-de"])
async def test_a_name_that_was_given_later_is_found(name: str) -> None:
    """An alias or adapter written after this client read its lane's offer: it reads it again."""
    async with a_lane() as (client, responder):
        await offers(client, aliases={"gpt-4o-mini": MODEL}, adapters={MODEL: ("tiny-de",)})
        for _ in range(2):
            ticket = await client.submit(a_chat_body(model=name))
            assert (await ticket.result(5)).kind is Kind.COMPLETED
        assert {job.model for job in responder.seen} == {MODEL}
        assert {job.adapter for job in responder.seen} == {"tiny-de" if name == "tiny-de" else ""}


async def test_an_alias_of_a_model_that_is_not_offered_is_told_with_both_names() -> None:
    """What was asked for, what that means, and what there is."""
    async with a_lane() as (client, _):
        await offers(client, aliases={"gpt-4o": "big"})
        told = "offers no model 'big' \\(also called 'gpt-4o'\\); it offers: tiny"
        with pytest.raises(UnknownModel, match=told):
            await client.submit(a_chat_body(model="gpt-4o"))


async def test_an_unknown_lane_is_told_from_the_config() -> None:
    """Other lanes stand in CONFIG, this one doesn't."""
    bus = MemoryBus()
    async with Responder(bus), Client(bus, lane="nobody", config=QUICK) as client:
        with pytest.raises(UnknownLane, match="acme"):
            await client.submit(a_chat_body())
    await bus.close()


async def test_a_model_that_is_offered_but_has_no_stream_yet_is_waited_for() -> None:
    """An election looks like an unknown model: what CONFIG offers is tried again, same id."""
    bus = MemoryBus()
    responder = Responder(bus)
    await responder.set_up()
    offer = LaneOffer(lane=LANE, models=(MODEL, "late"))
    await bus.kv_put(subjects.CONFIG_BUCKET, f"lane.{LANE}", encode(offer))
    async with Client(bus, lane=LANE, config=QUICK) as client:
        with pytest.raises(Unreachable, match="start a broker"):
            await client.submit({"model": "late", "messages": []})
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.submit({"model": "late", "messages": []}))
            await asyncio.sleep(0)
            responder.models = (MODEL, "late")
            await responder.set_up()
        assert waiting.result().submission == 0
    await bus.close()


async def test_nobody_set_the_cluster_up() -> None:
    """An empty server gives no verdict on the model, but one sentence on what to start."""
    bus = MemoryBus()
    async with Client(bus, lane=LANE, config=QUICK) as client:
        with pytest.raises(Unreachable, match="start a broker"):
            await client.submit(a_chat_body())
        assert client.open_tickets == 0
    await bus.close()


async def test_a_lost_link_is_waited_out_then_told() -> None:
    """While the link is down a submission waits; after `submit_s` the caller is told."""
    async with a_lane() as (client, _):
        link_of(client).disconnect()
        with pytest.raises(Unreachable, match="under the same id"):
            await client.submit(a_chat_body())
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(client.submit(a_chat_body()))
            await asyncio.sleep(0)
            link_of(client).reconnect()
        assert (await waiting.result().result(5)).kind is Kind.COMPLETED


async def test_a_body_beyond_the_bound_is_refused_before_anything_is_sent() -> None:
    """Too large is said at once, with both sizes."""
    async with a_lane() as (client, _):
        with pytest.raises(BodyTooLarge, match="7900000") as refused:
            await client.submit(a_chat_body(user="x" * 8_000_000))
        assert refused.value.reason is Reason.PAYLOAD_TOO_LARGE


@pytest.mark.parametrize(
    ("body", "fields", "said"),
    [
        (b"{", {}, "no JSON"),
        (b"\xff\xfe", {}, "no JSON"),
        (b"[]", {}, "no JSON object"),
        (b"{}", {}, "names no model"),
        (b'{"model": 3}', {}, "names no model"),
        (b'{"model": "a"}', {"model": "b"}, "name one"),
        (b'{"model": "a"}', {"band": 4}, "band 4"),
        (b'{"model": "a"}', {"job_id": "a b"}, "job id"),
        (b'{"model": "a"}', {"endpoint": "/v2"}, "endpoint"),
        (b'{"model": "a"}', {"session": "s" * 300}, "session"),
        (b'{"model": "' + b"m" * 300 + b'"}', {}, "model"),
        (b'{"model": "a"}', {"deadline_s": float("nan")}, "deadline"),
    ],
)
async def test_a_bad_request_is_told_at_the_call(
    body: bytes, fields: dict[str, Any], said: str
) -> None:
    """What can't be a job never reaches the broker; the message names the fault."""
    async with a_lane() as (client, responder):
        with pytest.raises(BadRequest, match=said):
            await client.submit(body, **fields)
        assert not responder.seen


def _nested(levels: int) -> list[object]:
    value: list[object] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize("model", ["", MODEL])
@pytest.mark.parametrize("field", ["tools", "x"])
@pytest.mark.parametrize("levels", [NESTING_MAX, 254, 300, 1_500])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_a_body_nested_too_deeply_is_told_so(
    model: str, field: str, levels: int, *, as_bytes: bool
) -> None:
    """Whoever built it, at whatever depth JSON's readers and writers give up themselves."""
    body: dict[str, object] = {"messages": []}
    if not model:
        body["model"] = MODEL
    deep = b"[" * levels + b"]" * levels
    raw = orjson.dumps(body)[:-1] + b',"%s":%s}' % (field.encode(), deep)
    body[field] = _nested(levels)
    with pytest.raises(BadRequest, match=f"more than {NESTING_MAX} levels deep"):
        build_job(raw if as_bytes else body, Wish(model=model), lane=LANE, client="c")


async def test_a_model_given_beside_the_body_is_put_into_it() -> None:
    """The engine needs the model in the body; a caller may name it once, in the call."""
    async with a_lane() as (client, responder):
        await (await client.submit({"messages": []}, model=MODEL)).result(5)
        assert msgspec.json.decode(responder.seen[0].body)["model"] == MODEL
        raw = b'{"messages": [], "seed": 18446744073709551616}'
        await (await client.submit(raw, model=MODEL)).result(5)
        sent = responder.seen[1].body
        assert msgspec.json.decode(sent)["model"] == MODEL
        assert b'"seed":18446744073709551616' in sent


async def test_the_same_job_id_while_it_runs_is_the_same_ticket() -> None:
    """The job id is an idempotency key: no second run."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        first = await client.submit(a_chat_body(), job_id="same")
        second = await client.submit(a_chat_body(), job_id="same")
        assert first is second
        responder.may_run.set()
        await second.result(5)
        assert responder.runs["same"] == 1


async def test_the_same_job_id_after_its_end_gives_the_stored_result() -> None:
    """Submitting a finished job again returns its record and runs nothing."""
    async with a_lane() as (client, responder):
        record = await (await client.submit(a_chat_body(), job_id="same")).result(5)
        again = await client.submit(a_chat_body(), job_id="same")
        assert await again.result(5) == record
        assert responder.deliveries["same"] == 1


async def test_closing_the_client_frees_who_waits_and_leaves_nothing_behind() -> None:
    """Waiters learn of it, no task and no subscription stays, and the job goes on."""
    bus = MemoryBus()
    async with Responder(bus) as responder:
        responder.may_run.clear()
        client = Client(bus, lane=LANE, config=QUICK)
        with structlog.testing.capture_logs() as logs:
            async with client:
                listeners = listeners_of(client)
                ticket = await client.submit(a_chat_body())
                await responder.started.wait()
                tasks = len(asyncio.all_tasks())
        (told,) = logs
        assert (told["jobs_that_go_on"], told["lane"]) == (1, LANE)
        assert len(asyncio.all_tasks()) == tasks - 1
        assert listeners_of(client) == listeners - 1
        with pytest.raises(ClientClosed):
            await ticket.result(5)
        with pytest.raises(ClientClosed):
            await client.submit(a_chat_body())
        responder.may_run.set()
    assert sum(responder.runs.values()) == 1
    await bus.close()


async def test_who_waits_when_the_client_closes_is_woken() -> None:
    """A pending `result` ends with ClientClosed instead of hanging."""
    bus = MemoryBus()
    await Responder(bus).set_up()
    async with asyncio.TaskGroup() as tasks:
        async with Client(bus, lane=LANE, config=QUICK) as client:
            waiting = tasks.create_task(_closed((await client.submit(a_chat_body())).result()))
            await asyncio.sleep(0)
        assert await waiting
    await bus.close()


async def _closed(result: Any) -> bool:
    try:
        await result
    except ClientClosed:
        return True
    return False


async def test_a_cancelled_submission_leaves_no_ticket() -> None:
    """A caller that gives up while the queue is full takes its ticket along."""
    async with a_lane(jobs_max=1) as (client, responder):
        responder.may_run.clear()
        await client.submit(a_chat_body())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await client.submit(a_chat_body(), queue_full_wait_s=60.0)
        assert client.open_tickets == 1


async def test_a_thousand_jobs_at_once_end_once_each() -> None:
    """One subscription and one watchdog serve them all."""
    async with a_lane(config=ClientConfig()) as (client, responder):
        listeners = listeners_of(client)
        async with asyncio.TaskGroup() as tasks:
            waits = [tasks.create_task(_result_of(client, number)) for number in range(1000)]
        assert {wait.result().kind for wait in waits} == {Kind.COMPLETED}
        assert set(responder.runs.values()) == {1}
        assert listeners_of(client) == listeners


async def _result_of(client: Client, number: int) -> Any:
    return await (await client.submit(a_chat_body(), job_id=f"job-{number}")).result(20)


async def test_a_bundle_is_heard_by_each_of_its_jobs() -> None:
    """Tokens of several jobs in one message; those of a job that is not ours are strays."""
    async with a_lane() as (client, responder):
        responder.may_run.clear()
        tickets = [await client.submit(a_chat_body(stream=True)) for _ in range(2)]
        pieces = [
            Tokens(job=job_id, attempt=ATTEMPT, index=index, data=f"{job_id} {index}".encode())
            for index in range(2)
            for job_id in (*(ticket.job_id for ticket in tickets), "nobody")
        ]
        subject = subjects.out_bundles(client.lane, client.client_id)
        await responder.bus.publish(subject, encode(Bundle(tokens=tuple(pieces))))
        for ticket in tickets:
            got = [await ticket.next_chunk() for _ in range(2)]
            assert [chunk.data.decode() for chunk in got if chunk] == [
                f"{ticket.job_id} 0",
                f"{ticket.job_id} 1",
            ]
        assert client.counts.strays == 2
        responder.may_run.set()


async def test_only_jobs_that_stream_ask_for_bundles() -> None:
    """Others have no tokens."""
    async with a_lane() as (client, responder):
        for stream in (True, False):
            await (await client.submit(a_chat_body(stream=stream))).result(5)
        assert [job.reads_bundles for job in responder.seen] == [True, False]
