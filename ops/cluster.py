"""A whole cluster of real processes on this machine: nats-server, broker, workers.

`inferlane demo` and `up` run on it, and so do the acceptance tests: what they kill and restart is
what users run. Everything listens on loopback and on free ports, lives in one folder that no other
cluster may share, and is ended by its process id, also when whoever started it is killed.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import msgspec

from ops.nats.server import NatsServer, ServerOptions
from ops.warden import ENDING_S_MAX, POLL_S, Warden

READY_S_MAX = 60.0
"""Longest wait for a process to say it is up: loading Python packages takes 1 s, on a busy machine
many."""

STOP_S_MAX = 10.0
"""Longest wait for a process to end in good order."""

LOG_TAIL_BYTES = 2000

LOCK_FILE = "cluster.lock"
"""In a cluster's folder: held by who runs there, with its process id."""

_SERVER_RANK, _MEMBER_RANK = 0, 1
"""The server is ended last, after its clients."""


class ClusterError(Exception):
    """A cluster can't run here, or a process of it did not come up; the text says what to do."""


@dataclass(slots=True)
class Member:
    """One process of the cluster."""

    name: str
    command: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    process: Process | None = None
    said: dict[str, object] = field(default_factory=dict[str, object])
    """Its readiness line."""
    starts: int = 0
    warden: Warden | None = None
    """Ends the process if we can't any more."""
    _log_start: int = 0
    """Where in the log its last start begins."""

    @property
    def log(self) -> Path:
        """Where its standard error goes."""
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Process id. Only after a start."""
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process is not None and self.process.returncode is None

    async def start(self, *, ready_s_max: float = READY_S_MAX) -> None:
        """Start and wait for its readiness line. Raises ClusterError."""
        assert not self.running, "already running"
        self.starts += 1
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=DEVNULL,
                stdout=PIPE,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.environment},
                start_new_session=True,
            )
        if self.warden is not None:
            self.warden.watch(self.process.pid, rank=_MEMBER_RANK)
        try:
            async with asyncio.timeout(ready_s_max):
                self.said = await self._readiness()
        except TimeoutError as error:
            await self.kill()
            message = f"{self.name} did not come up within {ready_s_max:g} s:\n{self._tail()}"
            raise ClusterError(message) from error

    async def _readiness(self) -> dict[str, object]:
        assert self.process is not None, "not started"
        assert self.process.stdout is not None, "stdout is a pipe"
        async for line in self.process.stdout:
            with contextlib.suppress(msgspec.DecodeError):
                said = msgspec.json.decode(line, type=dict[str, object])
                if said.get("event") == "ready":
                    return said
        code = await self.process.wait()
        message = f"{self.name} ended with code {code} before it was ready:\n{self._tail()}"
        raise ClusterError(message)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing when it has ended."""
        if self.process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def stop(self, *, timeout_s: float = STOP_S_MAX) -> int:
        """End it in good order, or hard after `timeout_s`; returns its exit code. Idempotent."""
        if self.process is None:
            return 0
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.ended()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """End it as a crash would. Idempotent."""
        if self.process is None:
            return 0
        self.signal(signal.SIGKILL)
        return await self.ended()

    async def ended(self) -> int:
        """Wait for its end, and return its exit code. Only after a start."""
        assert self.process is not None, "not started"
        code = await self.process.wait()
        if self.warden is not None:
            self.warden.forget(self.process.pid)
        return code

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            said = self.log.read_bytes()[self._log_start :]
            return said[-LOG_TAIL_BYTES:].decode(errors="replace").strip()
        return ""


class LocalCluster:
    """A server, a broker and workers, started together and ended together."""

    def __init__(
        self,
        folder: Path,
        *,
        port: int = 0,
        sync_interval: str = "",
        server: NatsServer | None = None,
    ) -> None:
        """Prepare a cluster whose files all stand in `folder`; port 0 is any free one.

        `server`, where given, is started and ended instead of one of its own.
        """
        self.folder = folder
        options = ServerOptions(sync_interval=sync_interval)
        self.server = server or NatsServer(folder / "nats", options=options, port=port)
        self.members: dict[str, Member] = {}
        self._warden: Warden | None = None
        self._lock: IO[str] | None = None

    @property
    def mark(self) -> dict[str, str]:
        """Environment of a process that is to end with this cluster, however that ends."""
        return {} if self._warden is None else self._warden.mark

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.server.url

    async def __aenter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = await _locked(self.folder)
        except OSError as error:
            message = f"{self.folder} can't be written ({error.strerror}); name another --folder"
            raise ClusterError(message) from error
        self._warden = Warden(keep_open=[self._lock.fileno()])
        self.server.environment = self._warden.mark
        try:
            await asyncio.to_thread(self.server.start)
        except BaseException:
            await self.close()
            raise
        self._warden.watch(self.server.pid, rank=_SERVER_RANK)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def add_broker(self, name: str, config: Path) -> Member:
        """Add a broker that reads `config`, with a state_dir of its own; not started yet."""
        command = (sys.executable, "-m", "ops.cli.main", "broker", "--config", str(config))
        own = ("--name", name, "--state-dir", str(self.folder / f"state-{name}"))
        return self.add(name, (*command, *own))

    def add_worker(self, name: str, config: Path) -> Member:
        """Add a worker that reads `config`; it is not started yet."""
        command = (sys.executable, "-m", "worker_agent.main", "--config", str(config))
        return self.add(name, (*command, "--worker", name))

    def add_gateway(self, name: str, config: Path) -> Member:
        """Add a gateway that reads `config`; it is not started yet."""
        return self.add(
            name, (sys.executable, "-m", "ops.cli.main", "gateway", "--config", str(config))
        )

    async def start(self, *members: Member) -> None:
        """Start several at once, and wait until all are ready."""
        async with asyncio.TaskGroup() as group:
            for member in members:
                group.create_task(member.start())

    async def close(self) -> None:
        """End everything: workers first, the server last. Idempotent."""
        async with asyncio.TaskGroup() as group:
            # One signal each: a second one would cut a worker's leave short.
            for member in reversed(list(self.members.values())):
                group.create_task(member.stop())
        await asyncio.to_thread(self.server.stop)
        if self._warden is not None and self._lock is not None:
            await asyncio.to_thread(self._warden.close)
            self._lock.close()

    def kill(self) -> None:
        """End all processes hard and at once; `close` is still to be called."""
        for member in self.members.values():
            member.signal(signal.SIGKILL)

    def add(self, name: str, command: tuple[str, ...]) -> Member:
        """Add any other process that says it is ready; it is not started yet."""
        assert name not in self.members, f"{name} is there already"
        member = Member(name, command, self.folder, self.mark, warden=self._warden)
        self.members[name] = member
        return member


async def _locked(folder: Path) -> IO[str]:
    """Lock a folder for this process's cluster. Raises ClusterError when another runs there.

    One whose starter was killed is waited for: it is being ended.
    """
    lock = (folder / LOCK_FILE).open("a+", encoding="utf-8")
    loop = asyncio.get_running_loop()
    gives_up_at_s = loop.time() + 2 * ENDING_S_MAX
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            holder = _holder(lock)
            if _runs(holder) or loop.time() > gives_up_at_s:
                lock.close()
                message = (
                    f"another cluster runs in {folder} (started by process {holder}): "
                    "end it first, or name another --folder"
                )
                raise ClusterError(message) from error
        await asyncio.sleep(POLL_S)
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _holder(lock: IO[str]) -> int:
    """Read whose lock it is; 0 when it doesn't say yet."""
    lock.seek(0)
    said = lock.read().strip()
    return int(said) if said.isdecimal() else 0


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
