"""Brings what ended into a batch's result files, in chunks, and then lets its records go."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import structlog

from broker.bus.base import PayloadTooLarge, StreamFull
from broker.bus.files import CHUNK_BYTES
from producers.batch.lines import Code, bad
from producers.batch.outcome import of_bad_line
from producers.batches.clearing import Clearing
from producers.batches.config import BatchesConfig
from producers.batches.results import Result, ResultFile, ResultFiles

CHUNK_LINES_MAX = 4096
"""Lines of one chunk: their numbers stand in its header, 9 bytes each at most."""

FULL_PAUSE_S = 5.0
"""Between two tries where the lane's files have no room: somebody has to remove one."""

PATIENCE_S = 60.0
"""How long one chunk is tried while the server can't be reached; then the batch is left, and taken
up again."""

_log = structlog.get_logger(__name__)


Count = Callable[[int, bool], None]
"""Told how many lines a chunk that stands brought, and whether they completed."""


class Writer:
    """The way of results into their files: one task writes."""

    def __init__(
        self,
        results: ResultFiles,
        clearing: Clearing,
        config: BatchesConfig,
        count: Count,
    ) -> None:
        self._count = count
        self._results = results
        self._clearing = clearing
        self._config = config
        self._waiting: deque[Result] = deque()
        self._waiting_bytes = 0
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._written = asyncio.Event()
        self._closed = False

    async def take(self, result: Result) -> None:
        """Hand over a line's end; waits while too much is unwritten."""
        while self._waiting_bytes > self._config.unwritten_bytes_max:
            self._written.clear()
            await self._written.wait()
        self._waiting.append(result)
        self._waiting_bytes += len(result.ended.text)
        self._some.set()
        if self._waiting_bytes >= CHUNK_BYTES or len(self._waiting) >= CHUNK_LINES_MAX:
            self._enough.set()

    def close(self) -> None:
        """No more will come: `run` ends once all is written."""
        self._closed = True
        self._some.set()
        self._enough.set()

    async def run(self) -> None:
        """Write what comes until closed. Raises LeaseLost, BusError."""
        while True:
            await self._some.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.write_s):
                    await self._enough.wait()
            while part := self._take_part():
                await self._write(part)
                self._written.set()
                if self._waiting_bytes < CHUNK_BYTES and not self._closed:
                    break
            if self._closed and not self._waiting:
                return
            self._enough.clear()
            if not self._waiting:
                self._some.clear()

    def _take_part(self) -> list[Result]:
        """As many results as one chunk takes; a large one alone."""
        part: list[Result] = []
        size = 0
        while self._waiting and len(part) < CHUNK_LINES_MAX:
            length = len(self._waiting[0].ended.text)
            if part and size + length > CHUNK_BYTES:
                break
            size += length
            part.append(self._waiting.popleft())
        self._waiting_bytes -= size
        return part

    async def _write(self, part: list[Result]) -> None:
        for file, is_output in ((self._results.output, True), (self._results.errors, False)):
            of_file = [result for result in part if result.ended.ok is is_output]
            if not of_file:
                continue
            try:
                sequence = await self._stored(file, of_file)
            except PayloadTooLarge:
                await self._write([_too_large(result) for result in of_file])
                continue
            self._count(len(of_file), is_output)
            records = [(one.ended.number, one.sequence) for one in of_file if one.job_id]
            await self._clearing.add(records, is_output=is_output, sequence=sequence)

    async def _stored(self, file: ResultFile, part: list[Result]) -> int:
        """Store a chunk, waiting for room as long as it takes."""
        told_at_s = 0.0
        while True:
            try:
                return await self._results.add(file, part, patience_s=PATIENCE_S)
            except StreamFull as error:
                if time.monotonic() > told_at_s + PATIENCE_S:
                    told_at_s = time.monotonic()
                    _log.warning("batches.files_full", file=file.info.id, error=str(error))
            await asyncio.sleep(FULL_PAUSE_S)


def _too_large(result: Result) -> Result:
    """What stands for a result that no message can hold."""
    number = result.ended.number
    told = "the answer is larger than a message of the server may be; ask for a shorter one"
    assert len(result.ended.text) > CHUNK_BYTES, "a chunk of small lines fits any message"
    fault = bad(number, result.custom_id, Code.INVALID_REQUEST, told)
    return Result(
        custom_id=result.custom_id,
        ended=of_bad_line(fault, batch_id=result.job_id.rpartition("-")[0]),
        usage=result.usage,
        job_id=result.job_id,
        sequence=result.sequence,
    )
