"""A worker that speaks the whole contract and computes nothing: what is left is the broker's cost.

It accepts every order, writes the terminal record by compare-and-set, says so at once, acknowledges
with reply,
and heartbeats each second. `throughput.py` starts it.
"""

import asyncio
import contextlib
import sys
import time
from collections import deque

from broker.bus.base import Bus, Message, WrongSequence
from broker.bus.nats import connect
from broker.wire import subjects
from broker.wire.codec import decode, decode_order, encode
from broker.wire.messages import (
    Answer,
    AttemptEnded,
    Dispatch,
    Finished,
    Heartbeat,
    InFlight,
    Inventory,
    Job,
    Kind,
    Load,
    Outcome,
    TerminalRecord,
    Usage,
    WorkReply,
)
from tests.bench.relay import say

WORKER = "null"
SLOTS = 1024
INCARNATION = 1
FINISHED_KEPT_MAX = 1024


class NullAgent:
    """One worker without an engine."""

    def __init__(self, bus: Bus, group: asyncio.TaskGroup, *, jobs: int) -> None:
        self.bus = bus
        self.group = group
        self.jobs = jobs
        self.epoch = 0
        self.echo = 0
        self.beats = 0
        self.running: dict[str, InFlight] = {}
        self.finished: deque[Finished] = deque(maxlen=FINISHED_KEPT_MAX)
        self.done = 0
        self.first_at_s = 0.0

    def order(self, message: Message) -> None:
        """Answer an order at once, then do it."""
        order = decode_order(message.data)
        self.epoch, self.echo = order.epoch, order.number
        if isinstance(order, Dispatch):
            self.first_at_s = self.first_at_s or time.perf_counter()
            self.group.create_task(self._run(order, message.reply))
        else:
            self.group.create_task(self._reply(message.reply))

    async def _reply(self, subject: str) -> None:
        reply = WorkReply(answer=Answer.ACCEPTED, epoch=self.epoch, incarnation=INCARNATION)
        await self.bus.publish(subject, encode(reply))

    async def _run(self, order: Dispatch, reply_subject: str) -> None:
        await self._reply(reply_subject)
        job = decode(order.job, Job)
        key = f"{job.lane}.{job.id}"
        self.running[key] = _entry(order, job, key)
        usage = Usage(job.prompt_tokens, order.predicted_hit_tokens, job.output_tokens_max)
        record = TerminalRecord(
            job=job.id,
            lane=job.lane,
            kind=Kind.COMPLETED,
            ended_at_s=time.time(),
            status_code=200,
            body=job.body,
            usage=usage,
            attempt=order.attempt,
            worker=WORKER,
        )
        with contextlib.suppress(WrongSequence):  # Its record stands: as good as written.
            await self.bus.append(
                subjects.result(job.lane, job.id), encode(record), expected_last_subject_sequence=0
            )
        finished = Finished(
            key=key,
            attempt=order.attempt,
            outcome=Outcome.SETTLED,
            kind=Kind.COMPLETED,
            usage=usage,
            predicted_hit_tokens=order.predicted_hit_tokens,
            stream_sequence=order.stream_sequence,
        )
        self.running.pop(key, None)
        self.finished.append(finished)
        note = AttemptEnded(worker=WORKER, incarnation=INCARNATION, finished=finished)
        await self.bus.publish(subjects.worker_note(WORKER), encode(note))
        await self.bus.ack(order.ack_subject)
        self.done += 1
        if self.done == self.jobs:
            say({"jobs_s": self.jobs / (time.perf_counter() - self.first_at_s)})

    async def inventory(self, message: Message) -> None:
        """Take the epoch and answer with a heartbeat."""
        self.epoch = decode(message.data, Inventory).epoch
        await self.beat()

    async def beat(self) -> None:
        """Send one heartbeat."""
        self.beats += 1
        heartbeat = Heartbeat(
            worker=WORKER,
            incarnation=INCARNATION,
            sequence=self.beats,
            epoch=self.epoch,
            echo=self.echo,
            at_s=time.time(),
            models=("tiny",),
            slots=SLOTS,
            inflight=tuple(self.running.values()),
            finished=tuple(self.finished),
            load=Load(prefill_tokens_s=1e9, decode_tokens_s=1e6),
        )
        await self.bus.publish(subjects.heartbeat(WORKER), encode(heartbeat))


def _entry(order: Dispatch, job: Job, key: str) -> InFlight:
    return InFlight(
        key=key,
        attempt=order.attempt,
        stream_sequence=order.stream_sequence,
        band=job.band,
        model=job.model,
        prompt_tokens=job.prompt_tokens,
        cached_tokens=order.predicted_hit_tokens,
        output_tokens_max=job.output_tokens_max,
        output_tokens=0,
        prefilled=False,
        enqueued_at_s=order.enqueued_at_s,
        started_at_s=order.enqueued_at_s,
        ack_subject=order.ack_subject,
        client=job.client,
    )


async def serve(url: str, jobs: int) -> None:
    """Work until standard input ends."""
    bus = await connect(url, name="null-agent")
    async with asyncio.TaskGroup() as group:
        agent = NullAgent(bus, group, jobs=jobs)
        await bus.subscribe(subjects.work(WORKER), agent.order)
        await bus.subscribe(subjects.INVENTORY, agent.inventory)
        beating = group.create_task(_beat(agent))
        say({"event": "ready"})
        await asyncio.to_thread(sys.stdin.read)
        beating.cancel()
        await bus.close()


async def _beat(agent: NullAgent) -> None:
    while True:
        await agent.beat()
        await asyncio.sleep(1.0)
