"""Lines that say the same again and again are counted instead: what else a log says stays visible.

While a server is away everything that is tried again fails again, several times a second in each
process, all night. The first few lines of a kind say all there is; the next that is let through
says how many were left out.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog

LINES_MAX = 5
"""Of one kind in a period: enough to see that it goes on, and how fast."""

PERIOD_S = 60.0

KINDS_MAX = 256
"""Kinds that are counted at once; beyond it the one that began first is forgotten."""

_COUNTED = frozenset({"debug", "info", "warning"})
"""An error is told each time it comes."""


@dataclass(slots=True)
class _Kind:
    since_s: float
    lines: int = 0
    left_out: int = 0


class Repeats:
    """A structlog processor: leaves out what fails in the same way for the sixth time in a minute.

    Lines are of one kind if event and `error` are the same; those without an `error` all pass.
    """

    def __init__(self, *, now: Callable[[], float]) -> None:
        """Count on a clock that never goes back."""
        self._now = now
        self._kinds: dict[tuple[object, str], _Kind] = {}

    def __call__(
        self, _: object, level: str, event: structlog.types.EventDict
    ) -> structlog.types.EventDict:
        """Pass a line on, with `left_out` if some were. Raises DropEvent."""
        if level not in _COUNTED or "error" not in event:
            return event
        kind = self._kind((event.get("event"), str(event["error"])))
        kind.lines += 1
        if kind.lines > LINES_MAX:
            kind.left_out += 1
            raise structlog.DropEvent
        if kind.left_out:
            event["left_out"], kind.left_out = kind.left_out, 0
        return event

    def _kind(self, name: tuple[object, str]) -> _Kind:
        at_s = self._now()
        kind = self._kinds.get(name)
        if kind is None:
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[next(iter(self._kinds))]
            kind = self._kinds[name] = _Kind(at_s)
        elif at_s >= kind.since_s + PERIOD_S:
            kind.since_s, kind.lines = at_s, 0
        return kind
