"""`inferlane up` as a user runs it: how it comes up, and that nothing of it stays behind.

However it ends (Ctrl-C at any moment, kill -9), its processes end too and the folder can be used
again.
"""

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from ops.cluster import LOCK_FILE
from ops.demo.setting import ONLINE_KEY
from producers.client import Client
from tests.acceptance.test_kills import a_chat


@dataclass(slots=True)
class Up:
    """One run of the command."""

    process: asyncio.subprocess.Process
    folder: Path

    async def until(self, said: str) -> str:
        """Read what it says until a line has this in it; return that line."""
        assert self.process.stdout is not None
        heard: list[str] = []
        try:
            async with asyncio.timeout(40):
                async for line in self.process.stdout:
                    heard.append(line.decode())
                    if said in heard[-1]:
                        return heard[-1]
        except TimeoutError:
            pass
        message = f"it never said {said!r}, but {''.join(heard)!r}"
        raise AssertionError(message)

    async def url(self) -> str:
        """Wait until it is up; return where NATS listens."""
        found = re.search(r"nats://\S+", await self.until(" submit "))
        assert found
        return found[0]

    async def end(self, number: signal.Signals) -> int:
        """Signal it, and wait for its end."""
        self.process.send_signal(number)
        async with asyncio.timeout(20):
            return await self.process.wait()

    def left(self) -> list[str]:
        """Commands of all processes that name its folder."""
        found: list[str] = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = entry.read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(self.folder) in command and entry.parent.name != str(os.getpid()):
                found.append(command)
        return found

    async def until_gone(self) -> None:
        """Wait until nothing of it runs."""
        async with asyncio.timeout(25):
            while self.left():
                await asyncio.sleep(0.05)


@asynccontextmanager
async def an_up(folder: Path) -> AsyncGenerator[Up]:
    """Run the command until the block ends, and make sure that nothing of it is left."""
    process = await _start(folder)
    up = Up(process, folder)
    try:
        yield up
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await up.until_gone()


async def _start(folder: Path) -> asyncio.subprocess.Process:
    """Start the command with modelled engines on free ports."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", "up", "--engine", "fake", "--workers", "2"),
        *("--port", "0", "--http-port", "0", "--gateway-port", "0", "--folder", str(folder)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def test_it_serves_until_ctrl_c_and_leaves_nothing(tmp_path: Path) -> None:
    """A job runs; a second one in the same folder is refused; a killed worker comes back."""
    async with an_up(tmp_path / "up") as up:
        gateway = (await up.until("base_url")).split('"')[1]
        async with openai.AsyncOpenAI(base_url=gateway, api_key=ONLINE_KEY) as door:
            assert [model.id async for model in door.models.list()] == ["tiny"]
        async with Client.connect(await up.url(), lane="online") as client:
            record = await (await client.submit(a_chat())).result(20)
        second = await _start(up.folder)
        said, _ = await second.communicate()
        assert f"started by process {up.process.pid}): end it first" in said.decode()
        assert second.returncode == 1
        _kill(up, lambda command: command.endswith("--worker worker-2 "))
        await up.until("worker-2 ended (-9) and is started again")
        assert await up.end(signal.SIGINT) == 0
        assert not up.left()
    async with an_up(tmp_path / "up") as again:
        async with Client.connect(await again.url(), lane="online") as client:
            assert await client.find_record(record.job) == record
        assert await again.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("said", ["Starting NATS", "broker-1.log", "worker-2.log"])
async def test_ctrl_c_while_it_starts_ends_all_at_once(tmp_path: Path, said: str) -> None:
    """Before NATS, before the broker, before the workers are up: exit code 0, nothing left."""
    async with an_up(tmp_path / "up") as up:
        if said.endswith(".log"):
            async with asyncio.timeout(20):
                while not (up.folder / said).exists():
                    await asyncio.sleep(0.01)
        else:
            await up.until(said)
        began_s = asyncio.get_running_loop().time()
        assert await up.end(signal.SIGINT) == 0
        assert asyncio.get_running_loop().time() - began_s < 10
        assert not up.left()


@pytest.mark.parametrize("moment", ["starting", "up"])
async def test_kill_9_leaves_nothing_and_the_folder_is_free_again(
    tmp_path: Path, moment: str
) -> None:
    """Server, broker and workers end within seconds; the next one waits for that and comes up."""
    async with an_up(tmp_path / "up") as up:
        if moment == "starting":
            async with asyncio.timeout(20):
                while not (up.folder / LOCK_FILE).exists():
                    await asyncio.sleep(0.01)
        else:
            await up.url()
        assert await up.end(signal.SIGKILL) == -signal.SIGKILL
        async with an_up(up.folder) as again:
            await again.url()
            assert await again.end(signal.SIGINT) == 0


def _kill(up: Up, chosen: Callable[[str], bool]) -> None:
    """Kill the one process of the cluster whose command is chosen."""
    (pid,) = [
        int(entry.parent.name)
        for entry in Path("/proc").glob("[0-9]*/cmdline")
        if str(up.folder) in (command := entry.read_bytes().replace(b"\0", b" ").decode())
        and chosen(command)
    ]
    os.kill(pid, signal.SIGKILL)
