"""Short jobs stand apart from long ones, where many run beside each other."""

import pytest

from broker.core.candidates import (
    COLD_EACH_MAX,
    SMALL_FLEET,
    STRETCH_EACH_MAX,
    best_of,
    cold,
    holdings,
    pull_of,
)
from broker.core.decode_rate import DecodeRate
from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.prefix_search import Level
from broker.core.roster import CROWD_MIN, Roster
from broker.core.scoring import CROWDED, CROWDING_MAX, Scored, need_of, set_apart
from broker.core.seat import Seat
from broker.core.size_intervals import JOBS_MIN, NO_PULL, Pull
from tests.unit.core.routing_builders import MODEL, SYSTEM, Place, a_spec, a_worker, chain

SHORT, LONG = 500, 30_000


def a_fleet(count: int = 8, *, running: int = 4, seen: int = 40, **policy: object) -> Place:
    """Workers that each run so many jobs, after so many short and long ones that took as long."""
    workers = [
        a_worker(f"w{index:03}", index=index, slots=64, kv_tokens_max=1_000_000)
        for index in range(count)
    ]
    place = Place(workers, **policy)
    for worker in workers:
        for _ in range(running):
            place.prefill(place.give(place.spec(prompt_tokens=2_000), to=worker.id))
    for _ in range(seen):
        for prompt_tokens in (SHORT, LONG):
            ran(place, prompt_tokens)
    return place


def ran(place: Place, prompt_tokens: int, **fields: object) -> None:
    """Let a job of so many tokens run for four seconds, somewhere."""
    lease = place.give(place.spec(prompt_tokens=prompt_tokens, **fields))
    worker = place.workers[lease.worker]
    place.router.ran(lease, worker, output_tokens=100, run_s=4.0)
    place.end(lease)


def where(place: Place, prompt_tokens: int) -> str:
    """Say where a job of so many tokens goes."""
    worker = place.place(place.spec(prompt_tokens=prompt_tokens)).worker
    assert worker is not None
    return worker.id


def test_short_ones_go_to_the_front_and_long_ones_to_the_end() -> None:
    """Of equal workers the first have the short jobs."""
    place = a_fleet()
    assert where(place, SHORT) == "w000"
    assert where(place, LONG) > "w000"


def test_nothing_is_set_apart_at_weight_0() -> None:
    """Off: whoever was given nothing for longest."""
    place = a_fleet(size_weight=0.0)
    assert where(place, SHORT) == where(place, LONG)


@pytest.mark.parametrize("running", [0, 1, int(CROWD_MIN)])
def test_nor_where_few_run_beside_each_other(running: int) -> None:
    """To spread them is worth more: equal workers take turns whatever the size."""
    place = a_fleet(running=running)
    assert where(place, SHORT) == where(place, LONG)


@pytest.mark.parametrize("times", [1, 2, 4, 5, 40])
def test_the_pull_grows_with_the_crowd_up_to_its_bound(times: int) -> None:
    """To so many more beside it, a job costs so much more by standing in the wrong place."""
    roster = Roster(RoutingPolicy(), by_load=True)
    worker = a_worker(slots=64)
    roster.join(worker, bit=1)
    pool = roster.pool(MODEL)
    assert pool is not None
    for _ in range(int(JOBS_MIN)):
        pool.sizes.note(SHORT, there_s=4.0, burden_s=0.1)
    pool.lease_count = jobs = times * int(CROWDED)
    pull = pull_of(RoutingPolicy(size_weight=1.0), need_of(a_spec(), 50), pool)
    assert pull.seconds == pytest.approx(0.1 * min(times, CROWDING_MAX) * (1.0 - CROWD_MIN / jobs))


def test_nor_while_little_is_known() -> None:
    """A broker that starts anew sets nothing apart."""
    place = a_fleet(seen=0)
    assert where(place, SHORT) == where(place, LONG)


def test_equal_sizes_are_shared_evenly() -> None:
    """Jobs of one size have the whole line, so every worker gets as many."""
    place = a_fleet(seen=0, turnover_weight=0.0)
    for _ in range(40):
        ran(place, 2_000)
    given = [place.run(place.spec(prompt_tokens=2_000)) for _ in range(16)]
    assert sorted(given) == sorted([*place.workers] * 2)


def test_it_is_a_pull_and_no_rule() -> None:
    """A short job goes elsewhere once the wait at its own end costs more."""
    place = a_fleet()
    place.give(place.spec(prompt_tokens=LONG), to="w000")
    assert where(place, SHORT) != "w000"


def test_what_is_cached_goes_before() -> None:
    """A short prompt goes to the long end for its prefix, though that is less than the pull."""
    place = a_fleet()
    place.prefill(place.give(place.spec(SYSTEM), to="w007"))
    placement = place.place(place.spec(SYSTEM, ("its", 1)))
    assert placement.worker is not None
    assert placement.worker.id == "w007"


def test_larger_caches_have_the_long_ones() -> None:
    """In a mixed fleet the line is by the size of the cache, then by name."""
    place = a_fleet(3)
    small = a_worker("z-small", index=9, slots=64, kv_tokens_max=100_000)
    place.workers[small.id] = small
    place.router.joined(small)
    for _ in range(4):
        place.prefill(place.give(place.spec(prompt_tokens=2_000), to=small.id))
    assert where(place, SHORT) == "z-small"


def test_a_large_fleet_has_its_stretch_looked_at() -> None:
    """The front of the order by load would not show it: a few of the stretch are looked at."""
    count = 16 * STRETCH_EACH_MAX
    place = a_fleet(count)
    # The least loaded are all at the long end.
    for worker in sorted(place.workers)[: count // 2]:
        place.prefill(place.give(place.spec(prompt_tokens=64), to=worker))
    places = [sorted(place.workers).index(where(place, SHORT)) for _ in range(8)]
    assert max(places) < count // 4, places


def test_batch_is_drawn_within_its_part() -> None:
    """A batch job goes to a worker that batch may use, on its side of the line if it can."""
    place = a_fleet(batch_cache_share=0.25)
    job = place.spec(prompt_tokens=LONG, band=3)
    assert place.place(job).worker is not None


def test_who_leaves_is_out_of_the_line() -> None:
    """Workers that go, drain, or come back under another size stand in the line once, or not."""
    policy = RoutingPolicy()
    roster = Roster(policy, by_load=True)
    workers = [a_worker(f"w{index}", index=index, kv_tokens_max=1_000) for index in range(4)]
    for index, worker in enumerate(workers):
        roster.join(worker, bit=1 << index)
    pool = roster.pool(MODEL)
    assert pool is not None

    def line() -> list[str]:
        assert pool is not None
        assert [entry[1] for entry in pool.line] == [
            entry[1] for entry in sorted(pool.line, key=lambda one: one[:2])
        ]
        return [entry[1] for entry in pool.line]

    assert line() == ["w0", "w1", "w2", "w3"]
    workers[1].draining = True
    workers[0].kv_tokens_max = 9_000
    for index in (0, 1):
        seat = roster.seat(f"w{index}")
        assert seat is not None
        roster.refresh(seat, bit=1 << index)
    assert line() == ["w2", "w3", "w0"]
    gone = roster.seat("w3")
    assert gone is not None
    roster.leave(gone)
    assert line() == ["w2", "w0"]
    workers[1].draining = False
    back = roster.seat("w1")
    assert back is not None
    roster.refresh(back, bit=2)
    assert line() == ["w1", "w2", "w0"]
    assert pool.lease_count == 0


def test_an_idle_worker_learns_from_its_kin() -> None:
    """What a step takes was told by others: it is not shunned for what was assumed at first."""
    place = Place(2)
    busy, idle = place.workers.values()
    line = DecodeRate(weight=100.0, kv_mean=1_000.0, step_mean_s=0.005)
    place.give(place.spec(prompt_tokens=100), to=busy.id)
    for worker in (busy, idle):
        worker.decode_rate = line
        place.router.changed(worker)
    job: JobSpec = place.spec(prompt_tokens=100)
    chosen = place.place(job)
    assert chosen.worker is idle
    scores = {
        one.worker: one.score
        for one in place.router.explain(job, chosen, at_s=place.at_s).candidates
    }
    # 50 tokens of 5 ms at the weight of decoding, and not of the 20 ms assumed at first.
    decode_s = place.policy.decode_weight * 50 * 0.005
    assert scores[idle.id] < decode_s + 3.1 * 100 / 8_000


@pytest.mark.parametrize("hit_tokens", [0, 250, 500, 999])
def test_a_job_is_drawn_by_the_part_that_is_not_cached(hit_tokens: int) -> None:
    """What its prefix saves at a worker, its size doesn't take it from there."""
    seat, need = Seat(a_worker(), 1), need_of(a_spec(prompt_tokens=1_000), 50)
    scored = Scored(seat, hit_tokens, 0.1, 0.0, True, score=3.0, decode_s=2.0)
    set_apart(scored, need, Pull((0.0, 0.5), 4.0), 0.75)
    cost_s = 4.0 * 0.25 * (1.0 - hit_tokens / 1_000)
    assert (scored.score, scored.decode_s) == pytest.approx((3.0 + cost_s, 2.0 + cost_s))


@pytest.mark.parametrize(
    ("workers", "others", "holders"),
    [(SMALL_FLEET, SMALL_FLEET, SMALL_FLEET), (SMALL_FLEET + 1, COLD_EACH_MAX, 1)],
)
def test_of_a_small_fleet_every_worker_is_looked_at(
    workers: int, others: int, holders: int
) -> None:
    """Of a larger one the least loaded few, and of many holders the least loaded."""
    roster = Roster(RoutingPolicy(), by_load=True)
    for index in range(workers):
        roster.join(a_worker(f"w{index}", index=index), bit=1 << index)
    pool = roster.pool(MODEL)
    assert pool is not None
    job = a_spec(blocks=chain(SYSTEM))
    need = need_of(job, 50)
    assert len(cold(0, need, pool, NO_PULL, ())) == others
    level = Level(30, pool.bits)
    (holding,) = holdings([level], job, pool, roster, 1024)
    assert len(list(best_of(holding, need, pool, ()))) == holders
