"""An engine of the agent's own: a llama.cpp server in a child process, on a Unix socket.

A crash of the engine is only an event here: what ran fails as with any lost engine, a new process
is started after a pause, and its incarnation says that the cache is empty.
"""

import asyncio
import importlib.util
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec
import structlog

from broker.bus.background import Background
from broker.wire.messages import Load
from worker_agent.engine.base import (
    EngineFailed,
    EngineOutput,
    EngineRequest,
    Facts,
    Readiness,
)
from worker_agent.engine.http_client import SOCKET_PATH_BYTES_MAX, UNIX_PREFIX
from worker_agent.engine.llama_server import READY, LlamaOptions
from worker_agent.engine.openai_http import OpenAiHttpEngine

RESTART_S_MIN = 0.5
"""Pause before the first restart; doubles with each one that didn't help (systemd's habit)."""

RESTART_S_MAX = 30.0
"""Longest pause: a model file that was put right is noticed within this time."""

STABLE_S = 60.0
"""A process that lived this long starts the pauses anew."""

STOP_S_MAX = 5.0
"""Longest wait for a process to end by itself before it is killed."""

LOG_BYTES_MAX = 400
"""End of the engine's log that is told when it fails to start: its last lines name the cause."""

_log = structlog.get_logger(__name__)


class LlamaEngine:
    """Runs the server, starts it again when it ends, and passes requests on to it."""

    def __init__(
        self,
        options: LlamaOptions,
        *,
        runtime_dir: Path | None = None,
        restart_s_min: float = RESTART_S_MIN,
    ) -> None:
        """Socket and log go into a folder of its own in `runtime_dir`, the system's if None.

        Raises ValueError when the socket's path would be too long.
        """
        self._restart_s_min = restart_s_min
        parent = runtime_dir or Path(tempfile.gettempdir())
        self._folder = parent / f"inferlane-{secrets.token_hex(4)}"
        socket_path = str(self._folder / "engine.sock")
        if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES_MAX:
            message = (
                f"{socket_path}: a socket's path has at most {SOCKET_PATH_BYTES_MAX} bytes; "
                f"choose a shorter runtime folder"
            )
            raise ValueError(message)
        self._options = msgspec.structs.replace(options, socket_path=socket_path)
        self._server = OpenAiHttpEngine(
            f"{UNIX_PREFIX}{socket_path}", slots=options.slots, models=(options.model,)
        )
        self._background = Background()
        self._process: asyncio.subprocess.Process | None = None
        self._incarnation = 0
        self._loaded = False
        self._detail = "not started"

    @property
    def facts(self) -> Facts:
        """Return what is known now."""
        known = self._server.facts
        capacity = self._options.slots * self._options.context_tokens
        return Facts(known.slots, known.kv_tokens_max or capacity, max(1, self._incarnation))

    @property
    def process_id(self) -> int | None:
        """Process id of the server; None while there is none."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the server and keep it running. Raises EngineFailed if it can't run here at all."""
        _check_runnable(self._options)
        self._folder.mkdir(mode=0o700)  # The socket takes no password.
        await self._server.start()
        self._background = Background()
        self._detail = "starting"
        self._background.start(self._keep_running())

    async def stop(self) -> None:
        """End the server and remove its folder."""
        await self._background.close()
        await self._server.stop()
        await self._end_process()
        self._detail = "stopped"
        shutil.rmtree(self._folder, ignore_errors=True)

    async def ready(self) -> Readiness:
        """Tell whether the model is loaded and the server answers."""
        if not self._loaded:
            return Readiness(ready=False, detail=self._detail, away=True)
        return await self._server.ready()

    def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request on the server."""
        return self._server.run(request)

    async def load(self) -> Load:
        """Return how loaded the server is."""
        return await self._server.load() if self._loaded else Load()

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._restart_s_min
        while True:
            started_at_s = loop.time()
            await self._live_once()
            if loop.time() - started_at_s >= STABLE_S:
                pause_s = self._restart_s_min
            self._detail = f"{self._detail}; starts again in {pause_s:g} s"
            _log.warning("engine ended", detail=self._detail)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RESTART_S_MAX)

    async def _live_once(self) -> None:
        """Run one process from start to end."""
        log_path = self._folder / "engine.log"
        with log_path.open("wb") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker_agent.engine.llama_server"),
                msgspec.json.encode(self._options).decode(),
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        self._incarnation += 1
        self._detail = "loading the model"
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                self._loaded = self._loaded or line == READY
            exit_code = await process.wait()
        finally:
            was_loaded, self._loaded = self._loaded, False
        self._process = None
        said = "" if was_loaded else f": {_last_lines(log_path)}"
        self._detail = f"the engine {_manner(exit_code)}{said}"

    async def _end_process(self) -> None:
        """Close the process's standard input, which ends it; kill it if that doesn't."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S_MAX):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def _check_runnable(options: LlamaOptions) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        message = "llama.cpp is not installed: pip install 'inferlane[llama]'"
        raise EngineFailed(message)
    if not Path(options.gguf).is_file():
        message = f"{options.gguf}: no such model file"
        raise EngineFailed(message)


def _manner(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was ended by {signal.Signals(-exit_code).name}"


def _last_lines(log_path: Path) -> str:
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - LOG_BYTES_MAX))
        return log.read().decode(errors="replace").strip()
