"""Fuzz: seeds × faults under checkers. The same seed is the same run, whatever ran before it.

After `HEAL_S` nothing goes wrong any more and two sound workers join; from then on everything must
come to its end within `settle_s`. The idea of a whole simulated cluster under checkers is
TigerBeetle's (its VOPR) and FoundationDB's.
"""

from collections.abc import Callable, Sequence
from functools import partial

import xxhash
from msgspec import Struct

from broker.core.decisions import Decision
from broker.core.events import Event, Tick
from broker.engine_model.profile import Curve, Profile
from broker.sim.checkers import Checkers
from broker.sim.host import Host
from broker.sim.mind import MindRouter
from broker.sim.scenario import (
    ADAPTERS,
    BLOCK_TOKENS,
    LAST_WISH_S,
    SEQUENCE_TOKENS_MAX,
    Fault,
    FaultKind,
    Scenario,
    draw,
)
from broker.sim.violation import Violation
from broker.sim.world import Change, FleetChange, World

HEAL_S = LAST_WISH_S + 4.5
"""The longest fault lasts four seconds."""

REQUEST_S_MAX = 5.0
"""One request alone takes less, back-off included."""

LEADERLESS_RATIO = 0.25
"""A new leader is there within a second: requests last a few, so that it finds them running."""

LOOK_S = 0.5
"""How often it is looked at whether all has ended."""

SICK_S = 0.002
"""How soon a sick engine answers: sooner than any that works."""

QUIET_S = 2.0
"""What ended lies still for this long before the last look: a drained worker's word, a last
report."""

SOUND = Profile(
    name="sound",
    source="chosen: holds anything that is drawn",
    slots=8,
    step_tokens_max=4096,
    kv_tokens_max=16 * SEQUENCE_TOKENS_MAX,
    block_tokens=BLOCK_TOKENS,
    prefill_s=Curve(4e-3, 5e-5, 0.0),
    decode_s=Curve(5e-3, 1e-2, 0.0),
)

Log = Callable[[str], None]

_FLEET = {
    FaultKind.LOSE: Change.LOSE,
    FaultKind.RESTART: Change.RESTART,
    FaultKind.DRAIN: Change.DRAIN,
}


class Found(Struct, frozen=True, kw_only=True):
    """What a seed came to."""

    seed: int
    digest: str
    """Of every decision and of what became of each request."""
    violation: str = ""
    """Empty: nothing was found."""
    at_s: float = 0.0
    """When the run ended."""
    steps: int = 0
    dispatches: int = 0


def fuzz_seed(seed: int, *, log: Log | None = None) -> Found:
    """Run a seed's scenario; with `log`, every event and decision is told in a line."""
    run = FuzzRun(draw(seed), log=log)
    violation = ""
    try:
        run.run()
    except Violation as found:
        violation = str(found)
    except Exception as error:  # noqa: BLE001 - A crash of the mind is what is looked for.
        violation = f"{type(error).__name__}: {error} ({_where(error)})"
    if violation and log is not None:
        log(f"{run.world.at_s:9.4f} VIOLATION {violation}")
    return Found(
        seed=seed,
        digest=run.digest(),
        violation=violation,
        at_s=run.world.at_s,
        steps=run.checkers.steps,
        dispatches=run.checkers.dispatches,
    )


def _where(error: Exception) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    return f"{trace.tb_frame.f_globals.get('__name__', '')}:{trace.tb_lineno}"


class FuzzRun:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, log: Log | None = None) -> None:
        self.scenario = scenario
        self.world = World(scenario.requests, profiles=scenario.profiles, journal=True)
        self.checkers = Checkers(scenario, self.world)
        self.router = MindRouter(
            self.world,
            scenario.policy,
            seed=scenario.seed,
            network=scenario.network,
            terms=scenario.terms,
            observer=self,
            adapters=self._adapters,
        )
        self.checkers.watch(self.router)
        self._log = log
        self._seen = xxhash.xxh3_64()

    def _adapters(self, host: Host) -> tuple[str, ...]:
        some = self.scenario.adapters
        return ADAPTERS if host.profile is SOUND else some[host.number % len(some)]

    def run(self) -> None:
        """Run it. Raises Violation, or what the mind raises."""
        world, scenario = self.world, self.scenario
        for fault in scenario.faults:
            world.call_at(fault.at_s, partial(self._strike, fault))
        for at_s, index in scenario.cancels:
            world.call_at(at_s, partial(self._cancel, index))
        world.begin(self.router)
        world.run_until(HEAL_S)
        self._heal(HEAL_S)
        until_s = HEAL_S + self.settle_s()
        while not self.checkers.is_over():
            if world.at_s >= until_s:
                message = f"not over {until_s - HEAL_S:g} s after all was well: "
                raise Violation(message + self.checkers.left())
            world.run_until(world.at_s + LOOK_S)
        world.run_until(world.at_s + QUIET_S)
        self.checkers.check_over()

    def settle_s(self) -> float:
        """Return how long all may take that has not ended now, one after another at worst."""
        requests = len(self.scenario.requests) - self.world.ended_count
        leases = self.scenario.policy.leases
        buckets_s = 60.0 if any(row.tokens_per_min for row in self.scenario.policy.quotas) else 0.0
        return 2 * leases.revoke_s + 10.0 + buckets_s + REQUEST_S_MAX * requests

    def digest(self) -> str:
        """Return a hash over all that was decided and all that happened."""
        seen = self._seen.copy()
        records = self.world.records
        for column in (records.given_s, records.first_token_s, records.ended_s, records.host):
            seen.update(column.tobytes())
        return seen.hexdigest()

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """See a step: log it, count it into the digest, check it."""
        if self._log is not None and not (isinstance(event, Tick) and not decisions):
            if event is not None:
                self._log(f"{at_s:9.4f} {event}")
            for decision in decisions:
                self._log(f"{at_s:9.4f}     -> {decision}")
        for decision in decisions:
            self._seen.update(f"{at_s} {decision}".encode())
        self.checkers.stepped(event, decisions, at_s)

    # ---- what goes wrong -----------------------------------------------------------------------

    def _strike(self, fault: Fault, at_s: float) -> None:
        self._say(at_s, f"{fault.kind} host {fault.host} for {fault.for_s:.2f} s")
        world, router = self.world, self.router
        until_s = at_s + fault.for_s
        host = world.hosts[fault.host % len(world.hosts)]
        match fault.kind:
            case FaultKind.JOIN:
                change = FleetChange(at_s=at_s, change=Change.JOIN, profile=fault.profile)
                world.change(change, at_s)
            case FaultKind.LOSE | FaultKind.RESTART | FaultKind.DRAIN:
                change = FleetChange(at_s=at_s, change=_FLEET[fault.kind], host=host.number)
                world.change(change, at_s)
            case FaultKind.UNDRAIN:
                host.draining = False
                router.drain(host, draining=False, at_s=at_s)
            case FaultKind.ENGINE:
                router.restart_engine(host, at_s=at_s)
            case FaultKind.CUT:
                router.wire.cut(host.name, until_s=until_s)
            case FaultKind.SICK:
                host.fails_after_s = SICK_S
                world.call_at(until_s, partial(self._cure, host))
            case FaultKind.LINK if router.wire.is_up:
                router.link_changed(up=False, at_s=at_s)
                world.call_at(until_s, self._link_back)
            case FaultKind.LEADER if router.leads:
                router.stand_down()
                world.call_at(at_s + LEADERLESS_RATIO * fault.for_s, self._take_over)
            case _:
                pass

    def _cure(self, host: Host, at_s: float) -> None:
        self._say(at_s, f"{host.name} is well")
        host.fails_after_s = None

    def _link_back(self, at_s: float) -> None:
        self._say(at_s, "link back")
        self.router.link_changed(up=True, at_s=at_s)

    def _take_over(self, at_s: float) -> None:
        self._say(at_s, f"leader {self.router.epoch + 1}")
        self.router.take_over(at_s=at_s)

    def _cancel(self, index: int, at_s: float) -> None:
        request = self.world.open.get(index)
        if request is not None:
            self._say(at_s, f"cancel {index}")
            self.router.cancel(request, at_s=at_s)

    def _heal(self, at_s: float) -> None:
        """Let two sound workers join: what is lost or drained stays so."""
        self._say(at_s, "all is well from here on")
        for _ in range(2):
            change = FleetChange(at_s=at_s, change=Change.JOIN, profile=SOUND)
            self.world.change(change, at_s)

    def _say(self, at_s: float, text: str) -> None:
        if self._log is not None:
            self._log(f"{at_s:9.4f} == {text}")
