"""What people do with batches from a shell: hand one in, watch it, fetch its results.

All over the message bus: a gateway runs the batch, none is needed to look at it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from broker.bus.base import Bus, BusError, NoStream, NotFound, StreamFull
from broker.bus.files import FileGone, Files, FilesFull, FileTooLarge, new_file_id
from broker.wire import subjects
from broker.wire.files import FileInfo, filename
from producers.batch.lines import Request, parse_line
from producers.batch.room import Disk
from producers.batch.source import STDIN, Line, open_input, plain_size
from producers.batches.errors import BadBatch, NoSuchFile
from producers.batches.lines import Splitter
from producers.batches.place import Place, require_own
from producers.batches.records import Batch
from producers.batches.shelf import FILE_LIFE_S, INPUT_PURPOSE, Shelf, Wanted
from producers.errors import UnknownLane, Unreachable

READ_BYTES = 1 << 20

ENDPOINT_DEFAULT = "/v1/chat/completions"
"""Of an input without a good line: its batch fails, and says why."""

LOOK_S = 2.0
"""A batch that is watched is read anew this often at the least: what is heard may be lost."""


class Desk:
    """The batches and files of one lane, for people."""

    def __init__(self, bus: Bus, lane: str) -> None:
        self.files = Files(bus, lane)
        self.shelf = Shelf(bus, lane, self.files)
        self._bus = bus
        self._lane = lane

    @asynccontextmanager
    async def trouble_told(self) -> AsyncGenerator[None]:
        """Say what the bus can't do. Raises UnknownLane, Unreachable, BatchesError."""
        try:
            yield
        except FileTooLarge as error:
            raise BadBatch(str(error), param="file") from error
        except FileGone as error:
            raise NoSuchFile(str(error)) from error
        except FilesFull as error:
            message = f"{error}: inferlane erase --only files"
            raise BadBatch(message, param="file") from error
        except StreamFull as error:
            message = (
                f"the files of lane {self._lane!r} take all the room they may "
                "(streams.files_bytes_max); delete some: inferlane erase --only files"
            )
            raise BadBatch(message, param="file") from error
        except (NoStream, NotFound) as error:
            message = (
                f"lane {self._lane!r} has no files here: the cluster has no such lane, it may not "
                "batch, or its broker is older"
            )
            raise UnknownLane(message) from error
        except BusError as error:
            message = f"the message server does not answer ({error})"
            raise Unreachable(message) from error

    async def hand_in(
        self,
        path: str,
        *,
        window: str,
        file_bytes_max: int,
        endpoint: str = "",
        api_key_name: str = "",
    ) -> Batch:
        """Store an input, decompressed, and create its batch.

        Without an endpoint the batch's is the url of the input's first good line. Raises
        InputUnusable, FileTooLarge, FilesFull (also before anything is sent), BadBatch, BusError.
        """
        plain_bytes = await asyncio.to_thread(plain_size, path)
        await self.files.see_room(plain_bytes, bytes_max=file_bytes_max)
        now_s = time.time()
        info = FileInfo(
            id=new_file_id(),
            lane=self._lane,
            filename=filename("stdin.jsonl" if path == STDIN else Path(path).name),
            purpose=INPUT_PURPOSE,
            created_at_s=now_s,
            expires_at_s=now_s + FILE_LIFE_S,
        )
        seen = _EndpointSeen(endpoint)
        stored = await self.files.put(info, seen.through(_read(path)), bytes_max=file_bytes_max)
        wanted = Wanted(
            endpoint=seen.endpoint or ENDPOINT_DEFAULT,
            input_file_id=stored.id,
            completion_window=window,
            api_key_name=api_key_name,
        )
        return await self.shelf.create(wanted)

    async def changes(self, batch_id: str) -> AsyncIterator[Batch]:
        """A batch as it is, and again at each change, until it has ended.

        Raises NoSuchBatch, BusError.
        """
        news = asyncio.Event()
        key = subjects.batch_key(self._lane, batch_id)
        subscription = await self._bus.kv_listen(subjects.BATCHES_BUCKET, key, lambda _: news.set())
        try:
            while True:
                news.clear()
                batch = await self.shelf.get(batch_id)
                yield batch
                if batch.has_ended:
                    return
                with suppress(TimeoutError):  # Nothing was heard; look all the same.
                    async with asyncio.timeout(LOOK_S):
                        await news.wait()
        finally:
            await subscription.unsubscribe()

    async def fetch(self, file_id: str, path: Path, *, batch_id: str) -> int:
        """Write a batch's file to `path`, where nothing else may stand; return its bytes.

        What was fetched there before is replaced once the new one is whole.

        Raises NoSuchFile, OutputUnusable, FileGone, BusError.
        """
        info = await self.files.find(file_id, now_s=time.time())
        if info is None:
            message = f"there is no file {file_id!r} any more"
            raise NoSuchFile(message)
        disk = Disk()
        size = 0
        try:
            await disk.do(require_own, path, batch_id=batch_id)
            place = await disk.do(Place, path)
            try:
                async for chunk in self.files.content(info):
                    size += await disk.do(place.write, chunk)
                await disk.do(place.take)
            finally:
                await disk.do(place.close)
        finally:
            disk.close()
        return size


class _EndpointSeen:
    """The url of an input's first good line, seen while the input passes by."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: where it is known already; then nothing is looked at."""
        self.endpoint = endpoint
        self._splitter = Splitter()

    async def through(self, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Give what comes, unchanged."""
        async for piece in source:
            if not self.endpoint:
                self._look(self._splitter.feed(piece))
            yield piece
        if not self.endpoint:
            self._look(self._splitter.end())

    def _look(self, found: list[Line]) -> None:
        for line in found:
            parsed = parse_line(line.text, line.number, endpoint="")
            if isinstance(parsed, Request):
                self.endpoint = parsed.url
                return


async def _read(path: str) -> AsyncIterator[bytes]:
    """An input's bytes, read in a thread. Raises InputUnusable."""
    disk = Disk()
    pieces = _pieces(path)
    try:
        while piece := await disk.do(next, pieces, b""):
            yield piece
    finally:
        await disk.do(pieces.close)
        disk.close()


def _pieces(path: str) -> Generator[bytes]:
    with open_input(path) as source:
        while piece := source.read(READ_BYTES):
            yield piece
