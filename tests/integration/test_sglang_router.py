"""The judge from outside: the real `sglang-router` against our implementation of its policies.

Both route the same chats to the same four fake engines, over HTTP, in turn; engines and routers
start each round empty. What the engines say they served from their caches must come out alike.
"""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import cast

import aiohttp
import orjson
import pytest

from broker.engine_model.profile import DEMO
from broker.sim.peers import round_robin, sglang
from broker.sim.peers.base import MakePeer, PeerWorker
from broker.sim.request import Request
from broker.wire.messages import Usage
from tests.builders import MODEL, a_chat_body
from tests.buses import until
from tests.engines_http import HttpEngine, an_http_engine
from tests.routers import RouterUnavailable, a_sglang_router
from worker_agent.engine.assembly import CHAT
from worker_agent.engine.fake import FakeEngine

ENGINES = 4
SPEED = 8.0
"""A round takes about a second, of which client and engines compute for two thirds."""

PROFILE = replace(DEMO, kv_tokens_max=100_000)
"""Room for every prefix: with less, shares hang on which ones are pushed out, and scatter more."""

ROUNDS = 3
"""One round's share scatters by 2 % where loads are evened out; it hangs on who ends first."""

CHATS = 400
OUTPUT_TOKENS = 16

CLIENTS = 24
"""Each sends its next chat when its last one is answered; one for each slot of the engines."""

PREFIXES = 64
PREFIX_CHARS = 3000
QUESTION_CHARS = 120

BLOCK_CHARS = 8
"""The router matches characters, our peers blocks. A block this short is 0.3 % of a chat: far less
than the threshold (30 % of it) or the size of a tree could show. What the engines cache goes by
their own blocks, of 256 bytes, under either router."""

OPTIONS = {
    "sglang 64/1.5": (),
    "sglang 4/1.1": ("--balance-abs-threshold", "4", "--balance-rel-threshold", "1.1"),
}
"""Settings by their label among our peers, and how the router's command line is given them."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A question behind one of the shared prefixes."""

    body: bytes
    request: Request
    """The same as a peer in the simulator sees it; its tokens are characters."""


def chats(seed: int) -> list[Chat]:
    """Chats in order of sending; a few prefixes are hot and many are not."""
    rng = random.Random(seed)
    prefixes = [_text(rng, PREFIX_CHARS) for _ in range(PREFIXES)]
    weights = [rank**-0.8 for rank in range(1, PREFIXES + 1)]
    picked = rng.choices(prefixes, weights, k=CHATS)
    return [
        a_chat(prefix, _text(rng, QUESTION_CHARS), index=index)
        for index, prefix in enumerate(picked)
    ]


def a_chat(
    prefix: str, question: str, *, index: int = 0, output_tokens: int = OUTPUT_TOKENS
) -> Chat:
    """One chat, as it goes over HTTP and as the simulator tells it."""
    text = f"{prefix} {question}"
    request = Request(
        index=index,
        at_s=0.0,
        prompt_tokens=len(text),
        output_tokens=output_tokens,
        output_tokens_max=output_tokens,
        blocks=_blocks(text),
        block_tokens=BLOCK_CHARS,
    )
    return Chat(a_chat_body(system=prefix, user=question, max_tokens=output_tokens), request)


def _blocks(text: str) -> list[int]:
    starts = range(0, len(text) - BLOCK_CHARS + 1, BLOCK_CHARS)
    numbers = (int.from_bytes(text[at : at + BLOCK_CHARS].encode()) for at in starts)
    return list(accumulate(numbers, lambda parent, number: hash((parent, number))))


def _text(rng: random.Random, chars: int) -> str:
    return "".join(rng.choices("abcdefghij  ", k=chars))


Send = Callable[[Chat], Coroutine[object, object, Usage]]
"""Brings a chat to an engine, and says what that engine reports."""


class InFlight:
    """An engine as our peer sees it: these rules look at `requests`, and find nothing else here."""

    def __init__(self, number: int) -> None:
        self.id = number
        self.requests = 0


class Field:
    """Four engines and whoever asks them: what both routers are tried on."""

    def __init__(self, engines: Sequence[HttpEngine], session: aiohttp.ClientSession) -> None:
        self.urls = [engine.url for engine in engines]
        self._engines = engines
        self._session = session

    @property
    def counts(self) -> list[int]:
        """How many chats each engine has been given so far."""
        return [engine.requests for engine in self._engines]

    @asynccontextmanager
    async def real(self, *options: str) -> AsyncGenerator[Send]:
        """Start the router: the way to the engines leads through it."""
        async with a_sglang_router(self.urls, options=options) as url:
            yield lambda chat: self._post(url, chat)

    @asynccontextmanager
    async def ours(self, make: MakePeer) -> AsyncGenerator[Send]:
        """Let our peer say which engine each chat goes to."""
        peer = make(random.Random(1))
        flights = [InFlight(number) for number in range(len(self.urls))]
        workers = cast("Sequence[PeerWorker]", flights)
        start_s = time.monotonic()

        async def send(chat: Chat) -> Usage:
            place = peer.choose(chat.request, workers, at_s=time.monotonic() - start_s)
            flights[place].requests += 1
            usage = await self._post(self.urls[place], chat)
            flights[place].requests -= 1
            peer.ended(chat.request, workers[place], at_s=time.monotonic() - start_s)
            return usage

        yield send

    async def cached_share(self, send: Send, sent: Sequence[Chat]) -> float:
        """Send the chats, from empty caches on; returns the share of their tokens found there."""
        for engine in self._engines:
            await engine.restart()
        left = iter(sent)
        usages: list[Usage] = []

        async def client() -> None:
            usages.extend([await send(chat) for chat in left])

        async with asyncio.TaskGroup() as tasks:
            for _ in range(CLIENTS):
                tasks.create_task(client())
        assert len(usages) == len(sent)
        cached_tokens = sum(usage.cached_tokens for usage in usages)
        return cached_tokens / sum(usage.prompt_tokens for usage in usages)

    async def placed(self, send: Send, chat: Chat) -> int:
        """Send a chat while nothing else arrives; returns which engine got it."""
        before = self.counts
        await send(chat)
        return self.gained(before)

    def gained(self, before: Sequence[int]) -> int:
        """Return the one engine that was given a chat since."""
        [place] = [place for place, count in enumerate(self.counts) if count > before[place]]
        return place

    async def _post(self, url: str, chat: Chat) -> Usage:
        async with self._session.post(f"{url}{CHAT}", data=chat.body) as response:
            body = await response.read()
        assert response.status == 200, body
        usage = orjson.loads(body)["usage"]
        cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        return Usage(usage["prompt_tokens"], cached_tokens, usage["completion_tokens"])


@asynccontextmanager
async def a_client() -> AsyncGenerator[aiohttp.ClientSession]:
    """A client that opens as many connections as it has chats under way."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Content-Type": "application/json"}
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield session


@asynccontextmanager
async def a_field() -> AsyncGenerator[Field]:
    """Four engines, and a client to ask them."""
    fakes = [FakeEngine(PROFILE, models=(MODEL,), speed=SPEED) for _ in range(ENGINES)]
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(an_http_engine(fake)) for fake in fakes]
        yield Field(engines, await stack.enter_async_context(a_client()))


def a_side(field: Field, side: str) -> AbstractAsyncContextManager[Send]:
    """The real router with its defaults, or our peer with the same."""
    return field.real() if side == "real" else field.ours(sglang.variants()["sglang 64/1.5"])


@pytest.mark.parametrize("label", OPTIONS)
async def test_real_router_and_our_peer_find_as_much_cached(label: str) -> None:
    """The cached shares of prompt tokens lie within 10 % of each other."""
    sent = chats(seed=7)
    real: list[float] = []
    ours: list[float] = []
    async with a_field() as field:
        for _ in range(ROUNDS):
            async with field.real(*OPTIONS[label]) as send:
                real.append(await field.cached_share(send, sent))
            async with field.ours(sglang.variants()[label]) as send:
                ours.append(await field.cached_share(send, sent))
    assert fmean(ours) == pytest.approx(fmean(real), rel=0.10)


async def test_the_chats_tell_policies_apart() -> None:
    """Neither setting could pass for the other, or round robin for either."""
    sent = chats(seed=7)
    makes = [sglang.variants()[label] for label in OPTIONS]
    makes += round_robin.variants().values()
    shares: list[float] = []
    async with a_field() as field:
        for make in makes:
            async with field.ours(make) as send:
                shares.append(await field.cached_share(send, sent))
    for more, less in pairwise(shares):
        assert less < 0.9 * more, shares


@pytest.mark.parametrize("side", ["real", "ours"])
async def test_cold_chats_one_by_one_go_to_one_engine(side: str) -> None:
    """What nobody holds goes to the least loaded, the first of equals; not round, not by chance."""
    rng = random.Random(3)
    async with a_field() as field, a_side(field, side) as send:
        for _ in range(8):
            await send(a_chat(_text(rng, PREFIX_CHARS), "?"))
        assert sorted(field.counts) == [0, 0, 0, 8]


@pytest.mark.parametrize("side", ["real", "ours"])
async def test_a_match_is_followed_above_three_tenths(side: str) -> None:
    """A chat that shares 31 % of itself with an earlier one follows it; with 29 % it does not."""
    rng = random.Random(4)
    earlier = _text(rng, 1000)
    beginnings = (earlier[:310], earlier[:290])
    followers = [a_chat(text + _text(rng, 998 - len(text)), "?") for text in beginnings]
    async with a_field() as field, a_side(field, side) as send:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(send(a_chat(_text(rng, 1000), "?", output_tokens=400)))
            await until(lambda: sum(field.counts) == 1)
            first = field.gained([0] * ENGINES)
            second = await field.placed(send, a_chat(earlier, "?"))
        assert first != second
        assert [await field.placed(send, chat) for chat in followers] == [second, first]


async def test_a_stream_comes_through_the_router_whole() -> None:
    """A streamed answer arrives in pieces, with the engine's report of use before its end."""
    body = a_chat_body(stream=True, stream_options={"include_usage": True})
    async with (
        a_field() as field,
        a_sglang_router(field.urls) as url,
        a_client() as session,
        session.post(f"{url}{CHAT}", data=body) as response,
    ):
        lines = [line async for line in response.content if line.strip()]
    events = [orjson.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
    assert lines[-1].strip() == b"data: [DONE]"
    assert sum(len(event["choices"]) for event in events) > 1
    assert events[-1]["usage"]["completion_tokens"] == OUTPUT_TOKENS


async def test_a_router_that_does_not_start_says_why() -> None:
    """Its own words stand in the error."""
    with pytest.raises(RouterUnavailable, match="no_such_policy"):
        async with a_sglang_router(["http://127.0.0.1:1"], options=("--policy", "no_such_policy")):
            pass
