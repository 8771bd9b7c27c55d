"""Results older than their stream's age, on a real server, within a window of 30 days.

Gateways are processes and die by kill -9; broker and workers are played, but for the accountant,
which is the broker's own.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest

from broker.bus import topology
from broker.bus.files import Files, new_file_id
from broker.bus.nats import NatsBus
from broker.bus.topology import Bounds, LanePlan
from broker.bus.usage import counted_sequence
from broker.service.accounting import Accounting
from broker.wire import subjects
from broker.wire.files import FileInfo
from ops.nats.server import NatsServer
from producers.batches.records import Batch, Status
from producers.batches.shelf import Shelf, Wanted
from tests.batches import lines
from tests.builders import LANE, MODEL
from tests.buses import until
from tests.integration.test_batch_stored import CONFIG, Gateway
from tests.responder import Responder
from tests.servers import Connections
from tests.stored_batches import ENDPOINT, pieces

AGE_S, SHORT_S = 3600.0, 1.0
"""How long RESULTS keeps a record here, and for how long once all are to be too old."""

LINES = 60

RESULTS, FILES = subjects.results_stream(LANE), subjects.files_stream(LANE)


class Listener:
    """Hears of what was counted."""

    def usage_counted(self, lane: str, records: int) -> None:
        """Nothing to do."""

    def usage_gone(self, lane: str, records: int) -> None:
        raise AssertionError(lane, records)


class Scene:
    """A lane on a real server, and gateways."""

    def __init__(
        self, server: NatsServer, bus: NatsBus, responder: Responder, folder: Path
    ) -> None:
        self.bus = bus
        self.server = server
        self.responder = responder
        self.files = Files(bus, LANE)
        self.shelf = Shelf(bus, LANE, self.files)
        self._folder = folder
        self._gateways: list[Gateway] = []

    async def gateway(self, **changed: str) -> Gateway:
        """Start a gateway; `changed`: other settings of its batches."""
        config = CONFIG
        for name, value in changed.items():
            (old,) = (line for line in config.splitlines() if line.startswith(f"{name} ="))
            config = config.replace(old, f"{name} = {value}")
        gateway = await asyncio.to_thread(Gateway, self.server, self._folder, config=config)
        self._gateways.append(gateway)
        return gateway

    async def submit(self) -> Batch:
        """Hand in a batch of LINES lines whose window is 30 days."""
        data = b"".join(line + b"\n" for line in lines(LINES))
        info = FileInfo(id=new_file_id(), lane=LANE, created_at_s=time.time())
        stored = await self.files.put(info, pieces(data), bytes_max=10**9)
        wanted = Wanted(endpoint=ENDPOINT, input_file_id=stored.id, completion_window="30d")
        return await self.shelf.create(wanted)

    async def when(self, batch: Batch, *, completed: int = 0, ended: bool = False) -> Batch:
        """Wait until so many lines completed, or all ended."""
        found = batch

        async def look() -> bool:
            nonlocal found
            found = await self.shelf.get(batch.id)
            return found.has_ended if ended else found.counts.completed >= completed

        await until(look)
        return found

    async def set_up(self, age_s: float) -> None:
        """Make or change the lane's streams: records are kept for so long."""
        bounds = Bounds(results_age_s_max=age_s)
        await topology.apply(self.bus, topology.of([LanePlan(LANE, (MODEL,))], bounds))

    async def age_out(self) -> None:
        """Let the server drop all records for their age, once they are counted."""

        async def are_counted() -> bool:
            state = await self.bus.stream_state(RESULTS)
            return await counted_sequence(self.bus, LANE) == state.last_sequence

        async def are_gone() -> bool:
            return not (await self.bus.stream_state(RESULTS)).messages

        await until(are_counted)
        await self.set_up(SHORT_S)
        await until(are_gone)
        await self.set_up(AGE_S)

    async def until_idle(self) -> None:
        """Wait until all jobs have ended and left their stream."""

        async def look() -> bool:
            return not (await self.bus.stream_state(subjects.jobs_stream(LANE, 3))).messages

        await until(look)

    async def copies(self) -> int:
        """How many copies stand."""
        return len(await self.bus.subject_counts(FILES, subject=subjects.line_copy(LANE, "*", "*")))

    async def until_no_copies(self) -> None:
        """Wait until all copies have gone."""

        async def look() -> bool:
            return not await self.copies()

        await until(look)

    async def check(self, batch: Batch) -> None:
        """Each line stands once in the output, and none was run twice."""
        assert (batch.status, batch.counts.completed) == (Status.COMPLETED, LINES)
        info = await self.files.find(batch.output_file_id)
        assert info is not None
        text = b"".join([chunk async for chunk in self.files.content(info)])
        found = Counter(orjson.loads(line)["custom_id"] for line in text.splitlines())
        assert found == Counter(f"id-{number}" for number in range(LINES))
        assert len(self.responder.runs) == LINES
        assert set(self.responder.runs.values()) == {1}

    def close(self) -> None:
        """End all gateways."""
        for gateway in self._gateways:
            gateway.kill()


@pytest.fixture
async def scene(
    nats_server: NatsServer, connections: Connections, tmp_path: Path
) -> AsyncIterator[Scene]:
    """A lane that keeps results for AGE_S."""
    bus = await connections()
    async with Responder(bus) as responder:
        made = Scene(nats_server, bus, responder, tmp_path)
        await made.set_up(AGE_S)  # After the responder's own, wider streams.
        async with accountant(bus):
            yield made
        made.close()


@asynccontextmanager
async def accountant(bus: NatsBus) -> AsyncGenerator[None]:
    """A leading broker's duty of counting."""
    duty = Accounting(bus, results_age_s_max={LANE: AGE_S}, hears=Listener(), now=time.time)
    async with asyncio.TaskGroup() as tasks:
        counting = tasks.create_task(duty.run())
        yield
        counting.cancel()


async def test_lines_end_and_age_out_while_no_gateway_is_up(scene: Scene) -> None:
    """One comes back, after a restart of the server at that: each line once, none run twice."""
    scene.responder.may_run.clear()
    first = await scene.gateway()
    batch = await scene.submit()
    await until(lambda: len(scene.responder.seen) == LINES)
    first.kill()
    scene.responder.may_run.set()
    await scene.until_idle()
    await scene.age_out()
    assert await scene.copies() == LINES
    await asyncio.to_thread(scene.server.kill)
    await asyncio.to_thread(scene.server.start)
    await scene.gateway()
    await scene.check(await scene.when(batch, ended=True))
    await scene.until_no_copies()


async def test_the_gateway_dies_between_written_and_taken_away(scene: Scene) -> None:
    """What stands in the output is not written again, though its record aged out, its copy not."""
    scene.responder.run_s = 0.5
    scene.responder.window = 16
    first = await scene.gateway(clear_after_s="60.0", lines_inflight_max="16")
    batch = await scene.submit()
    await scene.when(batch, completed=16)
    first.kill()
    await scene.until_idle()
    await scene.age_out()
    assert 16 <= await scene.copies() < LINES
    await scene.gateway()
    await scene.check(await scene.when(batch, ended=True))
    await scene.until_no_copies()
