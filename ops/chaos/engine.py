"""The modelled engine with a history of its own, and a file in which it is told to misbehave.

Its log of runs is what reruns and quotas are judged by: it knows nothing of brokers and leases.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from enum import StrEnum
from itertools import count
from pathlib import Path

from broker.engine_model.profile import Curve, Profile
from broker.wire.messages import Load
from ops.chaos.history import RunBegan, RunEnded
from ops.chaos.spy import Spy
from worker_agent.engine.base import (
    Chunk,
    EngineDisconnected,
    EngineError,
    EngineOutput,
    EngineRequest,
    Facts,
    Readiness,
)
from worker_agent.engine.fake import FakeEngine

SLOTS = 32

PROFILE = Profile(
    name="chaos",
    source=(
        "Chosen, not measured: a job of a few tokens takes about a second, so that ninety jobs are "
        "in flight and two cores are not busy with tokens."
    ),
    slots=SLOTS,
    step_tokens_max=8192,
    kv_tokens_max=SLOTS * 2048,
    block_tokens=64,
    prefill_s=Curve(2.0e-3, 1.0e-6, 0.0),
    decode_s=Curve(0.2, 0.0, 0.0),
)

SLOW_S = 1.0
"""What a slow engine adds before each token."""

LOOK_S = 0.05
"""How often a hanging engine looks whether it still is to hang."""


class Mode(StrEnum):
    """How an engine is."""

    FINE = "fine"
    SLOW = "slow"
    HANG = "hang"
    CRASH = "crash"


def mode_file(folder: Path, name: str) -> Path:
    """Name the file in which a worker's engine is told how to be."""
    return folder / f"{name}.engine"


class ChaosEngine:
    """An engine that is as its file says."""

    def __init__(self, folder: Path, spy: Spy, *, models: tuple[str, ...]) -> None:
        self._engine = FakeEngine(PROFILE, models=models)
        self._file = mode_file(folder, spy.name)
        self._spy = spy
        self._runs = count()

    @property
    def facts(self) -> Facts:
        """Return what is known now."""
        return self._engine.facts

    async def start(self) -> None:
        """Start with an empty cache."""
        await self._engine.start()

    async def stop(self) -> None:
        """End."""
        await self._engine.stop()

    async def ready(self) -> Readiness:
        """Tell whether it can take jobs: not while it is crashed."""
        if self._mode() is Mode.CRASH:
            return Readiness(ready=False, detail="the engine is down")
        return await self._engine.ready()

    async def load(self) -> Load:
        """Return how loaded it is."""
        return await self._engine.load()

    async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request, as far as the file lets it."""
        spy, run, life = self._spy, next(self._runs), os.getpid()
        job = spy.keys.get(request.request_id, request.request_id)
        began = RunBegan(at_s=time.time(), job=job, worker=spy.name, life=life, run=run)
        spy.pen.write(began)
        how = "aborted"
        try:
            async with aclosing(self._engine.run(request)) as outputs:
                async for output in outputs:
                    await self._misbehave()
                    if not isinstance(output, Chunk):
                        # The end comes first: who reads it may never come back for more.
                        how = "completed"
                    yield output
        except EngineError:
            how = "failed"
            raise
        finally:
            spy.pen.write(
                RunEnded(at_s=time.time(), job=job, worker=spy.name, life=life, run=run, how=how)
            )
            spy.forget(job)

    async def _misbehave(self) -> None:
        mode = self._mode()
        if mode is Mode.CRASH:
            message = "the engine is down"
            raise EngineDisconnected(message)
        if mode is Mode.SLOW:
            await asyncio.sleep(SLOW_S)
        while self._mode() is Mode.HANG:  # noqa: ASYNC110 - it is told by a file
            await asyncio.sleep(LOOK_S)

    def _mode(self) -> Mode:
        try:
            return Mode(self._file.read_text())
        except (OSError, ValueError):
            return Mode.FINE
