"""Readiness, load and restarts of an engine, however badly it behaves."""

import asyncio
from typing import Any

from tests.agents import ScriptedEngine
from tests.turns import until
from worker_agent.engine.base import Facts, Readiness
from worker_agent.engine_watch import EngineWatch


def a_watch(engine: ScriptedEngine, **fields: Any) -> tuple[EngineWatch, list[str]]:
    """A watch, and what it told."""
    told: list[str] = []
    defaults: dict[str, Any] = {"poll_s": 60.0, "poll_s_max": 5.0}
    watch = EngineWatch(
        engine,
        on_change=lambda: told.append("change"),
        on_facts=lambda facts: told.append(f"facts {facts.incarnation}"),
        **{**defaults, **fields},
    )
    return watch, told


async def test_a_change_of_readiness_is_told_once() -> None:
    """Equal answers are no news."""
    engine = ScriptedEngine()
    watch, told = a_watch(engine)
    await watch.ask()
    await watch.ask()
    assert told.count("change") == 1
    engine.is_ready = False
    await watch.ask()
    assert told.count("change") == 2
    assert not watch.readiness.ready


async def test_the_first_readiness_is_remembered() -> None:
    """Whoever waits for the engine hears of it once, and need not look."""
    engine = ScriptedEngine()
    engine.is_ready = False
    watch, _ = a_watch(engine)
    await watch.ask()
    assert not watch.was_ready.is_set()
    engine.is_ready = True
    await watch.ask()
    assert watch.was_ready.is_set()


async def test_changed_facts_are_told_when_they_are_read() -> None:
    """A restart is noticed by whoever looks first."""
    engine = ScriptedEngine()
    watch, told = a_watch(engine)
    assert watch.facts == Facts(4, 0, 1)
    assert watch.facts == Facts(4, 0, 1)
    engine.incarnation = 2
    assert watch.facts.incarnation == 2
    assert told == ["facts 1", "facts 2"]


async def test_an_engine_that_does_not_answer_is_not_ready() -> None:
    """Asking is bounded by `poll_s_max`."""

    class Silent(ScriptedEngine):
        async def ready(self) -> Readiness:
            await asyncio.Event().wait()
            raise AssertionError

    watch, _ = a_watch(Silent(), poll_s_max=0.01)
    await watch.ask()
    assert not watch.readiness.ready
    assert watch.readiness.detail == "the engine did not say whether it is ready within 0.01 s"


async def test_an_engine_that_breaks_its_promise_is_not_ready_and_asked_again() -> None:
    """An exception ends no watch."""

    class Broken(ScriptedEngine):
        faults = 1

        async def ready(self) -> Readiness:
            if self.faults:
                self.faults -= 1
                raise ZeroDivisionError
            return await super().ready()

    watch, _ = a_watch(Broken(), poll_s=0.001)
    async with asyncio.TaskGroup() as group:
        watching = group.create_task(watch.run())
        await until(lambda: "ZeroDivisionError" in watch.readiness.detail)
        await until(lambda: watch.readiness.ready)
        watching.cancel()
