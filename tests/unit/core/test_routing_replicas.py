"""How far a prefix spreads, and how a worker with an empty cache gets one."""

import pytest

from tests.unit.core.routing_builders import SYSTEM, Place, a_worker, where

LATER_S = 100.0


def a_place(holders: int, workers: int = 8, **policy: object) -> Place:
    """Workers of 2 slots, some of which hold a prefix, long after they joined."""
    place = Place([a_worker(f"w{n}", index=n, slots=2) for n in range(workers)], **policy)
    for n in range(holders):
        place.warm(f"w{n}", SYSTEM)
    return place


def fill(place: Place, *names: str, output_tokens: int = 50) -> None:
    """Give workers as much as they take."""
    for name in names:
        for _ in range(2):
            place.prefill(place.give(place.spec(), name, output_tokens=output_tokens))


@pytest.mark.parametrize(("limit", "home"), [(0, "w3"), (3, "w3"), (2, "")])
def test_a_prefix_with_enough_holders_spreads_no_further(limit: int, home: str) -> None:
    """Two full holders: a third is made of any free worker, unless two are all it may have."""
    place = a_place(2, replicas_max=limit, hold_for_affinity=False)
    fill(place, "w0", "w1")
    place.run(place.spec(), "w2")
    assert where(place, SYSTEM) == home


def test_a_prefix_spreads_when_all_its_holders_are_overloaded() -> None:
    """Over `wait_s_over_best_max` behind the best, a cap holds nobody."""
    place = a_place(2, replicas_max=2, hold_for_affinity=False)
    fill(place, "w0", "w1", output_tokens=500)
    assert where(place, SYSTEM) == "w2"


def test_a_prefix_that_half_of_the_workers_hold_belongs_everywhere() -> None:
    """No cap holds it back."""
    place = a_place(4, replicas_max=2, hold_for_affinity=False)
    fill(place, "w0", "w1", "w2", "w3")
    assert where(place, SYSTEM) == "w4"


def forced(place: Place, count: int = 400) -> int:
    """Count the jobs of a cached prefix that would go to w7."""
    return sum(where(place, SYSTEM) == "w7" for _ in range(count))


def test_a_share_of_jobs_fills_an_empty_cache() -> None:
    """Whatever is cached elsewhere, for `warmup_s` after it was lost; and none when it has no
    room.
    """
    place = a_place(2, forced_share=0.2)
    assert forced(place) == 0
    worker = place.workers["w7"]
    worker.reported_at_s = place.at_s
    place.router.cache_lost(worker)
    assert forced(place) == pytest.approx(80, abs=25)
    place.change("w7", slots=0)
    assert forced(place) == 0
    place.change("w7", slots=2, held_off=True)
    assert forced(place) == 0
    place.change("w7", held_off=False)
    assert forced(place) > 0
    place.at_s += LATER_S
    assert forced(place) == 0


@pytest.mark.parametrize(("share", "home"), [(0.0, ""), (1.0, "w7")])
def test_a_forced_job_does_not_wait_for_who_has_its_prefix(share: float, home: str) -> None:
    """The holder is busy for a moment, and worth the wait: which is what the share is against."""
    place = a_place(1, forced_share=share)
    place.workers["w7"].reported_at_s = place.at_s
    place.router.cache_lost(place.workers["w7"])
    place.give(place.spec(prompt_tokens=1600), "w0")
    assert where(place, SYSTEM) == home


def test_nobody_is_forced_where_half_of_the_caches_are_empty() -> None:
    """At the start of a fleet there is nothing to balance."""
    place = a_place(1, workers=4, forced_share=1.0)
    for name in ("w1", "w2"):
        place.workers[name].reported_at_s = place.at_s
        place.router.cache_lost(place.workers[name])
    assert where(place, SYSTEM) == "w0"


def test_an_excluded_worker_is_not_filled() -> None:
    """A job does not go where it failed, be that cache empty."""
    place = a_place(2, forced_share=1.0)
    place.workers["w7"].reported_at_s = place.at_s
    place.router.cache_lost(place.workers["w7"])
    assert where(place, SYSTEM) == "w7"
    placement = place.place(place.spec(SYSTEM), excluded=["w7"])
    assert placement.worker is not None
    assert placement.worker.id != "w7"


def test_a_cache_that_is_half_full_is_no_longer_empty() -> None:
    """The warm-up ends with the work that was given, where the cache's size is known."""
    place = a_place(2, forced_share=1.0)
    place.workers["w7"].reported_at_s = place.at_s
    place.change("w7", kv_tokens_max=10_000)
    place.router.cache_lost(place.workers["w7"])
    place.run(place.spec(prompt_tokens=4990), "w7")
    assert where(place, SYSTEM) == "w7"
    place.run(place.spec(prompt_tokens=10), "w7")
    assert where(place, SYSTEM) != "w7"


def test_a_fleet_that_starts_as_a_whole_is_not_forced_upon() -> None:
    """Its first workers to fill don't make a duty of the last: what is cached stays where it is."""
    place = Place(4, forced_share=1.0)
    place.at_s = 1.0  # All joined at 0.
    for name in ("w0", "w1", "w2"):
        place.change(name, kv_tokens_max=10_000)
        place.run(place.spec(prompt_tokens=5000), name)
    place.warm("w0", SYSTEM)
    assert where(place, SYSTEM) == "w0"
