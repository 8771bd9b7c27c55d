"""What may go wrong beneath the broker: looked at each second, alarmed, told in one place.

Each watch says what is wrong now, or nothing. Its alarm stands for as long and a minute more, so
that whoever scrapes /metrics each quarter of a minute sees also what lasted a second. What is done
about each trouble is done elsewhere, at once and without an alarm: `ops/docs/watchdogs.md` says
where.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from broker.bus.base import Bus
from broker.service.snapshot import WatchView

LOOK_S = 1.0
"""How often everything is looked at."""

ALARM_S = 60.0
"""How long an alarm stands after its trouble: four of Prometheus's usual scrapes."""

STORE_SLOW_S = 0.5
"""A write that the server needs longer for: a flushed one takes a few ms on a good disk, some 30
on a spinning one. In a cluster's election, 4 to 9 s."""

NAMES_MAX = 10
"""Of what a file lacks, or says otherwise, named in an alarm."""

_log = structlog.get_logger(__name__)

Look = Callable[[], str]
"""Says what is wrong now; empty: nothing."""


@dataclass(slots=True)
class _Watch:
    look: Look
    trouble: str = ""
    ends_at_s: float = 0.0
    alarms: int = 0


class Watchdogs:
    """All watches of a broker."""

    def __init__(self, looks: Mapping[str, Look], *, now: Callable[[], float]) -> None:
        """Look at these, by name."""
        self._watches = {name: _Watch(look) for name, look in looks.items()}
        self._now = now

    async def run(self) -> None:
        """Look each second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Look at everything once."""
        at_s = self._now()
        for name, watch in self._watches.items():
            trouble = watch.look()
            if trouble:
                if not watch.trouble:
                    watch.alarms += 1
                    _log.error("watchdog.alarm", watchdog=name, trouble=trouble)
                watch.trouble, watch.ends_at_s = trouble, at_s + ALARM_S
            elif watch.trouble and at_s >= watch.ends_at_s:
                watch.trouble = ""
                _log.warning("watchdog.over", watchdog=name)

    def views(self) -> tuple[WatchView, ...]:
        """Tell all, as of the last look."""
        return tuple(
            WatchView(name=name, trouble=watch.trouble, alarms=watch.alarms)
            for name, watch in self._watches.items()
        )


def risen(counts: Counter[str], kind: str, text: str) -> Look:
    """Look whether a count has risen since the last look; `text` tells what that means."""
    seen = counts[kind]

    def look() -> str:
        nonlocal seen
        before, seen = seen, counts[kind]
        return f"{text} ({seen:,} times since the start)" if seen > before else ""

    return look


def cut(bus: Bus) -> Look:
    """Look whether the link to the server is down, or was lost since the last look."""
    lost = risen(bus.counts, "links_lost", "the link to the message server was lost")

    def look() -> str:
        trouble = lost()
        return trouble if bus.connected else "there is no link to the message server"

    return look


def slow(write_s: Callable[[], float], *, stuck: Callable[[], str] = lambda: "") -> Look:
    """Look whether the server needs too long to store what it is given, or never does."""

    def look() -> str:
        if trouble := stuck():
            return trouble
        seconds = write_s()
        return f"a write took {seconds:.1f} s" if seconds > STORE_SLOW_S else ""

    return look


def full(lanes: Callable[[], tuple[str, ...]]) -> Look:
    """Look whether lanes have no more room for results."""

    def look() -> str:
        names = lanes()
        return f"results have no more room in {', '.join(names)}" if names else ""

    return look


def lacking(queues: Callable[[], tuple[str, ...]]) -> Look:
    """Look whether the broker's file lacks queues or lanes that stand at the server."""
    return _named("this broker's file lacks what stands at the server", queues)


def differing(keys: Callable[[], tuple[str, ...]]) -> Look:
    """Look whether a standby's file is another than the leader's."""
    return _named("this broker's file is not the leader's", keys)


def _named(trouble: str, what: Callable[[], tuple[str, ...]]) -> Look:
    def look() -> str:
        names = what()
        more = f" and {len(names) - NAMES_MAX:,} more" if len(names) > NAMES_MAX else ""
        return f"{trouble}: {', '.join(names[:NAMES_MAX])}{more}" if names else ""

    return look


def either(*looks: Look) -> Look:
    """Look at several things that are one trouble to the operator; the first one is told."""

    def look() -> str:
        return next(filter(None, [one() for one in looks]), "")

    return look
