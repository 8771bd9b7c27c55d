"""Heartbeats, from a thread of their own: a busy agent is not a dead worker.

The thread has its own event loop and connection. It asks the agent's loop for a report. If that
loop is too busy to answer, the last report goes out again (without its cache summary), so the
broker keeps hearing what runs. A loop that says nothing for `stuck_s_max` is not busy but stuck:
then the beats end, and the broker's probe finds out.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass

import structlog
import uvloop
from msgspec.structs import replace

from broker.bus.base import Bus, BusError
from broker.wire import codec, subjects
from broker.wire.messages import Heartbeat

_log = structlog.get_logger(__name__)

FETCH_S_MAX = 0.25
"""How long the agent's loop may take to answer before its last report is sent again."""

CONNECT_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Report:
    """A heartbeat as the agent made it; `number` counts them, so that it learns which went out."""

    number: int
    heartbeat: Heartbeat


Fetch = Callable[[int], Awaitable[Report | None]]
"""Given the number of the last report sent, make the next; None when the agent is too busy."""


class Pulse:
    """Sends the heartbeats of one agent over one connection."""

    def __init__(
        self,
        bus: Bus,
        fetch: Fetch,
        *,
        worker: str,
        interval_s: float,
        stuck_s_max: float,
        now_s: Callable[[], float] = time.time,
        tick_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._fetch = fetch
        self._subject = subjects.heartbeat(worker)
        self._interval_s = interval_s
        self._stuck_s_max = stuck_s_max
        self._now_s = now_s
        self._tick_s = tick_s
        self._wake = asyncio.Event()
        self._last: Heartbeat | None = None
        self._reported_tick_s = 0.0
        self._sent_number = 0
        self._sequence = 0

    def wake(self) -> None:
        """Send the next heartbeat now."""
        self._wake.set()

    async def run(self) -> None:
        """Beat until cancelled."""
        while True:
            try:
                await self.beat()
            except Exception:  # noqa: BLE001  # The edge of this loop.
                # A fault of ours may not silence a worker that lives.
                _log.exception("heartbeat failed")
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def beat(self) -> None:
        """Send one heartbeat."""
        tick_s = self._tick_s()
        report = await self._fetch(self._sent_number)
        if report is not None:
            self._last = replace(report.heartbeat, summary=None)
            self._reported_tick_s = tick_s
        elif tick_s - self._reported_tick_s > self._stuck_s_max:
            return
        heartbeat = report.heartbeat if report is not None else self._last
        if heartbeat is None:
            return
        self._sequence += 1
        whole = replace(heartbeat, sequence=self._sequence, at_s=self._now_s())
        try:
            await self._bus.publish(self._subject, codec.encode(whole))
        except BusError as error:
            _log.warning("heartbeat not sent", error=repr(error))
            return
        if report is not None:
            self._sent_number = report.number


class HeartbeatThread:
    """The thread that beats for an agent which lives on the loop that made this."""

    def __init__(
        self,
        *,
        connect: Callable[[], Awaitable[Bus]],
        report: Callable[[int], Report],
        worker: str,
        interval_s: float,
        stuck_s_max: float,
    ) -> None:
        self._connect = connect
        self._report = report
        self._worker = worker
        self._interval_s = interval_s
        self._stuck_s_max = stuck_s_max
        self._agent_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pulse: Pulse | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()
        self._started.wait()

    def wake(self) -> None:
        """Send the next heartbeat now. From any thread."""
        self._call(lambda: self._pulse.wake() if self._pulse is not None else None)

    async def stop(self) -> None:
        """Send a last heartbeat, close the connection and end the thread. Idempotent."""
        self._call(lambda: self._stopping.set() if self._stopping is not None else None)
        await asyncio.to_thread(self._thread.join)

    def _call(self, what: Callable[[], None]) -> None:
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            return  # The thread's loop is closed: there is nothing left to tell it.

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        self._stopping = stopping = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._started.set()
        bus = await self._connected(stopping)
        if bus is None:
            return
        self._pulse = Pulse(
            bus,
            self._fetch,
            worker=self._worker,
            interval_s=self._interval_s,
            stuck_s_max=self._stuck_s_max,
        )
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._pulse.run())
            await stopping.wait()
            beating.cancel()
        await self._pulse.beat()
        await bus.close()

    async def _connected(self, stopping: asyncio.Event) -> Bus | None:
        """Connect, however long it takes; None when told to stop before that."""
        async with asyncio.TaskGroup() as group:
            connecting = group.create_task(self._connect_in_the_end())
            told = group.create_task(stopping.wait())
            await asyncio.wait([connecting, told], return_when=asyncio.FIRST_COMPLETED)
            told.cancel()
            connecting.cancel()
        return None if connecting.cancelled() else connecting.result()

    async def _connect_in_the_end(self) -> Bus:
        while True:
            try:
                return await self._connect()
            except Exception as error:  # noqa: BLE001  # The edge of this loop.
                # Without heartbeats the worker would be taken for dead while it works.
                _log.warning("heartbeats have no connection yet", error=repr(error))
                await asyncio.sleep(CONNECT_RETRY_S)

    async def _fetch(self, sent_number: int) -> Report | None:
        future: Future[Report] = Future()
        try:
            self._agent_loop.call_soon_threadsafe(self._fill, future, sent_number)
            async with asyncio.timeout(FETCH_S_MAX):
                return await asyncio.wrap_future(future)
        except (TimeoutError, RuntimeError):
            return None

    def _fill(self, future: "Future[Report]", sent_number: int) -> None:
        """On the agent's loop: make a report, unless nobody waits for it any more."""
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(self._report(sent_number))
            except Exception as error:  # noqa: BLE001  # Passed on to the thread, which logs it.
                future.set_exception(error)
