"""The way into a lane: store a job's message in its stream, and tell apart why that may fail.

The message id is `<job>.<submission>`. The same id may be sent again and again (the server drops
doubles for 120 s), so a try whose answer was lost is repeated unchanged; the submission rises only
after an answered refusal or proven absence, since an unchanged id would then be swallowed as a
double.
"""

import asyncio
import random
import time
from functools import lru_cache

import msgspec

from broker.bus.base import (
    Appended,
    Bus,
    BusError,
    LinkDown,
    NoStream,
    NotFound,
    PayloadTooLarge,
    StreamFull,
    Timeout,
)
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.messages import Job, LaneOffer, LaneState, QueueState
from producers.config import ClientConfig
from producers.errors import (
    BodyTooLarge,
    QueueFull,
    Refused,
    UnknownLane,
    UnknownModel,
    Unreachable,
)
from producers.naming import other_names, resolve

_RETRY_S = (0.05, 2.0)
"""First and longest pause between tries while the link is down: a reconnect takes 0.2 s, an
election seconds."""


class Door:
    """Stores jobs of one lane."""

    def __init__(self, bus: Bus, lane: str, config: ClientConfig) -> None:
        self._bus = bus
        self.lane = lane
        self._config = config
        self._offer: LaneOffer | None = None
        self._queues: dict[tuple[int, str], QueueState] = {}

    @property
    def offer(self) -> LaneOffer | None:
        """What the lane offers, as last read from CONFIG; None before a broker wrote it."""
        return self._offer

    def take_state(self, state: LaneState) -> None:
        """Note the lane's queues, as the broker says them each second."""
        self._queues = {(queue.band, queue.model): queue for queue in state.queues}

    def queue(self, band: int, model: str) -> QueueState | None:
        """State of one queue; None while no broker told it."""
        return self._queues.get((band, model))

    async def store(self, job: Job) -> Appended:
        """Try once to store a job's message. Raises what the bus raises."""
        job = self._meant(job)
        return await self._bus.append(
            _subject(job.lane, job.band, job.model),
            encode(job),
            message_id=f"{job.id}.{job.submission}",
            timeout_s=self._config.append_s,
        )

    async def submit(self, job: Job, *, queue_full_wait_s: float) -> tuple[Job, Appended]:
        """Store a job, trying again while that can help; return it as it was stored, and where.

        Raises QueueFull after `queue_full_wait_s` of waiting for room, UnknownModel, UnknownLane,
        BodyTooLarge, Unreachable.
        """
        started_s = time.monotonic()
        no_stream_since_s = 0.0
        tries = 0
        while True:
            now_s = time.monotonic()
            try:
                return job, await self.store(job)
            except PayloadTooLarge as error:
                message = f"the request is larger than the server takes ({error}); shorten it"
                raise BodyTooLarge(message) from error
            except StreamFull as error:
                job = msgspec.structs.replace(job, submission=job.submission + 1)
                pause_s = self.retry_after_s(job, tries=tries)
                if now_s + pause_s > started_s + queue_full_wait_s:
                    raise self._queue_full(job, retry_after_s=pause_s) from error
            except NoStream as error:
                no_stream_since_s = no_stream_since_s or now_s
                refusal = await self.refusal(job)
                if refusal is not None:
                    raise refusal from error
                if now_s > no_stream_since_s + self._config.no_stream_s:
                    raise Unreachable(self._nothing_set_up(job)) from error
                pause_s = _pause_s(tries)
            except (Timeout, LinkDown) as error:
                if now_s > started_s + self._config.submit_s:
                    raise Unreachable(self._unconfirmed(job)) from error
                pause_s = _pause_s(tries)
            tries += 1
            await asyncio.sleep(pause_s)

    def _meant(self, job: Job) -> Job:
        """Return a job that was built before the offer said what its model's name stands for."""
        model, adapter = resolve(job.model, job.adapter, self._offer)
        if model == job.model:
            return job
        return msgspec.structs.replace(job, model=model, adapter=adapter)

    async def load_offer(self) -> LaneOffer | None:
        """Read what the lane offers; None when nobody wrote it or it can't be read now."""
        try:
            entry = await self._bus.kv_get(
                subjects.CONFIG_BUCKET, subjects.lane_offer_key(self.lane)
            )
            self._offer = decode(entry.value, LaneOffer)
        except NotFound:
            self._offer = None
        except (BusError, MalformedMessage):
            pass
        return self._offer

    async def refusal(self, job: Job) -> Refused | None:
        """Say why no stream takes this job; None when one should (an election, no broker yet)."""
        offer = await self.load_offer()
        if offer is None:
            lanes = await lanes_of(self._bus)
            if not lanes or self.lane in lanes:
                return None
            message = f"the cluster has no lane {self.lane!r}; it has: {', '.join(lanes)}"
            return UnknownLane(message)
        model = self._meant(job).model
        if model not in offer.models:
            also = other_names(model, offer)
            called = f" (also called {', '.join(map(repr, also))})" if also else ""
            message = (
                f"lane {self.lane!r} offers no model {model!r}{called}; "
                f"it offers: {', '.join(offer.models) or 'none'}"
            )
            return UnknownModel(message)
        if job.band not in offer.bands:
            bands = ", ".join(map(str, offer.bands))
            message = f"lane {self.lane!r} takes no jobs of band {job.band}; it takes: {bands}"
            return UnknownModel(message)
        return None

    def retry_after_s(self, job: Job, *, tries: int = 0) -> float:
        """Pause before a full queue is tried again: its own wait, or a doubling guess; jittered."""
        queue = self.queue(job.band, job.model)
        floor_s, ceiling_s = self._config.retry_after_s_min, self._config.retry_after_s_max
        guess_s = queue.wait_s if queue is not None else floor_s * 2.0 ** min(tries, 16)
        return min(max(guess_s, floor_s), ceiling_s) * random.uniform(1.0, 1.2)

    def _queue_full(self, job: Job, *, retry_after_s: float) -> QueueFull:
        message = (
            f"the queue of lane {self.lane!r}, band {job.band}, model {job.model!r} is full; "
            f"try again in {retry_after_s:.0f} s"
        )
        return QueueFull(message, retry_after_s=retry_after_s)

    def _unconfirmed(self, job: Job) -> str:
        for_s = f"for {self._config.submit_s:.0f} s"
        fault = (
            f"the message server is there and confirmed nothing {for_s} (`inferlane doctor` looks)"
            if self._bus.connected
            else f"the cluster could not be reached {for_s}"
        )
        return (
            f"{fault}; whether job {job.id} was stored is not known: submit it again under the "
            "same id"
        )

    def _nothing_set_up(self, job: Job) -> str:
        stream = subjects.jobs_stream(self.lane, job.band)
        return (
            f"no stream {stream} took the job for {self._config.no_stream_s:.0f} s; "
            "start a broker that serves this lane, or look at the server with `inferlane doctor`"
        )


def _pause_s(tries: int) -> float:
    first_s, longest_s = _RETRY_S
    return min(first_s * 2.0 ** min(tries, 16), longest_s) * random.uniform(0.8, 1.2)


@lru_cache(maxsize=1024)
def _subject(lane: str, band: int, model: str) -> str:
    """Subject of a queue, remembered: escaping a model's name is a tenth of a submission's time."""
    return subjects.jobs(lane, band, model)


async def lanes_of(bus: Bus) -> list[str]:
    """Lanes that a broker has set up here, sorted; none when CONFIG can't be read."""
    prefix = subjects.lane_offer_key("")
    try:
        keys = await bus.kv_keys(subjects.CONFIG_BUCKET)
    except BusError:
        return []
    return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
