"""What is known of the engine between requests: readiness, load, restarts."""

import asyncio
from collections.abc import Callable

import structlog

from broker.wire.messages import Load
from worker_agent.engine.base import Engine, Facts, Readiness

_log = structlog.get_logger(__name__)

NOT_READY_POLL_S = 0.2
"""How often an engine that is not ready is asked: loading takes minutes, but its end is seen at
once."""


class EngineWatch:
    """Asks the engine at intervals, and keeps the answers."""

    def __init__(
        self,
        engine: Engine,
        *,
        poll_s: float,
        poll_s_max: float,
        on_change: Callable[[], None],
        on_facts: Callable[[Facts], None],
    ) -> None:
        self._engine = engine
        self._poll_s = poll_s
        self._poll_s_max = poll_s_max
        self._on_change = on_change
        self._on_facts = on_facts
        self._seen: Facts | None = None
        self.readiness = Readiness(ready=False, detail="the engine was not asked yet")
        self.load = Load()
        self.was_ready = asyncio.Event()
        """Set once the engine was ready for the first time."""

    @property
    def facts(self) -> Facts:
        """Return what the engine says of itself now; a change is passed on."""
        facts = self._engine.facts
        if facts != self._seen:
            self._seen = facts
            self._on_facts(facts)
        return facts

    async def has_died(self, incarnation: int) -> bool:
        """Ask at once whether the engine of this incarnation is no more."""
        await self.ask()
        return self.readiness.away or self.facts.incarnation != incarnation

    async def run(self) -> None:
        """Ask, for ever."""
        while True:
            await self.ask()
            ready = self.readiness.ready
            await asyncio.sleep(self._poll_s if ready else min(self._poll_s, NOT_READY_POLL_S))

    async def ask(self) -> None:
        """Ask once."""
        before = self.readiness
        try:
            async with asyncio.timeout(self._poll_s_max):
                self.readiness = await self._engine.ready()
                self.load = await self._engine.load()
        except TimeoutError:
            detail = f"the engine did not say whether it is ready within {self._poll_s_max:g} s"
            self.readiness = Readiness(ready=False, detail=detail)
        except Exception as error:  # noqa: BLE001  # The edge of this loop.
            # An engine that breaks its promise is not ready, and is asked again.
            _log.exception("the engine could not be asked")
            self.readiness = Readiness(ready=False, detail=repr(error))
        if self.readiness.ready:
            self.was_ready.set()
        if before != self.readiness:
            _log.info(
                "engine", ready=self.readiness.ready, detail=self.readiness.detail, facts=self.facts
            )
            self._on_change()
