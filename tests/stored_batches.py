"""The Batch API's batches in one process: a lane with files, a responder, and runners."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import orjson

from broker.bus import topology
from broker.bus.base import Bus
from broker.bus.files import Files, new_file_id
from broker.bus.memory import MemoryBus
from broker.bus.topology import DEFAULTS, Bounds, LanePlan
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.files import FileInfo
from broker.wire.usage import UsageMark
from producers.batches.config import BatchesConfig
from producers.batches.records import Batch
from producers.batches.runner import BatchRunner
from producers.batches.shelf import Shelf, Wanted
from tests.builders import LANE, MODEL
from tests.lanes import QUICK
from tests.responder import Responder

ENDPOINT = "/v1/chat/completions"

PATIENCE_S = 20.0

SMALL = BatchesConfig(
    lines_inflight_max=8,
    lookahead_lines=16,
    write_s=0.02,
    progress_s=0.02,
    lease_s=0.5,
    scan_s=0.05,
    grace_s=0.3,
    clear_after_s=0.02,
    clear_s_max=5.0,
    retry_s_max=0.2,
    lane_gone_s=0.5,
)
"""Bounds that a small batch reaches."""


async def pieces(*given: bytes) -> AsyncIterator[bytes]:
    """A source that gives these."""
    for piece in given:
        yield piece


def a_batch(**fields: Any) -> Batch:
    """A batch that was just created."""
    defaults: dict[str, Any] = {
        "id": "batch_1",
        "lane": LANE,
        "endpoint": ENDPOINT,
        "input_file_id": "file-1",
        "completion_window": "24h",
        "window_s": 86_400.0,
        "created_at_s": 1000.0,
        "results_life_s": 3600.0,
    }
    return Batch(**{**defaults, **fields})


async def count_all(bus: Bus, lane: str = LANE) -> None:
    """Let the lane's accounts have all its records, those to come too: no broker counts here."""
    await count_up_to(bus, 2**53, lane)


async def count_up_to(bus: Bus, sequence: int, lane: str = LANE) -> None:
    """Let the lane's accounts have its records up to this one."""
    mark = UsageMark(lane=lane, sequence=sequence)
    await bus.kv_put(subjects.USAGE_BUCKET, subjects.usage_mark_key(lane), encode(mark))


class Member:
    """A runner on a connection of its own."""

    def __init__(self, bus: MemoryBus, config: BatchesConfig, wrapped: Bus | None = None) -> None:
        self.link = bus
        self.runner = BatchRunner(wrapped or bus, config=config, client=QUICK)
        self.task = asyncio.create_task(self.runner.run())

    async def kill(self) -> None:
        """End it as `kill -9` does: nothing more of it reaches the server."""
        self.link.disconnect()
        await self.stop()

    async def stop(self) -> None:
        """End it as SIGTERM does."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class Place:
    """A lane whose batches are run."""

    def __init__(self, bus: MemoryBus, responder: Responder) -> None:
        self.bus = bus
        self.responder = responder
        self.files = Files(bus, LANE, chunk_bytes=4096)
        self.shelf = Shelf(bus, LANE, self.files)
        self.members: list[Member] = []

    def start_runner(
        self,
        config: BatchesConfig = SMALL,
        *,
        wrap: Callable[[Bus], Bus] = lambda bus: bus,
    ) -> Member:
        """Start a runner."""
        link = self.bus.connection()
        member = Member(link, config, wrap(link))
        self.members.append(member)
        return member

    async def put(self, content: Iterable[bytes] | bytes) -> FileInfo:
        """Store an input of these lines, or bytes."""
        data = content if isinstance(content, bytes) else b"".join(c + b"\n" for c in content)
        info = FileInfo(id=new_file_id(), lane=LANE, filename="in.jsonl", created_at_s=time.time())
        return await self.files.put(info, pieces(data), bytes_max=10**9)

    async def create(self, content: Iterable[bytes] | bytes, **fields: Any) -> Batch:
        """Store an input and create its batch."""
        info = await self.put(content)
        asked: dict[str, Any] = {"endpoint": ENDPOINT, "input_file_id": info.id, **fields}
        wanted = Wanted(**asked)
        return await self.shelf.create(wanted)

    async def when(self, batch_id: str, holds: Callable[[Batch], bool]) -> Batch:
        """Wait until a batch's record says so; return it."""
        news = asyncio.Event()
        subscription = await self.bus.kv_listen("BATCHES", ">", lambda _: news.set())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not holds(batch := await self.shelf.get(batch_id)):
                    await news.wait()
                    news.clear()
        finally:
            await subscription.unsubscribe()
        return batch

    async def ended(self, batch_id: str) -> Batch:
        """Wait for a batch's end; return it."""
        return await self.when(batch_id, lambda batch: batch.has_ended)

    async def lines_of(self, file_id: str) -> list[dict[str, Any]]:
        """Lines of a result file; none without it."""
        info = await self.files.find(file_id)
        if info is None:
            return []
        data = b"".join([chunk async for chunk in self.files.content(info)])
        return [orjson.loads(line) for line in data.splitlines()]

    async def results(self, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Lines of its output and its error file."""
        return await self.lines_of(batch.output_file_id), await self.lines_of(batch.error_file_id)

    async def check(self, batch: Batch, ids: Iterable[str]) -> None:
        """The invariant: each id exactly once in output and errors together, and counted so."""
        output, errors = await self.results(batch)
        found = Counter(
            line["custom_id"] for line in output + errors if line["custom_id"] is not None
        )
        assert found == Counter(set(ids))
        assert (batch.counts.completed, batch.counts.failed) == (len(output), len(errors))
        assert batch.counts.ended == batch.counts.total
        numbers = [line["id"] for line in output + errors]
        assert len(set(numbers)) == len(numbers)
        for line in output:
            assert line["error"] is None
            assert line["response"]["status_code"] == 200

    async def until_cleared(self) -> None:
        """Wait until no record stands in RESULTS, and its runners are done."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.bus.stream_state(f"RESULTS_{LANE}")).messages:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """End all."""
        for member in self.members:
            await member.stop()
            await member.link.close()


def codes(lines: Iterable[dict[str, Any]]) -> Counter[str]:
    """How often each error code stands in lines."""
    return Counter(line["error"]["code"] for line in lines if line["error"])


@asynccontextmanager
async def a_place(
    *, lane: str = LANE, bounds: Bounds = DEFAULTS, **fields: Any
) -> AsyncGenerator[Place]:
    """A lane `acme` whose streams and buckets are set up, and a responder that serves it."""
    bus = MemoryBus()
    async with Responder(bus, **fields) as responder:
        # After the responder's own, narrower streams.
        await topology.apply(bus, topology.of([LanePlan(lane, (MODEL,))], bounds))
        await count_all(bus)
        place = Place(bus, responder)
        try:
            yield place
        finally:
            await place.close()
    await bus.close()
