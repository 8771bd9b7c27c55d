"""The unmodified `openai` client, waiting and not, against answers that a cluster seldom gives."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import openai
import pytest

from broker.wire.messages import Job, Reason, TerminalRecord
from tests.gateways import KEY, Front, a_front
from tests.responder import Responder, a_rejection
from tests.turns import until

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
PAUSE_S = 0.2

Ask = Callable[..., Awaitable[Any]]
"""Asks for a chat by one of the two clients: options of the client, fields of the call."""


def _options(front: Front, options: dict[str, Any]) -> dict[str, Any]:
    return {"base_url": f"{front.url}/v1", "api_key": KEY, "max_retries": 0, **options}


async def _waiting(front: Front, options: dict[str, Any], **fields: Any) -> Any:
    def ask() -> Any:
        with openai.OpenAI(**_options(front, options)) as client:
            return client.chat.completions.with_raw_response.create(**ASK, **fields)

    return await asyncio.to_thread(ask)


async def _not_waiting(front: Front, options: dict[str, Any], **fields: Any) -> Any:
    async with openai.AsyncOpenAI(**_options(front, options)) as client:
        return await client.chat.completions.with_raw_response.create(**ASK, **fields)


CLIENTS = pytest.mark.parametrize("ask", [_waiting, _not_waiting], ids=["sync", "async"])


def _rejects(played: Responder, times: int, reason: Reason) -> list[float]:
    """Have the next jobs rejected; return when each came."""
    came_s: list[float] = []

    def reject(job: Job) -> TerminalRecord | None:
        came_s.append(time.monotonic())
        is_refused = len(came_s) <= times
        return a_rejection(job, reason, retry_after_s=PAUSE_S) if is_refused else None

    played.reject = reject
    return came_s


@CLIENTS
async def test_what_is_full_now_is_tried_again_after_the_pause_that_was_told(ask: Ask) -> None:
    """By the client itself, as new requests; its caller sees the answer alone."""
    async with a_front() as (front, played):
        came_s = _rejects(played, 2, Reason.QUOTA_EXCEEDED)
        raw = await ask(front, {"max_retries": 3})
    assert raw.status_code == 200
    assert raw.retries_taken == 2
    assert len(came_s) == 3
    # `retry-after-ms`, and not its own pause of half a second and more.
    assert all(later - earlier >= PAUSE_S for earlier, later in pairwise(came_s))


@CLIENTS
async def test_when_it_gives_up_the_error_is_the_clients_own(ask: Ask) -> None:
    """Its class, our code, and the pause for whoever goes on by hand."""
    async with a_front() as (front, played):
        _rejects(played, 99, Reason.QUOTA_EXCEEDED)
        with pytest.raises(openai.RateLimitError) as full:
            await ask(front, {})
        _rejects(played, 99, Reason.NO_WORKERS)
        with pytest.raises(openai.InternalServerError) as away:
            await ask(front, {})
    assert full.value.code == "quota_exceeded"
    assert full.value.response.headers["retry-after-ms"] == str(int(PAUSE_S * 1000))
    assert (away.value.status_code, away.value.code) == (503, "no_workers")


@CLIENTS
async def test_what_no_other_try_helps_is_tried_once(ask: Ask) -> None:
    """Though the client would try a 503 again: `x-should-retry` says no."""
    async with a_front() as (front, played):
        came_s = _rejects(played, 99, Reason.WORKER_LOST)
        with pytest.raises(openai.InternalServerError) as lost:
            await ask(front, {"max_retries": 3})
    assert lost.value.code == "worker_lost"
    assert len(came_s) == 1


@CLIENTS
async def test_a_time_out_of_the_client_gives_its_job_up(ask: Ask) -> None:
    """It hangs up, and nobody works for it any more."""
    async with a_front() as (front, played):
        played.may_run.clear()
        with pytest.raises(openai.APITimeoutError):
            await ask(front, {"timeout": 0.3})
        await until(lambda: bool(played.cancelled))
        played.may_run.set()
