"""A prompt's tokens, as its engine's `/tokenize` tells them. Pure: what to ask, and what it means.

vLLM and SGLang take the fields of a completion (`prompt`) or of a chat (`messages`, `tools`, what
the chat template is given). vLLM adds each token's string when asked; SGLang passes that wish over,
and before it knew `messages` it refused chats.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, cast, runtime_checkable

import msgspec
import orjson

from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX
from broker.wire.prompt import prompt_text
from worker_agent.engine.base import EngineGarbage
from worker_agent.engine.kv_event_wire import TOKEN_MAX, extra_text
from worker_agent.engine_blocks import TokenizedPrompt
from worker_agent.token_edges import token_edges

TOKENIZE_PATH = "/tokenize"

TOKENIZE_BYTES_MAX = 2_097_152
"""Largest request body whose tokens are asked: what `BLOCKS_MAX` blocks of text have."""

TOKENS_BYTES_MAX = 33_554_432
"""Most that is read of an answer: a million tokens with their strings."""

_ALIKE = (
    "model",
    "prompt",
    "messages",
    "tools",
    "tool_choice",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "mm_processor_kwargs",
)
"""Fields of a request that decide its tokens, and go by the same names here."""


@runtime_checkable
class Tokenizing(Protocol):
    """An engine that tells a prompt's tokens."""

    async def tokenize(self, question: bytes) -> bytes:
        """Ask `/tokenize` and return its answer's body. Raises EngineError."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A request whose tokens are wanted."""

    chain: Sequence[int]
    body: bytes
    adapter: str = ""


class _Answer(msgspec.Struct):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]]
    token_strs: list[str] | None = None


def question_of(prompt: Prompt) -> bytes | None:
    """Return what to ask; None when `/tokenize` has no words for such a request."""
    if len(prompt.body) > TOKENIZE_BYTES_MAX:
        return None
    body = _fields(prompt.body)
    if not isinstance(body.get("messages"), list) and not isinstance(body.get("prompt"), str):
        return None
    asked = {name: body[name] for name in _ALIKE if body.get(name) is not None}
    return orjson.dumps({**asked, "return_token_strs": True})


def understood(prompt: Prompt, answer: bytes) -> TokenizedPrompt:
    """Bring tokens and prefix blocks together. Raises EngineGarbage.

    Takes some milliseconds for a long prompt: not for the event loop.
    """
    try:
        told = msgspec.json.decode(answer, type=_Answer)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        message = f"{TOKENIZE_PATH}: {error}"
        raise EngineGarbage(message) from error
    body = _fields(prompt.body)
    text = prompt_text(body)
    blocks = min(len(prompt.chain), len(text) // BLOCK_BYTES, BLOCKS_MAX)
    salt = body.get("cache_salt")
    model = body.get("model")
    return TokenizedPrompt(
        chain=prompt.chain[:blocks],
        edges=token_edges(
            text, blocks=blocks, tokens=len(told.tokens), strings=told.token_strs or ()
        ),
        tokens=told.tokens,
        model=model if isinstance(model, str) else "",
        adapter=prompt.adapter,
        extra=extra_text([salt]) if isinstance(salt, str) and salt else "",
    )


def _fields(body: bytes) -> Mapping[str, object]:
    try:
        fields: object = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return cast("dict[str, object]", fields) if isinstance(fields, dict) else {}
