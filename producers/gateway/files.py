"""/v1/files: inputs of batches and their results, streamed in and out."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import BodyPartReader, MultipartReader, web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.structs import replace

from broker.bus.base import BusError
from broker.bus.files import Files, new_file_id
from broker.wire.files import FileInfo, filename
from producers.batches.errors import NoSuchFile
from producers.batches.results import entry_of
from producers.batches.shelf import FILE_LIFE_S, INPUT_PURPOSE, Shelf
from producers.batches.view import file_object, page
from producers.gateway.errors import ApiError, bad_request
from producers.gateway.gateway import Gateway
from producers.gateway.stored import answer, expiry_s, files_of, paged, told

LIST_MAX = 10_000
"""Files of one page, and of a list that names no limit: as the hosted API has it."""

FIELDS_MAX = 16
"""Parts of an upload; the OpenAI client sends four."""

FIELD_BYTES_MAX = 1024
"""Of each that is no file."""

AROUND_BYTES_MAX = 64 * 1024
"""Of an upload, what is not its file, at the most: FIELDS_MAX parts with their heads."""

UNREADABLE = (
    ValueError,
    HttpProcessingError,
    web.RequestPayloadError,
    web.PayloadAccessError,
)
"""What aiohttp raises of a body that is no multipart body, or breaks off."""

PIECE_BYTES = 64 * 1024
"""Read of an upload at once."""


def routes(gateway: Gateway) -> Iterable[web.RouteDef]:
    """Name what can be done with files."""

    async def create(request: web.Request) -> web.Response:
        with told():
            return answer(file_object(await _Upload(gateway, request).take()))

    async def every(request: web.Request) -> web.Response:
        with told():
            found = await files_of(gateway, request).all(now_s=time.time())
        purpose = request.query.get("purpose")
        wanted = [info for info in found if purpose in (None, info.purpose)]
        if _order(request) == "desc":
            wanted.reverse()
        shown, has_more = paged(wanted, request, limit=LIST_MAX, limit_max=LIST_MAX)
        return answer(page([file_object(info) for info in shown], has_more=has_more))

    async def one(request: web.Request) -> web.Response:
        with told():
            files = files_of(gateway, request)
            return answer(file_object(await _sized(files, await _found(files, request))))

    async def content(request: web.Request) -> web.StreamResponse:
        with told():
            files = files_of(gateway, request)
            info = await _found(files, request)
        return await _send(files, info, request, write_s_max=gateway.config.write_s_max)

    async def delete(request: web.Request) -> web.Response:
        file_id = request.match_info["id"]
        with told():
            files = files_of(gateway, request)
            await Shelf(gateway.bus, files.lane, files).delete_file(file_id)
        return answer({"id": file_id, "object": "file", "deleted": True})

    return (
        web.post("/v1/files", create),
        web.get("/v1/files", every, allow_head=False),
        web.get("/v1/files/{id}", one, allow_head=False),
        web.get("/v1/files/{id}/content", content, allow_head=False),
        web.delete("/v1/files/{id}", delete),
    )


@dataclass(slots=True)
class _Fields:
    """What an upload says beside its file."""

    purpose: str | None = None
    anchor: str | None = None
    seconds: str | None = None

    def take(self, name: str | None, value: str) -> None:
        match name:
            case "purpose":
                self.purpose = value
            case "expires_after[anchor]":
                self.anchor = value
            case "expires_after[seconds]":
                self.seconds = value
            case _:
                pass  # Newer clients may say more.


class _Upload:
    """One upload: a multipart body, its fields in any order."""

    def __init__(self, gateway: Gateway, request: web.Request) -> None:
        self._gateway = gateway
        self._request = request
        self._files = files_of(gateway, request)
        self._fields = _Fields()
        self._stored: FileInfo | None = None

    async def take(self) -> FileInfo:
        """Store the file. Raises ApiError, FileTooLarge, BusError."""
        if not self._request.content_type.startswith("multipart/"):
            message = "a file is sent as multipart/form-data, with the fields purpose and file"
            raise ApiError(415, "unsupported_media_type", message)
        await self._see_size()
        try:
            await self._take_parts()
            return await self._judged(self._stored)
        except UNREADABLE as error:
            await self._undo()
            said = " ".join(str(error).split())[:200]
            message = f"the multipart body can't be read: {said or 'it broke off'}"
            raise bad_request(message) from error
        except BaseException:
            await self._undo()
            raise

    async def _see_size(self) -> None:
        """Refuse at once what is too large by its own word. Raises FileTooLarge, FilesFull."""
        declared = self._request.content_length
        if declared is None or declared <= AROUND_BYTES_MAX:
            return  # Sent in pieces, or so small that it is no matter: it is seen as it comes.
        bytes_max = self._gateway.config.batches.file_bytes_max
        await self._files.see_room(declared - AROUND_BYTES_MAX, bytes_max=bytes_max)

    async def _take_parts(self) -> None:
        reader = await self._request.multipart()
        for _ in range(FIELDS_MAX):
            async with self._patience():
                part = await reader.next()
            if part is None:
                return
            await self._take_part(part)
        message = f"the body has more than {FIELDS_MAX} parts"
        raise bad_request(message)

    async def _take_part(self, part: BodyPartReader | MultipartReader) -> None:
        if isinstance(part, MultipartReader):
            message = "a part of the body is multipart itself"
            raise bad_request(message)
        if part.name != "file":
            self._fields.take(part.name, await self._field(part))
        elif self._stored is None:
            self._stored = await self._store(part)
        else:
            message = "the body has more than one file"
            raise bad_request(message, param="file")

    async def _store(self, part: BodyPartReader) -> FileInfo:
        now_s = time.time()
        info = FileInfo(
            id=new_file_id(),
            lane=self._files.lane,
            filename=filename(part.filename or "file"),
            purpose=INPUT_PURPOSE,
            created_at_s=now_s,
            # Until its fields are known: one whose upload ends in between is swept then.
            expires_at_s=now_s + FILE_LIFE_S,
        )
        bytes_max = self._gateway.config.batches.file_bytes_max
        return await self._files.put(info, self._pieces(part), bytes_max=bytes_max)

    async def _judged(self, stored: FileInfo | None) -> FileInfo:
        """The file, once all fields are known. Raises ApiError."""
        fields = self._fields
        if stored is None:
            message = "the body has no part named file"
            raise bad_request(message, param="file")
        if fields.purpose != INPUT_PURPOSE:
            given = "none" if fields.purpose is None else repr(fields.purpose[:40])
            message = f"purpose must be {INPUT_PURPOSE!r}, and it is {given}"
            raise bad_request(message, param="purpose")
        life_s = expiry_s(
            fields.anchor, fields.seconds, default_s=FILE_LIFE_S, param="expires_after"
        )
        whole = replace(stored, expires_at_s=stored.created_at_s + life_s)
        await self._files.settle(whole)
        return whole

    async def _undo(self) -> None:
        if self._stored is not None:
            with suppress(BusError):  # Nobody was told of it, and it expires.
                await self._files.delete(self._stored.id)

    async def _field(self, part: BodyPartReader) -> str:
        value = bytearray()
        async for piece in self._pieces(part):
            value += piece
            if len(value) > FIELD_BYTES_MAX:
                message = f"the field {str(part.name)[:40]!r} is too long"
                raise bad_request(message)
        return value.decode()

    async def _pieces(self, part: BodyPartReader) -> AsyncIterator[bytes]:
        while True:
            async with self._patience():
                piece = await part.read_chunk(PIECE_BYTES)
            if not piece:
                return
            yield piece

    def _patience(self) -> "_Patience":
        return _Patience(self._gateway.config.body_s_max)


class _Patience:
    """How long the next piece of an upload may take. Raises ApiError (408)."""

    def __init__(self, piece_s_max: float) -> None:
        self._piece_s_max = piece_s_max
        self._timeout = asyncio.timeout(piece_s_max)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self._timeout.__aexit__(*error)  # pyright: ignore[reportArgumentType]
        except TimeoutError as late:
            message = f"nothing of the file came for {self._piece_s_max:g} s"
            raise ApiError(408, "body_timeout", message) from late


async def _found(files: Files, request: web.Request) -> FileInfo:
    """The file that a request names. Raises NoSuchFile, BusError."""
    file_id = request.match_info["id"]
    info = await files.find(file_id, now_s=time.time())
    if info is None:
        message = f"there is no file {file_id[:80]!r}"
        raise NoSuchFile(message)
    return info


async def _sized(files: Files, info: FileInfo) -> FileInfo:
    """A file that grows, with what stands in it now."""
    last = await files.last_chunk(info.id) if info.growing else None
    return info if last is None else replace(info, bytes=entry_of(last).bytes)


async def _send(
    files: Files, info: FileInfo, request: web.Request, *, write_s_max: float
) -> web.StreamResponse:
    """Send a file's bytes as they are, no faster than they are read."""
    response = web.StreamResponse()
    response.content_type = "application/octet-stream"
    if not info.growing:
        response.content_length = info.bytes
    await response.prepare(request)
    async for chunk in files.content(info):
        async with asyncio.timeout(write_s_max):
            await response.write(chunk)
    await response.write_eof()
    return response


def _order(request: web.Request) -> str:
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        message = "order must be asc or desc"
        raise bad_request(message, param="order")
    return order
