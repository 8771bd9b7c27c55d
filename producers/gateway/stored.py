"""What the routes of files and batches share: lists by cursor, and how their troubles are told."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

import orjson
from aiohttp import web

from broker.bus.base import BusError, StreamFull
from broker.bus.files import Files, FilesFull, FileTooLarge
from producers.batches.errors import (
    BadBatch,
    BatchesError,
    FileInUse,
    NoSuchBatch,
    NoSuchFile,
)
from producers.gateway.errors import RETRY_AFTER_S, ApiError, bad_request
from producers.gateway.gateway import CALLER, Gateway

EXPIRY_S_MIN, EXPIRY_S_MAX = 3600, 30 * 86_400
"""Life of a file that may be asked for, as the hosted API has it."""


class _Named(Protocol):
    @property
    def id(self) -> str: ...


_Item = TypeVar("_Item", bound=_Named)


def files_of(gateway: Gateway, request: web.Request) -> Files:
    """The files of the caller's lane."""
    return Files(gateway.bus, request[CALLER].lane)


def answer(value: object) -> web.Response:
    """A JSON answer."""
    return web.Response(body=orjson.dumps(value), content_type="application/json")


@contextmanager
def told() -> Generator[None]:
    """Say over HTTP what went wrong with a batch or a file. Raises ApiError."""
    try:
        yield
    except BadBatch as error:
        raise bad_request(str(error), param=error.param) from error
    except NoSuchBatch as error:
        raise ApiError(404, "batch_not_found", str(error)) from error
    except NoSuchFile as error:
        raise ApiError(404, "file_not_found", str(error)) from error
    except FileInUse as error:
        raise ApiError(409, "file_in_use", str(error)) from error
    except FileTooLarge as error:
        raise ApiError(413, "file_too_large", str(error), param="file") from error
    except FilesFull as error:
        raise ApiError(413, "files_full", str(error), param="file") from error
    except StreamFull as error:
        message = (
            "the lane's files take all the room they may (streams.files_bytes_max), or the message "
            f"server's store all it has ({error}); delete some"
        )
        raise ApiError(413, "files_full", message) from error
    except (BusError, BatchesError) as error:
        message = f"the message server does not answer now ({error}); try again"
        raise ApiError(503, "unreachable", message, retry_after_s=RETRY_AFTER_S) from error


def paged(
    items: Sequence[_Item], request: web.Request, *, limit: int, limit_max: int
) -> tuple[list[_Item], bool]:
    """The page that a request asks for, and whether there are more. Raises ApiError (400)."""
    count = _limit(request.query.get("limit"), limit, limit_max)
    first = 0
    if after := request.query.get("after"):
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            message = f"there is nothing here with the id {after[:80]!r} to list after"
            raise bad_request(message, param="after")
        first = places[0] + 1
    return list(items[first : first + count]), first + count < len(items)


def expiry_s(anchor: object, seconds: object, *, default_s: float, param: str) -> float:
    """Life of a file as asked for; `default_s` where nothing was. Raises ApiError (400)."""
    if anchor is None and seconds is None:
        return default_s
    if anchor != "created_at":
        message = f"{param}.anchor must be created_at"
        raise bad_request(message, param=param)
    number = int(seconds) if isinstance(seconds, int | str) and str(seconds).isdecimal() else 0
    if not EXPIRY_S_MIN <= number <= EXPIRY_S_MAX:
        message = f"{param}.seconds must be a whole number from {EXPIRY_S_MIN} to {EXPIRY_S_MAX}"
        raise bad_request(message, param=param)
    return float(number)


def _limit(given: str | None, default: int, most: int) -> int:
    if given is None:
        return default
    if not (given.isdecimal() and given.isascii() and 1 <= int(given) <= most):
        message = f"limit must be a whole number from 1 to {most}"
        raise bad_request(message, param="limit")
    return int(given)
