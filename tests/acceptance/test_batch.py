"""Batches and clients against a real cluster: kills of every part, windows, doubles, streams."""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Kind
from ops.cluster import LocalCluster
from ops.demo.setting import OFFLINE_LANE, ONLINE_LANE
from producers.answer import piece_text
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import UnknownLane, UnknownModel
from producers.ticket import TicketState
from tests.acceptance.audit import Audit, all_completed
from tests.acceptance.conftest import StartCluster
from tests.batches import a_plan, check_invariant, codes, lines, results, whole_lines

IMPATIENT = ClientConfig(watchdog_s=0.5, sweep_s=0.1)


@dataclass(slots=True)
class BatchProcess:
    """`inferlane batch` over the files of `a_plan`, against a cluster."""

    cluster: LocalCluster
    folder: Path

    async def start(self, *more: str, verb: str = "run") -> asyncio.subprocess.Process:
        """Start the command."""
        output = str(self.folder / "out.jsonl")
        files = [str(self.folder / "in.jsonl"), "--lane", OFFLINE_LANE, "--output", output]
        config = self.folder / "producer.toml"
        config.write_text("[producer.client]\nwatchdog_s = 0.5\n")
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "ops.cli.main", "batch", verb),
            *(files if verb == "run" else [output]),
            *("--config", str(config), *more),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "INFERLANE_URL": self.cluster.url},
        )

    async def run(self, *more: str, verb: str = "run") -> tuple[int, str]:
        """Run the command to its end; return exit code and the counts it told."""
        process = await self.start(*more, verb=verb)
        async with asyncio.timeout(50):
            said, told = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode().split(";")[0] or told.decode()


async def until_results(path: Path, count: int) -> None:
    """Wait until so many results are written."""
    async with asyncio.timeout(30):
        while whole_lines(path) < count:
            await asyncio.sleep(0.02)


async def test_everything_is_killed_under_a_batch_and_each_line_ends_once(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """Kill -9 of the batch, the broker, a worker: one record and one result for each line."""
    cluster, bus = await start_cluster()
    audit = await Audit(bus).begin()
    plan = a_plan(tmp_path, [*lines(300), b"bad"])
    batch = BatchProcess(cluster, tmp_path)
    for number, member in enumerate(("broker-1", "worker-1", "broker-1")):
        process = await batch.start("--concurrency", "60")
        await until_results(plan.output, 20 * (number + 1))
        await cluster.members[member].kill()
        process.kill()
        await process.communicate()
        await cluster.members[member].start()
    assert await batch.run() == (1, "301 lines: 300 completed, 1 failed")
    check_invariant(plan, (f"id-{number}" for number in range(300)))
    await audit.until_empty(OFFLINE_LANE)
    batch_id = results(plan.errors)[0]["id"].removeprefix("batch_req_").split("-")[0]
    jobs = [f"{batch_id}-{number}" for number in range(1, 301)]
    all_completed(await audit.records(OFFLINE_LANE), jobs)
    assert max(audit.ended.values()) == 1


async def test_the_windows_end_is_the_clusters_deadline_too(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """What doesn't fit into it is `batch_expired`, nothing runs on, and a retry finishes it."""
    cluster, bus = await start_cluster(workers=1)
    plan = a_plan(tmp_path, lines(400))
    batch = BatchProcess(cluster, tmp_path)
    code, said = await batch.run("--window", "3s")
    assert code == 1, said
    assert 0 < len(results(plan.output)) < 400
    assert set(codes(plan)) == {"batch_expired"}
    check_invariant(plan, (f"id-{number}" for number in range(400)))
    await (await Audit(bus).begin()).until_empty(OFFLINE_LANE)
    code, said = await batch.run("--window", "1h", verb="retry")
    assert (code, said) == (0, "400 lines: 400 completed, 0 failed")
    check_invariant(plan, (f"id-{number}" for number in range(400)))


async def test_a_batch_is_looked_over_with_the_clusters_own_rates(
    start_cluster: StartCluster, tmp_path: Path
) -> None:
    """`check` with a lane asks the workers that are there."""
    cluster, _ = await start_cluster()
    plan = a_plan(tmp_path, lines(100))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", "batch", "check", plan.input),
        *("--lane", OFFLINE_LANE, "--nats", cluster.url),
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert b"100 good, 0 bad" in said
    assert b"on the 2 workers that are there now" in said


async def test_two_messages_of_one_job_give_one_run_and_one_answer(
    start_cluster: StartCluster,
) -> None:
    """A job that was stored twice (its first word was lost for minutes) isn't run twice."""
    _, bus = await start_cluster()
    audit = await Audit(bus).begin()
    async with Client(bus, lane=ONLINE_LANE, config=IMPATIENT) as client:
        ticket = await client.submit(a_chat(tokens=60))
        double = msgspec.structs.replace(ticket.job, submission=1)
        subject = subjects.jobs(ONLINE_LANE, 2, "tiny")
        appended = await bus.append(subject, encode(double), message_id=f"{double.id}.1")
        assert not appended.duplicate
        record = await ticket.result(20)
        assert record.kind is Kind.COMPLETED
    await audit.until_empty(ONLINE_LANE)
    assert audit.started.total() == 1


async def test_a_streamed_answer_comes_in_pieces_that_make_the_whole(
    start_cluster: StartCluster,
) -> None:
    """Chunks in order; their texts together are the record's text."""
    _, bus = await start_cluster()
    async with Client(bus, lane=ONLINE_LANE) as client:
        ticket = await client.submit(a_chat(tokens=30, stream=True))
        chunks = [chunk async for chunk in ticket.stream()]
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert not any(chunk.whole for chunk in chunks)
        answer = orjson.loads((await ticket.result()).body)
        text = "".join(piece_text(chunk.data) for chunk in chunks)
        assert text == answer["choices"][0]["message"]["content"] != ""


async def test_a_cancelled_job_stops_running(start_cluster: StartCluster) -> None:
    """Queued or running: the record says cancelled, soon, and the queue is empty."""
    _, bus = await start_cluster(workers=1)
    audit = await Audit(bus).begin()
    async with Client(bus, lane=ONLINE_LANE) as client:
        tickets = [await client.submit(a_chat(tokens=4000)) for _ in range(20)]
        async with asyncio.timeout(10):
            while not any(ticket.state is TicketState.STARTED for ticket in tickets):
                await asyncio.sleep(0.02)
        for ticket in tickets:
            await ticket.cancel()
        kinds = {(await ticket.result(10)).kind for ticket in tickets}
        assert kinds == {Kind.CANCELLED}
    await audit.until_empty(ONLINE_LANE)


async def test_unknown_names_are_told_from_the_clusters_own_offer(
    start_cluster: StartCluster,
) -> None:
    """A lane or model that isn't there is told at once, with what is."""
    _, bus = await start_cluster(workers=1)
    async with Client(bus, lane=ONLINE_LANE) as client:
        with pytest.raises(UnknownModel, match="tiny"):
            await client.submit({"model": "huge", "messages": []})
    async with Client(bus, lane="nobody") as client:
        with pytest.raises(UnknownLane, match=ONLINE_LANE):
            await client.submit(a_chat())


def a_chat(*, tokens: int = 16, **fields: Any) -> dict[str, object]:
    """A chat on a modelled engine."""
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": tokens, **fields}
