"""Batch beside people's caches: on its share of the workers that hold something for them."""

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.cache_router import CacheAwareRouter
from broker.core.confinement import EXPIRE_SEATS_MAX, QUICK_USE_S
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.roster import Pool
from broker.core.state import Lease, Phase, Worker
from broker.wire.messages import Attempt
from tests.unit.core.routing_builders import CACHE_AWARE, MODEL, SYSTEM, Place, a_worker

PERSON, BATCH = 1, 3
HORIZON_S = 60.0


def a_place(workers: int = 4, **policy: Any) -> Place:
    """Workers of 8 slots."""
    seats = [a_worker(f"w{n}", index=n, slots=8) for n in range(workers)]
    return Place(seats, **{"online_prefix_s": HORIZON_S, **policy})


def come_back(place: Place, *workers: str) -> None:
    """Let on each worker somebody find what is cached there for them alone."""
    for worker in workers:
        place.warm(worker, (f"chat-{worker}", 30))
        say(place, worker, (f"chat-{worker}", 30))


def say(place: Place, worker: str, *runs: tuple[str, int], band: int = PERSON) -> None:
    """Let a job find its prefix on a worker, and end there."""
    job = place.spec(*runs, (f"question-{place.jobs}", 1), band=band)
    lease = place.give(job, worker)
    place.prefill(lease)
    place.end(lease)


def open_to_batch(place: Place) -> list[str]:
    """Name the workers to which a line goes when nothing else is against it."""
    return [name for name in place.workers if goes_to(place, name)]


def goes_to(place: Place, name: str) -> bool:
    """Say whether a line goes to a worker when it may go nowhere else."""
    others = [other for other in place.workers if other != name]
    placement = place.place(place.spec(("line", 60), band=BATCH), excluded=others)
    return placement.worker is not None and placement.worker.id == name


def a_probe(place: Place, job: JobSpec, name: str) -> Lease:
    """Give a job to a worker as the one that its breaker lets in."""
    place.workers[name].breaker.given(Attempt(1, place.jobs))
    return place.give(job, name)


def pass_time(place: Place, seconds: float) -> list[str]:
    """Let time pass; returns the models that opened."""
    place.at_s += seconds
    return place.router.sweep(place.at_s)


# ---- which workers -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_where_nobody_comes_back_batch_has_every_worker(policy: str) -> None:
    """No capacity is kept idle for caches that nobody uses."""
    place = a_place(policy=policy)
    assert open_to_batch(place) == ["w0", "w1", "w2", "w3"]
    for name in place.workers:
        say(place, name, ("new", 30))
    assert open_to_batch(place) == ["w0", "w1", "w2", "w3"]


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_batch_stays_off_workers_that_hold_what_people_come_back_to(policy: str) -> None:
    """Two of four do: batch has the other two, which is more than its share."""
    place = a_place(policy=policy)
    come_back(place, "w0", "w2")
    assert open_to_batch(place) == ["w1", "w3"]


@pytest.mark.parametrize(
    ("share", "workers", "count"),
    [(0.0, 4, 1), (0.25, 4, 1), (0.5, 4, 2), (0.74, 4, 2), (1.0, 4, 4), (0.25, 1, 1), (0.3, 10, 3)],
)
def test_batch_has_its_share_of_workers_and_never_none(
    share: float, workers: int, count: int
) -> None:
    """Where all hold something for people, batch has as many as its share allows, one at least."""
    place = a_place(workers, batch_cache_share=share)
    come_back(place, *place.workers)
    assert len(open_to_batch(place)) == count


def test_which_workers_batch_has_does_not_change_with_every_use() -> None:
    """A worker that batch fills keeps being the one, whoever comes back where."""
    place = a_place()
    come_back(place, *place.workers)
    before = open_to_batch(place)
    for name in ("w2", "w0", "w3", "w1", "w0"):
        place.at_s += QUICK_USE_S
        say(place, name, (f"chat-{name}", 30))
        assert open_to_batch(place) == before


def test_a_worker_opens_when_nobody_came_back_for_long() -> None:
    """And the mind is told which model's jobs to look at."""
    place = a_place()
    come_back(place, "w0")
    pass_time(place, HORIZON_S / 2)
    come_back(place, "w1")
    assert open_to_batch(place) == ["w2", "w3"]
    assert pass_time(place, HORIZON_S / 2) == [MODEL]
    assert open_to_batch(place) == ["w0", "w2", "w3"]
    assert pass_time(place, HORIZON_S / 4) == []
    assert pass_time(place, HORIZON_S / 4) == [MODEL]
    assert open_to_batch(place) == ["w0", "w1", "w2", "w3"]


def test_many_workers_open_over_several_looks() -> None:
    """A look at the time takes no longer in a large fleet."""
    place = a_place(EXPIRE_SEATS_MAX + 8, batch_cache_share=0.0)
    come_back(place, *place.workers)
    pool = pool_of(place)
    assert len(pool.closed) == EXPIRE_SEATS_MAX + 7
    assert pass_time(place, HORIZON_S) == [MODEL]
    assert len(pool.closed) == 7
    assert pass_time(place, 0.0) == [MODEL]
    assert not pool.closed


def test_when_another_worker_opens_batch_gives_the_spared_one_back() -> None:
    """Its share is all it takes of what people use."""
    place = a_place()
    come_back(place, *place.workers)
    (spared,) = open_to_batch(place)
    pass_time(place, HORIZON_S / 2)
    kept = [name for name in place.workers if name != "w0"]
    for name in kept:
        say(place, name, (f"chat-{name}", 30))
    assert spared in kept
    pass_time(place, HORIZON_S / 2)
    assert open_to_batch(place) == ["w0"]


# ---- what counts as coming back ------------------------------------------------------------------


def test_batch_guards_nothing_for_itself() -> None:
    """A line that finds its prefix keeps no other line away."""
    place = a_place()
    place.warm("w0", SYSTEM)
    say(place, "w0", SYSTEM, band=BATCH)
    assert open_to_batch(place) == ["w0", "w1", "w2", "w3"]


def test_a_prefix_that_is_always_in_use_needs_no_guard() -> None:
    """Used again within seconds it is never the least recently used; after a while it may be."""
    place = a_place()
    place.warm("w0", SYSTEM)
    say(place, "w0", SYSTEM, band=BATCH)
    place.at_s += QUICK_USE_S / 2
    say(place, "w0", SYSTEM)
    assert "w0" in open_to_batch(place)
    place.at_s += QUICK_USE_S
    say(place, "w0", SYSTEM)
    assert "w0" not in open_to_batch(place)


def test_a_prefix_that_half_of_the_workers_hold_guards_none() -> None:
    """If one loses it, others have it."""
    place = a_place()
    for name in ("w0", "w1"):
        place.warm(name, SYSTEM)
    say(place, "w0", SYSTEM)
    assert "w0" in open_to_batch(place)


def test_a_short_prefix_guards_nothing() -> None:
    """Under `prefix_tokens_min` it earns nothing, so it is nothing to lose."""
    place = a_place()
    place.warm("w0", ("short", 8))
    say(place, "w0", ("short", 8))
    assert "w0" in open_to_batch(place)


# ---- workers come and go -------------------------------------------------------------------------


def test_an_empty_cache_guards_nothing() -> None:
    """After a restart of its engine batch may have the worker."""
    place = a_place()
    come_back(place, "w0", "w1")
    place.router.cache_lost(place.workers["w0"])
    assert open_to_batch(place) == ["w0", "w2", "w3"]


def test_workers_that_leave_count_no_more() -> None:
    """When all that were open are gone, batch has one of the others at once."""
    place = a_place()
    come_back(place, "w0", "w1", "w2")
    assert open_to_batch(place) == ["w3"]
    place.router.gone(place.workers.pop("w3"))
    assert len(open_to_batch(place)) == 1


def test_a_silent_worker_comes_back_unguarded() -> None:
    """What it holds by then is not known; the next to come back guards it again."""
    place = a_place()
    come_back(place, "w0")
    place.change("w0", phase=Phase.SUSPECT)
    assert open_to_batch(place) == ["w1", "w2", "w3"]
    place.change("w0", phase=Phase.LIVE)
    assert "w0" in open_to_batch(place)
    place.at_s += QUICK_USE_S
    say(place, "w0", ("chat-w0", 30))
    assert "w0" not in open_to_batch(place)


def test_a_returning_worker_is_another_one() -> None:
    """The guard of the old one is gone with it."""
    place = a_place()
    come_back(place, "w0")
    again = place.workers["w0"] = a_worker("w0", index=0, slots=8)
    place.router.joined(again)
    assert open_to_batch(place) == ["w0", "w1", "w2", "w3"]


def test_a_worker_that_is_tried_is_none_that_batch_may_have() -> None:
    """The one job that its breaker lets in found its prefix there: nothing else goes there yet."""
    place = a_place(1)
    assert open_to_batch(place) == ["w0"]
    place.warm("w0", SYSTEM)
    worker = place.workers["w0"]
    worker.breaker.doubt(place.at_s)
    place.router.changed(worker)
    job = place.spec(SYSTEM, ("question", 1), band=PERSON)
    lease = a_probe(place, job, "w0")
    assert open_to_batch(place) == []
    place.prefill(lease)
    place.end(lease)
    worker.breaker.completes(lease.attempt, at_s=place.at_s)
    place.router.changed(worker)
    assert open_to_batch(place) == ["w0"]


def test_other_knobs_hold_at_once() -> None:
    """More of a share opens workers; all of it forgets the guards."""
    place = a_place()
    come_back(place, *place.workers)
    for share, count in ((0.5, 2), (1.0, 4), (0.25, 4)):
        place.router.reconfigured(RoutingPolicy(batch_cache_share=share))
        assert len(open_to_batch(place)) == count


# ---- answers -------------------------------------------------------------------------------------


def test_a_full_part_is_not_a_full_fleet() -> None:
    """Batch without room on its workers is told so; nobody else is kept from the others."""
    place = a_place(2)
    come_back(place, "w0")
    place.change("w1", held_off=True)
    placement = place.place(place.spec(("line", 60), band=BATCH))
    assert (placement.worker, placement.confined, placement.full) == (None, True, False)
    other = place.place(place.spec(("question", 60), band=PERSON))
    assert other.worker is place.workers["w0"]
    place.change("w0", held_off=True)
    assert not place.place(place.spec(("line", 60), band=BATCH)).confined


def test_a_part_without_kv_cache_is_not_a_full_fleet() -> None:
    """A line too long for what batch's workers have left says nothing of the others."""
    place = a_place(2)
    come_back(place, "w0")
    place.change("w1", kv_tokens_max=6000)
    place.prefill(place.give(place.spec(prompt_tokens=5000), "w1"))
    placement = place.place(place.spec(("line", 60), band=BATCH, output_tokens_max=1000))
    assert (placement.worker, placement.full) == (None, False)
    place.change("w0", held_off=True)
    assert place.place(place.spec(("line", 60), band=BATCH, output_tokens_max=1000)).full


def test_a_line_does_not_follow_its_session_to_a_closed_worker() -> None:
    """Stickiness and the cache count among the workers that batch has."""
    place = a_place()
    place.warm("w0", ("lines", 30))
    place.run(place.spec(("lines", 30), band=BATCH, session="s"), "w0")
    come_back(place, "w0")
    placement = place.place(place.spec(("lines", 30), band=BATCH, session="s"))
    assert placement.worker is not None
    assert placement.worker.id != "w0"


def test_a_kept_answer_hears_of_an_opened_worker() -> None:
    """A line that waits goes as soon as a worker opens."""
    place = a_place(2)
    come_back(place, "w0")
    place.change("w1", slots=1)
    place.give(place.spec(("line-0", 60), band=BATCH), "w1")
    waiting = place.spec(("line-1", 60), band=BATCH)
    assert place.place(waiting).worker is None
    pass_time(place, HORIZON_S)
    assert place.place(waiting).worker is place.workers["w0"]


# ---- after any history ---------------------------------------------------------------------------


def pool_of(place: Place) -> Pool:
    """Return the pool of the model."""
    assert isinstance(place.router, CacheAwareRouter)
    pool = place.router._roster.pool(MODEL)
    assert pool is not None
    return pool


def check(place: Place, share: float) -> None:
    """See that the part is what the guards say, and batch has its share and no more."""
    pool = pool_of(place)
    place.place(place.spec(("line", 60), band=BATCH))
    part = pool.part
    assert part is not None
    assert not set(pool.closed) & set(pool.spared)
    serving = [entry[3] for entry in pool.order]
    assert set(pool.closed) | set(pool.spared) <= set(serving)
    assert part.order == [entry for entry in pool.order if entry[3] not in pool.closed]
    assert part.free_count == sum(seat.has_room for seat in serving if seat not in pool.closed)
    assert part.bits == sum(seat.bit for seat in serving if seat not in pool.closed)
    least = min(len(serving), max(1, math.floor(share * len(serving) + 1e-9)))
    assert len(part.order) >= least, "batch is never without its share"
    assert not pool.spared or len(part.order) == least, "nor on more of what people use"


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32), share=st.sampled_from([0.0, 0.2, 0.25, 0.5, 0.9]), steps=st.just(60)
)
def test_batch_has_what_is_free_and_its_share_after_any_history(
    seed: int, share: float, steps: int
) -> None:
    """And where a line finds no room, every worker that it may use is full."""
    rng = random.Random(seed)
    place = a_place(rng.randrange(1, 7), batch_cache_share=share)
    names = list(place.workers)
    made = len(names)
    for _ in range(steps):
        live = [name for name in names if place.workers[name].phase is Phase.LIVE]
        name = rng.choice(names)
        match rng.randrange(9):
            case 0 | 1 | 2 if name in live:
                place.at_s += QUICK_USE_S
                come_back(place, name)
            case 3:
                pass_time(place, rng.choice([0.0, 1.0, HORIZON_S / 2]))
            case 4:
                place.change(name, phase=rng.choice([Phase.LIVE, Phase.SUSPECT]))
            case 5:
                place.change(name, slots=rng.choice([1, 2, 8]), held_off=rng.random() < 0.3)
            case 6:
                place.router.cache_lost(place.workers[name])
            case 7 if len(names) > 1:
                names.remove(name)
                place.router.gone(place.workers.pop(name))
            case 8 if made < 12:
                worker = Worker(f"w{made}", made, models=(MODEL,), slots=8, ready=True)
                names.append(worker.id)
                place.workers[worker.id] = worker
                place.router.joined(worker)
                made += 1
            case _:
                line = place.spec((f"line-{place.jobs}", 60), band=BATCH)
                placement = place.place(line)
                if placement.worker is not None:
                    place.end(place.give(line))
                elif placement.confined:
                    part = pool_of(place).part
                    assert part is not None
                    assert part.free_count == 0
        if any(place.workers[name].phase is Phase.LIVE for name in names):
            check(place, share)
    pass_time(place, 3 * HORIZON_S)
    assert not pool_of(place).closed, "nobody comes back: nothing is held"
