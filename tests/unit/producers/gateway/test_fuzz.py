"""Whatever is sent to the HTTP door: never a 500, nothing left over, and the loop turns on."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import orjson
import pytest

from producers.gateway.checks import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from tests.clusters import a_chat
from tests.gateways import AUTH, Front, a_front
from tests.turns import until

REQUESTS = 250
AT_ONCE = 8
LAG_S_MAX = 0.050
TICK_S = 0.002

STATUSES = {200, 202, 400, 401, 404, 405, 408, 409, 413, 415, 417, 429, 431, 503}

PATHS = (
    *(CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, CHAT, CHAT),
    *("/v1/models", "/v1/models/tiny", "/v1/jobs/x", "/healthz", "/metrics"),
    *("/", "//", "/v1/../etc", "/v1/jobs/%00", "/v1/models/%ff", "*", "/v1/chat/completions?x=%"),
)

VALUES = (
    *(None, True, 0, -1, 1.5, 10**30, "", "x", "\x00", "😀" * 50, [], {}, [[]], {"a": {"b": []}}),
    *(["x"], [None], [{"role": 1, "content": {"x": [1]}}], [{"role": "user", "content": None}]),
)

FIELDS = (
    *("model", "messages", "prompt", "input", "stream", "stream_options", "n", "max_tokens"),
    *("tools", "metadata", "previous_response_id", "temperature", "stop", "x\x00"),
)

HEADERS = (
    *("X-Inferlane-Band", "X-Inferlane-Deadline", "X-Inferlane-Session", "X-Inferlane-Job-Id"),
    *("Idempotency-Key", "X-Request-Id", "Prefer", "Content-Type", "Content-Encoding", "Accept"),
    *("Authorization", "Expect", "Connection", "Transfer-Encoding", "Content-Length", "Host"),
)

TEXTS = (
    *(b"", b"0", b"3", b"-1", b"1e9", b"nan", b"x" * 300, b"x" * 9000, b"\xff\xfe", b"\t", b"a,b"),
    *(b"respond-async", b"application/json", b"text/plain", b"gzip", b"chunked", b"close"),
    *(b"100-continue", b"Bearer x", AUTH["Authorization"].encode(), b"99999999999999999999"),
)


def _body(draw: random.Random) -> bytes:
    """A body, good, spoiled or none at all."""
    fields: dict[str, object] = a_chat(stream=draw.random() < 0.3)
    fields |= {"prompt": "hi", "input": "hi"}
    for _ in range(draw.randrange(4)):
        fields[draw.choice(FIELDS)] = draw.choice(VALUES)
    raw = orjson.dumps(
        {k: v for k, v in fields.items() if v != 10**30}, option=orjson.OPT_NON_STR_KEYS
    )
    match draw.randrange(12):
        case 0:
            return raw[: draw.randrange(len(raw))]
        case 1:
            place = draw.randrange(len(raw))
            return raw[:place] + bytes([draw.randrange(256)]) + raw[place + 1 :]
        case 2:
            depth = draw.choice((100, 250, 300, 1100, 50_000))
            return raw[:-1] + b',"deep":' + b"[" * depth + b"]" * depth + b"}"
        case 3:
            return raw[:-1] + b',"long":"' + b"x" * draw.choice((70_000, 400_000)) + b'"}'
        case 4:
            return draw.randbytes(draw.randrange(200))
        case _:
            return raw


def _request(draw: random.Random) -> bytes:
    """A request as bytes; most are nearly right, since those get furthest."""
    body = _body(draw)
    method = draw.choice((b"POST", b"POST", b"POST", b"GET", b"DELETE", b"PUT", b"OPTIONS", b"x"))
    headers = {
        b"Host": b"x",
        b"Authorization": AUTH["Authorization"].encode(),
        b"Content-Type": b"application/json",
        b"Content-Length": str(len(body)).encode(),
        b"Connection": b"close",
    }
    for _ in range(draw.choice((0, 0, 1, 2))):
        headers[draw.choice(HEADERS).encode()] = draw.choice(TEXTS)
    if draw.random() < 0.05:
        headers |= {b"X-%d" % number: b"y" for number in range(100)}
    path = draw.choice(PATHS).encode()
    head = b"".join(b"%s: %s\r\n" % header for header in headers.items())
    return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, path, head, body)


async def _send(front: Front, draw: random.Random) -> bytes:
    """Send a request, in one piece or by and by, and wait for its answer, or don't."""
    sent = _request(draw)
    host, port = front.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        if draw.random() < 0.2:
            place = draw.randrange(len(sent))
            writer.write(sent[:place])
            await asyncio.sleep(0)
            if draw.random() < 0.5:
                return b""  # He leaves in its midst.
            sent = sent[place:]
        writer.write(sent)
        if draw.random() < 0.1:
            return b""
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@asynccontextmanager
async def _lags() -> AsyncGenerator[list[float]]:
    """Processor time of the loop's thread between two of its turns, again and again.

    Not the clock's: on a busy machine that would measure others.
    """
    lags: list[float] = []

    async def watch() -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(TICK_S)
            lags.append(time.thread_time() - before_s)

    watching = asyncio.create_task(watch())
    try:
        yield lags
    finally:
        watching.cancel()


def _judged(raw: bytes) -> int:
    """Return an answer's status; an error is told in OpenAI's form and is none of our own."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status >= 400:
        error = orjson.loads(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] != "internal_error"
    return status


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_sent(seed: int) -> None:
    """Every answer is one that clients know; afterwards nothing is held for anybody."""
    found: Counter[int] = Counter()
    draw = random.Random(seed)
    async with (
        a_front(body_s_max=0.5, keepalive_s=0.5, body_bytes_max=300_000) as (front, _),
        _lags() as lags,
    ):

        async def ask_on(own: random.Random) -> None:
            for _ in range(REQUESTS // AT_ONCE):
                raw = await _send(front, own)
                if raw.startswith(b"HTTP/1.1 100"):
                    raw = raw.partition(b"\r\n\r\n")[2]
                if raw:
                    found[_judged(raw)] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(ask_on(random.Random(draw.random())))
        gateway = front.gateway
        await until(lambda: gateway.under_way.count == 0)
        await until(lambda: gateway.connections() == 0)
        await until(lambda: len(gateway.tasks._tasks) <= len(gateway.keys.lanes))
        assert set(found) <= STATUSES, found
        assert found[200] >= 3, found
        assert found[400] > 10, found
        assert (gateway.streams, gateway.bodies.held_bytes) == (0, 0)
        assert "inferlane_gateway_surprises_total 0.0" in gateway.expose().decode()
        assert sorted(lags)[int(len(lags) * 0.99)] < LAG_S_MAX
        assert (await front.ask(CHAT, a_chat()))[0] == 200, "it goes on"
