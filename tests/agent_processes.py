"""Worker agents as real processes, which a test may kill at any step."""

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import orjson

from tests.agents import WORKER
from tests.builders import MODEL

ROOT = Path(__file__).parents[1]


class AgentProcess:
    """One agent with a fake engine."""

    def __init__(self, process: asyncio.subprocess.Process, ready: dict[str, object]) -> None:
        self.process = process
        self.ready = ready
        """The first line it said: what it waits for, or that it is up."""

    async def next_said(self) -> dict[str, object]:
        """Wait for the next line it says."""
        assert self.process.stdout is not None
        return orjson.loads(await self.process.stdout.readline())

    async def ended(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal."""
        return await self.process.wait()


@asynccontextmanager
async def an_agent_process(
    url: str, *flags: str, place: str = "never", worker: str = WORKER
) -> AsyncGenerator[AgentProcess]:
    """Run an agent until the block ends. `place` is where it dies, see `crash_at`."""
    command = [sys.executable, "-m", "tests.crashing_agent", place]
    own = ["--worker", worker, "--nats", url, "--engine", "fake", "--model", MODEL]
    process = await asyncio.create_subprocess_exec(
        *command, *own, *flags, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        yield AgentProcess(process, orjson.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
