"""What goes into the engine model and what comes out."""

from collections.abc import Sequence

from msgspec import Struct

from broker.wire.messages import Usage


class SequenceRequest(Struct, frozen=True, kw_only=True):
    """One prompt to answer. Unlike a real engine, the model is told how long the answer gets."""

    request_id: str
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    blocks: Sequence[int] = ()
    """Chained prefix-block hashes of the prompt, first to last."""
    block_tokens: int = 0
    """Prompt tokens each block stands for; 0 is the profile's figure. Never more than its even
    share of the prompt: an estimate of the prompt may run short of its blocks."""


class FirstToken(Struct, frozen=True):
    """The prompt is prefilled and the first token is out."""

    request_id: str
    at_s: float
    cached_tokens: int


class TokenGenerated(Struct, frozen=True):
    """One more token, the second or later; only from a model that was asked for progress."""

    request_id: str
    at_s: float
    output_tokens: int


class Finished(Struct, frozen=True):
    """The last token is out; slot and memory are free."""

    request_id: str
    at_s: float
    usage: Usage


EngineEvent = FirstToken | TokenGenerated | Finished
