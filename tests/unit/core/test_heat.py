"""Hot prefixes: how often they are asked for, and when one more worker gets a copy."""

import math

import pytest

from broker.core import heat as module
from broker.core.decisions import Dispatch
from broker.core.decode_rate import GAP_SECONDS_MIN, TokenGap
from broker.core.heat import HEAT_KEYS_MAX, HEAT_S, Heat
from tests.unit.core.cluster import Cluster, a_spec, in_flight, only
from tests.unit.core.routing_builders import SYSTEM, Place, a_worker, where

SLOW = 5.0


def test_uses_fade() -> None:
    """Each counts one, and 1/e of it a minute later; what was never asked for has none."""
    heat = Heat()
    assert heat.uses(7, at_s=5.0) == 0.0
    for _ in range(10):
        heat.note(7, at_s=100.0)
    assert heat.uses(7, at_s=100.0) == 10.0
    assert heat.uses(7, at_s=100.0 + HEAT_S) == pytest.approx(10.0 / math.e)


def test_a_steady_rate_is_its_own_forecast() -> None:
    """Two a second for long: some 120 in the next minute."""
    heat = Heat()
    for number in range(2000):
        heat.note(7, at_s=number / 2)
    assert heat.uses(7, at_s=1000.0) == pytest.approx(2 * HEAT_S, rel=0.02)


def test_what_was_used_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of prefixes is bounded."""
    assert HEAT_KEYS_MAX == 65_536
    monkeypatch.setattr(module, "HEAT_KEYS_MAX", 3)
    heat = Heat()
    for key in (1, 2, 3, 1, 4):
        heat.note(key, at_s=float(key))
    assert len(heat) == 3
    assert heat.uses(2, at_s=4.0) == 0.0
    assert heat.uses(1, at_s=1.0) == 2.0


def test_a_gap_is_believed_once_enough_was_seen_and_forgotten_when_nothing_is() -> None:
    """Ten tokens in half a second are 50 ms apart; ten reports later nobody knows."""
    gap = TokenGap()
    gap.note(tokens=1, seconds=GAP_SECONDS_MIN / 2)
    assert gap.gap_s == 0.0
    gap.note(tokens=10, seconds=0.5)
    assert gap.gap_s == pytest.approx(0.05)
    gap.turn()
    gap.note(tokens=5, seconds=1.0)
    assert gap.gap_s == pytest.approx(1.275 / 10.5)
    for _ in range(10):
        gap.turn()
    assert gap.gap_s == 0.0


def test_the_gap_is_learned_from_the_lists_of_jobs() -> None:
    """Twenty tokens since the first, in two seconds."""
    cluster = Cluster()
    cluster.join("w1")
    spec = a_spec("j1", output_tokens_max=200)
    dispatch = only(Dispatch, cluster.hold(spec))
    cluster.first_token(dispatch)
    cluster.tick(2.0)
    listed = in_flight(spec, dispatch.attempt, output_tokens=21, prefilled=True)
    cluster.beat("w1", inflight=(listed,))
    worker = cluster.scheduler._mind.fleet.workers["w1"]
    assert worker.token_gap.gap_s == pytest.approx(0.1)


def a_hot_place(*, uses: int, slower: float = SLOW, workers: int = 4, **policy: object) -> Place:
    """Workers of which w0 holds a prefix that was asked for so often; its tokens come slowly."""
    place = Place([a_worker(f"w{n}", index=n, slots=200) for n in range(workers)], **policy)
    place.warm("w0", SYSTEM)
    for _ in range(uses):
        place.run(place.spec(SYSTEM), "w0")
    place.prefill(place.give(place.spec(SYSTEM, ("its", 1)), "w0"))
    seat_step_s = 1.0 / place.policy.decode_tokens_s
    place.workers["w0"].token_gap.note(tokens=1000, seconds=1000 * slower * seat_step_s)
    return place


@pytest.mark.parametrize(
    ("fields", "goes"),
    [
        ({"uses": 40}, "elsewhere"),
        ({"uses": 2}, "w0"),
        ({"uses": 40, "slower": 1.2}, "w0"),
        ({"uses": 40, "hot_slowdown_max": 6.0}, "w0"),
        ({"uses": 40, "hot_uses_min": 0.0}, "w0"),
        ({"uses": 40, "policy": "weighted"}, "w0"),
    ],
    ids=["hot", "not asked for", "not slow", "a higher threshold", "off", "weighted"],
)
def test_a_hot_prefix_gets_a_copy_where_its_holder_is_slow(
    fields: dict[str, float], goes: str
) -> None:
    """What the copy costs is shared among those that will use it."""
    place = a_hot_place(**fields)  # type: ignore[arg-type]
    chosen = where(place, SYSTEM)
    assert (chosen == "w0") is (goes == "w0")
    assert chosen


def test_copies_stop_when_one_holder_is_quick() -> None:
    """The copy serves: no third worker gets one while it is quick."""
    place = a_hot_place(uses=40)
    copy = place.run(place.spec(SYSTEM))
    assert copy != "w0"
    assert {where(place, SYSTEM) for _ in range(20)} <= {"w0", copy}


def test_heat_that_is_over_makes_no_copies() -> None:
    """Minutes later nobody asks any more: who comes then goes where it is cached."""
    place = a_hot_place(uses=40)
    place.at_s += 5 * HEAT_S
    assert where(place, SYSTEM) == "w0"


@pytest.mark.parametrize(("slower", "goes"), [(SLOW, "w1"), (1.2, "w0")])
def test_a_prefix_sticks_to_a_holder_that_is_quick(slower: float, goes: str) -> None:
    """Where the last worker's tokens come slowly and another holds as much, that is the one now."""
    place = a_hot_place(uses=40, slower=slower, workers=8, hot_uses_min=0.0)
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == goes
    place.run(place.spec(SYSTEM))
    assert {where(place, SYSTEM) for _ in range(5)} == {goes}
