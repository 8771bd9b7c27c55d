"""What the fake engine says: answers of the OpenAI API, the same for the same prompt."""

import hashlib
from collections.abc import Mapping
from typing import cast

import orjson

from broker.wire.messages import Usage
from broker.wire.prompt import output_tokens_max, prompt_text, prompt_tokens_estimate
from worker_agent.engine.assembly import CHAT, EMBEDDINGS, ENDPOINTS, RESPONSES
from worker_agent.engine.base import refusal

EMBEDDING_DIMENSIONS = 8
"""Enough to tell two vectors apart; a real model has thousands."""

_SYLLABLES = (
    "la",
    "ne",
    "wo",
    "ke",
    "to",
    "pre",
    "fi",
    "ca",
    "blo",
    "ba",
    "mo",
    "del",
    "sha",
    "re",
)

Json = Mapping[str, object]


class Answer:
    """One request's answer, given out as far as the engine model has got."""

    def __init__(
        self, *, request_id: str, endpoint: str, body: bytes, models: tuple[str, ...]
    ) -> None:
        """Read the request. Raises EngineRefused as a real engine answers 4xx."""
        if endpoint not in ENDPOINTS:
            raise refusal(404, f"{endpoint} is not served here", "not_found")
        fields = _fields(body)
        model = fields.get("model")
        if model not in models:
            raise refusal(404, f"The model {model!r} does not exist.", "model_not_found")
        if fields.get("n", 1) not in (1, None):
            raise refusal(400, "The fake engine gives one choice.", "invalid_request_error")
        self.endpoint = endpoint
        self.model = cast("str", model)
        self.id = request_id
        self.text = prompt_text(fields)
        self.prompt_tokens = prompt_tokens_estimate(self.text)
        self.output_tokens = 1 if endpoint == EMBEDDINGS else output_tokens_max(fields)
        self.usage_asked = _usage_asked(fields)
        self._seed = hashlib.blake2b(self.text, digest_size=16).digest()

    def words(self, start: int, stop: int) -> str:
        """Return the text's tokens `start` to `stop`, a short word each."""
        picks = (self._seed[i % 16] + 31 * i for i in range(start, stop))
        return "".join(f"{_SYLLABLES[pick % len(_SYLLABLES)]} " for pick in picks)

    def delta(self, start: int, stop: int) -> bytes:
        """Return the event that streams the tokens `start` to `stop`."""
        text = self.words(start, stop)
        last = "length" if stop == self.output_tokens else None
        match self.endpoint:
            case "/v1/chat/completions":
                role = {"role": "assistant"} if start == 0 else {}
                choice = {"index": 0, "delta": {**role, "content": text}, "finish_reason": last}
                return orjson.dumps(self._chat("chat.completion.chunk", choice))
            case "/v1/completions":
                choice = {"index": 0, "text": text, "finish_reason": last}
                return orjson.dumps(self._chat("text_completion", choice))
            case _:
                event = {"type": "response.output_text.delta", "output_index": 0, "delta": text}
                return orjson.dumps(event)

    def usage_event(self, usage: Usage) -> bytes:
        """Return the event that ends a stream; empty for a usage report nobody asked for."""
        if self.endpoint == RESPONSES:
            return orjson.dumps({"type": "response.completed", "response": self._whole(usage)})
        if not self.usage_asked:
            return b""
        kind = "chat.completion.chunk" if self.endpoint == CHAT else "text_completion"
        return orjson.dumps({**self._chat(kind), "usage": _usage(usage)})

    def whole(self, usage: Usage) -> bytes:
        """Return the answer in one piece."""
        return orjson.dumps(self._whole(usage))

    def _whole(self, usage: Usage) -> Json:
        text = self.words(0, self.output_tokens)
        match self.endpoint:
            case "/v1/chat/completions":
                message = {"role": "assistant", "content": text}
                choice = {"index": 0, "message": message, "finish_reason": "length"}
                return {**self._chat("chat.completion", choice), "usage": _usage(usage)}
            case "/v1/completions":
                choice = {"index": 0, "text": text, "finish_reason": "length"}
                return {**self._chat("text_completion", choice), "usage": _usage(usage)}
            case "/v1/embeddings":
                vector = [(byte - 128) / 128 for byte in self._seed[:EMBEDDING_DIMENSIONS]]
                entry = {"object": "embedding", "index": 0, "embedding": vector}
                counts = {"prompt_tokens": usage.prompt_tokens, "total_tokens": usage.prompt_tokens}
                return {"object": "list", "model": self.model, "data": [entry], "usage": counts}
            case _:
                return self._response(text, usage)

    def _chat(self, kind: str, *choices: Json) -> Json:
        return {
            "id": f"fake-{self.id}",
            "object": kind,
            "created": 0,
            "model": self.model,
            "choices": choices,
        }

    def _response(self, text: str, usage: Usage) -> Json:
        content: Json = {"type": "output_text", "text": text, "annotations": ()}
        message: Json = {"type": "message", "role": "assistant", "content": (content,)}
        return {
            "id": f"fake-{self.id}",
            "object": "response",
            "created_at": 0,
            "model": self.model,
            "status": "completed",
            "output": [{**message, "id": f"msg-{self.id}", "status": "completed"}],
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.output_tokens,
                "total_tokens": usage.prompt_tokens + usage.output_tokens,
            },
        }


def _fields(body: bytes) -> Mapping[str, object]:
    try:
        fields: object = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise refusal(400, f"The body is not JSON: {error}", "invalid_json") from error
    if not isinstance(fields, dict):
        raise refusal(400, "The body is not a JSON object.", "invalid_json")
    return cast("dict[str, object]", fields)


def _usage_asked(fields: Mapping[str, object]) -> bool:
    options = fields.get("stream_options")
    return isinstance(options, dict) and bool(
        cast("dict[str, object]", options).get("include_usage")
    )


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
