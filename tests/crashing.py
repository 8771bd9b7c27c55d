"""A bus on which a test decides what happens around each call: die, fail, wait, or look.

    bus = FaultyBus(real, fault)        # fault(step) runs before and after each call

`crash_at("append:1:after")` kills this very process, as `kill -9` does, once the first append was
answered. A process under test takes it from the command line (`tests/crashing_agent.py`).
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from broker.bus.base import Bus

When = Literal["before", "after"]

OPERATIONS = frozenset(
    {
        "rtt_s",
        "publish",
        "request",
        "append",
        "last_message",
        "message_at",
        "delete_message",
        "purge",
        "ack",
        "renew",
        "kv_get",
        "kv_create",
        "kv_update",
        "kv_put",
        "kv_delete",
        "ensure_consumer",
        "reset_consumer",
    }
)
"""Calls that reach the server; all others pass through unseen."""


@dataclass(frozen=True, slots=True)
class Step:
    """One moment of a process's life on the bus."""

    operation: str
    when: When
    count: int
    """How often this operation was called, this call included."""
    subject: str
    """First argument of the call: subject, stream, bucket or ack subject."""


Fault = Callable[[Step], Awaitable[None] | None]


class FaultyBus:
    """Passes all on to a real bus; a fault comes around each call that reaches the server."""

    def __init__(self, bus: Bus, fault: Fault) -> None:
        self._bus = bus
        self._fault = fault
        self._counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._bus, name)
        return self._around(name, real) if name in OPERATIONS else real

    def _around(self, name: str, real: Callable[..., Awaitable[Any]]) -> Any:
        async def call(*args: Any, **fields: Any) -> Any:
            self._counts[name] += 1
            count = self._counts[name]
            subject = str(args[0]) if args else ""
            await self._happen(Step(name, "before", count, subject))
            try:
                return await real(*args, **fields)
            finally:
                # Also after an answer that is an error: the server has been asked.
                if not _is_cancelled():
                    await self._happen(Step(name, "after", count, subject))

        return call

    async def _happen(self, step: Step) -> None:
        waiting = self._fault(step)
        if waiting is not None:
            await waiting


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def faulty(bus: Bus, fault: Fault) -> Bus:
    """Put a fault around a bus, typed as one."""
    return cast("Bus", FaultyBus(bus, fault))


def kill_now() -> None:
    """End this process as the kernel does: nothing is flushed, nothing is told."""
    os.kill(os.getpid(), signal.SIGKILL)


def crash_at(place: str, *, die: Callable[[], object] = kill_now) -> Fault:
    """Die at `operation:count:before|after`; with a fourth part only calls on such subjects count.

    `publish:1:before:out.` is before the first publish on a subject that begins with `out.`.
    """
    operation, count, when, *rest = place.split(":", 3)
    prefix = rest[0] if rest else ""
    seen = 0

    def fault(step: Step) -> None:
        nonlocal seen
        if (step.operation, step.when) != (operation, when) or not step.subject.startswith(prefix):
            return
        seen += 1
        if seen == int(count):
            die()

    return fault


class Gate:
    """Holds a call until the test opens it, and tells when one has come."""

    def __init__(self, operation: str, when: When = "before", *, prefix: str = "") -> None:
        self._operation = operation
        self._when = when
        self._prefix = prefix
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def __call__(self, step: Step) -> None:
        """Wait at the gate, if this is the step."""
        is_here = (step.operation, step.when) == (self._operation, self._when)
        if is_here and step.subject.startswith(self._prefix):
            self.reached.set()
            await self.open.wait()


class Failing:
    """Raises one error for the next `times` such calls, before or after they reached the server."""

    def __init__(
        self,
        operation: str,
        error: Exception,
        *,
        times: int = 1,
        when: When = "before",
        prefix: str = "",
    ) -> None:
        self._operation = operation
        self._prefix = prefix
        self._error = error
        self._when = when
        self.left = times
        self.raised = 0

    def __call__(self, step: Step) -> None:
        """Raise, if this is the step."""
        is_here = (step.operation, step.when) == (self._operation, self._when)
        if self.left and is_here and step.subject.startswith(self._prefix):
            self.left -= 1
            self.raised += 1
            raise self._error
