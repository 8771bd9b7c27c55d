"""Valid-by-default records for tests: `a_job(band=1)` says only what the case is about."""

from typing import Any

import orjson

from broker.wire.messages import Attempt, Job
from broker.wire.prefix import block_hashes, pack_hashes, seed
from broker.wire.prompt import prompt_text

LANE = "acme"
MODEL = "tiny"


def a_chat_body(*, system: str = "You are helpful.", user: str = "Hello", **fields: Any) -> bytes:
    """Body of a chat request."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 16, **fields})


def a_job(**fields: Any) -> Job:
    """A standard-band chat job of lane `acme`."""
    body = fields.pop("body", None) or a_chat_body()
    lane = fields.get("lane", LANE)
    model = fields.get("model", MODEL)
    blocks = block_hashes(prompt_text(orjson.loads(body)), seed=seed(model=model, scope=lane))
    defaults: dict[str, Any] = {
        "id": "job-1",
        "lane": lane,
        "band": 2,
        "model": model,
        "client": "client-1",
        "body": body,
        "output_tokens_max": 16,
        "submitted_at_s": 1000.0,
        "blocks": pack_hashes(blocks),
    }
    return Job(**{**defaults, **fields})


def an_attempt(number: int = 1, *, epoch: int = 1) -> Attempt:
    """An attempt of epoch 1."""
    return Attempt(epoch, number)
