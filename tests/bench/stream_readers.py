"""Readers of streamed answers, in a process of their own: any number of them, and cheap.

They speak just enough HTTP to ask and to count events, because what they take of the machine is
taken from those who are measured. Started by `gateway_streams`; says on standard output that all
streams run, then what they saw.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time
from dataclasses import dataclass, field
from typing import cast

import msgspec
import orjson
import uvloop

from broker.bus.nats import connect
from producers.client import Client
from producers.config import ClientConfig

EVENT = b"data: {"
BODY_END = b"0\r\n\r\n"
"""Ends an answer in chunks; no event ends so."""

ROUND_TOKENS = 4
"""Of an answer in a burst: the first one is what is looked at."""

PAUSE_S = 0.5
"""Between two bursts, so that the one has left before the other comes."""


class Seen(msgspec.Struct):
    """What came of some streams."""

    tokens: int = 0
    ended: int = 0
    failed: int = 0
    first_s: list[float] = []
    """From the request to the first token."""
    gaps_s: list[float] = []
    """Between two pieces of one answer."""


class Bursts(msgspec.Struct):
    """Times to the first token of requests that all came at once."""

    http_s: list[float] = []
    direct_s: list[float] = []


def a_body(number: int, tokens: int) -> dict[str, object]:
    """A short question, each another."""
    messages = [{"role": "user", "content": f"Question {number}: why?"}]
    return {"model": "tiny", "messages": messages, "max_tokens": tokens, "stream": True}


@dataclass(slots=True)
class Reader(asyncio.Protocol):
    """One connection, which asks one question after another."""

    seen: Seen
    transport: asyncio.Transport | None = None
    ended: asyncio.Future[None] | None = None
    asked_at_s: float = 0.0
    last_at_s: float = 0.0
    status: bytes = b""
    _tail: bytes = field(default=b"")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self.transport = cast("asyncio.Transport", transport)

    def ask(self, body: bytes) -> asyncio.Future[None]:
        """Send a question; the future is done when the answer has ended."""
        assert self.transport is not None, "connected"
        self.ended = asyncio.get_running_loop().create_future()
        self.asked_at_s, self.last_at_s, self.status = time.perf_counter(), 0.0, b""
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
            "Authorization: Bearer sk-bench\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        return self.ended

    def data_received(self, data: bytes) -> None:
        """Count what has come."""
        self.status = self.status or data[:12]
        tokens = data.count(EVENT)
        if tokens:
            now_s = time.perf_counter()
            if self.last_at_s:
                self.seen.gaps_s.append(now_s - self.last_at_s)
            else:
                self.seen.first_s.append(now_s - self.asked_at_s)
            self.last_at_s = now_s
            self.seen.tokens += tokens
        if data.endswith(BODY_END):
            self.seen.ended += 1
            self.seen.failed += not self.status.endswith(b"200")
            self._done()

    def connection_lost(self, exc: Exception | None) -> None:
        """Count an answer that broke off."""
        del exc
        if self.ended is not None and not self.ended.done():
            self.seen.failed += 1
            self._done()

    def _done(self) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_result(None)


async def a_reader(port: int, seen: Seen) -> Reader:
    """Connect."""
    loop = asyncio.get_running_loop()
    _, reader = await loop.create_connection(lambda: Reader(seen), "127.0.0.1", port)
    return reader


async def read_on(port: int, *, streams: int, tokens: int, ramp_s: float, seconds: float) -> Seen:
    """Keep so many streams under way, begun over `ramp_s`; tell of the `seconds` after it."""
    seen = Seen()
    numbers = itertools.count()
    drawn = random.Random(1)

    async def read() -> None:
        await asyncio.sleep(drawn.uniform(0.0, ramp_s))
        reader = await a_reader(port, seen)
        # The first answer is cut anywhere, so that they don't all end as they began.
        cut = drawn.randrange(2, tokens)
        while True:
            await reader.ask(orjson.dumps(a_body(next(numbers), cut)))
            cut = tokens

    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(read()) for _ in range(streams)]
        await asyncio.sleep(ramp_s)
        seen.tokens = seen.ended = seen.failed = 0
        seen.first_s.clear()
        seen.gaps_s.clear()
        _say({"event": "ready"})
        await asyncio.sleep(seconds)
        for task in readers:
            task.cancel()
    return seen


async def burst(port: int, nats: str, *, streams: int, rounds: int) -> Bursts:
    """Let all ask at once, in turn over HTTP and over NATS with the client library."""
    bursts = Bursts()
    seen = Seen(first_s=bursts.http_s)
    numbers = itertools.count()
    bus = await connect(nats, name="bench-readers")
    try:
        async with Client(bus, lane="bench", config=ClientConfig()) as client:
            readers = [await a_reader(port, seen) for _ in range(streams)]
            _say({"event": "ready"})
            for _ in range(rounds):
                bodies = [orjson.dumps(a_body(next(numbers), ROUND_TOKENS)) for _ in readers]
                await asyncio.gather(
                    *(reader.ask(body) for reader, body in zip(readers, bodies, strict=True))
                )
                await asyncio.sleep(PAUSE_S)
                asked = [a_body(next(numbers), ROUND_TOKENS) for _ in readers]
                first_s = await asyncio.gather(*(first_direct_s(client, body) for body in asked))
                bursts.direct_s.extend(first_s)
                await asyncio.sleep(PAUSE_S)
    finally:
        await bus.close()
    assert not seen.failed
    return bursts


async def first_direct_s(client: Client, body: dict[str, object]) -> float:
    """Ask over NATS; return the time to the first token once the answer has ended."""
    began_s = time.perf_counter()
    ticket = await client.submit(body, band=1)
    await ticket.next_chunk()
    first_s = time.perf_counter() - began_s
    await ticket.result()
    return first_s


def _say(event: object) -> None:
    sys.stdout.write(orjson.dumps(event).decode() + "\n")
    sys.stdout.flush()


def main() -> None:
    """Read as told on the command line."""
    parser = argparse.ArgumentParser(description="Read streams from a gateway.")
    parser.add_argument("mode", choices=("spread", "burst"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--nats", required=True)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--ramp", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.mode == "spread":
        work = read_on(
            given.port,
            streams=given.streams,
            tokens=given.tokens,
            ramp_s=given.ramp,
            seconds=given.seconds,
        )
    else:
        work = burst(given.port, given.nats, streams=given.streams, rounds=given.rounds)
    _say(msgspec.to_builtins(uvloop.run(work)))


if __name__ == "__main__":
    main()
