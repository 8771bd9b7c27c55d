"""Who leaves, who comes late, who reads slowly, and what becomes of their jobs."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from broker.wire.messages import Kind, Reason, Started, Tokens
from producers.gateway.asking import RERUNS_MAX
from producers.gateway.streaming import CHUNKS_AT_ONCE
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE
from tests.clusters import a_chat
from tests.gateways import AUTH, Front, a_front
from tests.responder import ATTEMPT, a_record
from tests.turns import until
from tests.unit.producers.gateway.test_generate import CHAT, a_whole, events_of, streamed_text
from worker_agent.engine.base import Chunk, EngineDisconnected

LEFT_S_MAX = 1.0
"""A job whose caller left is over within this."""


def _named(number: int) -> dict[str, str]:
    """Headers that make the scripted engine know the job by its id."""
    return {"X-Inferlane-Job-Id": f"job-{number}", "X-Request-Id": f"r.job-{number}"}


def _piece(text: str, **fields: Any) -> Chunk:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return Chunk(data=orjson.dumps({"choices": [choice]}), output_tokens=1, **fields)


def _whole(text: str) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return orjson.dumps({"id": "x", "object": "chat.completion", "choices": [choice]})


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
        engine.say("job-1", an_answer(_whole("hi").decode()))
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
        engine.say("job-1", an_answer(_whole("hi").decode()))
        status, answer = await second
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hi")
        assert engine.aborted == []


async def test_a_second_reader_of_a_stream_gets_it_whole(tmp_path: Path) -> None:
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
        engine.say("job-1", _piece("a"), _piece("b"), an_answer(_whole("ab").decode()))
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
        engine.say("two", an_answer(_whole("hi").decode()))
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


async def test_a_stream_that_takes_too_long() -> None:
    """`answer_s_max`: once it has begun, an error event; its job is given up."""
    async with a_front(answer_s_max=0.2, stream_silence_s=0.02) as (front, played):
        played.may_run.clear()
        async with front.session.post(CHAT, json=a_chat(stream=True)) as answer:
            raw = await answer.read()
        (event,) = events_of(raw)
        assert event[1]["error"]["code"] == "answer_timeout"
        await until(lambda: bool(played.cancelled))
        played.may_run.set()


async def test_pieces_that_piled_up_go_out_in_order() -> None:
    """More than CHUNKS_AT_ONCE at once: all of them, each once."""
    count = 3 * CHUNKS_AT_ONCE + 1
    async with a_front() as (front, played):
        played.chunks = lambda job: _numbered(job, count)
        played.answer = lambda job: a_record(job, body=_whole("".join(map(str, range(count)))))
        async with front.session.post(CHAT, json=a_chat(stream=True)) as answer:
            events = events_of(await answer.read())
    assert streamed_text(events) == "".join(map(str, range(count)))
    assert len(events) == count + 1


def _numbered(job: Any, count: int) -> list[Tokens]:
    made: list[Tokens] = []
    for index in range(count):
        choice = {"index": 0, "delta": {"content": str(index)}, "finish_reason": None}
        data = orjson.dumps({"choices": [choice]})
        made.append(Tokens(job=job.id, attempt=ATTEMPT, index=index, data=data))
    return made


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


def _tokens(job: Any, count: int, size: int) -> list[Tokens]:
    choice = {"index": 0, "delta": {"content": "x" * size}, "finish_reason": None}
    data = orjson.dumps({"choices": [choice]})
    return [Tokens(job=job.id, attempt=ATTEMPT, index=i, data=data) for i in range(count)]


async def _slow_stream(front: Front) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream and read none of it."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = orjson.dumps(a_chat(stream=True))
    lines = [
        f"POST {CHAT} HTTP/1.1",
        "Host: x",
        f"Authorization: {AUTH['Authorization']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "",
        "",
    ]
    writer.write("\r\n".join(lines).encode() + body)
    return reader, writer


SIZE, COUNT = 4000, 4000


async def test_a_slow_reader_gets_all_of_it_in_bounded_memory() -> None:
    """What waits for him is at most `stream_bytes_max`; the rest comes in one piece at the end."""
    text = "x" * SIZE * 1500
    async with a_front(stream_bytes_max=100_000) as (front, played):
        played.chunks = lambda job: _tokens(job, 1500, SIZE)
        played.answer = lambda job: _completed(job, text)
        reader, writer = await _slow_stream(front)
        client = await front.gateway.lanes.of(LANE)
        await until(lambda: client.counts.ended == 1)
        assert front.gateway.streams == 1, "he has not read it yet"
        raw = await asyncio.wait_for(_to_the_end(reader), 20)
        writer.close()
        counts = front.gateway.expose().decode()
    assert len(streamed_text(events_of(raw))) == len(text)
    assert raw.endswith(b"data: [DONE]\n\n")
    assert "inferlane_gateway_caught_up_total 1.0" in counts


def _completed(job: Any, text: str) -> Any:
    return a_record(job, body=_whole(text))


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked answer's body."""
    while (await reader.readline()) != b"\r\n":
        pass
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readline()
    return body


async def test_a_reader_who_takes_nothing_is_gone() -> None:
    """`write_s_max`: his connection is cut, and he holds nothing any more."""
    async with a_front(write_s_max=0.05) as (front, played):
        played.chunks = lambda job: _tokens(job, 1500, SIZE)
        played.answer = lambda job: _completed(job, "x" * SIZE * 1500)
        _, writer = await _slow_stream(front)
        await until(lambda: front.gateway.streams == 1)
        await until(lambda: front.gateway.streams == 0)
        await until(lambda: front.listener._connections() == 0)
        writer.close()
        assert front.gateway.bodies.held_bytes == 0


async def test_a_silent_stream_says_that_it_lives() -> None:
    """`stream_silence_s`: comments, which readers pass over; a later rejection is an event."""
    async with a_front(stream_silence_s=0.02) as (front, played):
        played.may_run.clear()
        async with front.session.post(CHAT, json=a_chat(stream=True)) as answer:
            assert answer.status == 200
            assert await answer.content.readline() == b": waiting\n"
            played.cancelled.add(answer.headers["X-Inferlane-Job-Id"])
            played.may_run.set()
            raw = await answer.read()
    (event,) = events_of(raw.lstrip(b"\n"))
    assert event[1]["error"]["code"] == "cancelled"


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
            engine.say("job-1", _piece("b"), an_answer(_whole("ab").decode()))
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
