"""How often the server flushes: from its file, its monitoring address, or our own file."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ops.cli.durability import (
    DEFAULT_SYNC_S,
    UNKNOWN,
    Durability,
    from_config,
    from_monitor,
    from_nats_config,
    sync_seconds,
)
from ops.cli.errors import CommandError, Misused


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("always", 0.0),
        ("1s", 1.0),
        ("2m", 120.0),
        ("1m30s", 90.0),
        ("500ms", 0.5),
        ("0.5s", 0.5),
        ("1h", 3600.0),
        ("often", None),
        ("5", None),
        ("", None),
    ],
)
def test_sync_interval(text: str, seconds: float | None) -> None:
    """As nats-server writes durations."""
    assert sync_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "sync_s"),
    [
        ("jetstream {\n  sync_interval: always\n}", 0.0),
        ("jetstream { store_dir: /data, sync: '1s' }", 1.0),
        ('jetstream = { sync_interval = "2m" }', 120.0),
        ("jetstream {\n # sync_interval: always\n}", DEFAULT_SYNC_S),
        ("jetstream { } // sync: always", DEFAULT_SYNC_S),
        ("listen: 127.0.0.1:4222", DEFAULT_SYNC_S),
        ("include ./jetstream.conf", None),
    ],
)
def test_server_s_file(text: str, sync_s: float | None, tmp_path: Path) -> None:
    """Its setting, else the default; with other files included, not known."""
    file = tmp_path / "nats.conf"
    file.write_text(text)
    assert from_nats_config(file).sync_s == sync_s


@pytest.mark.parametrize("name", ["single.conf", "node-1.conf"])
def test_files_that_we_ship(name: str) -> None:
    """Both say how often, and where the store is."""
    found = from_nats_config(Path("ops/nats") / name)
    assert found.sync_s == (0.0 if name == "single.conf" else 1.0)
    assert found.store_dir == Path("/var/lib/inferlane/nats")


def test_server_s_file_with_nonsense(tmp_path: Path) -> None:
    """nats-server would not start with it."""
    file = tmp_path / "nats.conf"
    file.write_text("jetstream { sync_interval: often }")
    with pytest.raises(CommandError, match=r"sync_interval 'often' is neither `always` nor a dur"):
        from_nats_config(file)


def test_our_configuration() -> None:
    """What an operator repeats there of the server's."""
    assert from_config("1s").sync_s == 1.0
    with pytest.raises(Misused, match=r'nats.sync_interval = "often": write "always"'):
        from_config("often")


@asynccontextmanager
async def a_monitor(answer: bytes, *, status: int = 200) -> AsyncGenerator[str]:
    """A monitoring address that answers /jsz so."""

    async def jsz(request: web.Request) -> web.Response:
        assert request.query_string == "config=true"
        return web.Response(body=answer, status=status)

    app = web.Application()
    app.router.add_get("/jsz", jsz)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


async def test_monitoring_address() -> None:
    """Its own word on flushing, store and room."""
    config = {"sync_interval": 1_000_000_000, "store_dir": "/data", "max_storage": 5}
    async with a_monitor(orjson.dumps({"config": config})) as address:
        assert await from_monitor(address) == Durability(1.0, address, Path("/data"), 5)
    async with a_monitor(orjson.dumps({"config": {**config, "sync_always": True}})) as address:
        assert (await from_monitor(address)).sync_s == 0.0


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (b"{}", 200, "does not answer as nats-server does"),
        (b"[]", 200, "does not answer as nats-server does"),
        (b"<html>", 200, "no monitoring answer at"),
        (b"", 404, "no monitoring answer at"),
    ],
)
async def test_address_of_something_else(answer: bytes, status: int, told: str) -> None:
    """Says that it is no nats-server's."""
    async with a_monitor(answer, status=status) as address:
        with pytest.raises(CommandError, match=told):
            await from_monitor(address)


async def test_address_where_nothing_listens() -> None:
    """Says what to set at the server."""
    with pytest.raises(CommandError, match=r"no monitoring answer at .* is `http:` set there\?"):
        await from_monitor("http://127.0.0.1:1")


def test_the_server_s_own_default_is_two_minutes() -> None:
    """Case 32: as nats-server has it; a smaller figure here would promise what is not kept."""
    assert DEFAULT_SYNC_S == 120.0


@pytest.mark.parametrize(
    ("durability", "told"),
    [
        (UNKNOWN, "not known"),
        (Durability(0.0), "at each write"),
        (Durability(120.0), "every 2 min"),
    ],
)
def test_told(durability: Durability, told: str) -> None:
    """In words."""
    assert durability.told == told
