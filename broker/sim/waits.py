"""How far wait estimates are from the waits that follow, in an overloaded cluster.

The receipt says how long a job will wait, its dispatch how long it did. Error = |told - had| ÷ had,
over the jobs that had waited at least `WAIT_S_MIN`. After a change of the fleet, once the mind can
know of it, each job that still waits is asked about anew, and the rest of its wait is what counts.
"""

import statistics
from collections.abc import Sequence

from msgspec import Struct

from broker.core.decisions import Decision, Dispatch, Queued
from broker.core.events import Event
from broker.core.policy import Policy
from broker.core.wait_errors import WAIT_S_MIN
from broker.sim.mind import MindRouter
from broker.sim.request import Request
from broker.sim.runs import Setting
from broker.sim.world import World

LOOK_S = 6.0
"""After a change of the fleet: a lost worker is known as gone after `lease_s` (3 s), a report late
at most, and an unanswered probe."""


class Told(Struct, frozen=True, kw_only=True):
    """An estimate, and the wait that followed."""

    key: str
    at_s: float
    told_s: float
    had_s: float

    @property
    def lane(self) -> str:
        """Whose job it is."""
        return self.key.partition(".")[0]

    @property
    def off_ratio(self) -> float:
        """How far off it was, as a share of the wait; below 0 it was too short."""
        return (self.told_s - self.had_s) / self.had_s


class WaitFigures(Struct, frozen=True, kw_only=True):
    """Of the long waits among many."""

    jobs: int
    wait_s_p50: float
    error_ratio_p50: float
    error_ratio_p90: float
    off_ratio_p50: float
    """Signed: below 0 most waited longer than they were told."""


class Waits:
    """Watches a mind: what jobs were told, and what came of it."""

    def __init__(self, *, changes_at_s: Sequence[float] = ()) -> None:
        self.told: list[Told] = []
        """By receipt, in order of dispatch."""
        self.asked: list[Told] = []
        """After changes of the fleet, in order of dispatch."""
        self._looks_at_s = sorted({at_s + LOOK_S for at_s in changes_at_s}, reverse=True)
        self._receipts: dict[str, tuple[float, float]] = {}
        self._asked: dict[str, tuple[float, float]] = {}
        self._router: MindRouter | None = None

    def watch(self, router: MindRouter) -> None:
        """Say whom to ask."""
        self._router = router

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """See what was decided."""
        del event
        if self._looks_at_s and at_s >= self._looks_at_s[-1]:
            self._looks_at_s.pop()
            self._ask(at_s)
        for decision in decisions:
            match decision:
                case Queued(key, _, wait_s):
                    self._receipts[key] = (at_s, wait_s)
                case Dispatch(key=key):
                    for told, after in ((self._receipts, self.told), (self._asked, self.asked)):
                        said = told.pop(key, None)
                        if said is not None and at_s > said[0]:
                            had_s = at_s - said[0]
                            after.append(Told(key=key, at_s=said[0], told_s=said[1], had_s=had_s))
                case _:
                    pass

    def _ask(self, at_s: float) -> None:
        """Ask about all that wait."""
        assert self._router is not None, "somebody is watched"
        for key in self._receipts:
            why = self._router.scheduler.views.why(key)
            if why is not None and not why.leased:
                self._asked[key] = (at_s, why.wait_s)


def waits_of(
    requests: Sequence[Request], policy: Policy, setting: Setting, *, seed: int = 0
) -> Waits:
    """Run requests under the mind and tell what their senders were told."""
    world = World(requests, profiles=setting.fleet(), changes=setting.changes, journal=True)
    waits = Waits(changes_at_s=[change.at_s for change in setting.changes])
    router = MindRouter(world, policy, seed=seed, network=setting.network, observer=waits)
    waits.watch(router)
    world.run(router)
    return waits


def figures(told: Sequence[Told]) -> WaitFigures | None:
    """Sum up the long waits; None when nobody waited long."""
    long = [one for one in told if one.had_s >= WAIT_S_MIN]
    if not long:
        return None
    ratios = sorted(abs(one.off_ratio) for one in long)
    return WaitFigures(
        jobs=len(long),
        wait_s_p50=statistics.median(one.had_s for one in long),
        error_ratio_p50=statistics.median(ratios),
        error_ratio_p90=ratios[int(0.9 * (len(ratios) - 1))],
        off_ratio_p50=statistics.median(one.off_ratio for one in long),
    )
