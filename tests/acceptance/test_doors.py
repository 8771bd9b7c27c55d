"""Gateways before a real cluster: clients hang up, and what stands behind a stream goes away.

Gateways, brokers, agents and the message server are processes; the engines are the test's own, and
tell when a request of theirs is aborted.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from broker.wire import subjects
from broker.wire.messages import Kind
from ops.cluster import Member
from tests.acceptance.engine_cluster import LANE, EngineCluster, a_chat, an_engine_cluster
from tests.engines import Behaviour

CHAT = "/v1/chat/completions"
KEY = "sk-of-the-doors"
TOKENS = 40
TEXT = "".join(f"t{index} " for index in range(TOKENS))

LEFT_S_MAX = 1.0
"""From a client's leaving to the abort in the engine. The quickest of TRIES counts: on a machine
that others use too a single one may wait long for a processor."""

TRIES = 5

PATIENCE_S = 40.0

_GATEWAY = """
[nats]
url = "{url}"

[gateway]
port = 0

[gateway.keys.doors]
lane = "{lane}"
key = "{key}"
"""


class Doors:
    """A cluster with gateways."""

    def __init__(self, stage: EngineCluster, config: Path) -> None:
        self.stage = stage
        self.config = config

    async def gateway(self, name: str) -> Member:
        """Start a gateway."""
        member = self.stage.cluster.add_gateway(name, self.config)
        await member.start()
        return member

    @asynccontextmanager
    async def session(self, gateway: Member) -> AsyncGenerator[aiohttp.ClientSession]:
        """Connections to a gateway, none of them kept."""
        headers = {"Authorization": f"Bearer {KEY}"}
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(
            str(gateway.said["http"]), headers=headers, connector=connector
        ) as session:
            yield session

    async def idle(self) -> None:
        """Wait until nothing of the lane is queued and no engine works."""
        async with asyncio.timeout(PATIENCE_S):
            await self.stage.until_idle()
        await self.stage.audit.until_empty(LANE, timeout_s=PATIENCE_S)


@asynccontextmanager
async def doors(folder: Path) -> AsyncGenerator[Doors]:
    """A cluster whose engines give a token when they are let."""
    async with an_engine_cluster(folder, stall_s=PATIENCE_S) as stage:
        config = folder / "gateway.toml"
        config.write_text(_GATEWAY.format(url=stage.cluster.url, lane=LANE, key=KEY))
        for engine in stage.engines:
            engine.tokens = TOKENS
        yield Doors(stage, config)


def slow(**fields: Any) -> dict[str, Any]:
    """A chat whose tokens come when they are let."""
    return a_chat(behaviour=Behaviour.SLOW, **fields)


def text_of(raw: bytes) -> str:
    """The text of a whole stream, which has ended as one does."""
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    blocks = [block for block in raw.decode().split("\n\n") if block.startswith("data: {")]
    choices = [orjson.loads(block[6:])["choices"] for block in blocks]
    return "".join(choice["delta"].get("content") or "" for found in choices for choice in found)


@pytest.mark.timeout(150)
async def test_whoever_hangs_up_stops_the_engine(tmp_path: Path) -> None:
    """Whole, in a stream's midst, with an id: aborted in the engine, and the lane is empty."""
    async with doors(tmp_path) as door:
        gateway = await door.gateway("gateway-1")
        async with door.session(gateway) as session:
            for number, stream in enumerate((False, True)):
                took_s = [
                    await _left(
                        door, session, {"X-Inferlane-Job-Id": f"{number}-{attempt}"}, stream
                    )
                    for attempt in range(TRIES)
                ]
                assert min(took_s) < LEFT_S_MAX, took_s
        await door.idle()
        records = await door.stage.audit.records(LANE)
        assert len(records) == 2 * TRIES
        assert {record.kind for record in records.values()} == {Kind.CANCELLED}


async def _left(
    door: Doors, session: aiohttp.ClientSession, headers: dict[str, str], stream: bool
) -> float:
    """Ask, leave, and return how long the engine took to hear of it."""
    before = door.stage.aborted
    asking = asyncio.create_task(_ask(session, headers, stream))
    async with asyncio.timeout(PATIENCE_S):
        while sum(engine.running for engine in door.stage.engines) == 0:
            await asyncio.sleep(0.005)
        if stream:
            for engine in door.stage.engines:
                engine.let_token_go()
    await asyncio.sleep(0)
    left_s = time.monotonic()
    asking.cancel()
    async with asyncio.timeout(PATIENCE_S):
        while door.stage.aborted == before:
            await asyncio.sleep(0.002)
    return time.monotonic() - left_s


async def _ask(session: aiohttp.ClientSession, headers: dict[str, str], stream: bool) -> bytes:
    async with session.post(CHAT, json=slow(stream=stream), headers=headers) as answer:
        return await answer.read()


@pytest.mark.timeout(120)
async def test_a_request_goes_through_whole(tmp_path: Path) -> None:
    """Its id and all its fields reach the engine; the answer tells who ran it."""
    async with doors(tmp_path) as door:
        gateway = await door.gateway("gateway-1")
        sent = {"X-Request-Id": "r.7:x", "X-Inferlane-Job-Id": "job-7"}
        async with (
            door.session(gateway) as session,
            session.post(CHAT, json=a_chat(tag="seven", odd=[1.5]), headers=sent) as answer,
        ):
            assert answer.status == 200, await answer.text()
            assert answer.headers["X-Request-Id"] == "r.7:x"
            assert answer.headers["X-Inferlane-Cached-Tokens"] == "7"
            worker = answer.headers["X-Inferlane-Worker"]
        (seen,) = (one for engine in door.stage.engines for one in engine.seen)
        assert seen.headers["x-request-id"] == "r.7:x"
        assert (seen.body["tag"], seen.body["odd"]) == ("seven", [1.5])
        record = await door.stage.record(LANE, "job-7")
        assert (record.request_id, record.worker) == ("r.7:x", worker)
        assert record.api_key_name == "doors"


@pytest.mark.timeout(120)
async def test_a_job_of_one_gateway_is_any_others_too(tmp_path: Path) -> None:
    """Made at one, looked at and cancelled at another; one that joins it reads it and leaves it."""
    async with doors(tmp_path) as door:
        gateways = [await door.gateway(f"gateway-{number}") for number in (1, 2)]
        async with door.session(gateways[0]) as first, door.session(gateways[1]) as second:
            later = {"Prefer": "respond-async", "X-Inferlane-Job-Id": "job-1"}
            async with first.post(CHAT, json=slow(), headers=later) as answer:
                assert answer.status == 202
                url = (await answer.json())["url"]
            await _until_status(second, url, "running")
            joining = asyncio.create_task(_ask(second, {"X-Inferlane-Job-Id": "job-1"}, False))
            await _until_asked(gateways[1])
            joining.cancel()
            await _until_given_up(gateways[1])
            async with first.get(url) as answer:
                assert (await answer.json())["status"] == "running", "it is kept"
            async with second.delete(url) as answer:
                assert (await answer.json())["status"] == "cancelling"
            await _until_status(first, url, "cancelled")
            await door.idle()
            assert door.stage.aborted == 1


async def _until_status(session: aiohttp.ClientSession, url: str, status: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with session.get(url) as answer:
                if (await answer.json())["status"] == status:
                    return
            await asyncio.sleep(0.02)


async def _metric(gateway: Member, name: str) -> float:
    async with (
        aiohttp.ClientSession(str(gateway.said["http"])) as session,
        session.get("/metrics") as answer,
    ):
        lines = [line.split() for line in (await answer.text()).splitlines()]
    return next(float(line[1]) for line in lines if line[0] == name)


async def _until_asked(gateway: Member) -> None:
    """Wait until a gateway has a request under way."""
    async with asyncio.timeout(PATIENCE_S):
        while not await _metric(gateway, "inferlane_gateway_body_bytes"):
            await asyncio.sleep(0.01)


async def _until_given_up(gateway: Member) -> None:
    """Wait until a client has left and all that is done about it is done."""
    async with asyncio.timeout(PATIENCE_S):
        while not await _metric(gateway, "inferlane_gateway_left_total"):
            await asyncio.sleep(0.01)
        while await _metric(gateway, "inferlane_gateway_giving_up"):
            await asyncio.sleep(0.01)


@pytest.mark.timeout(120)
async def test_a_gateway_that_dies_in_the_midst_of_a_stream(tmp_path: Path) -> None:
    """Its client's connection breaks; the job ends by itself, and another gateway tells of it."""
    async with doors(tmp_path) as door:
        gateways = [await door.gateway(f"gateway-{number}") for number in (1, 2)]
        named = {"X-Inferlane-Job-Id": "job-1"}
        async with door.session(gateways[0]) as first, door.session(gateways[1]) as second:
            async with a_stream(door, first, named) as answer:
                await _next_token(door, answer)
                await gateways[0].kill()
                with pytest.raises(aiohttp.ClientError):
                    await answer.read()
            door.stage.talk_to_the_end(tokens=TOKENS)
            await _until_status(second, "/v1/jobs/job-1", "completed")
            raw = await _ask(second, named, True)
            assert text_of(raw) == TEXT, "asked again, it is not run again"
        await door.idle()
        assert (door.stage.aborted, sum(len(one.seen) for one in door.stage.engines)) == (0, 1)


@asynccontextmanager
async def a_stream(
    door: Doors, session: aiohttp.ClientSession, headers: dict[str, str] | None = None
) -> AsyncGenerator[aiohttp.ClientResponse]:
    """Ask for a stream; its headers come with its first token."""
    door.stage.talk_to_the_end(tokens=1)
    async with session.post(CHAT, json=slow(stream=True), headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        yield answer


async def _next_token(door: Doors, answer: aiohttp.ClientResponse) -> bytes:
    """Read a token, and let another one go."""
    async with asyncio.timeout(PATIENCE_S):
        token = await answer.content.readuntil(b"\n\n")
    door.stage.talk_to_the_end(tokens=1)
    return token


@pytest.mark.timeout(120)
async def test_a_leader_that_dies_in_the_midst_of_a_stream(tmp_path: Path) -> None:
    """The stream goes on, before there is a new leader and after; nothing is run twice."""
    async with doors(tmp_path) as door:
        cluster = door.stage.cluster
        await cluster.start(cluster.add_broker("broker-2", cluster.folder / "inferlane.toml"))
        gateway = await door.gateway("gateway-1")
        async with (
            door.session(gateway) as session,
            a_stream(door, session) as answer,
        ):
            raw = await _next_token(door, answer)
            await cluster.members["broker-1"].kill()
            raw += await _next_token(door, answer)
            # A new job needs the new leader.
            async with session.post(CHAT, json=a_chat()) as other:
                assert other.status == 200
            raw += await _next_token(door, answer)
            door.stage.talk_to_the_end(tokens=TOKENS)
            raw += await answer.read()
        assert text_of(raw) == TEXT
        await door.idle()
        assert sum(len(one.seen) for one in door.stage.engines) == 2


@pytest.mark.timeout(120)
async def test_a_message_server_that_is_restarted_in_the_midst_of_a_stream(tmp_path: Path) -> None:
    """What was said meanwhile is not lost: the reader gets all of it, once."""
    async with doors(tmp_path) as door:
        gateway = await door.gateway("gateway-1")
        async with (
            door.session(gateway) as session,
            a_stream(door, session) as answer,
        ):
            raw = await _next_token(door, answer)
            server = door.stage.cluster.server
            await asyncio.to_thread(server.kill)
            door.stage.talk_to_the_end(tokens=TOKENS // 2)
            await asyncio.to_thread(server.start)
            door.stage.talk_to_the_end(tokens=TOKENS)
            async with asyncio.timeout(PATIENCE_S):
                raw += await answer.read()
        assert text_of(raw) == TEXT
        await door.idle()
        stored = await door.stage.bus.stream_state(subjects.results_stream(LANE))
        assert stored.messages == 1
        assert sum(len(one.seen) for one in door.stage.engines) == 1
