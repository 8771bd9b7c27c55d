"""The agent beside a real HTTP server that misbehaves: what each fault of an engine comes to."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.wire.messages import Answer, End, Kind, Outcome, Reason, Tokens
from tests.agents import Stage, an_agent
from tests.builders import a_chat_body, a_job, an_attempt
from tests.engines import BadEngine, Behaviour, a_bad_engine
from tests.turns import until
from worker_agent.engine.openai_http import OpenAiHttpEngine


@asynccontextmanager
async def beside(
    behaviour: Behaviour, *, socket_path: Path | None = None, **fields: Any
) -> AsyncGenerator[tuple[Stage, BadEngine]]:
    """An agent beside such a server."""
    async with a_bad_engine(behaviour, socket_path=socket_path) as server:
        engine = OpenAiHttpEngine(server.url, slots=2)
        async with an_agent(engine=engine, **fields) as stage:
            await until(lambda: stage.agent.watch.readiness.ready)
            yield stage, server


@pytest.mark.parametrize("is_socket", [False, True])
async def test_a_stream_reaches_the_caller_and_the_record(is_socket: bool, tmp_path: Path) -> None:
    """Over TCP and over a Unix socket: every event in order, then the whole answer."""
    socket_path = tmp_path / "e.sock" if is_socket else None
    async with beside(Behaviour.FINE, socket_path=socket_path) as (stage, _):
        await stage.dispatch(a_job(stream=True, body=a_chat_body(stream=True)))
        finished = await stage.end_of("job-1")
        record = await stage.record("job-1")
        *events, end = stage.out
    assert (finished.kind, finished.usage.cached_tokens) == (Kind.COMPLETED, 7)
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [one.index for one in tokens] == list(range(len(tokens)))
    said = [orjson.loads(one.data)["choices"] for one in tokens]
    text = "".join(c[0]["delta"].get("content", "") for c in said if c)
    assert text == "t0 t1 t2 t3 "
    assert orjson.loads(record.body)["choices"][0]["message"]["content"] == text
    assert isinstance(end, End)


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Behaviour.FAILS, Reason.ENGINE_FAILED),
        (Behaviour.UNAVAILABLE, Reason.ENGINE_FAILED),
        (Behaviour.DROPS, Reason.ENGINE_FAILED),
        (Behaviour.DROPS_AT_ONCE, Reason.ENGINE_FAILED),
        (Behaviour.ERROR_IN_STREAM, Reason.ENGINE_FAILED),
        (Behaviour.FORBIDS, Reason.ENGINE_FAILED),
        (Behaviour.BROKEN_JSON, Reason.ENGINE_GARBAGE),
        (Behaviour.WRONG_TYPE, Reason.ENGINE_GARBAGE),
        (Behaviour.HALF_STREAM, Reason.ENGINE_GARBAGE),
    ],
)
async def test_an_engines_fault_is_a_charged_retry(behaviour: Behaviour, reason: Reason) -> None:
    """No record, no ack; the agent takes the next job."""
    async with beside(behaviour) as (stage, server):
        await stage.dispatch(a_job())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, reason)
        assert finished.charged
        assert not await stage.has_record("job-1")
        assert await stage.queued() == 1
        server.behaviour = Behaviour.FINE
        await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        assert (await stage.end_of("job-2")).kind is Kind.COMPLETED


@pytest.mark.parametrize("behaviour", [Behaviour.REFUSES, Behaviour.NOT_FOUND])
async def test_a_refusal_is_the_jobs_own_end(behaviour: Behaviour) -> None:
    """4xx: recorded with the engine's words, not tried elsewhere."""
    async with beside(behaviour) as (stage, _):
        await stage.dispatch(a_job())
        assert (await stage.end_of("job-1")).outcome is Outcome.SETTLED
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.FAILED, Reason.ENGINE_REFUSED)
        assert record.status_code in (400, 404)
        assert record.body
        await stage.acknowledged()
        assert await stage.queued() == 0


async def test_a_busy_engine_is_nobodys_fault() -> None:
    """429: tried elsewhere, not charged."""
    async with beside(Behaviour.BUSY) as (stage, _):
        await stage.dispatch(a_job())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.charged) == (Outcome.RETRY, False)


@pytest.mark.parametrize("behaviour", [Behaviour.SILENT, Behaviour.HANGS])
async def test_a_silent_engine_is_a_stall_and_is_left(behaviour: Behaviour) -> None:
    """After headers or before them: aborted there, charged, tried elsewhere."""
    async with beside(behaviour) as (stage, server):
        await stage.dispatch(a_job(), stall_s=0.2)
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.STALLED)
        await server.until(lambda: server.aborted == 1)
        assert server.running == 0


async def test_cancel_aborts_the_engines_request_within_a_second() -> None:
    """The generation ends with its caller's interest (case 35), and slot and record are done."""
    async with beside(Behaviour.SLOW) as (stage, server):
        await stage.dispatch(a_job(stream=True))
        server.let_token_go()
        await stage.until(lambda: any(isinstance(event, Tokens) for event in stage.out))
        began_s = asyncio.get_running_loop().time()
        reply = await stage.abort(Reason.CANCELLED)
        assert reply.answer is Answer.ACCEPTED
        await server.until(lambda: server.aborted == 1)
        finished = await stage.end_of("job-1")
        assert asyncio.get_running_loop().time() - began_s < 1.0
        assert (server.running, finished.kind) == (0, Kind.CANCELLED)
        assert not stage.agent.ledger.running


async def test_an_engine_that_goes_away_is_told_and_its_return_too() -> None:
    """Not ready: nothing is taken; ready again: jobs are."""
    async with beside(Behaviour.FINE) as (stage, server):
        await stage.beat(lambda beat: beat.ready)
        server.health_code = 503
        await stage.beat(lambda beat: not beat.ready)
        assert (await stage.dispatch(a_job())).answer is Answer.BUSY
        server.health_code = 200
        await stage.beat(lambda beat: beat.ready)
        assert (await stage.dispatch(a_job(), attempt=an_attempt(2))).answer is Answer.ACCEPTED
        await stage.end_of("job-1")
