"""Runs one job on the engine until its answer, an error, a limit or an order to stop.

One cancel scope serves them all: it ends at the nearest of the stall, the run time and the job's
own deadline, and an order to stop ends it now. Each new token moves the stall, so that is only
noted; whether a limit was really reached is looked at when one was due. What is cut short is
aborted in the engine.
"""

import asyncio
import math
import time
from asyncio import to_thread
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.wire.messages import Attempt, Reason, Usage
from broker.wire.prefix import BLOCKS_MAX, unpack_hashes
from worker_agent.cache_model import CacheModel
from worker_agent.engine.base import (
    Chunk,
    Completed,
    Engine,
    EngineError,
    EngineFailed,
    EngineGarbage,
    EngineRequest,
)
from worker_agent.engine.tokenizer import Prompt
from worker_agent.ledger import Running, Step, Stop
from worker_agent.models import ModelNames
from worker_agent.notes import Notes
from worker_agent.records import RecordWriter, Standing
from worker_agent.token_gaps import TokenGaps

if TYPE_CHECKING:
    from worker_agent.kv_events import KvEvents

INLINE_BYTES_MAX = 256_000
"""A larger body is parsed in a thread: it would hold up the loop for over a millisecond."""

CHECK_STALL_RATIO = 0.5
"""Of an order's `stall_s`, as much may pass before the engine is asked. The broker counts a stall
from the order on, and charges it to the worker, which can do nothing for a server that is away."""

_Name = tuple[str, Attempt]
"""Of an attempt: its job's key, and which run."""

Verdict = Standing | Completed | EngineError | Stop


@dataclass(slots=True)
class _Watch:
    """The cancel scope of one attempt, and why it would end now."""

    scope: asyncio.Timeout
    run_ends_tick_s: float
    """Of the loop's clock."""
    limit_ends_tick_s: float = math.inf
    """Of what `limit_reason` stands for: moved on by each sign of progress."""
    limit_reason: Reason = Reason.HANDED_BACK
    reason: Reason = Reason.HANDED_BACK
    """Why the scope ended."""
    look: asyncio.TimerHandle | None = None
    """The next look at the limits: never after the nearest of them."""


class Supervisor:
    """Watches any number of attempts."""

    def __init__(
        self,
        *,
        engine: Engine,
        writer: RecordWriter,
        cache: CacheModel,
        notes: Notes,
        names: ModelNames,
        kv_events: "KvEvents | None" = None,
        check_s_max: float,
        now_s: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._cache = cache
        self._notes = notes
        self._names = names
        self._kv_events = kv_events
        self._check_s_max = check_s_max
        self._now_s = now_s
        self._gaps = TokenGaps()
        self._watches: dict[str, _Watch] = {}

    def decode_tokens_s(self) -> float:
        """Tell how fast an answer grew since the last call, while nothing was prefilled.

        0: too little was seen.
        """
        return self._gaps.meter.read()

    async def run(self, running: Running) -> Verdict:
        """Look for a record that stands; without one, run the engine. Raises no EngineError."""
        ends_tick_s = asyncio.get_running_loop().time() + running.order.run_s_max
        watch = _Watch(asyncio.timeout(None), ends_tick_s)
        try:
            async with watch.scope:
                self._watches[running.key] = watch
                return running.stop or await self._check_and_run(running, watch)
        except EngineError as error:
            return error
        except TimeoutError as error:
            if not watch.scope.expired():
                return EngineFailed(f"the engine client timed out: {error!r}")
            return running.stop or Stop(watch.reason)
        finally:
            if watch.look is not None:
                watch.look.cancel()
            self._watches.pop(running.key, None)

    def stop(self, running: Running, stop: Stop) -> None:
        """Stop an attempt, unless it has its answer already. The first order counts."""
        if running.stop is not None or running.step is Step.RECORDING:
            return
        running.stop = stop
        watch = self._watches.get(running.key)
        if watch is not None and not watch.scope.expired():
            watch.scope.reschedule(asyncio.get_running_loop().time())

    async def _check_and_run(self, running: Running, watch: _Watch) -> Verdict:
        check_s_max = min(self._check_s_max, CHECK_STALL_RATIO * running.order.stall_s)
        self._arm(running, watch, limit_s=check_s_max, reason=Reason.HANDED_BACK)
        standing = await self._writer.find(running.job.lane, running.job.id)
        if standing is not None:
            return standing
        if self._is_late(running):
            return Stop(Reason.DEADLINE_EXPIRED)
        running.step = Step.ENGINE
        running.engine_incarnation = self._engine.facts.incarnation
        chain = _chain(running)
        name = (running.key, running.attempt)
        running.cache_source = self._cache.source
        self._cache.begin(name, chain, at_s=time.monotonic())
        self._gaps.began(name)
        usage: Usage | None = None
        try:
            answer = await self._ask(name, running, watch, chain)
            usage = answer.usage
        finally:
            self._gaps.ended(name, at_s=asyncio.get_running_loop().time())
            cached_tokens = running.cached_tokens if usage is not None else None
            self._cache.end(name, at_s=time.monotonic(), usage=usage, cached_tokens=cached_tokens)
        return answer

    async def _ask(
        self, name: _Name, running: Running, watch: _Watch, chain: Sequence[int]
    ) -> Completed:
        self._arm(running, watch, limit_s=running.order.stall_s, reason=Reason.STALLED)
        request = await self._request(running)
        if self._kv_events is not None:
            prompt = Prompt(chain=chain, body=request.body, adapter=running.job.adapter)
            self._kv_events.given(prompt)
        index = 0
        async with aclosing(self._engine.run(request)) as outputs:
            async for output in outputs:
                if isinstance(output, Completed):
                    if output.cached_tokens is not None:
                        running.cached_tokens = output.cached_tokens
                    return output
                if self._progress(name, running, watch, output):
                    await self._first_token(name, running, chain)
                if output.data and running.job.stream:
                    await self._notes.tokens(running, index=index, data=output.data)
                    index += 1
        message = "the engine's answer ended without a result"
        raise EngineGarbage(message)

    def _progress(self, name: _Name, running: Running, watch: _Watch, chunk: Chunk) -> bool:
        """Take note of a chunk; say whether it has the first token."""
        if chunk.cached_tokens is not None:
            running.cached_tokens = chunk.cached_tokens
        if chunk.output_tokens <= running.output_tokens:
            return False
        running.output_tokens = chunk.output_tokens
        tick_s = asyncio.get_running_loop().time()
        self._gaps.came(name, tokens=chunk.output_tokens, at_s=tick_s)
        watch.limit_ends_tick_s = tick_s + running.order.stall_s
        return not running.first_token_at_s

    async def _first_token(self, name: _Name, running: Running, chain: Sequence[int]) -> None:
        running.first_token_at_s = self._now_s()
        running.first_token_tick_s = time.monotonic()
        self._cache.prefilled(name, at_s=running.first_token_tick_s)
        if self._kv_events is not None:
            self._kv_events.prefilled(chain)
        await self._notes.first_token(running)

    def _arm(self, running: Running, watch: _Watch, *, limit_s: float, reason: Reason) -> None:
        """Let the scope end at the nearest of `limit_s` from now, run time and deadline."""
        watch.limit_ends_tick_s = asyncio.get_running_loop().time() + limit_s
        watch.limit_reason = reason
        self._look(running, watch)

    def _look(self, running: Running, watch: _Watch) -> None:
        """End the scope if a limit is reached; else look again when the nearest one is due."""
        if watch.look is not None:
            watch.look.cancel()
        if running.stop is not None or watch.scope.expired():
            return
        loop = asyncio.get_running_loop()
        tick_s = loop.time()
        limits = [
            (watch.limit_ends_tick_s, watch.limit_reason),
            (watch.run_ends_tick_s, Reason.RUN_TIME_EXCEEDED),
        ]
        left_s = self._deadline_left_s(running)
        limits.append((tick_s + left_s, Reason.DEADLINE_EXPIRED))
        ends_tick_s, reason = min(limits, key=lambda limit: limit[0])
        if ends_tick_s <= tick_s:
            watch.reason = reason
            watch.scope.reschedule(tick_s)
        else:
            watch.look = loop.call_at(ends_tick_s, self._look, running, watch)

    def _is_late(self, running: Running) -> bool:
        return self._deadline_left_s(running) <= 0

    def _deadline_left_s(self, running: Running) -> float:
        """Tell how long until the deadline, by the broker's word if it gave one; inf: it has none.

        An order's own count needs no clock that agrees with anybody's.
        """
        if running.deadline_tick_s is not None:
            return running.deadline_tick_s - time.monotonic()
        deadline_at_s = running.job.deadline_at_s
        return math.inf if deadline_at_s is None else deadline_at_s - self._now_s()

    async def _request(self, running: Running) -> EngineRequest:
        job = running.job
        is_small = len(job.body) <= INLINE_BYTES_MAX
        body = self._names.body(job) if is_small else await to_thread(self._names.body, job)
        return EngineRequest(
            request_id=job.request_id or running.key,
            endpoint=job.endpoint,
            body=body,
            stream_to_client=job.stream,
            blocks=job.blocks,
            prompt_tokens=job.prompt_tokens,
            output_tokens_max=job.output_tokens_max,
        )


def _chain(running: Running) -> tuple[int, ...]:
    """Prefix blocks of a job; none when its producer sent garbage: they are a hint only."""
    try:
        return tuple(unpack_hashes(running.job.blocks)[:BLOCKS_MAX])
    except ValueError:
        return ()
