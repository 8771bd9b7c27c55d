"""A job that computes much goes to a cache that is filled anew more slowly, where many run."""

from typing import Any

import pytest

from broker.core.decisions import Dispatch
from broker.core.roster import CROWD_MIN
from broker.core.routing import make_router
from broker.core.scoring import need_of
from broker.wire.messages import Load
from tests.unit.core.cluster import Cluster, a_policy, a_spec, only
from tests.unit.core.routing_builders import SYSTEM, Place, a_worker

CACHE_TOKENS = 1_000_000
LONG = 30_000


def a_fleet(*, running: int = 4, cache_tokens: int = CACHE_TOKENS, **policy: object) -> Place:
    """Three workers, each with so many jobs; w0 has one fewer, and computed much of late."""
    workers = [
        a_worker(f"w{index}", index=index, slots=64, kv_tokens_max=cache_tokens)
        for index in range(3)
    ]
    place = Place(workers, size_weight=0.0, **policy)
    for worker in workers:
        for _ in range(running + (worker.id != "w0")):
            place.prefill(place.give(place.spec(prompt_tokens=2_000), to=worker.id))
    for _ in range(10):
        place.run(place.spec(prompt_tokens=LONG), to="w0")
    return place


def where(place: Place, prompt_tokens: int = LONG) -> str:
    """Say where a job of so many tokens goes."""
    worker = place.place(place.spec(prompt_tokens=prompt_tokens)).worker
    assert worker is not None
    return worker.id


def test_it_goes_past_the_cache_that_is_filled_anew_soonest() -> None:
    """Though fewer jobs run there."""
    assert where(a_fleet()) != "w0"


def test_at_weight_0_all_caches_are_the_same() -> None:
    """Off: the least loaded."""
    assert where(a_fleet(turnover_weight=0.0)) == "w0"


def test_for_a_job_that_computes_next_to_nothing_all_caches_are_the_same() -> None:
    """What counts is what it would push out."""
    tiny = 5
    assert where(a_fleet(), tiny) == where(a_fleet(turnover_weight=0.0), tiny)


@pytest.mark.parametrize("running", [0, 1])
def test_nor_does_it_count_where_few_run(running: int) -> None:
    """Up to CROWD_MIN jobs a worker to spread them is worth more."""
    assert running + 1 <= CROWD_MIN
    assert where(a_fleet(running=running)) == "w0"


def test_nor_where_no_worker_tells_the_size_of_its_cache() -> None:
    """There is nothing to count what is written against."""
    assert where(a_fleet(cache_tokens=0)) == "w0"


def test_a_cache_that_was_lost_was_not_written_to() -> None:
    """A worker that starts anew is the first to be filled."""
    place = a_fleet()
    place.router.cache_lost(place.workers["w0"])
    assert where(place) == "w0"


def test_a_job_that_was_answered_hears_of_it() -> None:
    """A kept answer is given anew once another worker's cache costs less."""
    place = a_fleet()
    job = place.spec(prompt_tokens=LONG)
    chosen = place.place(job).worker
    assert chosen is not None
    other = next(name for name in place.workers if name not in ("w0", chosen.id))
    for _ in range(40):
        place.run(place.spec(prompt_tokens=LONG), to=other)
    assert place.place(job).worker is chosen, "w0 looks as it did when it last changed"
    place.workers["w0"].kv_base_tokens += 1
    place.router.changed(place.workers["w0"])
    after = place.place(job).worker
    assert after is not None
    assert (chosen.id != "w0", after.id) == (True, "w0")


def test_a_cached_prefix_goes_before() -> None:
    """What is found needs no computing: the job goes to its prefix."""
    place = a_fleet()
    place.prefill(place.give(place.spec(SYSTEM), to="w0"))
    job = place.spec(SYSTEM, ("its", 1))
    assert need_of(job, 50).prompt_tokens > CACHE_TOKENS // 1_000
    placement = place.place(job)
    assert placement.worker is not None
    assert placement.worker.id == "w0"


def test_a_worker_whose_engine_changed_its_model_is_given_jobs() -> None:
    """Its old model's clock was a hundred caches ahead: the order broke off behind the lease, and
    no job of the new model ever left for it.
    """
    policy = a_policy()
    router: Any = make_router(policy.routing)
    cluster = Cluster(policy, router=router)
    load = Load(kv_tokens_max=CACHE_TOKENS)
    cluster.join("w1", models=("tiny",), load=load)
    pool = router._roster.pool("tiny")
    pool.turnover.fills = 100.0  # What an hour or so computes.
    cluster.end(only(Dispatch, cluster.hold(a_spec("before"))))
    cluster.beat("w1", models=("other",), load=load, engine_incarnation=2)
    assert only(Dispatch, cluster.hold(a_spec("behind", model="other"))).worker == "w1"
