"""Keeps a connection to NATS up: dials, watches, and after any trouble dials anew, for ever.

There is one way back, whatever happened (server gone, socket dead, client closed, reader dead): a
new wire, on which all subscriptions are made again before anything is sent. While the link is down
nothing is buffered: `send` raises LinkDown, because an order that goes out later than it was given
is a wrong order.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

from broker.bus.background import Background
from broker.bus.base import BadLink, BusError, LinkDown, Timeout
from broker.bus.containment import Contained
from broker.bus.logs import Log
from broker.bus.nats_wire import Credentials, RawHandler, RefusedCredentials, Wire

_log = Log(__name__)

RECONNECT_WAIT_S = 0.2
"""Mean wait between two dials; each is drawn between half and one and a half of it, so that a whole
fleet does not knock at the same instant."""

WATCH_INTERVAL_S = 2.0
"""How often the watchdog asks the server for a sign of life."""

SILENT_PINGS_MAX = 2
"""Pings without answer until the link is given up: one may be our own busy loop, two are not."""

PORT = 4222
"""Where NATS listens if nothing else is said."""

VERSION_MIN = (2, 12)
"""Older servers silently ignore stream settings that we rely on."""


@dataclass(slots=True, eq=False)
class Route:
    """A subscription as the link keeps it, over any number of wires."""

    subject: str
    queue: str
    handler: RawHandler
    number: int = 0
    wire: Wire | None = None
    """Where it stands, and under which number."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Where to connect, and as whom."""

    urls: tuple[str, ...]
    name: str
    credentials: Credentials = field(default_factory=Credentials)
    connect_timeout_s: float = 5.0


def parse_urls(url: str | Sequence[str], credentials: Credentials) -> LinkOptions:
    """Read server URLs (comma-separated in a string); a user in one fills empty credentials.

    Raises BusError.
    """
    given = url.split(",") if isinstance(url, str) else list(url)
    urls: list[str] = []
    user, password, token = credentials.user, credentials.password, credentials.token
    for one in given:
        parts, host, port = _parts(one)
        if parts.username and not user and not token:
            if parts.password:
                user, password = unquote(parts.username), unquote(parts.password)
            else:
                token = unquote(parts.username)
        urls.append(f"{parts.scheme}://{host}:{port}")
    return LinkOptions(
        urls=tuple(urls),
        name="",
        credentials=Credentials(
            user, password, token, creds_file=credentials.creds_file, tls=credentials.tls
        ),
    )


def _parts(url: str) -> tuple[SplitResult, str, int]:
    """Take a URL apart; also its host as a URL has it, and its port. Raises BadLink."""
    text = url.strip()
    message = f"not a NATS URL: {url!r} (nats://host:port)"
    try:
        parts = urlsplit(text if "://" in text else f"nats://{text}")
        port = PORT if parts.port is None else parts.port
    except ValueError as error:
        raise BadLink(message) from error
    if parts.scheme not in ("nats", "tls") or not parts.hostname or not port:
        raise BadLink(message)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return parts, host, port


class Link:
    """A connection that comes back."""

    def __init__(
        self, options: LinkOptions, *, counts: Counter[str], background: Background
    ) -> None:
        self._options = options
        self._urls = list(options.urls)
        self._counts = counts
        self._background = background
        self._wire: Wire | None = None
        self._routes: list[Route] = []
        self._watchers: list[Callable[[bool], None]] = []
        self._closed = False
        self._contained = Contained(counts, "link handler")

    # state
    @property
    def connected(self) -> bool:
        """Whether the link stands, as far as is known."""
        return self._wire is not None

    @property
    def wire(self) -> Wire:
        """The present wire. Raises LinkDown."""
        if self._wire is None:
            message = "not connected"
            raise LinkDown(message)
        return self._wire

    @property
    def version(self) -> tuple[int, ...]:
        """The server's version."""
        return parse_version(str(self.wire.info.get("version", "")))

    def on_link(self, watcher: Callable[[bool], None]) -> None:
        """Call with True when the link comes back, with False when it is lost."""
        self._watchers.append(watcher)

    def off_link(self, watcher: Callable[[bool], None]) -> None:
        """Call no more. Idempotent."""
        if watcher in self._watchers:
            self._watchers.remove(watcher)

    @property
    def clustered(self) -> bool:
        """Whether the server is one of several."""
        return self._wire is not None and "cluster" in self._wire.info

    # opening and closing
    async def open(self) -> None:
        """Connect for the first time, or raise BusError within `connect_timeout_s`."""
        deadline_s = time.monotonic() + self._options.connect_timeout_s
        while True:
            try:
                await self._dial_any(deadline_s - time.monotonic())
            except LinkDown:
                if time.monotonic() + RECONNECT_WAIT_S * 2 > deadline_s:
                    raise
                await asyncio.sleep(_jittered(RECONNECT_WAIT_S))
            else:
                break
        version = self.version
        if version < VERSION_MIN:
            await self.close()
            shown = ".".join(map(str, version))
            message = f"nats-server {shown} is too old: {'.'.join(map(str, VERSION_MIN))} or newer"
            raise BusError(message)
        self._background.start(self._watch())

    async def close(self) -> None:
        """Send what waits and close. Idempotent."""
        self._closed = True
        wire, self._wire = self._wire, None
        if wire is not None:
            await wire.end(flush=True)
            self._tell(up=False)

    async def _dial_any(self, timeout_s: float) -> None:
        """Try each known server once, in random order. Raises LinkDown, RefusedCredentials."""
        urls = list(self._urls)
        random.shuffle(urls)
        trouble: BusError = LinkDown("no server known")
        share_s = max(0.1, timeout_s / len(urls))
        for url in urls:
            wire = Wire(counts=self._counts, lost=self._lost)
            try:
                async with asyncio.timeout(share_s):
                    await wire.dial(
                        url, name=self._options.name, credentials=self._options.credentials
                    )
            except TimeoutError:
                trouble = LinkDown(f"{url} does not answer")
            except (LinkDown, RefusedCredentials) as error:
                trouble = error
            else:
                self._take(wire)
                return
        raise trouble

    def _take(self, wire: Wire) -> None:
        """Make a wire the present one: subscriptions first, then everybody hears of it."""
        for route in self._routes:
            _place(route, wire)
        self._wire = wire
        self._tell(up=True)

    def _learn(self, wire: Wire) -> None:
        """Take note of the cluster's other servers, as this one told of them while it lived."""
        scheme = urlsplit(self._options.urls[0]).scheme
        told = sorted(f"{scheme}://{server.netloc}" for server in wire.servers)
        self._urls = list(dict.fromkeys([*self._options.urls, *told]))

    def _tell(self, *, up: bool) -> None:
        for watcher in list(self._watchers):
            with self._contained:
                watcher(up)

    # staying up
    def _lost(self, wire: Wire, why: str) -> None:
        if wire is not self._wire:
            return
        self._wire = None
        self._learn(wire)
        self._counts["links_lost"] += 1
        _log.warning("link to NATS lost", name=self._options.name, why=why)
        self._tell(up=False)
        if not self._closed:
            self._background.start(self._redial(wire))

    async def _redial(self, old: Wire) -> None:
        with self._contained:
            await old.end()
        while not self._closed:
            await asyncio.sleep(_jittered(RECONNECT_WAIT_S))
            try:
                await self._dial_any(self._options.connect_timeout_s)
            except BusError as error:
                self._counts["dials_failed"] += 1
                _log.debug("dial failed", name=self._options.name, error=str(error))
            else:
                self._counts["links_rebuilt"] += 1
                _log.info("link to NATS is back", name=self._options.name)
                return

    async def _watch(self) -> None:
        """Give up a wire that stands, but on which the server says nothing any more."""
        silent = 0
        while not self._closed:
            await asyncio.sleep(WATCH_INTERVAL_S)
            wire = self._wire
            if wire is None:
                silent = 0
                continue
            try:
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await wire.ping()
            except (TimeoutError, LinkDown):
                silent += 1
            else:
                silent = 0
            if silent >= SILENT_PINGS_MAX and wire is self._wire:
                silent = 0
                self._lost(wire, "the server is silent")

    # using it
    def send(self, subject: str, data: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        """Send a message. Raises LinkDown, PayloadTooLarge."""
        self.wire.send(subject, data, reply=reply, headers=headers)

    def hear(self, subject: str, handler: RawHandler, *, queue: str = "") -> Route:
        """Subscribe, now or as soon as the link stands."""
        route = Route(subject, queue, handler)
        self._routes.append(route)
        if self._wire is not None:
            _place(route, self._wire)
        return route

    def leave(self, route: Route, *, deaf: bool = True) -> None:
        """Unsubscribe; unless `deaf`, what is under way is heard until `forget`. Idempotent."""
        if route not in self._routes:
            return
        self._routes.remove(route)
        if self._wire is not None:
            self._wire.leave(route.number, deaf=deaf)

    def forget(self, route: Route) -> None:
        """Hear nothing more of a subscription that was left."""
        # On a newer wire its number is another's.
        if route.wire is not None:
            route.wire.forget(route.number)

    async def rtt_s(self, timeout_s: float) -> float:
        """Time a round trip behind all that was sent before. Raises Timeout, LinkDown."""
        start_s = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wire.ping()
        except TimeoutError as error:
            message = f"the server did not answer within {timeout_s} s"
            raise Timeout(message) from error
        return time.perf_counter() - start_s


def _place(route: Route, wire: Wire) -> None:
    route.number = wire.hear(route.subject, route.handler, queue=route.queue)
    route.wire = wire


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.5, 1.5)


def parse_version(text: str) -> tuple[int, ...]:
    """Read `2.15.1-beta` as (2, 15, 1)."""
    numbers = text.split("-", 1)[0].split(".")
    return tuple(int(number) for number in numbers if number.isdecimal())
