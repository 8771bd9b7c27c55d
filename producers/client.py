"""The asynchronous client of one lane: submit a request, hold its ticket, get its result.

One subscription hears of all the client's jobs, and one task looks after all tickets, so thousands
of jobs at once cost little more than their bodies. Closing the client ends its waits, not its jobs.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Self, Unpack

import msgspec

from broker.bus.base import Bus, BusError, Message, Subscription
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, decode_out
from broker.wire.control import CancelRequest, LaneCancelStep
from broker.wire.ids import new_job_id, require_token
from broker.wire.messages import (
    Bundle,
    Job,
    LaneOffer,
    LaneState,
    OfOneJob,
    Reason,
    TerminalRecord,
)
from producers.config import ClientConfig, NatsLink
from producers.connecting import connect_bus
from producers.door import Door
from producers.errors import ClientClosed, ProducerError, Refused, Unreachable
from producers.lane_control import CancelProgress, LaneControl
from producers.looking import JobLook, Looks, Place
from producers.request import ReadBody, Wish, WishFields, build_job
from producers.ticket import Heard, Ticket
from producers.watchdog import FindCopy, Watchdog, WatchdogCounts, no_copy

TRANSIENT = frozenset(
    (
        Reason.QUEUE_FULL,
        Reason.QUOTA_EXCEEDED,
        Reason.RESULTS_FULL,
        Reason.NO_WORKERS,
        Reason.DRAINING,
        Reason.LANE_PAUSED,
    )
)
"""Rejections that another try may escape; all others are final."""


@dataclass(slots=True)
class ClientCounts:
    """What a client heard since its start."""

    submitted: int = 0
    refused: int = 0
    """Requests that were not accepted: nothing of them is stored, and the broker never heard."""
    ended: int = 0
    strays: int = 0
    """Messages about jobs that nobody here waits for: second ends, late tokens."""
    garbage: int = 0
    """Messages that could not be read."""


class Client:
    """Submits jobs to one lane: `async with Client(bus, lane=...)` or `Client.connect(...)`."""

    def __init__(
        self,
        bus: Bus,
        *,
        lane: str,
        client_id: str = "",
        config: ClientConfig | None = None,
        find_copy: FindCopy = no_copy,
    ) -> None:
        """`client_id` names where answers go; the same again hears of jobs of its past life.

        `find_copy` reads the copies of records that aged out; it raises BusError.
        """
        self.lane = require_token(lane, what="lane")
        self.client_id = require_token(client_id or new_job_id(), what="client id")
        self.config = config or ClientConfig()
        self.counts = ClientCounts()
        self._bus = bus
        self._tickets: dict[str, Ticket] = {}
        self._door = Door(bus, lane, self.config)
        self._watchdog = Watchdog(bus, self._door, self._tickets, self.config, self, find_copy)
        self._control = LaneControl(bus, lane, self.config)
        self._looks = Looks(
            bus,
            lane,
            self._watchdog.find_record,
            timeout_s=self.config.lookup_s,
            jobs_max=self.config.look_jobs_max,
        )
        self._overheard: dict[str, asyncio.Task[None]] = {}
        """What listens to other clients' news, by job."""
        self._stack = AsyncExitStack()
        self._closed = True

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        url: str = NatsLink().url,
        *,
        lane: str,
        client_id: str = "",
        config: ClientConfig | None = None,
        link: NatsLink | None = None,
    ) -> "AsyncGenerator[Client]":
        """Connect to NATS at `url` and open a client of `lane`. Raises Unreachable.

        `link`, instead of `url`, can carry credentials too.
        """
        async with (
            connect_bus(link or NatsLink(url=url), name=f"inferlane-client-{lane}") as bus,
            cls(bus, lane=lane, client_id=client_id, config=config) as client,
        ):
            yield client

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            try:
                await self._listen(stack)
            except BusError as error:
                message = f"the message server does not answer ({error}); is it running?"
                raise Unreachable(message) from error
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(self._group.create_task(self._watchdog.run()).cancel)
            self._bus.on_link(_weakly(self))
            self._stack = stack.pop_all()
        self._closed = False
        return self

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Hear of all jobs of this client and of the lane's queues. Raises BusError."""
        out = subjects.out_of_client(self.lane, self.client_id)
        await self._subscribe(stack, await self._bus.subscribe(out, self._on_out))
        state = subjects.queue_state(self.lane)
        await self._subscribe(stack, await self._bus.subscribe(state, self._on_state))
        await self._door.load_offer()

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._watchdog.give_up()
        self._tickets.clear()
        # Not told of an error in the body: the task group would wrap it in a group of its own.
        await self._stack.aclose()

    # ---- for callers ----------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the link to the server stands."""
        return self._bus.connected

    @property
    def offer(self) -> LaneOffer | None:
        """What the lane offers (models, bands, largest body); None before a broker wrote it."""
        return self._door.offer

    async def refresh_offer(self) -> LaneOffer | None:
        """Read anew what the lane offers; what is known stands when it can't be read now."""
        return await self._door.load_offer()

    @property
    def open_tickets(self) -> int:
        """Jobs that were submitted here and have not ended."""
        return len(self._tickets)

    @property
    def watchdog_counts(self) -> WatchdogCounts:
        """What the watchdog found and healed."""
        return self._watchdog.counts

    async def submit(
        self,
        body: Mapping[str, object] | bytes | ReadBody,
        *,
        queue_full_wait_s: float = 0.0,
        known: bool | None = None,
        **wish: Unpack[WishFields],
    ) -> Ticket:
        """Submit a request; returns once it is stored, which is the promise that it will end.

        `wish` has the fields of `Wish`: job_id, model, band, session, deadline_s, stream, endpoint
        and more. A job id submitted before gives that job's ticket or result, not a second run.
        Whether it may have been submitted before, `known` says; None: if it has an id.
        With `queue_full_wait_s` a full queue, at the door or by the broker's rejection, is waited
        out for so long. Raises QueueFull, UnknownModel, UnknownLane, BodyTooLarge, BadRequest,
        Unreachable.
        """
        wanted = Wish(**wish)
        raw = body.raw if isinstance(body, ReadBody) else body
        large = isinstance(raw, bytes) and len(raw) > self.config.prepare_inline_bytes_max
        build = self._build
        with self._refusals_counted():
            job = await asyncio.to_thread(build, body, wanted) if large else build(body, wanted)
        return await self.submit_job(
            job,
            queue_full_wait_s=queue_full_wait_s,
            known=bool(wanted.job_id) if known is None else known,
        )

    async def submit_job(
        self, job: Job, *, queue_full_wait_s: float = 0.0, known: bool = False, sequence: int = 0
    ) -> Ticket:
        """Submit a job that was built with `build_job`.

        `known`: it may have been submitted before, so its record is looked for first; and
        `sequence`, where given, is where its message was stored then: found there, it is not stored
        again. Raises as `submit`.
        """
        if self._closed:
            message = "the client is closed; open one with `async with`"
            raise ClientClosed(message)
        if (ticket := self._tickets.get(job.id)) is not None:
            return ticket
        ticket = self._tickets[job.id] = Ticket(job, self, self.config)
        ticket.backs_off_for(queue_full_wait_s)
        try:
            with self._refusals_counted():
                if not (known and await self._resume(ticket, sequence)):
                    await self._store(ticket, queue_full_wait_s)
        except BaseException as error:
            self._tickets.pop(job.id, None)
            # Another caller of the same id may wait on it already.
            given_up = ClientClosed("its submission was given up; submit it again")
            ticket.fail(error if isinstance(error, ProducerError) else given_up)
            raise
        self.counts.submitted += 1
        return ticket

    def ticket_of(self, job_id: str) -> Ticket | None:
        """Return the ticket of a job that was submitted here and has not ended; else None."""
        return self._tickets.get(job_id)

    async def find_record(self, job_id: str) -> TerminalRecord | None:
        """Read the terminal record of any job of the lane; None without one. Raises Unreachable."""
        try:
            return await self._watchdog.find_record(job_id)
        except BusError as error:
            message = f"the results of lane {self.lane!r} can't be read now ({error}); try again"
            raise Unreachable(message) from error

    async def look(self, job_id: str, *, place: Place | None = None) -> JobLook | None:
        """Say where any job of the lane stands: queued, started or ended; None without such a job.

        A job beyond the broker's window is searched in its stream, at most `look_jobs_max` messages
        far, unless `place` (of a look before, or of a ticket) says where it is. Raises Unreachable.
        """
        try:
            return await self._looks.look(job_id, place or self._place(job_id))
        except BusError as error:
            message = f"the jobs of lane {self.lane!r} can't be looked at now ({error}); try again"
            raise Unreachable(message) from error

    def forget(self, ticket: Ticket) -> None:
        """Look after a job no longer: it goes on, and a later `submit_job(known=True)` finds it."""
        self._tickets.pop(ticket.job_id, None)
        if (listening := self._overheard.get(ticket.job_id)) is not None:
            listening.cancel()

    async def cancel_job(
        self, job_id: str, *, place: Place | None = None, only_own: bool = False
    ) -> bool:
        """Ask for a job's cancellation; say whether the broker found it. Raises Unreachable.

        With `only_own` a job that another client submitted first is left alone, and not found.
        A job that was not submitted here and that the broker has not pulled is searched in its
        stream, as by `look`, unless `place` says where it is.
        """
        place = place or self._place(job_id)
        client = self.client_id if only_own else ""
        if await self._ask_to_cancel(job_id, place, client):
            return True
        if place is not None:
            return False
        try:
            place = await self._looks.search(job_id)
        except BusError as error:
            message = f"the jobs of lane {self.lane!r} can't be read now ({error}); try again"
            raise Unreachable(message) from error
        return place is not None and await self._ask_to_cancel(job_id, place, client)

    async def _ask_to_cancel(self, job_id: str, place: Place | None, client: str) -> bool:
        request = CancelRequest(
            job=job_id,
            client=client,
            stream="" if place is None else place.stream,
            stream_sequence=0 if place is None else place.sequence,
        )
        what = f"the cancellation of job {job_id}"
        return (await self._control.ask("cancel", request, what=what)).ok

    async def count_jobs(self, *, bands: Collection[int] = (), model: str = "") -> LaneCancelStep:
        """Count jobs of the lane that wait or run: what `cancel_jobs` would hit.

        Raises Unreachable.
        """
        return await self._control.count(bands=bands, model=model)

    async def cancel_jobs(
        self,
        *,
        bands: Collection[int] = (),
        model: str = "",
        progress: CancelProgress = lambda _: None,
    ) -> LaneCancelStep:
        """Cancel all jobs of the lane, whoever submitted them: queued and running.

        Of some bands or a model only, where named. Returns how many; `progress` hears as it goes.
        Jobs that come meanwhile stay. Raises Unreachable; what was cancelled before stays so.
        """
        return await self._control.cancel(bands=bands, model=model, progress=progress)

    def queue_wait_s(self, band: int, model: str) -> float | None:
        """Expected wait in a queue of the lane; None while no broker told it."""
        queue = self._door.queue(band, model)
        return None if queue is None else queue.wait_s

    def queue_pace_s(self, band: int, model: str) -> float:
        """Jobs a second that a queue of the lane gets through, as far as its wait tells; else 0."""
        queue = self._door.queue(band, model)
        if queue is None or queue.wait_s <= 0:
            return 0.0
        return queue.queued_jobs / queue.wait_s

    # ---- what the watchdog found ----------------------------------------------------------------

    def found_record(self, ticket: Ticket, record: TerminalRecord) -> None:
        """Take a record that was looked up: its end was not heard."""
        self._take_record(ticket, record, heard=False)

    def found_refusal(self, ticket: Ticket, refusal: Refused) -> None:
        """Give up a job that was lost and can't be submitted again."""
        self._tickets.pop(ticket.job_id, None)
        ticket.fail(refusal)

    # ---- inside ---------------------------------------------------------------------------------

    @contextmanager
    def _refusals_counted(self) -> Generator[None]:
        try:
            yield
        except Refused:
            self.counts.refused += 1
            raise

    def _place(self, job_id: str) -> Place | None:
        """Say where the job's message is, where that is known: the broker may not hold it yet."""
        ticket = self._tickets.get(job_id)
        if ticket is None or not ticket.sequence:
            return None
        return Place(subjects.jobs_stream(self.lane, ticket.job.band), ticket.sequence)

    def _build(self, body: Mapping[str, object] | bytes | ReadBody, wish: Wish) -> Job:
        if not wish.cache_scope:
            wish = msgspec.structs.replace(wish, cache_scope=self.config.scope)
        return build_job(body, wish, lane=self.lane, client=self.client_id, offer=self.offer)

    async def _subscribe(self, stack: AsyncExitStack, subscription: Subscription) -> None:
        async def unsubscribe() -> None:
            with suppress(BusError):
                await subscription.unsubscribe()

        stack.push_async_callback(unsubscribe)

    async def _store(self, ticket: Ticket, queue_full_wait_s: float) -> None:
        job, appended = await self._door.submit(ticket.job, queue_full_wait_s=queue_full_wait_s)
        if ticket.record is not None or ticket.submission > job.submission:
            return  # It ended, or was submitted again, before the stream's word came.
        ticket.submission, ticket.sequence = job.submission, appended.sequence
        if appended.duplicate:
            self._overhear(ticket)
            self._watchdog.look_now(ticket)  # It may have ended long ago.
        elif not ticket.rejected:
            self._watchdog.heard(ticket)

    def _overhear(self, ticket: Ticket) -> None:
        """Listen to what another client is told of a job.

        Its message was there already, with that one's name in it, and nobody else is told.
        """
        task = self._group.create_task(self._listen_to(ticket))
        self._overheard[ticket.job_id] = task
        task.add_done_callback(lambda _: self._overheard.pop(ticket.job_id, None))

    async def _listen_to(self, ticket: Ticket) -> None:
        anybody = subjects.out(self.lane, "*", ticket.job_id)
        try:
            subscription = await self._bus.subscribe(anybody, self._on_out)
        except BusError:
            return  # The watchdog finds its end, later.
        try:
            with suppress(ProducerError):
                await ticket.result()
        finally:
            with suppress(BusError):
                await subscription.unsubscribe()

    async def _resume(self, ticket: Ticket, sequence: int) -> bool:
        """Find a job of an earlier life: its record, or its message. False: it has to be stored."""
        try:
            record = await self._watchdog.find_record(ticket.job_id)
            if record is not None:
                if ticket.record is None:
                    self._take_record(ticket, record, heard=False)
                return True
            ticket.sequence = sequence
            if sequence and await self._watchdog.is_stored(ticket):
                self._watchdog.heard(ticket)
                return True
        except BusError:
            # Not known now; storing it under its first id again is safe, and the watchdog looks
            # later.
            ticket.sequence = 0
            return False
        if sequence:
            self._watchdog.look_now(
                ticket
            )  # It left its stream: the record is there now, or it is lost.
        return bool(sequence)

    def _on_out(self, message: Message) -> None:
        """Hear of a job, or of several. Never blocks."""
        try:
            event = decode_out(message.data)
        except MalformedMessage:
            self.counts.garbage += 1
            return
        if isinstance(event, Bundle):
            for tokens in event.tokens:
                self._hear(tokens.job, tokens)
        else:
            self._hear(message.subject.rpartition(".")[2], event)

    def _hear(self, job_id: str, event: OfOneJob) -> None:
        ticket = self._tickets.get(job_id)
        if ticket is None:
            self.counts.strays += 1
            return
        try:
            heard, record = ticket.hear(event)
        except MalformedMessage:
            self.counts.garbage += 1
            return
        match heard:
            case Heard.RECORD if record is not None:
                self._take_record(ticket, record, heard=True)
            case Heard.LOOK:
                self._watchdog.look_now(ticket)
            case _:
                if ticket.sequence:
                    self._watchdog.heard(ticket)

    def _take_record(self, ticket: Ticket, record: TerminalRecord, *, heard: bool) -> None:
        if record.reason in TRANSIENT and record.ended_at_s <= ticket.rejected_at_s:
            return  # Said twice; it was waited out already.
        if record.reason in TRANSIENT and ticket.may_back_off(record.retry_after_s):
            ticket.hold_back(record)
            floor_s, ceiling_s = self.config.retry_after_s_min, self.config.retry_after_s_max
            self._watchdog.look_in(ticket, min(max(record.retry_after_s, floor_s), ceiling_s))
            return
        self._tickets.pop(ticket.job_id, None)
        ticket.end(record, heard=heard)
        self.counts.ended += 1

    def _on_state(self, message: Message) -> None:
        try:
            self._door.take_state(decode(message.data, LaneState))
        except MalformedMessage:
            self.counts.garbage += 1

    def on_link(self, *, up: bool) -> None:
        """Take note that the link was lost or came back: messages may have passed unheard."""
        if self._closed:
            return
        if up:
            self._watchdog.link_restored()
            return
        for ticket in self._tickets.values():
            ticket.link_lost()


def _weakly(client: Client) -> Callable[[bool], None]:
    """A link handler that doesn't keep a closed client: a bus can't forget its handlers."""
    reference = weakref.ref(client)

    def told(up: bool) -> None:  # noqa: FBT001 - the bus calls it so.
        if (alive := reference()) is not None:
            alive.on_link(up=up)

    return told
