"""A request body becomes a job: what the broker needs to know is read out of it here, once."""

import time
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple, TypedDict, cast

import msgspec
import orjson

from broker.wire.codec import decode, encode
from broker.wire.ids import BANDS, MalformedName, escape_model, is_token, new_job_id
from broker.wire.messages import BODY_BYTES_MAX, Job, LaneOffer
from broker.wire.prefix import CLUSTER_SCOPE, block_hashes, pack_hashes, seed
from broker.wire.prompt import (
    BYTES_PER_TOKEN,
    output_tokens_max,
    prompt_text,
    prompt_tokens_estimate,
)
from broker.wire.splice import with_fields
from producers.errors import BadRequest, BodyTooLarge
from producers.naming import resolve

STANDARD_BAND = 2

CHAT_ENDPOINT = "/v1/chat/completions"

ENDPOINTS = (CHAT_ENDPOINT, "/v1/completions", "/v1/embeddings", "/v1/responses")
"""Paths of the OpenAI API that a job may name."""


NESTING_MAX = 200
"""Deepest nesting of a body: what reads JSON here and in engines gives up at some depth between 254
and 1,000, and no prompt nests deeper than a tool's schema, a few dozen."""

_TOO_DEEP = f"the body is nested more than {NESTING_MAX} levels deep; flatten it"


class ReadBody(NamedTuple):
    """A body that was read already."""

    fields: Mapping[str, object]
    raw: bytes
    """The same, as it came."""


class WishFields(TypedDict, total=False):
    """The fields of `Wish`, as keyword arguments of a call."""

    job_id: str
    model: str
    band: int
    session: str
    adapter: str
    deadline_s: float | None
    stream: bool | None
    restart_visible: bool
    endpoint: str
    cache_scope: str
    request_id: str
    api_key_name: str


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How the caller wants a body to run: everything of a job that isn't in the body."""

    job_id: str = ""
    """The idempotency key; empty for a new one."""
    model: str = ""
    """Empty: the body's own."""
    band: int = STANDARD_BAND
    session: str = ""
    adapter: str = ""
    """LoRA adapter of the model; empty: none, or the one that the model's name stands for."""
    deadline_s: float | None = None
    """Seconds from now after which nobody wants the answer."""
    stream: bool | None = None
    """None: as the body says."""
    restart_visible: bool = False
    endpoint: str = CHAT_ENDPOINT
    cache_scope: str = ""
    """Who may share the prefix cache with it: empty for the lane alone, or
    `prefix.CLUSTER_SCOPE`."""
    request_id: str = ""
    api_key_name: str = ""
    """Who asks inside the lane, as its accounts will name them: never the secret."""


def read_body(body: bytes) -> ReadBody:
    """Read a body of bytes. Raises BadRequest when it is no JSON object, or nested too deeply."""
    return ReadBody(*_read(body, ""))


def build_job(
    body: Mapping[str, object] | bytes | ReadBody,
    wish: Wish,
    *,
    lane: str,
    client: str,
    offer: LaneOffer | None = None,
) -> Job:
    """Read a body and build its job.

    A name that the offer knows as an alias or adapter stands for that model. Raises BadRequest or
    BodyTooLarge. A body of bytes goes through untouched unless the model is missing in it.
    """
    parsed, raw = body if isinstance(body, ReadBody) else _read(body, wish.model)
    model, adapter = resolve(_model_of(parsed, wish.model), wish.adapter, offer)
    bytes_max = min(BODY_BYTES_MAX, offer.body_bytes_max) if offer else BODY_BYTES_MAX
    if len(raw) > bytes_max:
        message = (
            f"the body has {len(raw)} bytes and the lane takes {bytes_max}; "
            "shorten the prompt or send images by URL"
        )
        raise BodyTooLarge(message)
    text = prompt_text(parsed)
    hashes = block_hashes(
        text, seed=seed(model=model, adapter=adapter, scope=wish.cache_scope or lane)
    )
    stream = parsed.get("stream") is True if wish.stream is None else wish.stream
    now_s = time.time()
    per_token = offer.bytes_per_token.get(model, BYTES_PER_TOKEN) if offer else BYTES_PER_TOKEN
    job = Job(
        id=wish.job_id or new_job_id(),
        lane=lane,
        band=wish.band,
        model=model,
        client=client,
        body=raw,
        endpoint=wish.endpoint,
        session=wish.session,
        adapter=adapter,
        stream=stream,
        restart_visible=wish.restart_visible,
        submitted_at_s=now_s,
        deadline_at_s=None if wish.deadline_s is None else now_s + wish.deadline_s,
        prompt_tokens=prompt_tokens_estimate(text, bytes_per_token=per_token),
        output_tokens_max=output_tokens_max(parsed),
        blocks=pack_hashes(hashes),
        cluster_scope=wish.cache_scope == CLUSTER_SCOPE,
        request_id=wish.request_id,
        api_key_name=wish.api_key_name,
        reads_bundles=stream,
    )
    return _checked(job)


def _read(body: Mapping[str, object] | bytes, model: str) -> tuple[Mapping[str, object], bytes]:
    """Return the body as an object and as bytes; `model` is added where the body names none."""
    if body == b"":
        message = "the body is empty; send an OpenAI request body, which is a JSON object"
        raise BadRequest(message)
    try:
        parsed = orjson.loads(body) if isinstance(body, bytes) else body
        if not isinstance(parsed, Mapping):
            message = "the body is no JSON object; send an OpenAI request body"
            raise BadRequest(message)
        known = cast("Mapping[str, object]", parsed)
        lacks_model = bool(model) and "model" not in known
        if lacks_model:
            known = {**known, "model": model}
        if isinstance(body, bytes):
            raw = with_fields(body, {"model": model}) if lacks_model else body
        else:
            raw = orjson.dumps(known)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, TypeError, RecursionError) as error:
        # orjson itself gives up at 254 (writing) or 1,024 levels (reading), msgspec in between.
        is_deep = any(word in str(error) for word in ("ecursion", "depth limit"))
        message = _TOO_DEEP if is_deep else f"the body is no JSON: {error}"
        raise BadRequest(message) from error
    if raw.count(b"[") + raw.count(b"{") > NESTING_MAX and _is_deeper(known, NESTING_MAX):
        raise BadRequest(_TOO_DEEP)
    return known, raw


def _is_deeper(value: object, levels: int) -> bool:
    """Say whether containers are nested deeper than so many levels."""
    level: list[object] = [value]
    for _ in range(levels):
        inner: list[object] = []
        for one in level:
            if isinstance(one, Mapping):
                inner += cast("Mapping[str, object]", one).values()
            else:
                inner += cast("list[object]", one)
        level = [one for one in inner if isinstance(one, Mapping | list)]
        if not level:
            return False
    return True


def _model_of(parsed: Mapping[str, object], wanted: str) -> str:
    named = parsed.get("model")
    if not isinstance(named, str) or not named:
        message = 'the body names no model; add "model": "..."'
        raise BadRequest(message)
    if wanted and wanted != named:
        message = f"the body asks for model {named!r} and the call for {wanted!r}; name one"
        raise BadRequest(message)
    return named


@lru_cache(maxsize=1024)
def _can_be_model(name: str) -> bool:
    """Say whether a subject can name it; remembered, as `door` does."""
    try:
        escape_model(name)
    except MalformedName:
        return False
    return True


def _checked(job: Job) -> Job:
    """Return `job` if its peers will take it. Field bounds are those of the wire."""
    if job.band not in BANDS:
        message = f"band {job.band} is none of {BANDS}"
        raise BadRequest(message)
    if not is_token(job.id):
        message = f"job id {job.id!r} is not 1 to 64 of the characters A-Z a-z 0-9 _ -"
        raise BadRequest(message)
    if not _can_be_model(job.model):
        message = f"{job.model[:80]!r} can't be a model's name: it is too long for a subject"
        raise BadRequest(message)
    if job.endpoint not in ENDPOINTS:
        message = f"endpoint {job.endpoint!r} is none of {', '.join(ENDPOINTS)}"
        raise BadRequest(message)
    try:
        decode(encode(msgspec.structs.replace(job, body=b"")), Job)
    except ValueError as error:
        message = f"the request can't be a job: {error}"
        raise BadRequest(message) from error
    return job
