"""Who leaves, who comes late, and what becomes of their jobs."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from broker.wire.messages import Kind, Reason, Started
from producers.gateway.asking import RERUNS_MAX
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE
from tests.clusters import a_chat
from tests.gateways import Front, a_front
from tests.responder import ATTEMPT
from tests.turns import until
from tests.unit.producers.gateway.test_generate import (
    CHAT,
    a_completion,
    a_whole,
    events_of,
    streamed_text,
)
from worker_agent.engine.base import Chunk, EngineDisconnected

LEFT_S_MAX = 1.0
"""A job whose caller left is over within this."""


def _named(number: int) -> dict[str, str]:
    """Headers that make the scripted engine know the job by its id."""
    return {"X-Inferlane-Job-Id": f"job-{number}", "X-Request-Id": f"r.job-{number}"}


def _piece(text: str, **fields: Any) -> Chunk:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return Chunk(data=orjson.dumps({"choices": [choice]}), output_tokens=1, **fields)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_a_running_job(tmp_path: Path, stream: bool) -> None:
    """The engine's request ends and the slot is free, within a second."""
    engine = ScriptedEngine()
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, cluster):
        asking = asyncio.create_task(front.ask(CHAT, a_chat(stream=stream), headers=_named(1)))
        await until(lambda: "job-1" in engine.running)
        asking.cancel()
        async with asyncio.timeout(LEFT_S_MAX):
            await until(lambda: engine.aborted == ["job-1"])
            await until(lambda: _has_record(cluster, "job-1"))
        record = await cluster.record("job-1")
        assert record is not None
        assert (record.kind, record.reason) == (Kind.CANCELLED, Reason.CANCELLED)
        await cluster.until_empty()
        assert front.gateway.streams == 0
        assert front.gateway.bodies.held_bytes == 0


async def _has_record(cluster: Any, job_id: str) -> bool:
    return await cluster.record(job_id) is not None


async def test_a_client_that_leaves_a_stream_in_its_midst(tmp_path: Path) -> None:
    """The same after some tokens."""
    engine = ScriptedEngine()
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):
        engine.say("job-1", _piece("a"))
        async with front.session.post(CHAT, json=a_chat(stream=True), headers=_named(1)) as answer:
            assert await answer.content.readline()
        # Leaving the block closes the connection: the answer was not read to its end.
        async with asyncio.timeout(LEFT_S_MAX):
            await until(lambda: engine.aborted == ["job-1"])
        await until(lambda: front.gateway.streams == 0)


async def test_a_client_that_leaves_the_queue(tmp_path: Path) -> None:
    """A job that waits is taken out, and never runs."""
    engine = ScriptedEngine(slots=1)
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, cluster):
        first = asyncio.create_task(front.ask(CHAT, a_chat(), headers=_named(1)))
        await until(lambda: "job-1" in engine.running)
        second = asyncio.create_task(front.ask(CHAT, a_chat(), headers=_named(2)))
        client = await front.gateway.lanes.of(LANE)
        await until(lambda: (t := client.ticket_of("job-2")) is not None and t.position is not None)
        second.cancel()
        async with asyncio.timeout(LEFT_S_MAX):
            await until(lambda: _has_record(cluster, "job-2"))
        engine.say("job-1", an_answer(a_completion("hi").decode()))
        assert (await first)[0] == 200
        assert "job-2" not in engine.requests


async def test_a_client_that_leaves_while_its_job_is_on_its_way() -> None:
    """The submission goes on by itself, and what it stored is cancelled."""
    async with a_front() as (front, played):
        await front.gateway.lanes.of(LANE)
        played.may_run.clear()
        bus = front.gateway.bus
        held, asked = asyncio.Event(), asyncio.Event()
        append = bus.append

        async def slow(*args: Any, **fields: Any) -> Any:
            asked.set()
            await held.wait()
            return await append(*args, **fields)

        bus.append = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(front.ask(CHAT, a_chat()))
        await asked.wait()
        asking.cancel()
        await until(lambda: front.gateway.under_way.count == 0)
        held.set()
        await until(lambda: bool(played.cancelled))
        played.may_run.set()


async def test_stopping_while_a_job_is_on_its_way() -> None:
    """A request that came in time is answered, though its job was not stored yet."""
    async with a_front() as (front, _):
        await front.gateway.lanes.of(LANE)
        held, asked = asyncio.Event(), asyncio.Event()
        append = front.gateway.bus.append

        async def slow(*args: Any, **fields: Any) -> Any:
            asked.set()
            await held.wait()
            return await append(*args, **fields)

        front.gateway.bus.append = slow  # type: ignore[method-assign]
        asking = asyncio.create_task(front.ask(CHAT, a_chat()))
        await asked.wait()
        stopping = asyncio.create_task(front.listener.stop())
        await until(lambda: front.gateway.leaving)
        held.set()
        assert (await asking)[0] == 200
        await stopping


async def test_the_last_of_two_callers_cancels(tmp_path: Path) -> None:
    """Both wait on one job; the first that leaves leaves it running, and the other gets it."""
    engine = ScriptedEngine()
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):
        first = asyncio.create_task(front.ask(CHAT, a_chat(), headers=_named(1)))
        await until(lambda: "job-1" in engine.running)
        second = asyncio.create_task(front.ask(CHAT, a_chat(), headers=_named(1)))
        await until(lambda: front.gateway.under_way.count == 2)
        first.cancel()
        await until(lambda: front.gateway.under_way.count == 1)
        engine.say("job-1", an_answer(a_completion("hi").decode()))
        status, answer = await second
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")
        assert engine.aborted == []


async def test_a_second_reader_of_a_stream_gets_ita_completion(tmp_path: Path) -> None:
    """Pieces can be given once; the other reader gets the answer when it is whole."""
    engine = ScriptedEngine()
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):

        async def read() -> list[tuple[str, Any]]:
            async with front.session.post(
                CHAT, json=a_chat(stream=True), headers=_named(1)
            ) as answer:
                return events_of(await answer.read())

        readers = [asyncio.create_task(read())]
        await until(lambda: "job-1" in engine.running)
        readers.append(asyncio.create_task(read()))
        await until(lambda: front.gateway.streams == 2)
        engine.say("job-1", _piece("a"), _piece("b"), an_answer(a_completion("ab").decode()))
        first, second = await asyncio.gather(*readers)
    assert (streamed_text(first), len(first)) == ("ab", 3)
    assert (streamed_text(second), len(second)) == ("ab", 2)


async def test_the_same_key_gives_the_same_answer_run_once() -> None:
    """Also long after; with another body it is another job."""
    key = {"Idempotency-Key": "order 66"}
    async with a_front() as (front, played):
        _, first, told = await front.ask_all(CHAT, a_chat("a"), headers=key)
        _, second, again = await front.ask_all(CHAT, a_chat("a"), headers=key)
        assert first == second
        assert told["X-Inferlane-Job-Id"] == again["X-Inferlane-Job-Id"]
        await front.ask(CHAT, a_chat("b"), headers=key)
        assert len(played.seen) == 2
        assert all(runs == 1 for runs in played.runs.values())


async def test_the_same_id_with_another_body_is_a_conflict() -> None:
    """409 while the first one runs."""
    async with a_front() as (front, played):
        played.may_run.clear()
        first = asyncio.create_task(front.ask(CHAT, a_chat("a"), headers=_named(1)))
        await played.started.wait()
        status, told = await front.ask(CHAT, a_chat("b"), headers=_named(1))
        assert (status, told["error"]["code"]) == (409, "idempotency_conflict")
        played.may_run.set()
        assert (await first)[0] == 200


async def test_a_key_whose_caller_left_is_run_anew(tmp_path: Path) -> None:
    """Its job was cancelled when he left; coming back with the key, he gets an answer."""
    engine = ScriptedEngine()
    key = {"Idempotency-Key": "again", "X-Request-Id": "r.one"}
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):
        asking = asyncio.create_task(front.ask(CHAT, a_chat(), headers=key))
        await until(lambda: "one" in engine.running)
        asking.cancel()
        await until(lambda: engine.aborted == ["one"])
        engine.say("two", an_answer(a_completion("hi").decode()))
        again = {**key, "X-Request-Id": "r.two"}
        status, _, told = await front.ask_all(CHAT, a_chat(), headers=again)
    assert status == 200
    assert told["X-Inferlane-Job-Id"].endswith("-1")


async def test_a_key_is_not_run_anew_for_ever() -> None:
    """After RERUNS_MAX jobs that were given up: 409, and to use another key."""
    async with a_front() as (front, played):
        played.may_run.clear()
        key = {"Idempotency-Key": "again"}
        _, told = await front.ask(CHAT, a_chat(), headers={**key, "Prefer": "respond-async"})
        first = told["id"]
        played.cancelled |= {f"{first}-{number}" for number in range(1, RERUNS_MAX)} | {first}
        played.may_run.set()
        for number in range(1, RERUNS_MAX + 1):
            status, told = await front.ask(CHAT, a_chat(), headers=key)
            expected = "cancelled" if number < RERUNS_MAX else "idempotency_conflict"
            assert (status, told["error"]["code"]) == (409, expected)
        assert len(played.seen) == RERUNS_MAX


async def test_a_job_that_was_cancelled_by_its_id_stays_so() -> None:
    """An id names one job, whatever became of it."""
    async with a_front() as (front, played):
        played.cancelled.add("job-1")
        for _ in range(2):
            status, told = await front.ask(CHAT, a_chat(), headers=_named(1))
            assert (status, told["error"]["code"]) == (409, "cancelled")


async def test_a_worker_lost_in_the_midst_of_a_stream(tmp_path: Path) -> None:
    """An error event and the end: no [DONE], no second attempt in the same stream."""
    engine = ScriptedEngine()
    engine.say("job-1", _piece("half"))
    async with (
        a_whole(tmp_path, cluster={"engine": engine}) as (front, _),
        front.session.post(CHAT, json=a_chat(stream=True), headers=_named(1)) as answer,
    ):
        await answer.content.readline()
        engine.say("job-1", EngineDisconnected("gone"))
        ((_, told),) = events_of((await answer.read()).lstrip(b"\n"))
    error = told["error"]
    assert error["code"] in ("worker_lost", "engine_failed")
    assert set(error) == {"message", "type", "param", "code"}


async def test_one_stream_too_many() -> None:
    """`streams_max`: 503 before a job is made; answers in one piece are still given."""
    async with a_front(streams_max=1) as (front, played):
        played.may_run.clear()
        first = asyncio.create_task(_read(front))
        await played.started.wait()
        status, told = await front.ask(CHAT, a_chat(stream=True))
        assert (status, told["error"]["code"]) == (503, "gateway_overloaded")
        assert len(played.seen) == 1
        played.may_run.set()
        assert await first == 200
        assert (await front.ask(CHAT, a_chat()))[0] == 200


async def _read(front: Front) -> int:
    async with front.session.post(CHAT, json=a_chat(stream=True)) as answer:
        await answer.read()
        return answer.status


async def test_stopping_lets_streams_end(tmp_path: Path) -> None:
    """Nothing new is taken; what streams has `drain_s_max` to end."""
    engine = ScriptedEngine()
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):
        engine.say("job-1", _piece("a"))
        async with front.session.post(CHAT, json=a_chat(stream=True), headers=_named(1)) as answer:
            await answer.content.readline()
            stopping = asyncio.create_task(front.listener.stop())
            await until(lambda: front.gateway.leaving)
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as other, other.get(f"{front.url}/healthz"):
                    pass
            engine.say("job-1", _piece("b"), an_answer(a_completion("ab").decode()))
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            await stopping
        assert engine.aborted == []


@pytest.mark.parametrize("hurried", [False, True])
async def test_stopping_cuts_off_what_takes_too_long(tmp_path: Path, hurried: bool) -> None:
    """After `drain_s_max`, or at a second signal: then jobs are cancelled, as if callers left."""
    engine = ScriptedEngine()
    drain_s_max = 60.0 if hurried else 0.05
    wholes = a_whole(tmp_path, cluster={"engine": engine}, drain_s_max=drain_s_max)
    async with wholes as (front, cluster):
        engine.say("job-1", _piece("a"))
        async with front.session.post(CHAT, json=a_chat(stream=True), headers=_named(1)) as answer:
            await answer.content.readline()
            stopping = asyncio.create_task(front.listener.stop())
            await until(lambda: front.gateway.leaving)
            if hurried:
                front.listener.hurry()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
            await stopping
        await until(lambda: engine.aborted == ["job-1"])
        await until(lambda: _has_record(cluster, "job-1"))


async def test_a_started_job_tells_its_worker_before_its_first_token() -> None:
    """Headers of a stream come with its first byte, and say who runs it."""
    async with a_front(stream_silence_s=0.02) as (front, played):
        played.may_run.clear()
        task = asyncio.create_task(_headers(front))
        await played.started.wait()
        (job,) = played.seen
        await played.say(job, Started(job=job.id, attempt=ATTEMPT, worker="gpu-7"))
        headers = await task
        played.may_run.set()
    assert headers["X-Inferlane-Worker"] == "gpu-7"
    assert int(headers["X-Inferlane-Queue-Ms"]) >= 0


async def _headers(front: Front) -> Any:
    async with front.session.post(CHAT, json=a_chat(stream=True)) as answer:
        return answer.headers
