"""What a reader of a stream gets: in order, in bounds, whole or said to be broken."""

import asyncio
from typing import Any

import orjson
from msgspec import structs

from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Attempt, Bundle, Tokens
from producers.gateway.streaming import CHUNKS_AT_ONCE
from tests.builders import LANE
from tests.clusters import a_chat
from tests.gateways import AUTH, Front, a_front
from tests.responder import ATTEMPT, a_record
from tests.turns import until
from tests.unit.producers.gateway.test_generate import CHAT, a_completion, events_of, streamed_text


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
        played.answer = lambda job: a_record(
            job, body=a_completion("".join(map(str, range(count))))
        )
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


async def test_what_comes_in_one_turn_is_one_write() -> None:
    """After the first piece, which opens the answer."""
    async with a_front() as (front, played):
        played.may_run.clear()
        reader, writer = await _slow_stream(front)
        await played.started.wait()
        (job,) = played.seen
        first, *others = _numbered(job, 6)
        await played.say(job, first)
        await _head(reader)
        assert await _a_write(reader) == "0"
        subject = subjects.out_bundles(job.lane, job.client)
        await played.bus.publish(subject, encode(Bundle(tokens=tuple(others))))
        assert await _a_write(reader) == "12345"
        played.may_run.set()
        writer.close()


async def _a_write(reader: asyncio.StreamReader) -> str:
    """The text of one write: an HTTP chunk."""
    size = int(await reader.readline(), 16)
    events = events_of(await reader.readexactly(size))
    await reader.readline()
    return streamed_text(events)


async def test_a_reader_without_chunks() -> None:
    """HTTP/1.0: the events as they are, and the end of the connection is the answer's."""
    async with a_front() as (front, played):
        played.may_run.clear()
        played.answer = lambda job: _completed(job, "012")
        reader, writer = await _slow_stream(front, http="1.0")
        await played.started.wait()
        (job,) = played.seen
        first, *others = _numbered(job, 3)
        await played.say(job, first)
        await _head(reader)
        raw = await reader.readuntil(b"\n\n")
        for tokens in others:
            await played.say(job, tokens)
        raw += await reader.readuntil(b'"2"') + await reader.readuntil(b"\n\n")
        played.may_run.set()
        raw += await reader.read()
        writer.close()
    assert streamed_text(events_of(raw)) == "012"
    assert raw.endswith(b"data: [DONE]\n\n")


async def test_another_attempt_in_the_midst_of_a_stream() -> None:
    """What was written can't be taken back: an error event, and nothing of the other attempt."""
    async with a_front() as (front, played):
        played.may_run.clear()
        reader, writer = await _slow_stream(front)
        await played.started.wait()
        (job,) = played.seen
        first, second, third = _numbered(job, 3)
        await played.say(job, first)
        await _head(reader)
        assert await _a_write(reader) == "0"
        await played.say(job, second)
        later = Attempt(ATTEMPT.epoch, ATTEMPT.number + 1)
        await played.say(job, structs.replace(third, attempt=later, index=0))
        events = events_of(await _body(reader))
        played.may_run.set()
        writer.close()
    assert "2" not in streamed_text(events[:-1])
    assert events[-1][1]["error"]["code"] == "stream_broken"


def _tokens(job: Any, count: int, size: int) -> list[Tokens]:
    choice = {"index": 0, "delta": {"content": "x" * size}, "finish_reason": None}
    data = orjson.dumps({"choices": [choice]})
    return [Tokens(job=job.id, attempt=ATTEMPT, index=i, data=data) for i in range(count)]


async def _slow_stream(
    front: Front, *, http: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask for a stream and read none of it."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = orjson.dumps(a_chat(stream=True))
    lines = [
        f"POST {CHAT} HTTP/{http}",
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
    return a_record(job, body=a_completion(text))


async def _to_the_end(reader: asyncio.StreamReader) -> bytes:
    """Read a chunked answer's body."""
    await _head(reader)
    return await _body(reader)


async def _head(reader: asyncio.StreamReader) -> None:
    while (await reader.readline()) != b"\r\n":
        pass


async def _body(reader: asyncio.StreamReader) -> bytes:
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
