"""Two gateways before one cluster: whose job is it, when several read it and some of them leave?"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from broker.wire.messages import Kind
from producers.config import ClientConfig
from producers.gateway import asking
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE
from tests.clusters import Cluster, a_chat
from tests.gateways import Front, a_gateway
from tests.turns import until
from tests.unit.producers.gateway.test_generate import (
    CHAT,
    a_completion,
    a_whole,
    events_of,
    streamed_text,
)
from tests.unit.producers.gateway.test_leaving import LEFT_S_MAX, _has_record, _piece

NAMED = {"X-Inferlane-Job-Id": "job-1", "X-Request-Id": "r.job-1"}
LATER = {**NAMED, "Prefer": "respond-async"}

HEARS_S_MAX = 2.0
"""An end that is heard takes milliseconds; one that is looked for, a watchdog's period of 10 s."""


class Pair:
    """Two gateways, their cluster and its engine."""

    def __init__(
        self, first: Front, second: Front, cluster: Cluster, engine: ScriptedEngine
    ) -> None:
        self.first, self.second = first, second
        self.cluster = cluster
        self.engine = engine

    async def read(self, front: Front, job_id: str = "job-1") -> "asyncio.Task[tuple[int, Any]]":
        """Begin to read a job at a gateway, and wait until its ticket is there."""
        before = front.gateway.under_way.count
        named = {"X-Inferlane-Job-Id": job_id, "X-Request-Id": f"r.{job_id}"}
        task = asyncio.create_task(front.ask(CHAT, a_chat(), headers=named))
        await until(lambda: front.gateway.under_way.count == before + 1)
        client = await front.gateway.lanes.of(LANE)
        await until(lambda: (t := client.ticket_of(job_id)) is not None and t.sequence > 0)
        return task

    async def leave(self, front: Front, task: "asyncio.Task[Any]") -> None:
        """Leave, and wait until the gateway has done about it what it does."""
        task.cancel()
        await until(lambda: front.gateway.under_way.count == 0)
        await front.gateway.errands.none.wait()

    async def answer(self) -> None:
        """Let the engine answer."""
        await until(lambda: "job-1" in self.engine.running)
        self.engine.say("job-1", an_answer(a_completion("hi").decode()))

    async def is_cancelled(self) -> None:
        """See the job end within the time that is promised, in its engine too."""
        async with asyncio.timeout(LEFT_S_MAX):
            await until(lambda: _has_record(self.cluster, "job-1"))
        record = await self.cluster.record("job-1")
        assert record is not None
        assert record.kind is Kind.CANCELLED
        assert "job-1" in self.engine.aborted


@asynccontextmanager
async def a_pair(folder: Path, **fields: Any) -> AsyncGenerator[Pair]:
    """Two gateways with the client's real patience: what isn't heard is looked for late."""
    engine = ScriptedEngine()
    patient: dict[str, Any] = {"client": ClientConfig(), **fields}
    async with a_whole(folder, cluster={"engine": engine}, **patient) as (first, cluster):
        link = cluster.bus.connection()
        async with a_gateway(link, **patient) as second:
            yield Pair(first, second, cluster, engine)
        await link.close()


async def test_a_job_is_read_at_both_gateways(tmp_path: Path) -> None:
    """It runs once, and the second gateway hears of its end as soon as the first."""
    async with a_pair(tmp_path) as pair:
        first = await pair.read(pair.first)
        second = await pair.read(pair.second)
        await pair.answer()
        async with asyncio.timeout(HEARS_S_MAX):
            found = await asyncio.gather(first, second)
        assert [status for status, _ in found] == [200, 200]
        assert found[0] == found[1]
        assert len(pair.engine.requests) == 1
        client = await pair.second.gateway.lanes.of(LANE)
        await until(lambda: not client._overheard)


async def test_a_stream_that_is_joined_in_its_midst_comes_whole(tmp_path: Path) -> None:
    """What was said before is not heard any more: no piece is lost, and none comes twice."""
    async with a_pair(tmp_path) as pair:
        pair.engine.say("job-1", _piece("a"))
        async with pair.first.session.post(CHAT, json=a_chat(stream=True), headers=NAMED) as one:
            assert await one.content.readline()
            client = await pair.second.gateway.lanes.of(LANE)
            joining = asyncio.create_task(_streamed(pair.second))
            await until(lambda: "job-1" in client._overheard)
            pair.engine.say("job-1", _piece("b"), an_answer(a_completion("ab").decode()))
            async with asyncio.timeout(HEARS_S_MAX):
                assert await joining == "ab"


async def _streamed(front: Front) -> str:
    async with front.session.post(CHAT, json=a_chat(stream=True), headers=NAMED) as answer:
        return streamed_text(events_of(await answer.read()))


async def test_whoever_leaves_first_leaves_it_running(tmp_path: Path) -> None:
    """Its gateway submitted it, and hands it over; when the other's reader leaves, it is over."""
    async with a_pair(tmp_path) as pair:
        first = await pair.read(pair.first)
        second = await pair.read(pair.second)
        await until(lambda: "job-1" in pair.engine.running)
        await pair.leave(pair.first, first)
        assert "job-1" not in pair.engine.aborted
        await pair.leave(pair.second, second)
        await pair.is_cancelled()


async def test_the_one_who_stays_gets_the_answer(tmp_path: Path) -> None:
    """Whichever gateway is left."""
    for stays in (0, 1):
        async with a_pair(tmp_path / str(stays)) as pair:
            fronts = [pair.first, pair.second]
            readers = [await pair.read(front) for front in fronts]
            await until(lambda: "job-1" in pair.engine.running)
            await pair.leave(fronts[1 - stays], readers[1 - stays])
            assert "job-1" not in pair.engine.aborted
            await pair.answer()
            async with asyncio.timeout(HEARS_S_MAX):
                assert (await readers[stays])[0] == 200


async def test_a_reader_elsewhere_does_not_cancel_what_is_kept(tmp_path: Path) -> None:
    """His leaving is not the end of what another gateway promised to tell of later."""
    async with a_pair(tmp_path) as pair:
        assert (await pair.first.ask(CHAT, a_chat(), headers=LATER))[0] == 202
        await until(lambda: "job-1" in pair.engine.running)
        await pair.leave(pair.second, await pair.read(pair.second))
        assert "job-1" not in pair.engine.aborted


async def test_what_a_gateway_kept_that_is_gone_stays_kept(tmp_path: Path) -> None:
    """Nobody answers for it any more, and who joined it may not cancel it."""
    async with a_pair(tmp_path) as pair:
        link = pair.cluster.bus.connection()
        async with a_gateway(link, client=ClientConfig()) as gone:
            assert (await gone.ask(CHAT, a_chat(), headers=LATER))[0] == 202
            await until(lambda: "job-1" in pair.engine.running)
        await link.close()
        await pair.leave(pair.second, await pair.read(pair.second))
        assert "job-1" not in pair.engine.aborted
        await pair.answer()
        while (told := (await pair.second.ask("/v1/jobs/job-1"))[1])["status"] != "completed":
            await asyncio.sleep(0)
        assert told["response"]["status_code"] == 200


async def test_a_reader_does_not_cancel_what_is_kept_elsewhere(tmp_path: Path) -> None:
    """His gateway submitted it; another one promised to tell of it later."""
    async with a_pair(tmp_path) as pair:
        reading = await pair.read(pair.first)
        assert (await pair.second.ask(CHAT, a_chat(), headers=LATER))[0] == 202
        await until(lambda: "job-1" in pair.engine.running)
        await pair.leave(pair.first, reading)
        assert "job-1" not in pair.engine.aborted
        assert (await pair.second.ask("/v1/jobs/job-1", method="DELETE"))[0] == 200
        await pair.is_cancelled()


async def test_who_begins_to_read_while_the_last_one_leaves(tmp_path: Path) -> None:
    """A client whose connection broke tries again at another gateway: its job goes on."""
    async with a_pair(tmp_path) as pair:
        # Both listen from their first named job on.
        await pair.leave(pair.second, await pair.read(pair.second, job_id="job-0"))
        first = await pair.read(pair.first)
        await until(lambda: "job-1" in pair.engine.running)
        heard = asyncio.Event()
        await pair.cluster.bus.subscribe("gateways.*.leaving", lambda _: heard.set())
        first.cancel()
        await heard.wait()
        second = await pair.read(pair.second)
        await pair.first.gateway.errands.none.wait()
        assert "job-1" not in pair.engine.aborted
        await pair.answer()
        async with asyncio.timeout(HEARS_S_MAX):
            assert (await second)[0] == 200


async def test_kept_jobs_that_are_remembered_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is forgotten: then a reader who joins it and leaves cancels it."""
    monkeypatch.setattr(asking, "KEPT_MAX", 1)
    async with a_pair(tmp_path) as pair:
        assert (await pair.first.ask(CHAT, a_chat(), headers=LATER))[0] == 202
        await pair.leave(pair.first, await pair.read(pair.first))
        assert "job-1" not in pair.engine.aborted
        other = LATER | {"X-Inferlane-Job-Id": "job-2", "X-Request-Id": "r.job-2"}
        assert (await pair.first.ask(CHAT, a_chat(), headers=other))[0] == 202
        await pair.leave(pair.first, await pair.read(pair.first))
        await pair.is_cancelled()
