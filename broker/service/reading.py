"""From a message's bytes to a whole job: in either form, checked, and filled in where it lacks.

Our producers compute what routing needs of a prompt. A foreign producer may leave that out: then it
is computed here, by the same functions. A worker always gets the job whole and in msgpack, so that
agents know one form; the message in the stream stays as it was published.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
import orjson
import structlog

from broker.bus.base import Delivery, StoredMessage
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
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX, HASH_BYTES, block_hashes, pack_hashes, seed
from broker.wire.subjects import JobAddress

INLINE_BYTES_MAX = 32 * 1024
"""Largest message of a foreign producer that is read on the loop: longer takes over 0.4 ms."""

_PROMPT = frozenset(("blocks", "prompt_tokens"))
"""What a producer in msgpack may leave out. Defaults are not sent there, so the others can't be
told from a default that is meant."""

_FROM_BODY = _PROMPT | {"output_tokens_max", "stream"}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Whole:
    """A job with nothing missing."""

    job: Job
    message: bytes
    """As a worker gets it: what was published, or that made whole, in msgpack."""
    speaks_json: bool = False
    """Its caller reads JSON."""


_Then = Callable[[Whole | Exception], None]


class Reader:
    """Reads the messages of job streams."""

    def __init__(self, learned: Learned, *, call: Callable[[Callable[[], object]], object]) -> None:
        """What was read aside comes back by `call`."""
        self._learned = learned
        self._call = call
        self._aside: asyncio.Queue[tuple[Callable[[], Whole], _Then]] = asyncio.Queue()

    async def run(self) -> None:
        """Read aside until cancelled; what waits then comes again to the next leader."""
        while True:
            read, then = await self._aside.get()
            try:
                found: Whole | Exception = await asyncio.to_thread(read)
            except MalformedMessage as error:
                found = error
            except Exception as error:  # noqa: BLE001 - the edge of one message: the others go on
                _log.exception("reading.surprise")
                found = error
            self._call(partial(then, found))

    def prompt_tokens(self, job: Job) -> int:
        """Estimate a whole job's prompt: by what its model's prompts really made, else as told."""
        blocks = len(job.blocks) // HASH_BYTES
        return self._learned.prompt_tokens(job.model, prompt_blocks=blocks, told=job.prompt_tokens)

    def read_soon(self, message: Delivery | StoredMessage, address: JobAddress) -> Whole | None:
        """Read a message; None where that takes long. Raises MalformedMessage."""
        is_long = len(message.data) > INLINE_BYTES_MAX
        if speaks_json(message.data, message.headers):
            return None if is_long else self._of_json(message, address)
        job = _checked(decode(message.data, Job), address)
        if job.blocks or not _lacks_prompt(job):
            return Whole(job, message.data)
        return None if is_long else self._completed(job, _PROMPT)

    def read(self, message: Delivery | StoredMessage, address: JobAddress) -> Whole:
        """Read a message, however long it takes. Raises MalformedMessage."""
        if speaks_json(message.data, message.headers):
            return self._of_json(message, address)
        job = _checked(decode(message.data, Job), address)
        return self._completed(job, _PROMPT) if _lacks_prompt(job) else Whole(job, message.data)

    def read_aside(self, delivery: Delivery, address: JobAddress, *, then: _Then) -> None:
        """Read a message in a thread, one after another, and tell `then` how that went.

        What waits is bounded by the pulls' windows: a message keeps its place until it is read.
        """
        self._aside.put_nowait((partial(self.read, delivery, address), then))

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
        start = seed(model=job.model, adapter=job.adapter, scope=job.lane)
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
    said = (job.lane, job.band, job.model)
    if said != (address.lane, address.band, address.model):
        message = f"the job says {said}, its queue is {address}"
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
