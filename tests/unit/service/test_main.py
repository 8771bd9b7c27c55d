"""The process: a start that waits for the server, a stop that hands over, faults it outlives."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec.structs import replace

from broker.bus.base import Bus, BusError, LinkDown, NoStream, NotFound, Timeout
from broker.bus.memory import MemoryBus
from broker.core.policy import LanePolicy
from broker.service import main as module
from broker.service.config import Config, ConfigError
from broker.service.decision_log import DecisionLog
from broker.service.election import leader_now
from broker.service.main import Broker, Reread, main, run, serve
from broker.service.metrics import Metrics
from broker.service.offer import publish_offers
from broker.service.state_folder import StateTaken
from broker.wire.codec import decode
from broker.wire.messages import LaneOffer
from broker.wire.subjects import CONFIG_BUCKET, lane_offer_key
from tests.builders import LANE, MODEL
from tests.clusters import until
from tests.crashing import Failing, Fault, faulty
from tests.leaders import QUICK_LEASES, a_config


def a_broker(folder: Path, bus: Bus, config: Config | None = None) -> Broker:
    """A broker that has not begun."""
    log = DecisionLog(folder, file_bytes_max=0, files_max=1)
    return Broker(bus, config or a_config(), metrics=Metrics(lanes=[], models=[]), log=log)


def quick(folder: Path, **fields: Any) -> Config:
    """A configuration of an impatient broker."""
    return a_config(
        policy={"leases": QUICK_LEASES}, state_dir=str(folder), leader_ttl_s=30.0, **fields
    )


class Process:
    """`serve` at work in this process, on an in-process server."""

    def __init__(
        self, config: Config, *, fault: Fault | None = None, reread: Reread | None = None
    ) -> None:
        self.server = MemoryBus()
        self.link = self.server.connection()
        self._bus = faulty(self.link, fault) if fault else self.link
        self.task = asyncio.create_task(serve(config, reread=reread, open_bus=self._open))

    async def _open(self, config: Config) -> Bus:
        del config
        return self._bus

    async def leads(self) -> None:
        """Wait until it has the key."""
        async with asyncio.timeout(10):
            while True:
                try:
                    if await leader_now(self.server) is not None:
                        return
                except BusError:
                    pass
                await asyncio.sleep(0.01)

    async def ends(self) -> None:
        """Wait for its end, and raise what it raised."""
        async with asyncio.timeout(10):
            await self.task


def terminate() -> None:
    """What an operator, or systemd, sends."""
    os.kill(os.getpid(), signal.SIGTERM)


async def test_sigterm_ends_it_in_good_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said where its page is; then key, pulls, page and tasks are gone, and it returns."""
    before = asyncio.all_tasks()
    process = Process(quick(tmp_path))
    await process.leads()
    await until(lambda: '"ready"' in capsys.readouterr().out)
    state = process.server.server.streams[f"JOBS_{LANE}"].consumers["b2-tiny"]
    await until(lambda: state.state().waiting == 1)
    terminate()
    await process.ends()
    assert await leader_now(process.server) is None
    assert state.state().waiting == 0
    assert not process.link.connected
    assert asyncio.all_tasks() - before <= {process.task}
    await process.server.close()


async def test_sighup_takes_the_file_anew_and_a_mistake_in_it_changes_nothing(
    tmp_path: Path,
) -> None:
    """The third try is right; a broker lives through the others, a fault of ours included."""
    config = quick(tmp_path)
    lanes = (*config.policy.lanes, LanePolicy(name="gamma"))
    tries: list[Config | Exception] = [
        ConfigError("f.toml", ()),
        RuntimeError("a file that nobody thought of"),
        replace(config, policy=replace(config.policy, lanes=lanes)),
    ]

    def reread() -> Config:
        given = tries.pop(0)
        if isinstance(given, Exception):
            raise given
        return given

    process = Process(config, reread=reread)
    await process.leads()
    for left in (2, 1, 0):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda left=left: len(tries) == left)
    await until(lambda: "JOBS_gamma" in process.server.server.streams)
    terminate()
    await process.ends()
    await process.server.close()


async def test_a_second_broker_of_one_state_dir_refuses_at_once(tmp_path: Path) -> None:
    """It says who has it and what to do, before it knows any server; the first goes on."""
    process = Process(quick(tmp_path, decision_log_bytes_max=1000))
    await process.leads()
    second = Process(quick(tmp_path, decision_log_bytes_max=1000, name="b2"))
    told = rf"{tmp_path} is in use by another broker \(process {os.getpid()} on .*--state-dir"
    with pytest.raises(StateTaken, match=told):
        await second.ends()
    assert await leader_now(process.server) is not None
    terminate()
    await process.ends()
    third = Process(quick(tmp_path, decision_log_bytes_max=1000))
    await third.leads()
    terminate()
    await third.ends()


@pytest.mark.parametrize(("place", "bytes_max"), [("state", 0), ("file/state", 1000)])
async def test_a_broker_that_writes_no_log_needs_no_folder(
    tmp_path: Path, place: str, bytes_max: int
) -> None:
    """Because it was told not to, or can't: it leads, and so may another beside it."""
    (tmp_path / "file").touch()
    config = quick(tmp_path / place, decision_log_bytes_max=bytes_max)
    processes = [Process(config), Process(config)]
    for process in processes:
        await process.leads()
        process.task.cancel()
    for process in processes:
        with pytest.raises(asyncio.CancelledError):
            await process.ends()


async def test_sigterm_ends_it_also_while_it_waits_for_the_server(tmp_path: Path) -> None:
    """A start that can't go on yet is no reason to be killed."""
    process = Process(quick(tmp_path), fault=Failing("ensure_consumer", NoStream(""), times=99999))
    await asyncio.sleep(0.05)
    terminate()
    await process.ends()
    await process.server.close()


async def test_a_start_waits_for_a_server_in_election(tmp_path: Path) -> None:
    """Its streams are not there yet, then they are."""
    bus = MemoryBus()
    failing = Failing("ensure_consumer", NoStream("no leader yet"), times=1)
    await asyncio.wait_for(a_broker(tmp_path, faulty(bus, failing)).prepare(), 10)
    assert failing.raised == 1
    assert (await bus.stream_state(f"JOBS_{LANE}")).messages == 0
    await bus.close()


async def test_a_start_waits_for_streams_that_another_broker_makes(tmp_path: Path) -> None:
    """Three servers say that a stream exists, and a moment later that they know of none."""
    bus = MemoryBus()
    failing = Failing("ensure_consumer", NotFound("stream not found"), times=1)
    await asyncio.wait_for(a_broker(tmp_path, faulty(bus, failing)).prepare(), 10)
    assert failing.raised == 1
    assert (await bus.stream_state(f"JOBS_{LANE}")).messages == 0
    await bus.close()


async def test_a_start_gives_up_in_a_sentence(tmp_path: Path) -> None:
    """After its patience, and saying what to look at."""
    bus = MemoryBus()
    failing = Failing("ensure_consumer", NoStream("no leader yet"), times=99999)
    with pytest.raises(Timeout, match=r"not ready within 0 s \(no leader yet\); see whether"):
        await a_broker(tmp_path, faulty(bus, failing)).prepare(patience_s=0.0)
    await bus.close()


async def test_a_setting_that_the_server_refuses_is_not_waited_for(tmp_path: Path) -> None:
    """It will never take it."""
    bus = MemoryBus()
    failing = Failing("ensure_consumer", BusError("max_deliver was not taken"), times=99999)
    with pytest.raises(BusError, match="not taken"):
        await a_broker(tmp_path, faulty(bus, failing)).prepare()
    assert failing.raised < 20
    await bus.close()


async def test_a_restart_keeps_what_clients_were_told_of_tokens(tmp_path: Path) -> None:
    """The offer is not written over with nothing, and the estimate goes on from it."""
    bus = MemoryBus()
    broker = a_broker(tmp_path, bus)
    await broker.prepare()
    await publish_offers(bus, a_config(), bytes_per_token={MODEL: 3.5})
    await a_broker(tmp_path, bus).prepare()
    entry = await bus.kv_get(CONFIG_BUCKET, lane_offer_key(LANE))
    assert decode(entry.value, LaneOffer).bytes_per_token == {MODEL: 3.5}
    await bus.close()


async def test_leaderships_that_fail_come_ever_more_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAD_AGAIN_S_MAX at the most; another broker gets its chance meanwhile."""
    bus = MemoryBus()
    broker = a_broker(tmp_path, bus)
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def fail() -> None:
        message = "a fault of ours"
        raise RuntimeError(message)

    monkeypatch.setattr(broker, "_lead_once", fail)
    monkeypatch.setattr(module.asyncio, "sleep", noted)
    running = asyncio.create_task(broker._lead_for_ever())
    while len(pauses) < 9:
        await sleep(0)
    running.cancel()
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert max(pauses) == module.LEAD_AGAIN_S_MAX
    await bus.close()


async def test_health_tells_standby_starting_and_leader(tmp_path: Path) -> None:
    """A standby is ready: it waits for its turn."""
    bus = MemoryBus()
    broker = a_broker(tmp_path, bus.connection(), quick(tmp_path))
    await broker.prepare()
    assert (broker.health().role, broker.health().ready) == ("standby", True)
    roles: set[str] = set()
    running = asyncio.create_task(broker.run())

    def leads() -> bool:
        health = broker.health()
        roles.add(health.role)
        return health.role == "leader"

    await until(leads)
    assert "starting" in roles
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()


async def test_a_lost_link_is_told_to_the_mind(tmp_path: Path) -> None:
    """Lease clocks stand still while our own link is down."""
    bus = MemoryBus()
    link = bus.connection()
    broker = a_broker(tmp_path, link, quick(tmp_path))
    await broker.prepare()
    link.disconnect()
    link.reconnect()
    running = asyncio.create_task(broker.run())
    await until(lambda: broker.leadership is not None and broker.leadership.ready)
    leadership = broker.leadership
    assert leadership is not None
    link.disconnect()
    await until(lambda: not leadership.scheduler._mind.link_up)
    link.reconnect()
    await until(lambda: leadership.scheduler._mind.link_up)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await bus.close()


# ---- exit codes ----


def test_a_bad_configuration_is_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the line and what to do."""
    path = tmp_path / "inferlane.toml"
    path.write_text("[broker]\nnonsense = 1\n")
    assert main([str(path)]) == module.EXIT_CONFIG
    assert "nonsense" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_its_own_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = tmp_path / "inferlane.toml"
    path.write_text(
        f'[nats]\nurl = "nats://127.0.0.1:{port}"\n[broker]\nstate_dir = "{tmp_path}"\n'
        f'[policy]\nmodels = ["{MODEL}"]\n[[policy.lanes]]\nname = "{LANE}"\n'
    )
    assert main([str(path)]) == module.EXIT_UNREACHABLE
    assert capsys.readouterr().err.startswith("the broker could not run: ")


def test_a_page_whose_port_is_taken_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told with the port; nothing was begun."""

    async def open_memory(config: Config) -> Bus:
        del config
        return MemoryBus()

    monkeypatch.setattr(module, "connect", open_memory)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = quick(tmp_path, http_port=port)
        monkeypatch.setattr(module, "load", lambda _: config)
        assert main(["inferlane.toml"]) == module.EXIT_FAILED
    assert str(port) in capsys.readouterr().err


def test_a_stop_is_exit_code_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole program: started, told to stop, ended."""

    async def open_memory(config: Config) -> Bus:
        del config
        asyncio.get_running_loop().call_later(0.2, terminate)
        return MemoryBus()

    monkeypatch.setattr(module, "connect", open_memory)
    monkeypatch.setattr(module, "load", lambda _: quick(tmp_path))
    assert main(["inferlane.toml"]) == 0


def test_an_error_while_it_runs_is_raised_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a tree of groups."""

    async def open_memory(config: Config) -> Bus:
        del config
        return faulty(MemoryBus(), Failing("ensure_consumer", LinkDown("cut"), times=99999))

    monkeypatch.setattr(module, "connect", open_memory)
    monkeypatch.setattr(module, "PREPARE_RETRY_S", 0.0)

    async def prepare(broker: Broker) -> None:
        await Broker._declare(broker)

    monkeypatch.setattr(Broker, "prepare", prepare)
    with pytest.raises(LinkDown):
        run(quick(tmp_path))


def test_the_ready_line_is_for_launchers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One JSON line on standard output."""
    module._say_ready(quick(tmp_path, name="b7"), "http://x")
    assert orjson.loads(capsys.readouterr().out) == {
        "event": "ready",
        "broker": "b7",
        "http": "http://x",
    }
