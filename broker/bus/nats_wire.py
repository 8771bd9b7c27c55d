"""One connection to a NATS server: the nats client, stripped of what gets in the way.

This is the only module that touches the nats package. A wire lives from connect to its first
trouble; it never reconnects (`nats_link` makes a new one), so that no buffer, parser state or stale
order outlives a connection.

What is changed in the client, and why (each trap has a test in
`tests/integration/test_nats_*.py`):
- Messages go straight to a plain function: no queue, task and header parsing for each one.
- Commands of one turn of the loop leave in one write, in order, subscriptions and pings included.
- The end of the reading task, whatever ended it, is the end of the wire: no "connected" that hears
  nothing.
- A late PONG, after its waiter gave up, is ignored; the client's own code dies of it.
"""

import asyncio
import re
import ssl
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.client import Client

from broker.bus.base import BadLink, BusError, LinkDown, PayloadTooLarge
from broker.bus.containment import Contained
from broker.bus.logs import Log

_log = Log(__name__)

RawHandler = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Called with subject, reply, data and header block."""

SEND_BYTES_MAX = 64 * 1024 * 1024
"""What may wait for a server that reads too slowly; it would drop us at 64 MB itself."""

TROUBLES_MAX = 3
"""How many causes are told when a wire is lost."""

FLUSH_S_MAX = 2.0
"""How long a close waits for the server to read what was sent."""

PING_INTERVAL_S = 5
"""How often the client asks whether the server is there; three silent ones end the wire."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """How we say who we are. Empty = not at all."""

    user: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    creds_file: Path | None = None
    tls: ssl.SSLContext | None = None


_REFUSED = re.compile(r"authorization violation|authentication (expired|revoked)", re.IGNORECASE)
"""How a server says so. Its "authentication timeout" is haste, not refusal."""


CREDS_BYTES_MAX = 1_000_000
"""Of a credentials file; one of a user has 1 kB. The client reads all of what it is given."""


def _check_creds(path: Path) -> None:
    """Raises BadLink when it is no file of a sensible size."""
    try:
        is_file = path.is_file()
    except OSError as error:  # In a folder that may not be entered.
        message = f"{path} can't be read: {(error.strerror or str(error)).lower()}"
        raise BadLink(message) from error
    if not is_file:
        message = f"no credentials file {path}"
        raise BadLink(message)
    if path.stat().st_size > CREDS_BYTES_MAX:
        message = f"{path} is no credentials file: it is larger than {CREDS_BYTES_MAX:,} bytes"
        raise BadLink(message)


class RefusedCredentials(BusError):
    """The server does not know us by these credentials: trying again won't help."""


class Wire(Client):
    """A connection that ends at its first trouble, and says so at once."""

    _reading_task: asyncio.Task[None] | None

    def __init__(self, *, counts: Counter[str], lost: Callable[["Wire", str], None]) -> None:
        super().__init__()
        self._counts = counts
        self._lost: Callable[[Wire, str], None] | None = lost
        self._handlers: dict[int, RawHandler] = {}
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._contained = Contained(counts, "bus")
        self._trouble: list[str] = []
        self._pong_waiters: deque[asyncio.Future[bool]] = deque()
        self._must_encrypt = False

    async def dial(self, url: str, *, name: str, credentials: Credentials) -> None:
        """Connect, or raise LinkDown, RefusedCredentials, BadLink. Bounded by the caller."""
        self._must_encrypt = url.startswith("tls://") or credentials.tls is not None
        creds = credentials.creds_file
        if creds is not None:
            await asyncio.to_thread(_check_creds, creds)
        try:
            await self.connect(
                [url],
                name=name,
                error_cb=self._note_trouble,
                allow_reconnect=False,
                # One try a wire (0 would mean for ever); waiting between tries is the link's.
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                ping_interval=PING_INTERVAL_S,
                pending_size=0,
                user=credentials.user or None,
                password=credentials.password or None,
                token=credentials.token or None,
                user_credentials=str(creds) if creds else None,
                tls=credentials.tls,
            )
        except (OSError, nats.errors.Error, TimeoutError, asyncio.IncompleteReadError) as error:
            await self.end()
            said = "; ".join(dict.fromkeys([*self._trouble, str(error)]))
            if _REFUSED.search(said):
                message = f"{url} refused our credentials"
                raise RefusedCredentials(message) from error
            message = f"can't reach {url}: {said}"
            raise LinkDown(message) from error
        except ImportError as error:
            await self.end()
            message = (
                f"a credentials file needs a package that is missing: pip install {error.name}"
            )
            raise BadLink(message) from error
        except BaseException:
            await self.end()
            raise
        assert self._reading_task is not None
        self._reading_task.add_done_callback(lambda _: self._tell_lost("the reading task ended"))

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002 - the client calls it so
        """Hear what the server is; before who we are is said, see that nobody else will hear it.

        The client alone encrypts only where the server insists, whatever the URL says.
        """
        if initial_connection and self._must_encrypt and not info.get("tls_required"):
            if not info.get("tls_available"):
                message = "this server has no TLS; take nats:// if the way there is safe"
                raise nats.errors.Error(message)
            info["tls_required"] = True
        await super()._process_info(info, initial_connection=initial_connection)

    async def end(self, *, flush: bool = False) -> None:
        """Close without telling; with `flush`, what was sent before goes out first. Idempotent."""
        self._lost = None
        if flush:
            self._write_out()
        else:
            self._abort()
        with self._contained:
            try:
                async with asyncio.timeout(FLUSH_S_MAX):
                    await self._close(Client.CLOSED, do_cbs=False)
            except TimeoutError:
                self._abort()

    def _abort(self) -> None:
        """Drop the socket: a peer that doesn't read would hold up an orderly close for ever."""
        self._out.clear()
        self._out_bytes = 0
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    @property
    def info(self) -> dict[str, Any]:
        """What the server said of itself."""
        return self._server_info

    # sending
    def send(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        """Send a message at the end of this turn of the loop. Raises PayloadTooLarge, LinkDown."""
        size = len(headers) + len(data)
        if size > self._max_payload:
            # The server would answer with a closed connection, and the client would not come back.
            message = f"{size} bytes are more than the server's {self._max_payload}"
            raise PayloadTooLarge(message)
        middle = f"{reply} " if reply else ""
        if headers:
            line = f"HPUB {subject} {middle}{len(headers)} {size}\r\n".encode()
            self.put(b"".join((line, headers, data, b"\r\n")))
        else:
            line = f"PUB {subject} {middle}{size}\r\n".encode()
            self.put(b"".join((line, data, b"\r\n")))

    def put(self, command: bytes, *, bounded: bool = True) -> None:
        """Send a command at the end of this turn of the loop. Raises LinkDown."""
        if self._lost is None or self._transport is None:
            message = "the link is lost"
            raise LinkDown(message)
        if bounded and self.waiting_bytes + len(command) > SEND_BYTES_MAX:
            message = f"the server reads too slowly: {self.waiting_bytes} bytes wait for it"
            raise LinkDown(message)
        if not self._out:
            self._loop.call_soon(self._write_out)
        self._out.append(command)
        self._out_bytes += len(command)

    @property
    def waiting_bytes(self) -> int:
        """What was sent and has not left this process."""
        writer = getattr(self._transport, "_io_writer", None)
        buffered = writer.transport.get_write_buffer_size() if writer is not None else 0
        return self._out_bytes + buffered

    def _write_out(self) -> None:
        if not self._out:
            return
        out, self._out = b"".join(self._out), []
        self._out_bytes = 0
        if self._transport is not None and not self._is_cut():
            with self._contained:
                self._transport.write(out)

    def _is_cut(self) -> bool:
        """Whether nothing can leave: the link is lost, and its reader is about to say so."""
        writer = getattr(self._transport, "_io_writer", None)
        return writer is not None and writer.transport.is_closing()

    # hearing
    def hear(self, subject: str, handler: RawHandler, *, queue: str = "") -> int:
        """Subscribe; returns the number to `leave` by."""
        self._sid += 1
        self._handlers[self._sid] = handler
        middle = f"{queue} " if queue else ""
        self.put(f"SUB {subject} {middle}{self._sid}\r\n".encode())
        return self._sid

    def leave(self, number: int, *, deaf: bool = True) -> None:
        """Unsubscribe; unless `deaf`, what the server has sent already is still heard."""
        if deaf:
            self._handlers.pop(number, None)
        self.put(f"UNSUB {number}\r\n".encode())

    def forget(self, number: int) -> None:
        """Drop the handler of a subscription left before."""
        self._handlers.pop(number, None)

    async def ping(self) -> None:
        """Wait until the server has answered all that was sent before."""
        future: asyncio.Future[bool] = self._loop.create_future()
        self._pong_waiters.append(future)
        self.put(b"PING\r\n")
        await future

    # what the client calls: names and signatures are its own
    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        handler = self._handlers.get(sid)
        if handler is not None:
            with self._contained:
                handler(subject, reply, data, headers)

    async def _send_command(self, cmd: bytes, priority: bool = False) -> None:  # noqa: FBT001, FBT002
        del priority
        # The answer to a PING of a server that is just leaving: nobody waits for it.
        if self._lost is not None:
            self.put(cmd, bounded=False)

    async def _flush_pending(self, force_flush: bool = False) -> None:  # noqa: FBT001, FBT002
        """Nothing to do: what was put leaves at the end of the turn."""

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        if self._lost is not None:
            self._pong_waiters.append(future or self._loop.create_future())
            self.put(b"PING\r\n", bounded=False)

    async def _process_pong(self) -> None:
        self._pings_outstanding = 0
        if self._pong_waiters:
            future = self._pong_waiters.popleft()
            if not future.done():
                future.set_result(True)

    async def _close(self, status: int, do_cbs: bool = True) -> None:  # noqa: FBT001, FBT002
        self._tell_lost("; ".join(self._trouble) or str(self._err or "the server closed it"))
        await super()._close(status, do_cbs)

    async def _note_trouble(self, error: Exception) -> None:
        """Hear of an error. Must never raise: it would end the reading task."""
        with self._contained:
            self._counts["link_errors"] += 1
            text = str(error) or type(error).__name__
            if "permissions" in text.lower():
                # The link stands, but what was asked for is not done, and nobody else hears of it.
                _log.warning("NATS refuses", error=text)
            if text not in self._trouble:
                self._trouble = [*self._trouble[-TROUBLES_MAX:], text]

    def _tell_lost(self, why: str) -> None:
        lost, self._lost = self._lost, None
        for future in self._pong_waiters:
            if not future.done():
                future.set_exception(LinkDown("the link was lost"))
                # Whoever waits hears it; nobody needs to.
                future.exception()
        if lost is not None:
            with self._contained:
                lost(self, why)
