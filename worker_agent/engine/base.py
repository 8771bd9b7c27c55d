"""The one seam between the agent and an engine: what is asked, what comes back, how it goes wrong.

The agent asks `run` for one job at a time and reads outputs until the single `Completed`; closing
the generator (or cancelling the task that reads it) aborts the request inside the engine. An engine
never retries, times no stall and keeps no ledger: those are the agent's. Every error is one
`EngineError`, and its class says who is to blame.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

import orjson
from msgspec import Struct

from broker.wire.messages import BODY_BYTES_MAX, Load, Reason, Usage

RESPONSE_BYTES_MAX = BODY_BYTES_MAX
"""Largest answer an engine may give, streamed or whole: a longer one fits no terminal record."""

DETAIL_CHARS_MAX = 4096
"""Longest error text that is passed on: the bound of `LongText` on the wire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One job as the engine sees it. `body` goes through with every field its caller set."""

    request_id: str
    """Sent as X-Request-Id, so that the engine's own log can be searched for the job."""
    endpoint: str
    """Path of the OpenAI API, such as /v1/chat/completions."""
    body: bytes
    stream_to_client: bool = False
    """The caller reads along: chunks carry data for him."""
    blocks: bytes = b""
    """Hints for engines that model a cache: prefix-block hashes, packed as on the wire; ..."""
    prompt_tokens: int = 1
    """... the producer's estimate; ..."""
    output_tokens_max: int = 256
    """... and the longest answer the body allows."""


class Chunk(Struct, frozen=True, kw_only=True, gc=False):
    """A sign of progress: one server-sent event of the engine's answer. Made for each token."""

    data: bytes = b""
    """The event's JSON for the caller, untouched; empty when there is nothing for him (he doesn't
    stream, or this is a usage report that only the agent asked for)."""
    output_tokens: int = 0
    """Tokens of the answer so far: the engine's count where it tells, else one for each delta."""
    cached_tokens: int | None = None
    """Prompt tokens served from the cache, as soon as the engine tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The whole answer, as if it had not been streamed. Always the last output."""

    status_code: int
    body: bytes
    usage: Usage
    cached_tokens: int | None = None
    """None when the engine doesn't tell: then `usage.cached_tokens` is 0 and means nothing."""


EngineOutput = Chunk | Completed


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether an engine can take jobs now. `detail` says why not, for people."""

    ready: bool
    models: tuple[str, ...] = ()
    """Names the engine answers to."""
    detail: str = ""
    away: bool = False
    """Nobody is there at all: its process has ended, or was never begun."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an engine between requests; cheap to read, current at every read."""

    slots: int
    """Requests that may run at once: the configured number, never above the engine's own."""
    kv_tokens_max: int = 0
    """Capacity of its KV cache; 0 when it doesn't tell."""
    incarnation: int = 1
    """Rises when the engine restarted: its cache is empty then."""


class Engine(Protocol):
    """Any engine, real or modelled."""

    @property
    def facts(self) -> Facts:
        """Return what is known now."""
        ...

    async def start(self) -> None:
        """Start it, or open what is needed to reach it. Whether it is ready, `ready` tells."""
        ...

    async def stop(self) -> None:
        """End it, aborting what runs. Stopping twice, or what never started, does nothing."""
        ...

    async def ready(self) -> Readiness:
        """Ask whether it can take jobs. One that is away is not ready: never raises EngineError."""
        ...

    def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request: Chunks as they come, then exactly one Completed.

        Closing the generator aborts the request in the engine. Raises EngineError.
        """
        ...

    async def load(self) -> Load:
        """Return how loaded it is; `Load()` when it doesn't tell. Never raises EngineError."""
        ...


class EngineError(Exception):
    """A request came to nothing. `reason` is its word on the wire, `detail` is for people."""

    reason: Reason = Reason.ENGINE_FAILED
    retriable: bool = True
    """False when no other worker could do better, and the worker is not to blame."""

    def __init__(self, detail: str, *, status_code: int = 0, body: bytes = b"") -> None:
        self.detail = detail[:DETAIL_CHARS_MAX]
        self.status_code = status_code
        """HTTP status of the engine's answer; 0 when there was none."""
        self.body = body
        """The engine's own words: passed on to the caller when the error is his."""
        super().__init__(self.detail)


class EngineRefused(EngineError):
    """The engine answered 4xx: the job's own error, the same on every worker."""

    reason = Reason.ENGINE_REFUSED
    retriable = False


class EngineBusy(EngineError):
    """The engine has no room now (408, 429): not the job's error, and no fault of the worker."""


class EngineFailed(EngineError):
    """The engine answered 5xx, reported an error in mid-stream, or lets the agent itself not in."""


class EngineGarbage(EngineError):
    """Not an answer: broken JSON, wrong content type, half a stream, beyond a bound."""

    reason = Reason.ENGINE_GARBAGE


class EngineDisconnected(EngineError):
    """The engine closed the connection before its answer was whole, or could not be reached."""


class EngineAway(EngineDisconnected):
    """Nobody took the connection: the request reached no engine, so it can't be to blame."""


class AnswerTooLarge(EngineError):
    """The answer fits no terminal record, and would not on another worker either."""

    reason = Reason.PAYLOAD_TOO_LARGE
    retriable = False


class EngineTimeout(EngineError):
    """The engine did not begin to answer in time."""

    reason = Reason.ENGINE_TIMEOUT


def refusal(status_code: int, message: str, code: str) -> EngineRefused:
    """Return the error for a request that no engine could run, with a body of the OpenAI shape."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return EngineRefused(message, status_code=status_code, body=orjson.dumps({"error": error}))
