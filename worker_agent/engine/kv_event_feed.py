"""Hears an engine's KV-cache events, in order and without holes, or says that some are lost.

The engine publishes (PUB) and we subscribe; where it has a replay endpoint (ROUTER), what was
missed is asked for over a DEALER: at the start from the first batch on, and after a gap from there
on. What no replay fills is lost: `sink.lost` is called and hearing begins anew with what comes
next.

A sequence that falls is an engine that started again, unless its batch is no newer than the last
one: replay and subscription overlap.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Protocol

import structlog
import zmq
import zmq.asyncio

from worker_agent.engine.kv_event_wire import (
    END_OF_REPLAY,
    PAYLOAD_BYTES_MAX,
    Batch,
    MalformedEvents,
    pieces,
    read_batch,
    read_frames,
)

BLOCKS_PER_TURN_MAX = 64
"""Engine blocks taken in one turn of the event loop: well under a millisecond. One step of an
engine stores up to thousands (a prompt of 100,000 tokens has 6,250)."""

PAYLOAD_HERE_BYTES_MAX = 16_384
"""Larger payloads are read in a thread: about 3,000 tokens, half a millisecond."""

FRAMES_MAX = 100_000
"""Messages that may wait for us, as many as vLLM keeps for a subscriber; more are a gap."""

REPLAY_S_MAX = 3.0
"""Longest silence during a replay; vLLM looks for requests each 0.1 s."""

REPLAY_BATCHES_MAX = 100_000
"""Of one replay; vLLM keeps 10,000 unless told otherwise."""

RECONNECT_MS_MIN, RECONNECT_MS_MAX = 100, 1000
"""Pauses of ZeroMQ between two tries to connect; doubled each time."""

_log = structlog.get_logger(__name__)


class Sink(Protocol):
    """Who wants to know."""

    def heard(self, batch: Batch) -> None:
        """Take the next batch."""
        ...

    def lost(self, *, whole: bool) -> None:
        """Know nothing any more. `whole`: the engine's cache is empty, too; nothing is missed."""
        ...


class KvEventFeed:
    """One engine's events."""

    def __init__(
        self,
        endpoint: str,
        sink: Sink,
        *,
        replay_endpoint: str = "",
        replay_s_max: float = REPLAY_S_MAX,
    ) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._replay_s_max = replay_s_max
        self._sink = sink
        self._next: int | None = None
        """Sequence of the next batch; None: whatever comes begins anew."""
        self._last_at_s = 0.0
        self._begun = 0
        """How often hearing began anew by order: what is left of a batch from before is void."""
        self.counts: Counter[str] = Counter()
        """Batches heard and replayed, gaps, restarts, malformed messages, unknown events."""

    async def run(self) -> None:
        """Listen for ever."""
        context = zmq.asyncio.Context()
        try:
            async with _socket(context, zmq.SUB, self._endpoint) as socket:
                socket.subscribe(b"")
                await self._replay(context, 0)
                while True:
                    await self._take(context, await socket.recv_multipart())
                    await asyncio.sleep(0)  # What can't be read must not fill a turn either.
        finally:
            context.term()

    def resync(self) -> None:
        """Begin anew with the next batch: the engine, or what we knew of it, is another."""
        self._next = None
        self._begun += 1

    async def _take(self, context: "zmq.asyncio.Context", frames: list[bytes]) -> None:
        try:
            sequence, payload = read_frames(frames)
        except MalformedEvents as error:
            self._malformed(error)
            return
        batch = await self._read(payload)
        if batch is not None and self._next is not None and sequence < self._next:
            if batch.at_s <= self._last_at_s:
                return
            self.counts["restarts"] += 1
            self._next = None
        if self._next is None:
            await self._replay(context, 0)
        elif sequence > self._next:
            self.counts["gaps"] += 1
            _log.info("kv events missed", expected=self._next, heard=sequence)
            await self._replay(context, self._next)
        await self._place(sequence, batch)

    async def _place(self, sequence: int, batch: Batch | None) -> None:
        """Pass a batch on in its order; None: it can't be read."""
        if self._next is not None and sequence < self._next:
            return
        if sequence != self._next or batch is None:
            self._sink.lost(whole=sequence == 0 and batch is not None)
        self._next = sequence + 1
        if batch is not None:
            self._last_at_s = batch.at_s
            self.counts["batches"] += 1
            self.counts["unknown"] += batch.unknown
            await self._pass_on(batch)

    async def _pass_on(self, batch: Batch) -> None:
        """Tell the sink, some blocks in each turn of the loop."""
        begun = self._begun
        for piece in pieces(batch, blocks_max=BLOCKS_PER_TURN_MAX):
            if self._begun != begun:
                return
            self._sink.heard(piece)
            await asyncio.sleep(0)

    async def _replay(self, context: "zmq.asyncio.Context", start: int) -> None:
        """Ask for all from `start` on, and place it; whatever goes wrong leaves a gap."""
        if not self._replay_endpoint:
            return
        async with _socket(context, zmq.DEALER, self._replay_endpoint) as socket:
            try:
                await socket.send(b"", zmq.SNDMORE)
                await socket.send(start.to_bytes(8, "big"))
                for _ in range(REPLAY_BATCHES_MAX):
                    async with asyncio.timeout(self._replay_s_max):
                        frames = await socket.recv_multipart()
                    if END_OF_REPLAY in frames:
                        return
                    sequence, payload = read_frames(frames)
                    self.counts["replayed"] += 1
                    await self._place(sequence, await self._read(payload))
            except TimeoutError:
                self.counts["replay_timeouts"] += 1
            except MalformedEvents as error:
                self._malformed(error)

    async def _read(self, payload: bytes) -> Batch | None:
        try:
            if len(payload) > PAYLOAD_HERE_BYTES_MAX:
                return await asyncio.to_thread(read_batch, payload)
            return read_batch(payload)
        except MalformedEvents as error:
            self._malformed(error)
            return None

    def _malformed(self, error: MalformedEvents) -> None:
        self.counts["malformed"] += 1
        _log.warning("not a kv event", error=str(error)[:400])


@asynccontextmanager
async def _socket(
    context: "zmq.asyncio.Context", kind: int, endpoint: str
) -> AsyncGenerator["zmq.asyncio.Socket"]:
    socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, FRAMES_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, PAYLOAD_BYTES_MAX)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        socket.connect(endpoint)
        yield socket
    finally:
        socket.close(linger=0)
