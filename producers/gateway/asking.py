"""From a request to its job: read, judged, submitted, and cancelled when nobody waits any more.

Several requests may wait on one job (the same job id or idempotency key), at this gateway and at
others; it is cancelled when the last of them has left, by the gateway that submitted it or was
given it (`readers`), unless one of them is to ask for it later. A request that leaves while its job
is on its way into the queue leaves a job too: the submission goes on by itself, and its job is
cancelled then.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from broker.wire.ids import new_job_id
from broker.wire.messages import Kind, LaneOffer
from producers.client import Client
from producers.errors import BadRequest
from producers.gateway import checks, headers
from producers.gateway.auth import Caller
from producers.gateway.errors import ApiError, bad_request
from producers.gateway.gateway import CALLER, REQUEST_ID, Gateway
from producers.gateway.readers import Readers
from producers.naming import resolve
from producers.request import ReadBody, WishFields, read_body
from producers.ticket import Ticket

RERUNS_MAX = 8
"""Times that a job under one idempotency key is run anew because its caller left before."""

KEPT_MAX = 100_000
"""Kept jobs that are remembered, the latest: some ten megabytes of names. An older one that still
lives is cancelled when a reader who joined it leaves."""

_Key = tuple[str, str]
"""Lane and job id."""


@dataclass(slots=True)
class Question:
    """A request that was read and judged."""

    endpoint: str
    body: ReadBody
    stream: bool
    wish: WishFields
    is_named: bool
    """The caller gave the job's id, himself or by an idempotency key."""
    is_keyed: bool
    """By an idempotency key."""

    @property
    def usage_asked(self) -> bool:
        """Whether a stream is to end with its usage."""
        options = self.body.fields.get("stream_options")
        if not isinstance(options, Mapping):
            return False
        return bool(cast("Mapping[str, object]", options).get("include_usage"))


@dataclass(slots=True)
class _Audience:
    """Who waits on a job."""

    ticket: asyncio.Future[Ticket]
    body: bytes
    readers: int = 0
    is_kept: bool = False
    """Somebody will ask for it later: it is not cancelled when all readers have left."""
    is_streamed: bool = False
    """A reader has its stream, whose pieces can be given once."""
    is_named: bool = False
    """Its caller gave it its id, so another gateway may have readers of it."""
    is_ours: bool = False
    """Another gateway handed it over: it is cancelled here, whoever submitted it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A request's hold on its job."""

    ticket: Ticket
    may_stream: bool
    """The pieces are this reader's; any other gets the answer whole."""


class Desk:
    """Submits the jobs of one gateway's requests."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._audiences: dict[_Key, _Audience] = {}
        self._kept: OrderedDict[_Key, None] = OrderedDict()
        """Jobs that somebody will ask for later."""
        self._left: set[_Key] = set()
        """Jobs that are being cancelled."""
        self._readers = Readers(gateway.bus, new_job_id(), takes_over=self._takes_over)

    @property
    def waited_for(self) -> int:
        """Jobs that some request waits on."""
        return len(self._audiences)

    async def read(self, request: web.Request, endpoint: str, raw: bytes) -> Question:
        """Read and judge a request. Raises ApiError."""
        caller = request[CALLER]
        band = headers.band_of(request.headers, caller.band)
        deadline_s = headers.deadline_s_of(request.headers)
        session = headers.session_of(request.headers)
        large = len(raw) > self._gateway.config.client.prepare_inline_bytes_max
        try:
            body = await asyncio.to_thread(read_body, raw) if large else read_body(raw)
        except BadRequest as error:
            message = f"{error}."
            raise bad_request(message, code="invalid_json") from error
        checks.check(endpoint, body.fields)
        job_id = headers.job_id_of(request.headers, endpoint, raw)
        stream = checks.wants_stream(endpoint, body.fields)
        wish = WishFields(
            job_id=job_id or new_job_id(),
            band=band,
            deadline_s=deadline_s,
            session=session,
            stream=stream,
            endpoint=endpoint,
            request_id=request[REQUEST_ID],
            api_key_name=caller.name,
        )
        is_keyed = headers.IDEMPOTENCY_KEY in request.headers
        return Question(endpoint, body, stream, wish, is_named=bool(job_id), is_keyed=is_keyed)

    async def client_for(self, caller: Caller, question: Question) -> Client:
        """Return the lane's client, once it is known to offer what is asked for.

        Raises ApiError: 404 for a model that isn't offered, 400 for a band.
        """
        client = await self._gateway.lanes.of(caller.lane)
        model = str(question.body.fields["model"])
        if not _offers(client.offer, model):
            await self._gateway.lanes.refresh_offer(caller.lane)
        offer = client.offer
        if offer is None:
            return client  # Whether there is such a lane, its door finds out.
        if not _offers(offer, model):
            known = ", ".join(offer.models) or "none"
            message = f"The model {model[:80]!r} does not exist here; there are: {known[:400]}."
            raise ApiError(404, "model_not_found", message, param="model")
        band = question.wish.get("band", 0)
        if band not in offer.bands:
            known = ", ".join(map(str, offer.bands))
            message = f"Lane {caller.lane} takes no jobs of band {band}; it takes: {known}."
            raise bad_request(message, code="invalid_header", param=headers.BAND)
        return client

    @asynccontextmanager
    async def ask(self, caller: Caller, question: Question) -> AsyncGenerator[Held]:
        """Submit a job and hold it; left before its end, it is cancelled unless others hold it.

        Raises ApiError, ProducerError.
        """
        client = await self.client_for(caller, question)
        key, audience = await self._audience(client, caller, question)
        audience.readers += 1
        may_stream = question.stream and not audience.is_streamed
        audience.is_streamed = audience.is_streamed or may_stream
        try:
            # Shielded: its job may be stored when its caller leaves, and others may wait on it.
            yield Held(await asyncio.shield(audience.ticket), may_stream)
        finally:
            audience.readers -= 1
            self._leave(key, audience)

    async def keep(self, caller: Caller, question: Question) -> Ticket:
        """Submit a job that somebody will ask for later. Raises ApiError, ProducerError."""
        client = await self.client_for(caller, question)
        key, audience = await self._audience(client, caller, question)
        audience.is_kept = True
        self._kept[key] = None
        if len(self._kept) > KEPT_MAX:
            self._kept.popitem(last=False)
        audience.readers += 1
        try:
            return await asyncio.shield(audience.ticket)
        finally:
            audience.readers -= 1
            self._leave(key, audience)

    async def _audience(
        self, client: Client, caller: Caller, question: Question
    ) -> tuple[_Key, _Audience]:
        """Find or make who waits on the job. Raises ApiError (409) for another body."""
        key = client.lane, await self._id_of(client, question)
        audience = self._audiences.get(key)
        if audience is None:
            live = client.ticket_of(key[1])
            _check_same(live.job.body if live else None, question)
            audience = self._audiences[key] = _Audience(
                asyncio.get_running_loop().create_future(),
                question.body.raw,
                is_kept=key in self._kept,
                is_named=question.is_named,
            )
            # Whoever waits may have left when it fails.
            audience.ticket.add_done_callback(lambda done: done.cancelled() or done.exception())
            work = self._submit(client, caller, question, key, audience.ticket)
            self._gateway.tasks.create_task(work)
        _check_same(audience.body, question)
        return key, audience

    async def _id_of(self, client: Client, question: Question) -> str:
        """Return the job's id: under an idempotency key the first run that nobody gave up."""
        first = question.wish.get("job_id", "")
        if not question.is_keyed:
            return first
        for number in range(RERUNS_MAX):
            job_id = f"{first}-{number}" if number else first
            if (client.lane, job_id) in self._audiences:
                return job_id
            if (client.lane, job_id) in self._left:
                continue
            record = await client.find_record(job_id)
            if record is None or record.kind is not Kind.CANCELLED:
                return job_id
        message = "Under this idempotency key a job was given up too often; use another."
        raise ApiError(409, "idempotency_conflict", message, param=headers.IDEMPOTENCY_KEY)

    async def _submit(
        self,
        client: Client,
        caller: Caller,
        question: Question,
        key: _Key,
        submitted: asyncio.Future[Ticket],
    ) -> None:
        """Submit a job for all who wait on it, whoever of them leaves meanwhile."""
        try:
            if question.is_named:
                await self._readers.listen()
                await self._readers.begins(key)
            wish = question.wish.copy()
            wish["job_id"] = key[1]
            ticket = await client.submit(question.body, known=question.is_named, **wish)
        except asyncio.CancelledError:
            submitted.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - told to whoever waits; the gateway goes on
            submitted.set_exception(error)
        else:
            self._gateway.metrics.jobs.labels(caller.lane, caller.name).inc()
            submitted.set_result(ticket)

    def _leave(self, key: _Key, audience: _Audience) -> None:
        """Forget a job that nobody waits on; cancel it unless it has ended or is kept."""
        if audience.readers:
            return
        if self._audiences.get(key) is audience:
            del self._audiences[key]
        if audience.is_kept or _is_over(audience.ticket):
            return
        self._gateway.metrics.left.inc()
        self._left.add(key)
        self._gateway.do(self._give_up(key, audience), what=f"cancel of job {key[1]}")

    async def _give_up(self, key: _Key, audience: _Audience) -> None:
        """Cancel a job, once it is known to be stored, and see it end.

        Not one that is read again meanwhile, here or at another gateway.
        """
        try:
            ticket = await audience.ticket
            client = await self._gateway.lanes.of(key[0])
            is_read_elsewhere = audience.is_named and await self._readers.elsewhere(key)
            if key in self._audiences:
                return
            if not is_read_elsewhere and await client.cancel_job(
                key[1], only_own=not audience.is_ours
            ):
                await ticket.result(timeout_s=self._gateway.config.client.cancel_s)
            else:
                client.forget(ticket)  # It has ended, or is another gateway's to cancel.
        finally:
            self._left.discard(key)

    def _takes_over(self, key: _Key) -> bool:
        """Say whether a job is read here, or kept; it is this gateway's to cancel then."""
        audience = self._audiences.get(key)
        if audience is not None:
            audience.is_ours = True
            return True
        return key in self._kept


def _check_same(body: bytes | None, question: Question) -> None:
    if body is not None and body != question.body.raw:
        message = "A job with this id runs with another body; give this one another id."
        raise ApiError(409, "idempotency_conflict", message, param=headers.JOB_ID)


def _is_over(submitted: asyncio.Future[Ticket]) -> bool:
    """Say whether there is nothing to cancel: the job has ended, or never came to be."""
    if not submitted.done():
        return False
    if submitted.cancelled() or submitted.exception() is not None:
        return True
    return submitted.result().record is not None


def _offers(offer: LaneOffer | None, name: str) -> bool:
    return offer is not None and resolve(name, "", offer)[0] in offer.models
