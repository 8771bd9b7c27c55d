"""Connections that are out for harm: bombs, dribbles, pipelines, garbage. None costs the others.

Each case says which answers it may get; `b""` stands for a connection that is closed without one.
"""

import asyncio
import gc
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from producers.gateway.checks import CHAT
from tests.clusters import a_chat
from tests.gateways import AUTH, Front, a_front
from tests.turns import until
from tests.unit.producers.gateway.test_fuzz import LAG_S_MAX, _judged, _lags

KEY_LINE = f"Authorization: {AUTH['Authorization']}\r\n".encode()
HEAD = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\n" + KEY_LINE
JSON = b"Content-Type: application/json\r\n"
CLOSE = b"Connection: close\r\n"
CHUNKED = HEAD + JSON + CLOSE + b"Transfer-Encoding: chunked\r\n\r\n"
GOOD = orjson.dumps(a_chat())

BOUNDS: dict[str, Any] = {"body_s_max": 0.5, "keepalive_s": 0.5, "body_bytes_max": 300_000}

CLOSED_S_MAX = 8.0
"""After this a connection that should have been closed is held to be kept open."""

ROUNDS = 4
GROWTH_KB_MAX = 12_000
"""Memory that the rounds after the first may add: a bomb that stayed would be many times that."""


def asked(body: bytes, *, extra: bytes = b"", head: bytes = HEAD) -> bytes:
    """A request with a body."""
    return head + JSON + CLOSE + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def with_field(raw: bytes) -> bytes:
    """A good chat with one more field, as raw JSON."""
    return asked(GOOD[:-1] + b',"x":' + raw + b"}")


def get(path: bytes, *, method: bytes = b"GET", version: bytes = b"HTTP/1.1") -> bytes:
    """A request without a body."""
    return method + b" " + path + b" " + version + b"\r\nHost: x\r\n" + KEY_LINE + CLOSE + b"\r\n"


def header(line: bytes) -> bytes:
    """A good chat with one more header."""
    return asked(GOOD, extra=line + b"\r\n")


OK, BAD = {200}, {400}
REFUSED = {400, 0}
"""Told so, or closed at once."""

CASES: dict[str, tuple[bytes, set[int]]] = {
    # JSON
    "deep": (with_field(b"[" * 100_000 + b"]" * 100_000), BAD),
    "deep objects": (with_field(b'{"a":' * 40_000 + b"1" + b"}" * 40_000), BAD),
    "deep and cut off": (asked(b'{"model":' + b"[" * 100_000), BAD),
    "1e999": (with_field(b"1e999"), BAD),
    "-1e999": (with_field(b"-1e999"), BAD),
    "a huge whole number": (with_field(b"9" * 100_000), {200, 400}),
    "a long fraction": (with_field(b"0." + b"3" * 100_000), {200, 400}),
    "NaN": (with_field(b"NaN"), BAD),
    "half a rune": (with_field(b'"\\ud800"'), BAD),
    "half a rune in a name": (asked(GOOD[:-1] + b',"\\udfff":1}'), BAD),
    "NUL in the model": (asked(orjson.dumps(a_chat(model="tiny\x00"))), {404}),
    "a byte order mark": (asked(b"\xef\xbb\xbf" + GOOD), BAD),
    "UTF-16": (asked(GOOD.decode().encode("utf-16")), BAD),
    "a field twice": (asked(GOOD[:-1] + b',"model":"none"}'), {404}),
    "twenty thousand fields": (
        asked(GOOD[:-1] + b"".join(b',"%d":0' % n for n in range(20_000)) + b"}"),
        OK,
    ),
    "bytes that are no text": (asked(GOOD[:-1] + b',"x":"\xff\xfe"}'), BAD),
    # headers
    "NUL in an id": (header(b"X-Inferlane-Job-Id: a\x00b"), REFUSED),
    "no ASCII in an id": (header("X-Inferlane-Job-Id: ü".encode()), BAD),
    "no ASCII in a key": (header("Idempotency-Key: ключ 🔑".encode()), OK),
    "no text in a key": (header(b"Idempotency-Key: \xff\xfe\xfd"), OK),
    "a key of blanks": (header(b"Idempotency-Key:    "), BAD),
    "no text in a session": (header(b"X-Inferlane-Session: \xff"), BAD),
    "no ASCII in a band": (header("X-Inferlane-Band: \uff12".encode()), BAD),
    "no ASCII in a deadline": (header("X-Inferlane-Deadline: \u0663s".encode()), BAD),
    "a deadline of 1e999": (header(b"X-Inferlane-Deadline: 1e999"), BAD),
    "a folded header": (header(b"X-Inferlane-Session: a\r\n b"), {200, 400, 0}),
    "a huge header": (header(b"X-A: " + b"y" * 1_000_000), REFUSED),
    "a huge name": (header(b"y" * 1_000_000 + b": x"), REFUSED),
    "many headers": (header(b"\r\n".join(b"X-%d: y" % n for n in range(10_000))), REFUSED),
    "a header twice": (
        header(b"X-Inferlane-Band: 1\r\nX-Inferlane-Band: 2\r\nX-Request-Id: a\r\nX-Request-Id: b"),
        {200, 400},
    ),
    "two keys": (header(b"Authorization: Bearer other"), {200, 400, 401}),
    "two hosts": (header(b"Host: y"), {200, 400}),
    "two lengths": (header(b"Content-Length: 3"), REFUSED),
    "the same length twice": (header(b"Content-Length: %d" % len(GOOD)), {200, 400, 0}),
    "length and chunks": (header(b"Transfer-Encoding: chunked"), {400, 0}),
    "a length below zero": (HEAD + JSON + b"Content-Length: -1\r\n\r\n", REFUSED),
    "a length beyond all": (HEAD + JSON + b"Content-Length: 1" + b"0" * 30 + b"\r\n\r\n", REFUSED),
    "a length with a sign": (HEAD + JSON + b"Content-Length: +3\r\n\r\n{}", REFUSED),
    "a name with a blank": (header(b"X A: b"), REFUSED),
    "no colon": (header(b"nothing"), REFUSED),
    "gzip": (header(b"Content-Encoding: gzip"), {415}),
    "an upgrade": (header(b"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk"), {200, 400, 0}),
    # chunks
    "a chunk of no number": (CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n", REFUSED),
    "a chunk below zero": (CHUNKED + b"-2\r\n{}\r\n0\r\n\r\n", REFUSED),
    "a chunk beyond all": (CHUNKED + b"F" * 40 + b"\r\n{}", REFUSED),
    "a chunk that lies": (CHUNKED + b"2\r\n{}xx\r\n0\r\n\r\n", REFUSED),
    "much beside a chunk's length": (
        CHUNKED + b"2;" + b"a" * 1_000_000 + b"\r\n{}\r\n",
        {400, 408, 0},
    ),
    "trailers without end": (
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X-A: b\r\n" * 50_000,
        {400, 408, 0},
    ),
    "thousands of chunks": (CHUNKED + b"1\r\n{\r\n" * 20_000 + b"0\r\n\r\n", {400, 408}),
    # requests
    "HTTP/1.0": (get(b"/v1/models", version=b"HTTP/1.0"), OK),
    "HTTP/0.9": (b"GET /healthz\r\n\r\n", {200, 400, 0}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    "HTTP/9.9": (get(b"/healthz", version=b"HTTP/9.9"), {200, 400, 0}),
    "HEAD": (get(b"/v1/models", method=b"HEAD"), {200, 405}),
    "HEAD of an endpoint": (get(CHAT.encode(), method=b"HEAD"), {405}),
    "OPTIONS": (get(CHAT.encode(), method=b"OPTIONS"), {405}),
    "OPTIONS of all": (get(b"*", method=b"OPTIONS"), {400, 404, 0}),
    "TRACE": (get(CHAT.encode(), method=b"TRACE"), {405}),
    "CONNECT": (get(b"example.org:443", method=b"CONNECT"), {400, 404, 405, 0}),
    "no such method": (get(CHAT.encode(), method=b"BREW"), {400, 405}),
    "another site": (get(b"http://example.org/v1/models"), {200, 404}),
    "NUL in a path": (get(b"/v1/jobs/%00"), {404}),
    "half a rune in a path": (get(b"/v1/jobs/%ED%A0%80"), {404}),
    "a path up": (get(b"/v1/models/../../etc/passwd"), {404}),
    "a long path": (get(b"/v1/jobs/" + b"a" * 7_000), {404}),
    "a long query": (get(b"/v1/models?" + b"a=b&" * 1_500), OK),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), REFUSED),
    "zeros": (bytes(100_000), REFUSED),
    "only ends of lines": (b"\r\n" * 50_000, {400, 0}),
}  # fmt: skip


async def _told(front: Front, sent: bytes) -> int:
    """Send bytes and read to the end; return the status, 0 for none. A kept connection fails."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**24)
    try:
        writer.write(sent)
        async with asyncio.timeout(CLOSED_S_MAX):
            raw = await reader.read()
    except ConnectionError:
        return 0
    finally:
        writer.close()
    if not raw:
        return 0
    head, _, body = raw.partition(b"\r\n\r\n")
    return _judged(raw) if body else int(head.split(b" ", 2)[1])


async def _let_go(front: Front) -> None:
    """Wait until nothing is held for anybody."""
    gateway = front.gateway
    await until(lambda: gateway.under_way.count == 0)
    await until(lambda: gateway.connections() == 0)
    await until(lambda: gateway.errands.count == 0)
    assert (gateway.streams, gateway.bodies.held_bytes) == (0, 0)
    assert "inferlane_gateway_surprises_total 0.0" in gateway.expose().decode()


@pytest.mark.parametrize("case", CASES)
async def test_what_a_hostile_connection_gets(case: str) -> None:
    """An answer of its own, in OpenAI's form, or none; the connection ends, and nothing is left."""
    sent, allowed = CASES[case]
    async with a_front(**BOUNDS) as (front, _):
        assert await _told(front, sent) in allowed
        await _let_go(front)
        assert (await front.ask(CHAT, a_chat()))[0] == 200


@pytest.mark.timeout(120)
async def test_rounds_of_all_of_them_leave_nothing_behind() -> None:
    """Tasks, sockets and memory are flat, and the loop turns on; good requests are answered."""
    async with a_front(**BOUNDS) as (front, _):
        tasks, files, sizes_kb = 0, 0, list[int]()
        for turn in range(ROUNDS):
            async with _lags() as lags, asyncio.TaskGroup() as group:
                for sent, _ in CASES.values():
                    group.create_task(_told(front, sent))
                good = group.create_task(front.ask(CHAT, a_chat()))
            assert good.result()[0] == 200
            await _let_go(front)
            gc.collect()
            sizes_kb.append(_memory_kb())
            if turn == 0:
                tasks, files = len(asyncio.all_tasks()), _open_files()
            assert len(asyncio.all_tasks()) <= tasks
            assert _open_files() <= files
            assert sorted(lags)[int(len(lags) * 0.99)] < LAG_S_MAX
        assert max(sizes_kb[1:]) - sizes_kb[0] < GROWTH_KB_MAX, sizes_kb


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _memory_kb() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@asynccontextmanager
async def _dribbling(
    front: Front, head: bytes, piece: Callable[[int], bytes]
) -> AsyncGenerator[asyncio.StreamReader]:
    """Send a beginning, and then small pieces for as long as they are taken."""
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head)

    async def dribble() -> None:
        number = 0
        while not writer.is_closing():
            writer.write(piece(number))
            number += 1
            await asyncio.sleep(0.02)

    task = asyncio.create_task(dribble())
    try:
        yield reader
    finally:
        task.cancel()
        writer.close()


DRIBBLES: dict[str, tuple[bytes, Callable[[int], bytes], set[bytes]]] = {
    "in a request line": (b"GET /", lambda _: b"a", {b""}),
    "in headers": (HEAD, lambda number: b"X-%d: y\r\n" % (number % 20), {b"", b"400"}),
    "in one header": (HEAD + b"X-A: ", lambda _: b"y", {b"", b"400"}),
    "in a body": (HEAD + JSON + b"Content-Length: 100000\r\n\r\n", lambda _: b" ", {b"408", b""}),
    "in chunks": (CHUNKED, lambda _: b"1\r\n \r\n", {b"408", b""}),
    "in a chunk's length": (CHUNKED, lambda _: b"0", {b"408", b"400", b""}),
}


@pytest.mark.parametrize("case", DRIBBLES)
async def test_whoever_dribbles_is_cut_off(case: str) -> None:
    """Time is counted for the whole: a byte now and then does not begin it anew.

    Who writes on does not always get to read why: his system drops what came before a reset.
    """
    head, piece, statuses = DRIBBLES[case]
    async with a_front(**BOUNDS) as (front, _):
        async with _dribbling(front, head, piece) as reader, asyncio.timeout(CLOSED_S_MAX):
            try:
                raw = await reader.read()
            except ConnectionError:
                raw = b""
        assert (raw.split(b" ", 2)[1] if raw else b"") in statuses
        await _let_go(front)


@pytest.mark.parametrize("rest", [b"-5\r\n", b"zz\r\n", b"F" * 40 + b"\r\n", b"2\r\n{}xx\r\n"])
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(CLOSE, b"")])
async def test_chunks_that_break_off_are_told_at_once(head: bytes, rest: bytes) -> None:
    """Also when the request was begun: once, and before the time for a body is over."""
    async with a_front(body_s_max=60.0) as (front, _):
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        await until(lambda: front.gateway.under_way.count > 0)
        writer.write(rest)
        async with asyncio.timeout(CLOSED_S_MAX):
            raw = await reader.read()
        writer.close()
        assert raw.startswith(b"HTTP/1.1 400 ")
        assert raw.count(b"HTTP/1.") == 1
        assert b"The body broke off" in raw
        await _let_go(front)


PIPELINED = 20_000
PENDING_MAX = 1_000


async def test_pipelined_requests_are_answered_in_order_and_bounded() -> None:
    """A reader who sends thousands and reads none has a few of them parsed, not all."""
    async with a_front() as (front, _):
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        few = b"".join(
            b"GET /v1/models/%d HTTP/1.1\r\nHost: x\r\n" % n + KEY_LINE + b"\r\n" for n in range(20)
        )
        writer.write(few + get(b"/v1/models/last"))
        raw = await reader.read()
        told = [int(part.split(b"'")[0]) for part in raw.split(b"The model '")[1:21]]
        assert told == list(range(20))
        writer.close()

        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(get(b"/healthz").replace(CLOSE, b"") * PIPELINED)
        server = front.listener._runner.server
        assert server is not None
        requests = front.gateway.metrics.requests.labels("/healthz", 200)
        await until(lambda: requests._value.get() > 100)
        assert max(len(one._messages) for one in server.connections) < PENDING_MAX
        writer.transport.abort()
        await until(lambda: front.gateway.connections() <= 1)


async def test_who_sends_half_a_request_and_leaves_holds_nothing() -> None:
    """Wherever he stops: in the line, in a header, in the body, between chunks."""
    whole = asked(GOOD)
    async with a_front(**BOUNDS) as (front, _):
        host, port = front.url.removeprefix("http://").split(":")
        for place in range(1, len(whole), 7):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(whole[:place])
            writer.transport.abort() if place % 2 else writer.close()
        await _let_go(front)
