"""A streamed answer: each piece goes out as it comes, at the pace of its reader.

Until the first piece there is no status yet, so what fails before has one of its own; a stream that
waits for long begins with comments instead, and what fails then is an event. While a slow reader
takes nothing, his pieces wait within `stream_bytes_max`; beyond, the rest comes at the end in one
piece. One who takes nothing for `write_s_max` is cut off by his connection.

Once an answer has begun, its pieces are written at the end of the turn in which they are heard: no
task wakes for them, which would cost more than all the rest, and what was heard together is one
write. Whatever is not plain (a slow reader, a restart, the end) is the task's.
"""

import asyncio

from aiohttp import web

from broker.wire.messages import Kind
from producers.errors import ProducerError, ResultTimeout
from producers.gateway import headers
from producers.gateway.asking import Held, Question
from producers.gateway.connections import Outlet
from producers.gateway.errors import ApiError, of_producer, of_record
from producers.gateway.gateway import Gateway
from producers.gateway.sse import CONTENT_TYPE, WAITING, CantContinue, Relay
from producers.token_stream import Chunk

CHUNKS_AT_ONCE = 64
"""Pieces that go out in one write, where a busy gateway or a slow reader let some pile up: 16 kB of
usual ones, what a connection buffers without waiting."""


class Streamed:
    """One streamed answer."""

    def __init__(
        self,
        gateway: Gateway,
        request: web.Request,
        question: Question,
        held: Held,
        *,
        arrived_at_s: float,
    ) -> None:
        """`arrived_at_s`: when the request came, by the loop's clock."""
        self._gateway = gateway
        self._config = gateway.config
        self._request = request
        self._ticket = held.ticket
        self._may_stream = held.may_stream
        self._relay = Relay(question.endpoint, usage_asked=question.usage_asked)
        self._arrived_at_s = arrived_at_s
        self._response: web.StreamResponse | None = None
        self._outlet: Outlet | None = None
        """Since the answer's head is written."""
        self._sent_at_s = arrived_at_s
        """By the loop's clock."""
        self._waits = False
        """The task waits for a piece: nothing is under way to the reader but what was written."""
        self._is_due = False
        """Pieces are written at the end of this turn."""

    async def answer(self) -> web.StreamResponse:
        """Stream the answer to its end. Raises ApiError, ProducerError before it has begun."""
        self._gateway.streams += 1
        try:
            async with asyncio.timeout(self._config.answer_s_max):
                await self._pass_on()
                ending = self._ending()
        except TimeoutError:
            late = f"there is no whole answer after {self._config.answer_s_max:g} s"
            ending = self._failed(of_producer(ResultTimeout(late)))
        except CantContinue as error:
            ending = self._failed(ApiError(503, "stream_broken", f"The stream broke: {error}."))
        except ProducerError as error:
            ending = self._failed(of_producer(error))
        finally:
            self._gateway.streams -= 1
        response = await self._open()
        await self._write(ending)
        await response.write_eof()
        return response

    async def _pass_on(self) -> None:
        """Send piece by piece, until the job has ended."""
        loop = asyncio.get_running_loop()
        silence_s = self._config.stream_silence_s
        self._sent_at_s = loop.time()
        self._ticket.on_chunks = self._heard if self._may_stream else None
        try:
            while True:
                try:
                    async with asyncio.timeout_at(self._sent_at_s + silence_s):
                        chunk = await self._next()
                except TimeoutError:
                    if self._sent_at_s + silence_s <= loop.time():
                        await self._write(WAITING)
                    continue
                if chunk is None:
                    return
                if self._response is None:
                    self._gateway.metrics.ttft_s.observe(loop.time() - self._arrived_at_s)
                await self._send(chunk)
        finally:
            if self._may_stream:
                self._ticket.on_chunks = None

    def _heard(self) -> bool:
        """Hear that there are pieces; say whether they are seen to without the task."""
        if not self._waits or self._outlet is None:
            return False
        if not self._is_due:
            self._is_due = True
            self._gateway.turn.at_end(self._write_due)
        return True

    def _write_due(self) -> None:
        """Write what was heard in this turn, if the task still waits; wake it for what is left."""
        self._is_due = False
        outlet = self._outlet
        if not self._waits or outlet is None:
            return
        events: list[bytes] = []
        if outlet.is_open:
            while len(events) < CHUNKS_AT_ONCE:
                chunk = self._ticket.ready_chunk(plain=True)
                if chunk is None:
                    break
                events.append(self._relay.event(chunk))
        if events:
            outlet.write(events[0] if len(events) == 1 else b"".join(events))
            self._sent_at_s = asyncio.get_running_loop().time()
        if self._ticket.has_chunks:
            self._ticket.wake()

    async def _send(self, first: Chunk) -> None:
        """Send a piece, and with it what else is here by now: one write instead of many."""
        events = [self._relay.event(first)]
        try:
            while self._may_stream and len(events) < CHUNKS_AT_ONCE:
                chunk = self._ticket.ready_chunk()
                if chunk is None:
                    break
                events.append(self._relay.event(chunk))
        finally:
            # Also before it is told that the rest can't follow.
            await self._write(b"".join(events))

    async def _next(self) -> Chunk | None:
        """Wait for the next piece; None at the job's end."""
        if self._may_stream:
            self._waits = True
            try:
                return await self._ticket.next_chunk()
            finally:
                self._waits = False
        # Another reader has the pieces.
        record = await self._ticket.result()
        if self._relay.caught_up or record.kind is not Kind.COMPLETED:
            return None
        return Chunk(record.body, attempt=record.attempt, whole=True)

    def _ending(self) -> bytes:
        """Return what ends the stream of a job that has ended."""
        record = self._ticket.record
        assert record is not None, "the pieces end with the job"
        if record.kind is not Kind.COMPLETED:
            return self._failed(of_record(record))
        if self._relay.caught_up and self._may_stream:
            self._gateway.metrics.caught_up.inc()
        return self._relay.done()

    def _failed(self, error: ApiError) -> bytes:
        """Return the event that tells of an error; raise it while there is no answer yet."""
        if self._response is None:
            error.extra_headers |= headers.told_of(self._ticket)
            raise error
        return self._relay.failed(error)

    async def _open(self) -> web.StreamResponse:
        """Begin the answer, unless it has begun."""
        if self._response is None:
            self._response = web.StreamResponse(
                headers={
                    **headers.told_of(self._ticket),
                    "Content-Type": CONTENT_TYPE,
                    # Or a proxy (nginx) would keep tokens until it has some kilobytes.
                    "X-Accel-Buffering": "no",
                }
            )
            await self._response.prepare(self._request)
        return self._response

    async def _write(self, data: bytes) -> None:
        """Send, as fast as it is read. Raises ConnectionResetError for a reader that is gone."""
        response = await self._open()
        if data:
            await response.write(data)
            if self._outlet is None:
                self._outlet = Outlet(self._request)
            self._sent_at_s = asyncio.get_running_loop().time()
