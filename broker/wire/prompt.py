"""What of an OpenAI request body decides its prefix: tools, then messages, as one run of bytes."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import cast

import orjson

from broker.wire.prefix import canonical_text

Body = Mapping[str, object]

BYTES_PER_TOKEN = 4.0
"""Starting guess for English text and common tokenizers; learned per model from `usage`
afterwards."""

OUTPUT_TOKENS_MAX = 1_000_000
"""No model's context is longer: whoever asks for more asks for no limit."""

OUTPUT_TOKENS_DEFAULT = 256
"""Assumed longest answer of a request that names none: near the mean of public chat traces (Azure
2023: 211)."""


def prompt_text(body: Body) -> bytes:
    """Canonical prompt text of a chat, completions, responses or embeddings body.

    A body of another shape has the empty text: it is routed by load alone.
    """
    tools = body.get("tools")
    packed_tools = orjson.dumps(tools) if tools else b""
    if isinstance(messages := body.get("messages"), list):
        return canonical_text(_chat(cast("list[object]", messages)), tools=packed_tools)
    if "input" in body:
        return canonical_text(_responses(body), tools=packed_tools)
    return canonical_text([("prompt", [_part(body["prompt"])])]) if "prompt" in body else b""


def output_tokens_max(body: Body) -> int:
    """Most tokens the body allows in the answer, at most OUTPUT_TOKENS_MAX.

    OUTPUT_TOKENS_DEFAULT when it names no limit.
    """
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return min(value, OUTPUT_TOKENS_MAX)
    return OUTPUT_TOKENS_DEFAULT


def prompt_tokens_estimate(text: bytes, *, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
    """Estimate how many tokens `text` makes; at least 1."""
    return max(1, round(len(text) / bytes_per_token))


def _chat(messages: list[object]) -> Iterator[tuple[str, list[bytes]]]:
    for message in messages:
        if isinstance(message, dict):
            record = cast("dict[str, object]", message)
            calls = record.get("tool_calls")
            pieces = [_part(part) for part in _parts(record.get("content"))]
            yield str(record.get("role", "")), [*pieces, _part(calls)] if calls else pieces


def _responses(body: Body) -> Iterator[tuple[str, list[bytes]]]:
    if instructions := body.get("instructions"):
        yield "system", [_part(instructions)]
    entries = _parts(body["input"])
    if entries and all(isinstance(entry, dict) and "role" in entry for entry in entries):
        yield from _chat(entries)
    else:
        yield "user", [_part(entry) for entry in entries]


def _parts(content: object) -> list[object]:
    """Return the parts of a message's content, which may stand there bare."""
    return cast("list[object]", content) if isinstance(content, list) else [content]


def _part(content: object) -> bytes:
    """Bytes of one content part: text as it is, anything else by its digest."""
    if isinstance(content, str):
        return content.encode(errors="surrogatepass")
    if content is None:
        return b""
    text = cast("dict[str, object]", content).get("text") if isinstance(content, dict) else None
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")
    return hashlib.blake2b(orjson.dumps(content), digest_size=16).digest()
