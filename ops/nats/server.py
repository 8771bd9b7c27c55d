"""Runs a nats-server of our own: for the demo, the tests, and a cluster on one machine.

The binary comes from the `embedded` extra (a wheel) or from PATH. The server listens on loopback,
on a port that the system picks at the first start and that it keeps over restarts, and stores in a
folder of its own. It is known to be ready by its own word in its log, and it is ended by its
process id.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024
LOG_LINES_MAX = 200
"""Last lines of the server's log, kept for the error message."""

LOG_LINES_SHOWN = 10
"""How many of them an error message shows."""

START_S_MAX = 20.0
"""A start takes 10 ms; recovering a large store takes seconds."""

STOP_S_MAX = 10.0
"""A stop takes 10 ms; flushing under load takes longer."""

_LISTENING = re.compile(r"Listening for client connections on [^ ]+:(\d+)")
_MONITOR = re.compile(r"Starting http monitor on [^ ]+:(\d+)")
_READY = "Server is ready"
_FATAL = "[FTL]"


class ServerUnavailable(Exception):
    """No nats-server could be found or started; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server of ours may differ in."""

    name: str = "inferlane-embedded"
    sync_interval: str = ""
    """How often writes are flushed to disk: `always`, `1s`; empty = the server's own 2m."""
    user: str = ""
    password: str = ""
    max_mem: str = "256MB"
    max_file: str = "1TB"
    """Above the sum of all streams' own bounds, which the server sets aside as they are made."""
    monitor: bool = False
    """Whether to offer the HTTP monitor, on a free port."""
    extra: str = ""
    """More lines of configuration."""


def find_binary() -> Path:
    """Find nats-server beside this Python (the wheel's) or on PATH. Raises ServerUnavailable."""
    places = [Path(sysconfig.get_path("scripts")), Path(sys.executable).parent]
    for place in places:
        candidate = place / "nats-server"
        if os.access(candidate, os.X_OK):
            return candidate
    on_path = shutil.which("nats-server")
    if on_path is None:
        message = (
            "nats-server is not installed: run `pip install 'inferlane[embedded]'`, "
            "or put nats-server 2.12 or newer on PATH"
        )
        raise ServerUnavailable(message)
    return Path(on_path)


class NatsServer:
    """One nats-server process and its store."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        options: ServerOptions | None = None,
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Prepare; nothing runs yet. Without a `folder` the store is temporary: `close` ends it.

        `environment` comes on top of our own.
        """
        self.environment = dict(environment or {})
        self._temporary = None if folder else TemporaryDirectory(prefix="inferlane-nats-")
        self.folder = folder or Path(self._temporary.name if self._temporary else "")
        self.options = options or ServerOptions()
        self.port = port
        self.monitor_port = 0
        self._binary = find_binary()
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._log: deque[str] = deque(maxlen=LOG_LINES_MAX)
        # Set when the server said it is ready, and when its log ended without that.
        self._settled = threading.Event()
        self._ready = False

    @property
    def url(self) -> str:
        """Where clients connect, without credentials."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def monitor_url(self) -> str:
        """Where the monitor answers; empty where it was not asked for."""
        return f"http://127.0.0.1:{self.monitor_port}" if self.monitor_port else ""

    @property
    def pid(self) -> int:
        """Process id. Only after a start."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> list[str]:
        """Last lines the server wrote."""
        return list(self._log)

    def start(self, *, timeout_s: float = START_S_MAX) -> "NatsServer":
        """Start and wait until it says it is ready; after a stop, on the same port and store.

        Blocks: asynchronous callers use a thread. Raises ServerUnavailable.
        """
        assert not self.running, "already running"
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "server.conf"
        config.write_text(self._config())
        config.chmod(0o600)
        self._settled.clear()
        self._ready = False
        self._process = subprocess.Popen(
            [str(self._binary), "-c", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **self.environment},
            # Ctrl-C at the terminal is for us: the server is ended after its clients.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_log, name="nats-server log", daemon=True)
        self._reader.start()
        self._settled.wait(timeout_s)
        if not self._ready:
            self.kill()
            raise ServerUnavailable(self._why_not())
        return self

    def stop(self, *, timeout_s: float = STOP_S_MAX) -> None:
        """End the server in good order, or hard after `timeout_s`. Idempotent."""
        self._end(signal.SIGTERM, timeout_s=timeout_s)

    def kill(self) -> None:
        """End the server as a crash would. Idempotent."""
        self._end(signal.SIGKILL, timeout_s=STOP_S_MAX)

    def restart(self) -> "NatsServer":
        """Stop, then start on the same port and store."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop, and remove a temporary store. Idempotent."""
        self.stop()
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def pause(self) -> None:
        """Stop the process where it stands, as a stalled machine would."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "not started"
        self._process.send_signal(number)

    def _end(self, number: signal.Signals, *, timeout_s: float) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(number)
            # A paused process takes a signal only when it goes on.
            self._process.send_signal(signal.SIGCONT)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._reader is not None:
            self._reader.join()
            self._reader = None

    def _why_not(self) -> str:
        """Tell why it did not start: in its own words on what was fatal, else its last ones."""
        fatal = [line for line in self.log if _FATAL in line]
        return "nats-server did not start:\n" + "\n".join(fatal or self.log[-LOG_LINES_SHOWN:])

    def _read_log(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._note(line.rstrip())
        self._settled.set()

    def _note(self, line: str) -> None:
        self._log.append(line)
        if (clients := _LISTENING.search(line)) is not None:
            self.port = int(clients[1])
        elif (monitor := _MONITOR.search(line)) is not None:
            self.monitor_port = int(monitor[1])
        elif _READY in line:
            self._ready = True
            self._settled.set()

    def _config(self) -> str:
        options = self.options
        lines = [
            f"server_name: {_quoted(options.name)}",
            f"listen: 127.0.0.1:{self.port or -1}",
            f"max_payload: {PAYLOAD_BYTES_MAX}",
            "max_pending: 64MB",
            "jetstream {",
            f"  store_dir: {_quoted(str(self.folder))}",
            f"  max_mem: {options.max_mem}",
            f"  max_file: {options.max_file}",
        ]
        if options.sync_interval:
            lines.append(f"  sync_interval: {options.sync_interval}")
        lines.append("}")
        if options.monitor:
            lines.append(f"http: 127.0.0.1:{self.monitor_port or -1}")
        if options.user:
            user, password = _quoted(options.user), _quoted(options.password)
            lines.append(f"authorization {{ user: {user}, password: {password} }}")
        return "\n".join([*lines, options.extra, ""])


def _quoted(text: str) -> str:
    assert not set(text) & set('"\n\\'), "no quotes, backslashes or line breaks in a setting"
    return f'"{text}"'
