"""The plan: of the seed alone, even over all kinds, within its bounds."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ops.chaos.faults import DEEDS
from ops.chaos.moments import STEPS
from ops.chaos.plan import (
    AWAY_S,
    DIES_THERE,
    DOWN_S,
    DURATION_S,
    OF_SEVERAL_SERVERS,
    PLACES,
    STANDS_THERE,
    Kind,
    kinds_of,
    plan,
)
from ops.chaos.spy import CALLS, Place

SEEDS = st.integers(min_value=0, max_value=2**32)
COUNTS = st.integers(min_value=0, max_value=100)


@given(SEEDS, COUNTS)
def test_a_seed_makes_one_plan(seed: int, count: int) -> None:
    """The same faults in the same order, as many as asked for; a longer plan begins alike."""
    faults = plan(seed, count)
    assert len(faults) == count
    assert [fault.number for fault in faults] == list(range(count))
    assert plan(seed, count + 10)[:count] == faults


def test_another_seed_makes_another_plan() -> None:
    """In kinds, not only in durations."""
    assert [fault.kind for fault in plan(1, 20)] != [fault.kind for fault in plan(2, 20)]


@given(SEEDS, COUNTS)
def test_each_kind_comes_before_any_comes_twice_more_often(seed: int, count: int) -> None:
    """Kinds differ in number by one at most."""
    counts = Counter(dict.fromkeys(kinds_of(1), 0))
    counts.update(fault.kind for fault in plan(seed, count))
    assert max(counts.values()) - min(counts.values()) <= 1


@given(SEEDS)
def test_faults_stay_within_their_bounds(seed: int) -> None:
    """Durations as the table says, places only where a process can be killed in its work."""
    for fault in plan(seed, len(Kind)):
        low_s, high_s = DURATION_S.get(fault.kind, (0.0, 0.0))
        assert low_s <= fault.for_s <= high_s
        assert 0 <= fault.pick < 1
        assert any(low_s <= fault.down_s <= high_s for low_s, high_s in (DOWN_S, AWAY_S))
        may_aim = fault.kind in DIES_THERE | STANDS_THERE
        assert not fault.part or (may_aim and fault.place in PLACES[fault.part][fault.step])
        assert bool(fault.part) == bool(fault.place) == bool(fault.step)


def test_what_takes_several_servers_is_done_to_several_only() -> None:
    """One server leads nothing; three are hit by all kinds."""
    assert not OF_SEVERAL_SERVERS & {fault.kind for fault in plan(1, 100)}
    assert {fault.kind for fault in plan(1, 100, kinds=kinds_of(3))} == {*Kind} - {Kind.HIT_YOURS}


def test_every_kind_is_carried_out() -> None:
    """A kind without a deed would end a run in its midst."""
    assert DEEDS.keys() == set(Kind)


@given(SEEDS)
def test_to_end_in_order_and_to_be_killed_is_one_plan(seed: int) -> None:
    """The same processes at the same places, but for what is done to them."""
    parts = ("leader", "worker", "producer", "nats")
    killed, ended = (
        plan(seed, 8, kinds=[Kind(f"{how}_{part}") for part in parts]) for how in ("kill", "term")
    )
    for one, other in zip(killed, ended, strict=True):
        assert one.kind.value.partition("_")[2] == other.kind.value.partition("_")[2]
        assert replace(one, kind=other.kind) == other


def test_every_place_is_one_that_the_spy_looks_at() -> None:
    """Of a step of a job's life, at a call or a hearing that is spied on."""
    for steps in PLACES.values():
        for step, places in steps.items():
            assert step in STEPS
            for text in places:
                place = Place.read(f"die {step} {text}")
                assert place.step == step
                assert Place.read(place.order()) == place
                assert place.operation in CALLS | {"hear", "deliver"}
                assert place.when in ("before", "after")


def test_a_long_plan_has_processes_back_at_once_and_away_for_long() -> None:
    """Both the quick restart and the takeover are seen."""
    downs = [fault.down_s for fault in plan(1, 200) if fault.kind is Kind.KILL_WORKER]
    assert min(downs) <= DOWN_S[1]
    assert max(downs) >= AWAY_S[0]


def test_a_long_plan_aims_at_each_step() -> None:
    """200 faults come in the midst of all steps, ten times and more."""
    aimed = Counter(fault.step for fault in plan(1, 200))
    long_steps = {"hold", "run"}  # A job is in one of these at almost any moment.
    assert all(aimed[step] >= 10 for step in STEPS if step not in long_steps)
    assert all(aimed[step] >= 5 for step in long_steps)
