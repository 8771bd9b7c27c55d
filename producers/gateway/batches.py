"""/v1/batches, and the batches that this gateway runs itself."""

import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress

import msgspec
from aiohttp import web

from broker.bus.base import BusError
from producers.batches.errors import BatchesError
from producers.batches.outlook import outlook
from producers.batches.records import Batch
from producers.batches.runner import BatchRunner
from producers.batches.shelf import FILE_LIFE_S, Shelf, Wanted
from producers.batches.view import batch_object, page
from producers.errors import ProducerError
from producers.gateway.batch_metrics import BatchMetrics
from producers.gateway.errors import bad_request
from producers.gateway.gateway import CALLER, Gateway
from producers.gateway.headers import IDEMPOTENCY_KEY, TEXT_CHARS_MAX
from producers.gateway.stored import answer, expiry_s, files_of, paged, told

LIST_DEFAULT, LIST_MAX = 20, 100
"""Batches of a page: as the hosted API has them."""

RETRY_COUNT = "x-stainless-retry-count"
"""How often the OpenAI client has sent this request before."""

HOST_CHARS_MAX = 48
"""Of a host's name, what stands in a lease: with a process id still a token."""

_NO_TOKEN = re.compile(r"[^A-Za-z0-9_-]")
_AT = re.compile(r" - at `\$\.?(.*)`$")


class _ExpiresAfter(msgspec.Struct):
    anchor: str
    seconds: int


class _Create(msgspec.Struct):
    """Body of a request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


_decoder = msgspec.json.Decoder(_Create)


def routes(gateway: Gateway) -> Iterable[web.RouteDef]:
    """Name what can be done with batches, and begin to run them."""
    runner = BatchRunner(
        gateway.bus,
        config=gateway.config.batches,
        client=gateway.config.client,
        name=process_name(socket.gethostname(), os.getpid()),
    )
    gateway.metrics.registry.register(BatchMetrics(runner))
    running = gateway.tasks.create_task(runner.run())
    gateway.stack.callback(running.cancel)

    def shelf_of(request: web.Request) -> Shelf:
        return Shelf(gateway.bus, request[CALLER].lane, files_of(gateway, request))

    async def create(request: web.Request) -> web.Response:
        async with gateway.bodies.json(request) as body:
            wanted = _wanted(body, request)
        with told():
            shelf = shelf_of(request)
            batch = await shelf.create(wanted)
            if batch.forecast is None and not batch.has_ended:
                batch = await _with_outlook(gateway, shelf, batch)
        return answer(batch_object(batch))

    async def every(request: web.Request) -> web.Response:
        with told():
            found = await shelf_of(request).all()
        shown, has_more = paged(found, request, limit=LIST_DEFAULT, limit_max=LIST_MAX)
        return answer(page([batch_object(batch) for batch in shown], has_more=has_more))

    async def one(request: web.Request) -> web.Response:
        with told():
            return answer(batch_object(await shelf_of(request).get(_id_of(request))))

    async def cancel(request: web.Request) -> web.Response:
        with told():
            return answer(batch_object(await shelf_of(request).cancel(_id_of(request))))

    return (
        web.post("/v1/batches", create),
        web.get("/v1/batches", every, allow_head=False),
        web.get("/v1/batches/{id}", one, allow_head=False),
        web.post("/v1/batches/{id}/cancel", cancel),
    )


def process_name(host: str, pid: int) -> str:
    """Name a process in the lease of a batch that it runs, so that people find its log."""
    return f"{_NO_TOKEN.sub('-', host)[:HOST_CHARS_MAX]}-{pid}"


async def _with_outlook(gateway: Gateway, shelf: Shelf, batch: Batch) -> Batch:
    """Note how long it may take, where that can be told; nothing hangs on it."""
    with suppress(BusError, ProducerError, BatchesError):
        client = await gateway.lanes.of(shelf.lane)
        ahead = await outlook(batch, await shelf.all(), client, files=shelf.files)
        if ahead is not None:
            return await shelf.change(
                batch.id,
                lambda now: now if now.forecast else msgspec.structs.replace(now, forecast=ahead),
            )
    return batch


def _wanted(body: bytes, request: web.Request) -> Wanted:
    """Read what is asked for. Raises ApiError (400)."""
    try:
        asked = _decoder.decode(body)
    except msgspec.ValidationError as error:
        at = _AT.search(str(error))
        raise bad_request(str(error), param=at[1] or None if at else None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"the body is not JSON: {error}"
        raise bad_request(message, code="invalid_json") from error
    after = asked.output_expires_after
    key = request.headers.get(IDEMPOTENCY_KEY, "")
    if len(key) > TEXT_CHARS_MAX:
        message = f"{IDEMPOTENCY_KEY} has more than {TEXT_CHARS_MAX} characters"
        raise bad_request(message, param=IDEMPOTENCY_KEY)
    return Wanted(
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        metadata=asked.metadata or {},
        results_life_s=expiry_s(
            after.anchor if after else None,
            after.seconds if after else None,
            default_s=FILE_LIFE_S,
            param="output_expires_after",
        ),
        api_key_name=request[CALLER].name,
        idempotency_key=key,
        repeated=request.headers.get(RETRY_COUNT, "0") not in ("", "0"),
    )


def _id_of(request: web.Request) -> str:
    return request.match_info["id"]
