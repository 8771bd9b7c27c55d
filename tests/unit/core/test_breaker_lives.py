"""Random lives of sick and sound engines: what a breaker may never do, and must do in time."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from broker.core.breaker import Breaker, BreakerState
from broker.core.breakers import Breakers
from broker.core.endings import Endings
from broker.core.policy import PolicyName
from broker.core.state import Lease
from broker.wire.messages import Answer, Finished, Kind, Reason
from tests.unit.core.breaker_world import (
    COMPLETED,
    FAULTS,
    HARMLESS,
    UNTAKEN,
    BreakerWorld,
    retried,
    settled,
)

ROUTINGS: tuple[PolicyName, ...] = ("first_token", "weighted", "round_robin")


class Trials(RuleBasedStateMachine):
    """Engines that fail and heal at random."""

    world: BreakerWorld

    @initialize(
        workers=st.integers(1, 4),
        slots=st.integers(1, 3),
        routing=st.sampled_from(ROUTINGS),
        failures_max=st.integers(1, 3),
        open_s_max=st.sampled_from((2.0, 20.0)),
    )
    def begin(self, **fields: Any) -> None:
        self.world = BreakerWorld(open_s=2.0, **fields)
        self.world.submit(4)

    @rule(count=st.integers(1, 6), lane=st.sampled_from(("acme", "beta")))
    def jobs_come(self, count: int, lane: str) -> None:
        self.world.submit(count, lane=lane)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), reason=st.sampled_from(FAULTS))
    def an_engine_fails(self, data: st.DataObject, reason: Reason) -> None:
        self.world.end(self._key(data), **retried(reason))

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), count=st.integers(1, 8))
    def a_worker_fails_all_it_gets(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(self.world.names))
        for _ in range(count):
            keys = self.world.keys_at(name)
            if keys:
                self.world.end(keys[0], **retried(Reason.ENGINE_FAILED))
            else:
                self.world.submit()

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def a_job_completes(self, data: st.DataObject) -> None:
        self.world.end(self._key(data), **COMPLETED)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), how=st.sampled_from(sorted(HARMLESS)))
    def a_job_ends_harmlessly(self, data: st.DataObject, how: str) -> None:
        self.world.end(self._key(data), **HARMLESS[how])

    @precondition(lambda self: self.world.running)
    @rule(data=st.data(), answer=st.sampled_from(UNTAKEN))
    def an_order_comes_back(self, data: st.DataObject, answer: Answer) -> None:
        self.world.answer(self._key(data), answer)

    @precondition(lambda self: self.world.running)
    @rule(data=st.data())
    def an_owner_cancels(self, data: st.DataObject) -> None:
        self.world.cancel(self._key(data))

    @rule(seconds=st.sampled_from((0.25, 2.0, 2.25, 5.0, 21.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(data=st.data())
    def a_worker_restarts(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.world.names))
        self.world.restart(name)
        assert self.world.state(name) != BreakerState.OPEN

    @rule(data=st.data())
    def an_engine_restarts(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.world.names))
        self.world.restart_engine(name)
        assert self.world.state(name) == BreakerState.CLOSED

    def _key(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(sorted(self.world.running)))

    def teardown(self) -> None:
        """After all failures, all serve and all jobs end, in bounded time."""
        if hasattr(self, "world"):
            self.world.heal()


SETTINGS = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestTrials = Trials.TestCase
TestTrials.settings = SETTINGS


# ---- what never opens it -------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.sampled_from([*sorted(HARMLESS), *UNTAKEN]), min_size=1, max_size=60),
    failures_max=st.integers(1, 3),
)
def test_what_says_nothing_of_the_engine_never_opens_it(
    ends: list[str | Answer], failures_max: int
) -> None:
    """4xx, busy, cancel, deadline, doubles and deaths, in any order and number: always closed."""
    world = BreakerWorld(workers=1, slots=1, failures_max=failures_max)
    for how in ends:
        world.submit()
        world.wait(1.25)
        key = next(iter(world.running))
        if isinstance(how, Answer) or how not in HARMLESS:
            world.answer(key, how)  # pyright: ignore[reportArgumentType] - One of UNTAKEN.
        else:
            world.end(key, **HARMLESS[how])
        assert world.state("w0") == BreakerState.CLOSED
    world.heal()


# ---- broken on purpose ---------------------------------------------------------------------------


def found(monkeypatch: pytest.MonkeyPatch, broken: type, name: str, value: object) -> str:
    """What the machine says of a mind that was broken on purpose."""
    monkeypatch.setattr(broken, name, value)
    plain = settings(
        SETTINGS,
        derandomize=True,
        database=None,
        max_examples=200,
        phases=[Phase.generate],  # That it fails is enough, the least example takes a minute.
    )
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(Trials, settings=plain)
    return str(caught.value)


def test_a_mind_whose_breakers_open_by_4xx_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's fault is not the worker's."""
    sound = Endings._settled

    def settle(self: Endings, lease: Lease, finished: Finished) -> None:
        if finished.kind is Kind.FAILED:
            self._breakers.attempt_failed(lease, Reason.ENGINE_FAILED, charged=True)
        sound(self, lease, finished)

    assert "opened after" in found(monkeypatch, Endings, "_settled", settle)


def test_a_mind_that_tries_two_at_once_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-open is one job."""
    lets_in = property(lambda self: self.state is not BreakerState.OPEN)
    assert "tried at once" in found(monkeypatch, Breaker, "takes_new", lets_in)


def test_a_mind_whose_breakers_never_half_open_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes for a worker that nobody asks."""
    said = found(monkeypatch, Breakers, "time_passed", lambda _: None)
    assert "stays open" in said or "still don't serve" in said


def test_a_mind_that_loses_a_probe_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that was cancelled, refused or never taken frees its place."""
    said = found(monkeypatch, Breaker, "left", lambda *_: None)
    assert "still don't serve" in said


def test_the_world_ends_attempts_as_agents_do() -> None:
    """A settled attempt tells its kind, one that came to nothing its reason."""
    assert settled(Kind.FAILED)["kind"] is Kind.FAILED
    assert retried(Reason.STALLED)["reason"] is Reason.STALLED
