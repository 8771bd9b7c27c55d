"""Real routers of other projects, started as their users start them, on free loopback ports.

A router ends with its test, and by the warden with a test process that was killed.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from tempfile import TemporaryFile
from typing import IO

import aiohttp

from ops.warden import Warden

START_S_MAX = 20.0
"""It is up in half a second on a quiet machine."""

STOP_S_MAX = 5.0
STARTS_MAX = 3
"""A port picked as free may be taken by another test before the router binds it."""

LOG_BYTES_SHOWN = 2000


class RouterUnavailable(Exception):
    """The router did not come up; the message shows why."""


@asynccontextmanager
async def a_sglang_router(
    worker_urls: Sequence[str], *, options: Sequence[str] = ()
) -> AsyncGenerator[str]:
    """Run `sglang-router` in front of these workers; gives its URL once it knows them all.

    Raises RouterUnavailable.
    """
    with TemporaryFile() as log, closing(Warden()) as warden:
        process, url = await _started(worker_urls, options, log, {**os.environ, **warden.mark})
        try:
            warden.watch(process.pid, rank=0)
            yield url
        finally:
            await _end(process)
            warden.forget(process.pid)


async def _started(
    worker_urls: Sequence[str], options: Sequence[str], log: IO[bytes], env: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, str]:
    for _ in range(STARTS_MAX):
        port, metrics_port = _free_ports(2)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sglang_router.launch_router"),
            *("--host", "127.0.0.1", "--port", f"{port}", "--log-level", "warn"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", f"{metrics_port}"),
            *options,
            *("--worker-urls", *worker_urls),
            stdout=log,
            stderr=log,
            env=env,
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            if await _knows_all(url, worker_urls, process):
                return process, url
        except BaseException:
            await _end(process)
            raise
        await _end(process)
    log.seek(0)
    said = log.read()[-LOG_BYTES_SHOWN:].decode(errors="replace")
    message = f"sglang-router (extra `test`) did not come up; it said:\n{said}"
    raise RouterUnavailable(message)


async def _knows_all(
    url: str, worker_urls: Sequence[str], process: asyncio.subprocess.Process
) -> bool:
    """Wait until the router has taken up all workers; False when it ended, or never did."""
    give_up_at_s = time.monotonic() + START_S_MAX
    async with aiohttp.ClientSession() as session:
        while process.returncode is None and time.monotonic() < give_up_at_s:
            # Asked by their URLs: whoever took the port in between may be a router as well.
            with suppress(aiohttp.ClientError):
                async with session.get(f"{url}/workers") as response:
                    workers = (await response.json())["workers"]
                if {one["url"] for one in workers if one["is_healthy"]} == set(worker_urls):
                    return True
            await asyncio.sleep(0.05)
    return False


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(STOP_S_MAX):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
