"""Broker and workers in one small part, for tests of producers: it plays their side of the bus.

It pulls a lane's jobs, tells the caller, runs a script instead of an engine, writes the record by
compare-and-set and acknowledges: the steps of a job's life that a producer can see. Each fault a
producer must survive is one attribute.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from typing import Self

import msgspec
import orjson

from broker.bus.base import (
    BucketSpec,
    Bus,
    BusError,
    ConsumerSpec,
    Delivery,
    Message,
    NotFound,
    Pull,
    StreamSpec,
    WrongSequence,
)
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.control import CancelRequest, ControlReply
from broker.wire.ids import BANDS, BATCH_BAND
from broker.wire.messages import (
    Attempt,
    End,
    Job,
    Kind,
    LaneOffer,
    LaneState,
    Queued,
    QueueState,
    Reason,
    Started,
    StoredEnd,
    TerminalRecord,
    Tokens,
    Usage,
)
from tests.builders import LANE, MODEL

ATTEMPT = Attempt(1, 1)


def an_answer(job: Job, *, text: str = "hi") -> bytes:
    """Body of a chat answer."""
    message = {"role": "assistant", "content": text}
    return orjson.dumps(
        {"id": job.id, "model": job.model, "choices": [{"index": 0, "message": message}]}
    )


def a_record(job: Job, **fields: object) -> TerminalRecord:
    """The record of a job that completed; any field may be another."""
    made = TerminalRecord(
        job=job.id,
        lane=job.lane,
        kind=Kind.COMPLETED,
        ended_at_s=time.time(),
        band=job.band,
        model=job.model,
        client=job.client,
        status_code=200,
        body=an_answer(job),
        usage=Usage(prompt_tokens=job.prompt_tokens, output_tokens=1),
        attempt=ATTEMPT,
        worker="worker-1",
    )
    return msgspec.structs.replace(made, **fields)


def a_rejection(
    job: Job, reason: Reason = Reason.QUOTA_EXCEEDED, *, retry_after_s: float = 1.0
) -> TerminalRecord:
    """The record of a job that was turned away."""
    return a_record(
        job,
        kind=Kind.REJECTED,
        reason=reason,
        row="lane=acme",
        retry_after_s=retry_after_s,
        message="the lane has no room",
        status_code=0,
        body=b"",
        attempt=None,
    )


class Responder:
    """Serves one lane over a bus."""

    def __init__(
        self,
        bus: Bus,
        *,
        lane: str = LANE,
        models: tuple[str, ...] = (MODEL,),
        jobs_max: int = 100_000,
        window: int = 256,
        result_life_s: float = 0.0,
    ) -> None:
        self.bus = bus
        self.lane = lane
        self.models = models
        self.jobs_max = jobs_max
        self.window = window
        self.result_life_s = result_life_s
        self.runs: Counter[str] = Counter()
        """Times each job was run: more than one is a second run."""
        self.seen: list[Job] = []
        self.deliveries: Counter[str] = Counter()
        self.cancelled: set[str] = set()
        self.answer: Callable[[Job], TerminalRecord] = a_record
        self.reject: Callable[[Job], TerminalRecord | None] = lambda _: None
        self.chunks: Callable[[Job], list[Tokens]] = lambda _: []
        self.loses_end: Callable[[Job], bool] = lambda _: False
        self.ends = 1
        """How often each end is said."""
        self.stores_end = False
        """Say only that the record is stored."""
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.may_ack = asyncio.Event()
        self.may_ack.set()
        self.run_s = 0.0
        """How long each job takes."""
        self.started = asyncio.Event()
        """A job was given to the script."""
        self._stack = AsyncExitStack()

    async def set_up(self) -> None:
        """Make the lane's streams, buckets and offer."""
        for name, bands in (("JOBS", (0, 1, 2)), ("BATCH", (BATCH_BAND,))):
            await self.bus.ensure_stream(
                StreamSpec(
                    name=f"{name}_{self.lane}",
                    subjects=tuple(
                        subjects.jobs(self.lane, band, model)
                        for band in bands
                        for model in self.models
                    ),
                    work_queue=True,
                    max_msgs_per_subject=self.jobs_max,
                    discard_new_per_subject=True,
                )
            )
        await self.bus.ensure_stream(
            StreamSpec(
                name=subjects.results_stream(self.lane),
                subjects=(subjects.result(self.lane, "*"),),
                max_msgs_per_subject=1,
                discard_new_per_subject=True,
                allow_msg_ttl=True,
            )
        )
        await self.bus.ensure_bucket(BucketSpec(name=subjects.CONFIG_BUCKET))
        offer = LaneOffer(lane=self.lane, models=self.models)
        await self.bus.kv_put(subjects.CONFIG_BUCKET, f"lane.{self.lane}", encode(offer))

    async def __aenter__(self) -> Self:
        await self.set_up()
        self._tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        control = subjects.lane_control(self.lane, "cancel")
        subscription = await self.bus.subscribe(control, self._cancel)
        self._stack.push_async_callback(subscription.unsubscribe)
        for band in BANDS:
            for model in self.models:
                await self._serve(band, model)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.may_run.set()
        self.may_ack.set()
        await self._stack.aclose()

    async def tell_state(self, *queues: QueueState) -> None:
        """Say the lane's state once."""
        state = LaneState(lane=self.lane, epoch=1, at_s=time.time(), queues=queues)
        await self.bus.publish(subjects.queue_state(self.lane), encode(state))

    async def say(
        self, job: Job, event: Queued | Started | Tokens | End | StoredEnd, *, client: str = ""
    ) -> None:
        """Tell the caller something."""
        await self.bus.publish(subjects.out(job.lane, client or job.client, job.id), encode(event))

    async def _serve(self, band: int, model: str) -> None:
        stream = subjects.jobs_stream(self.lane, band)
        consumer = subjects.job_consumer(band, model)
        await self.bus.ensure_consumer(
            ConsumerSpec(
                stream=stream,
                name=consumer,
                filter_subject=subjects.jobs(self.lane, band, model),
                # What was on its way when a link broke comes again after this.
                ack_wait_s=5.0,
                max_ack_pending=max(self.window, 1000),
            )
        )
        held: list[Pull] = []

        def take(deliveries: list[Delivery]) -> None:
            for delivery in deliveries:
                self._tasks.create_task(self._live(delivery, held[0]))

        pull = await self.bus.pull(stream, consumer, take, window=0)
        held.append(pull)
        pull.resize(self.window)
        self._stack.push_async_callback(pull.stop)

    async def _live(self, delivery: Delivery, pull: Pull) -> None:
        """One delivery's life: the record until it stands; an ack that fails brings it again."""
        job = decode(delivery.data, Job)
        self.deliveries[job.id] += 1
        self.seen.append(job)
        try:
            record = None if await self._is_recorded(job) else await self._record_of(job)
            if record is not None and await self._won(job, record) and not self.loses_end(job):
                await self._tell_end(job, record)
            await self.may_ack.wait()
            with suppress(BusError):
                await self.bus.ack(delivery.ack_subject)
        finally:
            pull.release()

    async def _is_recorded(self, job: Job) -> bool:
        while True:
            try:
                subject = subjects.result(job.lane, job.id)
                await self.bus.last_message(subjects.results_stream(job.lane), subject)
            except NotFound:
                return False
            except BusError:
                await asyncio.sleep(0.05)
            else:
                return True

    async def _record_of(self, job: Job) -> TerminalRecord:
        rejection = self.reject(job)
        return rejection or await self._run(job)

    async def _won(self, job: Job, record: TerminalRecord) -> bool:
        """Write the record, unless one stands."""
        is_rejection = record.kind is Kind.REJECTED
        life_s = max(record.retry_after_s, 1.0) if is_rejection else self.result_life_s
        while True:
            try:
                await self.bus.append(
                    subjects.result(job.lane, job.id),
                    encode(record),
                    expected_last_subject_sequence=0,
                    ttl_s=life_s,
                )
            except WrongSequence:
                return False
            except BusError:
                await asyncio.sleep(0.05)
            else:
                return True

    async def _tell_end(self, job: Job, record: TerminalRecord) -> None:
        end = StoredEnd(job=job.id) if self.stores_end else End(job=job.id, record=encode(record))
        for _ in range(self.ends):
            with suppress(BusError):
                await self.say(job, end)

    async def _run(self, job: Job) -> TerminalRecord:
        await self._murmur(job, Queued(job=job.id, position=3, wait_s=1.5))
        self.started.set()
        await self.may_run.wait()
        if self.run_s:
            await asyncio.sleep(self.run_s)
        if job.id in self.cancelled:
            return a_record(job, kind=Kind.CANCELLED, reason=Reason.CANCELLED, status_code=0)
        self.runs[job.id] += 1
        await self._murmur(job, Started(job=job.id, attempt=ATTEMPT, worker="worker-1"))
        for tokens in self.chunks(job):
            await self._murmur(job, tokens)
        return self.answer(job)

    async def _murmur(self, job: Job, event: Queued | Started | Tokens) -> None:
        """Say what may be lost."""
        with suppress(BusError):
            await self.say(job, event)

    async def _cancel(self, message: Message) -> None:
        request = decode(message.data, CancelRequest)
        self.cancelled.add(request.job)
        reply = ControlReply(ok=any(job.id == request.job for job in self.seen))
        await self.bus.publish(message.reply, encode(reply))
