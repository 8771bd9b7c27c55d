"""What generates: chat, completions, embeddings, responses; in one piece or as a stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from broker.wire.messages import Kind
from producers.gateway import headers
from producers.gateway.asking import Desk, Held, Question
from producers.gateway.checks import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from producers.gateway.errors import of_record, overloaded
from producers.gateway.gateway import CALLER, Gateway
from producers.gateway.streaming import Streamed

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Later = Callable[[web.Request, Question], Awaitable[web.StreamResponse]]
"""Answers a request whose caller prefers to fetch the answer later."""


def routes(gateway: Gateway, desk: Desk, later: Later) -> Iterable[web.RouteDef]:
    """Name the four endpoints that a job may have."""
    return tuple(
        web.post(endpoint, _handler(gateway, desk, later, endpoint))
        for endpoint in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
    )


def _handler(gateway: Gateway, desk: Desk, later: Later, endpoint: str) -> _Handler:
    async def generate(request: web.Request) -> web.StreamResponse:
        arrived_at_s = asyncio.get_running_loop().time()
        async with gateway.bodies.json(request) as raw:
            question = await desk.read(request, endpoint, raw)
            if headers.wants_no_wait(request.headers):
                return await later(request, question)
            if question.stream and gateway.streams >= gateway.config.streams_max:
                message = "The gateway streams as many answers as it may; try again."
                raise overloaded(message)
            async with desk.ask(request[CALLER], question) as held:
                if not question.stream:
                    return await _in_one_piece(gateway, held)
                streamed = Streamed(gateway, request, question, held, arrived_at_s=arrived_at_s)
                return await streamed.answer()

    return generate


async def _in_one_piece(gateway: Gateway, held: Held) -> web.Response:
    record = await held.ticket.result(timeout_s=gateway.config.answer_s_max)
    told = headers.told_of(held.ticket)
    if record.kind is not Kind.COMPLETED:
        error = of_record(record)
        error.extra_headers |= told
        raise error
    return web.Response(body=record.body, headers=told, content_type="application/json")
