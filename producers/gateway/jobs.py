"""Requests whose answers are fetched later: 202 at once, then /v1/jobs/{id} tells and gives.

Any gateway can tell: what it submitted itself it knows by its tickets, for all else the record, the
broker and the queue are looked at; `at` in the URL that was told spares a search of the queue.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress

import orjson
from aiohttp import web

from broker.wire import subjects
from broker.wire.ids import is_token
from broker.wire.messages import Kind, TerminalRecord
from producers.client import Client
from producers.gateway import headers
from producers.gateway.asking import Desk, Question
from producers.gateway.errors import ApiError, bad_request, of_record
from producers.gateway.gateway import CALLER, Gateway
from producers.looking import JobLook, Place
from producers.ticket import Ticket, TicketState

RECEIPT_S_MAX = 0.25
"""How long 202 waits for the broker's first word, to tell place and wait: it comes in milliseconds
where a broker is at work."""

TICKETS_MAX = 10_000
"""Jobs whose tickets are kept for later questions; of older ones the broker is asked."""

TICKET_BYTES_MAX = 64 * 1024 * 1024
"""Bodies that those tickets hold, at most."""

_PLACE = re.compile(r"([0-3])\.([0-9]{1,15})")


class LaterJobs:
    """The jobs of one gateway that are asked for later."""

    def __init__(self, gateway: Gateway, desk: Desk) -> None:
        self._gateway = gateway
        self._desk = desk
        self._tickets: OrderedDict[tuple[str, str], tuple[Client, Ticket]] = OrderedDict()
        self._held_bytes = 0

    def routes(self) -> Iterable[web.RouteDef]:
        """Name what can be asked of a job."""
        return (
            web.get("/v1/jobs/{job_id}", self._tell),
            web.delete("/v1/jobs/{job_id}", self._cancel),
        )

    async def accept(self, request: web.Request, question: Question) -> web.StreamResponse:
        """Submit a job and say at once where its answer will be. Raises ApiError, ProducerError."""
        lane = request[CALLER].lane
        ticket = await self._desk.keep(request[CALLER], question)
        with suppress(TimeoutError):
            async with asyncio.timeout(RECEIPT_S_MAX):
                await ticket.told()
        self._keep(await self._gateway.lanes.of(lane), ticket)
        url = f"/v1/jobs/{ticket.job_id}"
        if ticket.sequence:
            url += f"?at={ticket.job.band}.{ticket.sequence}"
        told = {**headers.told_of(ticket), "Location": url, "Preference-Applied": "respond-async"}
        return _json({**_of_ticket(ticket), "url": url}, status=202, told=told)

    def _keep(self, client: Client, ticket: Ticket) -> None:
        """Keep a ticket for later questions, and let go of what has ended or is too much."""
        key = client.lane, ticket.job_id
        if ticket.record is not None or key in self._tickets:
            return
        self._tickets[key] = client, ticket
        self._held_bytes += len(ticket.job.body)
        if self._is_full:
            for other in [key for key, (_, kept) in self._tickets.items() if kept.record]:
                self._drop(other)
        while self._is_full:
            self._drop(next(iter(self._tickets)))

    @property
    def _is_full(self) -> bool:
        return len(self._tickets) > TICKETS_MAX or self._held_bytes > TICKET_BYTES_MAX

    def _drop(self, key: tuple[str, str]) -> None:
        client, ticket = self._tickets.pop(key)
        self._held_bytes -= len(ticket.job.body)
        client.forget(ticket)

    async def _tell(self, request: web.Request) -> web.Response:
        job_id, place, client = await self._asked(request)
        told, found = await _standing(client, job_id, place)
        return _json(found, told=told)

    async def _cancel(self, request: web.Request) -> web.Response:
        job_id, place, client = await self._asked(request)
        told, found = await _standing(client, job_id, place)
        if found["status"] in ("queued", "running"):
            await client.cancel_job(job_id, place=place)
            found |= {"status": "cancelling"}
        return _json(found, told=told)

    async def _asked(self, request: web.Request) -> tuple[str, Place | None, Client]:
        """Return the job that is asked for. Raises ApiError."""
        job_id = request.match_info["job_id"]
        if not is_token(job_id):
            raise _unknown(job_id)
        lane = request[CALLER].lane
        given = request.query.get("at")
        place = None
        if given is not None:
            hit = _PLACE.fullmatch(given)
            if hit is None:
                message = "`at` is not as it was told in the job's URL."
                raise bad_request(message, param="at")
            place = Place(subjects.jobs_stream(lane, int(hit[1])), int(hit[2]))
        return job_id, place, await self._gateway.lanes.of(lane)


async def _standing(
    client: Client, job_id: str, place: Place | None
) -> tuple[dict[str, str], dict[str, object]]:
    """Find out where a job stands: headers, and the job as JSON. Raises ApiError, Unreachable."""
    ticket = client.ticket_of(job_id)
    if ticket is not None and ticket.record is None:
        return headers.told_of(ticket), _of_ticket(ticket)
    look = await client.look(job_id, place=place)
    if look is None:
        raise _unknown(job_id)
    if look.record is not None:
        return headers.of_record(look.record), _of_record(look.record)
    return {headers.JOB_ID: job_id}, _of_look(look)


def _of_ticket(ticket: Ticket) -> dict[str, object]:
    """Describe a job by what its ticket heard."""
    if ticket.record is not None:
        return _of_record(ticket.record)
    is_running = ticket.state is TicketState.STARTED
    job = ticket.job
    return _job(
        job.id,
        "running" if is_running else "queued",
        model=job.model,
        band=job.band,
        endpoint=job.endpoint,
        created_at=int(job.submitted_at_s),
        position=ticket.position,
        wait_s=ticket.wait_s,
        worker=ticket.worker or None,
    )


def _of_look(look: JobLook) -> dict[str, object]:
    """Describe a job by what the broker, or its message, says of it."""
    is_running = look.state is TicketState.STARTED
    return _job(
        look.job_id,
        "running" if is_running else "queued",
        position=look.position,
        wait_s=look.wait_s,
        worker=look.worker or None,
    )


def _of_record(record: TerminalRecord) -> dict[str, object]:
    """Describe a job that has ended, with its answer."""
    is_completed = record.kind is Kind.COMPLETED
    usage = {
        "prompt_tokens": record.usage.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "output_tokens": record.usage.output_tokens,
    }
    response = {"status_code": record.status_code, "body": orjson.Fragment(record.body)}
    return _job(
        record.job,
        str(record.kind),
        model=record.model,
        band=record.band,
        created_at=int(record.submitted_at_s),
        ended_at=int(record.ended_at_s),
        worker=record.worker or None,
        usage=usage if record.status_code else None,
        response=response if is_completed else None,
        error=None if is_completed else of_record(record).fields,
    )


def _job(job_id: str, status: str, **fields: object) -> dict[str, object]:
    """Make the job object; what is not known is null."""
    known: dict[str, object] = {
        "id": job_id,
        "object": "job",
        "status": status,
        "model": None,
        "band": None,
        "endpoint": None,
        "created_at": None,
        "ended_at": None,
        "position": None,
        "wait_s": None,
        "worker": None,
        "usage": None,
        "response": None,
        "error": None,
    }
    return known | fields


def _unknown(job_id: str) -> ApiError:
    message = f"There is no job {job_id[:80]!r} here, or its result is no longer kept."
    return ApiError(404, "job_not_found", message, param="job_id")


def _json(
    value: Mapping[str, object], *, told: Mapping[str, str], status: int = 200
) -> web.Response:
    body = orjson.dumps(value)
    return web.Response(body=body, status=status, headers=told, content_type="application/json")
