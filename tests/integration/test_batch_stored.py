"""Batches that gateways run, as processes: a real NATS server, the command line, kill -9."""

import asyncio
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.bus import topology
from broker.bus.nats import connect
from broker.bus.topology import Bounds, LanePlan
from ops.nats.server import NatsServer
from producers.batches.records import Batch
from producers.batches.shelf import all_batches
from tests.batches import a_line, a_plan, check_invariant, lines
from tests.builders import LANE, MODEL
from tests.buses import until
from tests.integration.test_batch_cli import INFERLANE, Responding, run, start
from tests.stored_batches import count_all

CONFIG = """
[nats]
url = "{url}"
[gateway]
port = 0
[gateway.batches]
lease_s = 1.0
scan_s = 0.2
write_s = 0.1
progress_s = 0.1
grace_s = 2.0
clear_after_s = 0.1
lines_inflight_max = 1000
[gateway.keys.tester]
lane = "acme"
key = "sk-of-the-tests"
"""


class Gateway:
    """A gateway process that runs batches."""

    def __init__(self, server: NatsServer, folder: Path, *, config: str = CONFIG) -> None:
        path = folder / "inferlane.toml"
        path.write_text(config.format(url=server.url))
        command = [*INFERLANE, "gateway", "--config", str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        assert b"ready" in self.process.stdout.readline()

    def kill(self) -> None:
        """End it as the kernel does. Idempotent."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def stop(self) -> int:
        """End it as a service manager does; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=20)
        return self.process.returncode


class Scene:
    """A server with a lane's streams, and gateways on it."""

    def __init__(self, server: NatsServer, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._gateways: list[Gateway] = []
        self._responders: list[Responding] = []
        asyncio.run(self._set_up())

    @property
    def url(self) -> str:
        """Where the message server is."""
        return self._server.url

    async def _set_up(self) -> None:
        bus = await connect(self._server.url, name="set-up")
        await topology.apply(bus, topology.of([LanePlan(LANE, (MODEL,))], Bounds()))
        await count_all(bus)
        await bus.close()

    def responder(self, **faults: Any) -> Responding:
        """Start what plays broker and workers."""
        responder = Responding(self._server.url, **faults)
        self._responders.append(responder)
        return responder

    def gateway(self) -> Gateway:
        """Start a gateway."""
        gateway = Gateway(self._server, self._folder)
        self._gateways.append(gateway)
        return gateway

    def batch(self, verb: str, *arguments: str) -> tuple[int, str, str]:
        """Run a command about batches."""
        return run("batch", verb, *arguments, "--nats", self._server.url, "--lane", LANE)

    def when(self, holds: Callable[[Batch], bool]) -> None:
        """Wait until the one batch's record says so."""

        async def waited() -> None:
            bus = await connect(self._server.url, name="test")

            async def look() -> bool:
                return any(holds(batch) for batch in await all_batches(bus))

            await until(look)
            await bus.close()

        asyncio.run(waited())

    def until_cleared(self) -> None:
        """Wait until no record stands in RESULTS."""

        async def waited() -> None:
            bus = await connect(self._server.url, name="test")

            async def look() -> bool:
                return not (await bus.stream_state(f"RESULTS_{LANE}")).messages

            await until(look)
            await bus.close()

        asyncio.run(waited())

    def close(self) -> None:
        """End all."""
        for gateway in self._gateways:
            gateway.kill()
        for responder in self._responders:
            if responder._process.poll() is None:
                responder.end()


@pytest.fixture
def scene(nats_server: NatsServer, tmp_path: Path) -> Iterator[Scene]:
    """A lane without a gateway."""
    made = Scene(nats_server, tmp_path)
    yield made
    made.close()


def results_of(scene: Scene, folder: Path, batch_id: str) -> tuple[int, str]:
    """Fetch a batch's results into the files of `a_plan`."""
    code, said, hint = scene.batch("results", batch_id, "--output", str(folder / "out.jsonl"))
    assert code in (0, 1), hint
    return code, said


def test_submit_watch_results(scene: Scene, tmp_path: Path) -> None:
    """The way a user goes: hand in, watch, fetch; exit codes say how it ended."""
    responder = scene.responder()
    gateway = scene.gateway()
    plan = a_plan(tmp_path, [*lines(299), b"{no json"])
    code, said, _ = scene.batch("submit", str(tmp_path / "in.jsonl"))
    batch_id = said.strip()
    assert (code, batch_id.startswith("batch_")) == (0, True)
    code, said, shown = scene.batch("watch", batch_id)
    assert (code, shown) == (1, "")
    assert said.startswith(f"{batch_id} is completed; 300 lines: 299 completed, 1 failed")
    code, told, _ = scene.batch("status", batch_id, "--json")
    assert orjson.loads(told)["request_counts"] == {"total": 300, "completed": 299, "failed": 1}
    assert batch_id in scene.batch("list")[1]
    for standing in (tmp_path / "in.jsonl", tmp_path, Path("/dev/null")):
        before = standing.stat().st_ino
        code, _, told = scene.batch("results", batch_id, "--output", str(standing))
        assert (code, standing.stat().st_ino) == (2, before), told
    assert scene.batch("results", batch_id, "--output", "")[0] == 2
    assert not (tmp_path / "in.errors.jsonl").exists()
    assert results_of(scene, tmp_path, batch_id)[0] == 1
    check_invariant(plan, (f"id-{number}" for number in range(299)))
    scene.until_cleared()
    assert gateway.stop() == 0
    assert responder.end()["most"] == 1
    at = ("--lane", LANE, "--all", "--yes", "--nats", scene.url)
    assert run("erase", *at)[1] == "0 results and 0 dead letters, 3 files and 1 batches deleted\n"
    assert "no batch" in scene.batch("status", batch_id)[2]


def test_a_detached_run_is_a_batch_handed_in(scene: Scene, tmp_path: Path) -> None:
    """`run --detach` needs no gateway, prints the id, and says how to fetch; one runs it later."""
    responder = scene.responder()
    plan = a_plan(tmp_path, lines(50))
    output = tmp_path / "out.jsonl"
    code, said, hint = scene.batch(
        "run", plan.input, "--detach", "--key", "night", "--output", str(output)
    )
    batch_id = said.strip()
    assert (code, said) == (0, f"{batch_id}\n")
    assert f"inferlane batch results {batch_id} --lane {LANE} --output {output}" in hint
    assert not output.exists()
    assert scene.batch("status", batch_id)[1] == f"{batch_id} is validating\n"
    scene.gateway()
    assert scene.batch("watch", batch_id)[0] == 0
    results_of(scene, tmp_path, batch_id)
    check_invariant(plan, (f"id-{number}" for number in range(50)))
    assert responder.end()["most"] == 1


def test_what_a_detached_run_can_not_be(scene: Scene, tmp_path: Path) -> None:
    """A run that was begun here is not handed in a second time; a key is a name."""
    responder = scene.responder()
    plan = a_plan(tmp_path, lines(3))
    run_it = ("run", plan.input, "--output", str(plan.output))
    assert scene.batch(*run_it)[0] == 0
    code, _, told = scene.batch(*run_it, "--detach")
    assert (code, "without --detach" in told) == (2, True)
    code, _, told = scene.batch("run", plan.input, "--detach", "--key", "a key")
    assert (code, "key" in told) == (2, True)
    code, _, told = scene.batch("run", plan.input)
    assert (code, "--output" in told) == (2, True)
    responder.end()


def test_cancel_and_what_is_not_there(scene: Scene, tmp_path: Path) -> None:
    """Finished lines stay, the others are told; an unknown id is one sentence."""
    responder = scene.responder(run_s=0.5, window=8)
    scene.gateway()
    plan = a_plan(tmp_path, lines(400))
    batch_id = scene.batch("submit", str(tmp_path / "in.jsonl"))[1].strip()
    scene.when(lambda batch: batch.counts.completed > 0)
    assert "cancelling" in scene.batch("cancel", batch_id)[1]
    code, said, _ = scene.batch("watch", batch_id, "--quiet")
    assert (code, "is cancelled" in said) == (1, True)
    results_of(scene, tmp_path, batch_id)
    check_invariant(plan, (f"id-{number}" for number in range(400)))
    assert "no batch 'batch_none'" in scene.batch("status", "batch_none")[2]
    assert scene.batch("submit", str(tmp_path / "none.jsonl"))[0] == 2
    responder.end()


def test_an_input_may_come_compressed_or_by_a_pipe(scene: Scene, tmp_path: Path) -> None:
    """It is stored as lines, so results and retries need no packing."""
    import gzip  # noqa: PLC0415

    packed = tmp_path / "in.jsonl.gz"
    packed.write_bytes(gzip.compress(a_line("a") + b"\n"))
    first = scene.batch("submit", str(packed), "--json")
    assert first[0] == 0
    shown = orjson.loads(first[1])
    assert (shown["status"], shown["request_counts"]["total"]) == ("validating", 0)


def test_who_watches_is_told_that_no_gateway_runs_it(scene: Scene, tmp_path: Path) -> None:
    """A batch that nobody takes would be watched for ever."""
    a_plan(tmp_path, lines(1))
    batch_id = scene.batch("submit", str(tmp_path / "in.jsonl"))[1].strip()
    watching = start("batch", "watch", batch_id, "--nats", scene.url, "--lane", LANE)
    assert watching.stderr is not None
    try:
        for told in watching.stderr:  # Its progress is told in between.
            if b"no gateway has taken it" in told:
                break
        else:
            pytest.fail("the watching ended, and nobody was told")
        scene.batch("cancel", batch_id)
        scene.gateway()
        said, _ = watching.communicate(timeout=30)
    finally:
        watching.kill()
    assert (watching.returncode, b"is cancelled" in said) == (1, True)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_of_the_runner_at_a_random_point(scene: Scene, tmp_path: Path, seed: int) -> None:
    """Another gateway finishes the batch: each line once, and none was run twice."""
    count = 1500
    chance = random.Random(seed)
    responder = scene.responder(run_s=0.01)
    first = scene.gateway()
    plan = a_plan(tmp_path, lines(count))
    batch_id = scene.batch("submit", str(tmp_path / "in.jsonl"))[1].strip()
    enough = chance.randrange(count * 3 // 4)
    scene.when(lambda batch: batch.counts.completed >= enough and batch.counts.total > 0)
    first.kill()
    scene.gateway()
    code, said, hint = scene.batch("watch", batch_id)
    assert (code, said.split(";")[1].strip()) == (
        0,
        f"{count:,} lines: {count:,} completed, 0 failed",
    ), hint
    results_of(scene, tmp_path, batch_id)
    check_invariant(plan, (f"id-{number}" for number in range(count)))
    ran: dict[str, Any] = responder.end()
    assert (ran["most"], ran["jobs"]) == (1, count)
    scene.until_cleared()
