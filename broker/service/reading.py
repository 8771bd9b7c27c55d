"""From a message's bytes to a whole job: in either form, checked, and filled in where it lacks.

Our producers compute what routing needs of a prompt. A foreign producer may leave that out: then it
is computed here, by the same functions. A worker always gets the job whole and in msgpack, so that
agents know one form; the message in the stream stays as it was published.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import msgspec
import orjson
import structlog

from broker.bus.base import Bus, BusError, Delivery, StoredMessage
from broker.service.learned import Learned
from broker.wire import prompt
from broker.wire.codec import (
    MalformedMessage,
    decode,
    encode,
    read_json_job,
    speaks_json,
)
from broker.wire.messages import Job
from broker.wire.prefix import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    CLUSTER_SCOPE,
    HASH_BYTES,
    block_hashes,
    pack_hashes,
    seed,
)
from broker.wire.subjects import JobAddress

INLINE_BYTES_MAX = 32 * 1024
"""Largest message of a foreign producer that is read on the loop, in 0.2 ms on a slow core."""

ASIDE_BYTES_MAX = 64 * 1024 * 1024
"""Bytes of messages that wait to be read aside: eight of the largest. Further ones are read from
their stream when it is their turn."""

REFERENCED_TOKENS_MAX = 131_072
"""A prompt has no more tokens than its body bytes, but for what it only names (images, a video):
so many. Whoever says more would hold a worker's room for as long as that took to prefill."""

_PROMPT = frozenset(("blocks", "prompt_tokens"))
"""What a producer in msgpack may leave out. Defaults are not sent there, so the others can't be
told from a default that is meant."""

_FROM_BODY = _PROMPT | {"output_tokens_max", "stream"}

_log = structlog.get_logger(__name__)


class Whole(msgspec.Struct, frozen=True):
    """A job with nothing missing."""

    job: Job
    message: bytes
    """As a worker gets it: what was published, or that made whole, in msgpack."""
    speaks_json: bool = False
    """Its caller reads JSON."""


_Then = Callable[[Delivery, Whole | Exception], None]


@dataclass(frozen=True, slots=True)
class _Aside:
    """A message that waits to be read aside."""

    delivery: Delivery
    """Without its bytes where those were too many: they are in the stream."""
    address: JobAddress
    then: _Then


class Reader:
    """Reads the messages of job streams."""

    def __init__(
        self, bus: Bus, learned: Learned, *, call: Callable[[Callable[[], object]], object]
    ) -> None:
        """What was read aside comes back by `call`."""
        self._bus = bus
        self._learned = learned
        self._call = call
        self._aside: dict[str, deque[_Aside]] = {}
        """By lane, the one whose turn it is first: a lane's long messages wait for each other."""
        self._aside_bytes = 0
        self._aside_ready = asyncio.Event()

    @property
    def aside_bytes(self) -> int:
        """Bytes of the messages that wait to be read aside, at most ASIDE_BYTES_MAX."""
        return self._aside_bytes

    async def run(self) -> None:
        """Read aside until cancelled; what waits then comes again to the next leader."""
        while True:
            while not self._aside:
                self._aside_ready.clear()
                await self._aside_ready.wait()
            aside = self._next_aside()
            delivery, found = await self._read_aside(aside)
            self._call(partial(aside.then, delivery, found))

    def _next_aside(self) -> _Aside:
        lane = next(iter(self._aside))
        waiting = self._aside.pop(lane)
        aside = waiting.popleft()
        if waiting:
            self._aside[lane] = waiting
        self._aside_bytes -= len(aside.delivery.data)
        return aside

    async def _read_aside(self, aside: _Aside) -> tuple[Delivery, Whole | Exception]:
        delivery = aside.delivery
        try:
            if not delivery.data:
                stored = await self._bus.message_at(delivery.stream, delivery.sequence)
                delivery = replace(delivery, data=stored.data, headers=stored.headers)
            return delivery, await asyncio.to_thread(self.read, delivery, aside.address)
        except (MalformedMessage, BusError) as error:
            return delivery, error
        except Exception as error:  # noqa: BLE001 - the edge of one message: the others go on
            _log.exception("reading.surprise", stream=delivery.stream, sequence=delivery.sequence)
            return delivery, error

    def prompt_tokens(self, job: Job) -> int:
        """Estimate a whole job's prompt: by what its model's prompts really made, else as told."""
        blocks = len(job.blocks) // HASH_BYTES
        told = min(job.prompt_tokens, len(job.body) + REFERENCED_TOKENS_MAX)
        return self._learned.prompt_tokens(job.model, prompt_blocks=blocks, told=told)

    def read_soon(self, message: Delivery | StoredMessage, address: JobAddress) -> Whole | None:
        """Read a message; None where that takes long. Raises MalformedMessage."""
        data = message.data
        if speaks_json(data, message.headers):
            return self._of_json(message, address) if len(data) <= INLINE_BYTES_MAX else None
        job = _checked(decode(data, Job), address)
        if job.blocks or not _lacks_prompt(job):
            return Whole(job, data)
        return self._completed(job, _PROMPT) if len(data) <= INLINE_BYTES_MAX else None

    def read(self, message: Delivery | StoredMessage, address: JobAddress) -> Whole:
        """Read a message, however long it takes. Raises MalformedMessage."""
        if speaks_json(message.data, message.headers):
            return self._of_json(message, address)
        job = _checked(decode(message.data, Job), address)
        return self._completed(job, _PROMPT) if _lacks_prompt(job) else Whole(job, message.data)

    def read_aside(self, delivery: Delivery, address: JobAddress, *, then: _Then) -> None:
        """Read a message in a thread, and tell `then` how that went.

        One after another, the lanes in turn. How many wait is bounded by the pulls' windows, and
        their bytes by ASIDE_BYTES_MAX. `then` hears of a BusError where the message could not be
        had again, and of MalformedMessage.
        """
        if self._aside_bytes + len(delivery.data) > ASIDE_BYTES_MAX:
            delivery = replace(delivery, data=b"")
        self._aside_bytes += len(delivery.data)
        aside = _Aside(delivery, address, then)
        self._aside.setdefault(address.lane, deque()).append(aside)
        self._aside_ready.set()

    async def message_of(self, stored: StoredMessage, address: JobAddress) -> bytes:
        """Return a stored job as a worker gets it. Raises MalformedMessage."""
        found = self.read_soon(stored, address)
        if found is None:
            found = await asyncio.to_thread(self.read, stored, address)
        return found.message

    def _of_json(self, message: Delivery | StoredMessage, address: JobAddress) -> Whole:
        job, missing = read_json_job(message.data)
        _checked(job, address)
        if "submitted_at_s" in missing:
            at_s = message.stored_at_s if isinstance(message, Delivery) else message.at_s
            job = msgspec.structs.replace(job, submitted_at_s=at_s)
        return self._completed(job, missing & _FROM_BODY, speaks_json=True)

    def _completed(self, job: Job, missing: frozenset[str], *, speaks_json: bool = False) -> Whole:
        per_token = self._learned.bytes_per_token_of(job.model) or prompt.BYTES_PER_TOKEN
        whole = completed(job, missing, bytes_per_token=per_token) if missing else job
        return Whole(whole, encode(whole), speaks_json)


def completed(job: Job, missing: frozenset[str], *, bytes_per_token: float) -> Job:
    """Fill in what a producer left out of a job, as ours would have computed it from the body.

    A body that is no JSON object has no prompt that anybody knows: its job is routed by load alone.
    """
    body = _parsed(job.body)
    text = _prompt_text(body) if missing & _PROMPT else b""
    found: dict[str, Any] = {}
    if "blocks" in missing:
        scope = CLUSTER_SCOPE if job.cluster_scope else job.lane
        start = seed(model=job.model, adapter=job.adapter, scope=scope)
        found["blocks"] = pack_hashes(block_hashes(text, seed=start))
    if "prompt_tokens" in missing:
        found["prompt_tokens"] = prompt.prompt_tokens_estimate(
            text, bytes_per_token=bytes_per_token
        )
    if "output_tokens_max" in missing:
        found["output_tokens_max"] = prompt.output_tokens_max(body)
    if "stream" in missing:
        found["stream"] = body.get("stream") is True
    return msgspec.structs.replace(job, **found)


def _checked(job: Job, address: JobAddress) -> Job:
    """Return a job that is what its subject says. Raises MalformedMessage."""
    if job.lane != address.lane or job.band != address.band or job.model != address.model:
        says = f"lane {job.lane}, band {job.band}, model {job.model}"
        message = (
            f"the job says {says}, its subject {address.lane}, {address.band}, {address.model}"
        )
        raise MalformedMessage(message)
    if len(job.blocks) % HASH_BYTES or len(job.blocks) > BLOCKS_MAX * HASH_BYTES:
        message = f"{len(job.blocks)} bytes are no list of at most {BLOCKS_MAX} block hashes"
        raise MalformedMessage(message)
    return job


def _lacks_prompt(job: Job) -> bool:
    """Say whether nothing was computed of a prompt that has at least a block, as far as it shows.

    Our producers estimate more than one token of it.
    """
    return not job.blocks and job.prompt_tokens <= 1 and len(job.body) >= BLOCK_BYTES


def _parsed(body: bytes) -> Mapping[str, object]:
    try:
        parsed: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return cast("dict[str, object]", parsed) if isinstance(parsed, dict) else {}


def _prompt_text(body: Mapping[str, object]) -> bytes:
    try:
        return prompt.prompt_text(body)
    except orjson.JSONEncodeError:
        return b""  # Nested deeper than can be written: the engine may say what it thinks of it.
