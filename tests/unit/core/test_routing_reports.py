"""What workers report, and what their engines find."""

import pytest

from broker.core.cache_router import TRUST_MIN, CacheAwareRouter
from broker.core.policy import RoutingPolicy
from broker.core.routing import make_router
from broker.core.scoring import TRUST_MAX
from broker.core.unconfirmed import CONFIRM_REPORTS_MAX
from broker.wire.messages import CacheSummary
from tests.unit.core.routing_builders import (
    SYSTEM,
    Place,
    a_worker,
    chain,
    where,
)


def test_a_restarted_broker_learns_from_a_full_report() -> None:
    """Case 9: a delta calls for a full report, and with that one the worker's cache is known."""
    place = Place(4)
    assert not place.report("w2", 57, added=chain(("late", 1)))
    assert place.report("w2", 58, added=chain(SYSTEM), full=True)
    assert place.report("w2", 59, added=chain(SYSTEM, ("more", 5)))
    assert place.place(place.spec(SYSTEM, ("more", 5))).hit_tokens > 34 * 64
    assert where(place, SYSTEM) == "w2"


def test_what_is_known_of_caches_is_counted() -> None:
    """A block counts once for each worker that holds it; round robin knows of none."""
    place = Place(4)
    place.warm("w1", SYSTEM)
    place.warm("w2", SYSTEM, ("more", 5))
    assert place.router.index_entries_count == 30 + 35
    assert Place(4, policy="round_robin").router.index_entries_count == 0


def test_a_gap_calls_for_a_full_report_until_one_comes() -> None:
    """After a lost report every further one asks again; what they say still counts."""
    place = Place(4)
    place.warm("w2", SYSTEM)
    assert not place.report("w2", 3, removed=chain(SYSTEM)[20:])
    assert not place.report("w2", 4)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 20 * 64
    assert place.report("w2", 5, added=chain(SYSTEM), full=True)
    assert place.report("w2", 6)


def test_an_old_report_says_nothing() -> None:
    """A report that comes twice or late is ignored."""
    place = Place(4)
    place.warm("w2", SYSTEM)
    assert place.report("w2", 2, added=chain(("b", 9)))
    assert place.report("w2", 2, removed=chain(SYSTEM))
    assert place.report("w2", 1, removed=chain(SYSTEM))
    assert where(place, SYSTEM) == "w2"


def test_a_full_report_replaces_all_before() -> None:
    """What a full report does not list is gone, but for what is being prefilled right now."""
    place = Place(4)
    place.warm("w2", SYSTEM)
    running = place.give(place.spec(("running", 20)), "w2")
    done = place.give(place.spec(("done", 20)), "w2")
    place.prefill(done)
    assert place.report("w2", 9, added=chain(("b", 19)), full=True)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0
    assert place.place(place.spec(("done", 20))).hit_tokens == 0
    place.prefill(running)
    assert place.place(place.spec(("running", 20))).hit_tokens == 20 * 64
    assert place.place(place.spec(("b", 19))).hit_tokens == 19 * 64


def test_a_report_that_is_no_list_of_hashes_calls_for_a_full_one() -> None:
    """Garbage changes nothing, and neither does the report of a stranger."""
    place = Place(2)
    place.warm("w0", SYSTEM)
    for summary in (
        CacheSummary(sequence=2, added=b"12345"),
        CacheSummary(sequence=2, removed=b"12345"),
        CacheSummary(sequence=2, full=True, added=b"1"),
    ):
        assert not place.router.summary(place.workers["w0"], summary, at_s=place.at_s)
    assert where(place, SYSTEM) == "w0"
    assert not place.router.summary(a_worker("x", index=7), CacheSummary(sequence=1), at_s=1.0)


def test_credit_that_no_report_confirms_is_dropped() -> None:
    """A dispatched prefix is credited for a few reports after its prefill; unconfirmed it is
    gone.
    """
    place = Place(3)
    place.warm("w1", ("seen", 20))
    lease = place.give(place.spec(SYSTEM), "w1")
    for number in range(10):
        place.report("w1", 2 + number)
    job = place.spec(SYSTEM)
    assert place.place(job).hit_tokens > 0
    place.prefill(lease)
    for number in range(CONFIRM_REPORTS_MAX - 1):
        place.report("w1", 12 + number)
        assert place.place(job).hit_tokens > 0
    place.report("w1", 15)
    assert place.place(job).hit_tokens == 0
    assert place.place(place.spec(("seen", 20))).hit_tokens > 0


def test_credit_that_a_report_confirms_stays() -> None:
    """Confirmed blocks stay; of a chain confirmed in part the rest goes."""
    place = Place(3)
    place.warm("w1", ("seen", 5))
    place.run(place.spec(SYSTEM), "w1")
    place.report("w1", 2, added=chain(SYSTEM)[:20])
    for number in range(CONFIRM_REPORTS_MAX + 1):
        place.report("w1", 3 + number)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 20 * 64


def test_a_restarted_engine_has_no_credit_and_fresh_trust() -> None:
    """A new incarnation has an empty cache, whatever was reported or dispatched before; its reports
    begin anew with a full one.
    """
    place = Place(3)
    place.warm("w1", SYSTEM)
    place.run(place.spec(("own", 20)), "w1")
    place.workers["w1"].trust = 0.4
    place.router.cache_lost(place.workers["w1"])
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0
    assert place.place(place.spec(("own", 20))).hit_tokens == 0
    assert place.workers["w1"].trust == 1.0
    assert not place.report("w1", 2, added=chain(SYSTEM))
    assert place.report("w1", 1, added=chain(SYSTEM), full=True)
    assert where(place, SYSTEM) == "w1"


def test_a_worker_that_returns_starts_without_credit() -> None:
    """Gone and joined again: known, at the end of the turn, and nothing cached."""
    place = Place(2)
    place.warm("w0", SYSTEM)
    worker = place.workers["w0"]
    place.give(place.spec(("x", 9)), "w0")
    worker.remove("acme.j1")
    place.router.gone(worker)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    assert not router._unconfirmed._chains
    place.router.joined(worker)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0
    assert where(place) == "w1"
    place.router.joined(worker)
    assert where(place) == "w1"


def test_another_worker_of_the_same_name_takes_its_seat() -> None:
    """A worker known under a name is replaced when another joins under it."""
    place = Place(1)
    newcomer = a_worker("w0", index=5, slots=1)
    place.router.joined(newcomer)
    placement = place.place(place.spec())
    assert placement.worker is newcomer


def test_words_about_strangers_change_nothing() -> None:
    """Calls about a worker that never joined, or left, are harmless."""
    place = Place(1)
    stranger = a_worker("x", index=3)
    for router in (place.router, make_router(RoutingPolicy(policy="round_robin"))):
        router.changed(stranger)
        router.gone(stranger)
        router.cache_lost(stranger)
        lease = place.give(place.spec(SYSTEM), "w0")
        router.given(lease, stranger, at_s=1.0)
        place.prefill(lease)
        place.end(lease)
    assert where(place) == "w0"


def test_trust_follows_what_engines_find() -> None:
    """Misses of predicted hits lower a worker's credit, hits raise it again, within bounds."""
    place = Place(2)
    place.warm("w0", SYSTEM)
    worker = place.workers["w0"]
    job = place.spec(SYSTEM)
    lease = place.give(place.spec(SYSTEM, ("a", 1)))
    place.router.hit_seen(lease, worker, cached_tokens=lease.hit_tokens // 2)
    assert worker.trust == pytest.approx(0.95, abs=0.01)
    place.prefill(lease)
    place.end(lease)
    assert place.place(job).hit_tokens == pytest.approx(1920 * worker.trust, abs=2)
    for _ in range(100):
        place.router.hit_seen(lease, worker, cached_tokens=0)
    assert worker.trust == TRUST_MIN
    for _ in range(100):
        lease.hit_tokens = round(1920 * worker.trust)
        place.router.hit_seen(lease, worker, cached_tokens=1920)
    assert worker.trust == pytest.approx(1.0, abs=0.01)
    for _ in range(100):
        place.router.hit_seen(lease, worker, cached_tokens=1920 * 2)
    assert worker.trust == pytest.approx(TRUST_MAX, abs=0.001)
    assert worker.trust <= TRUST_MAX


def test_trust_is_won_back_however_little_is_left() -> None:
    """A prefix that is long enough to count is so at any trust: what is predicted of it may not be,
    and hits must count all the same.
    """
    place = Place(1)
    place.warm("w0", SYSTEM)
    worker = place.workers["w0"]

    def ask(*, cached_tokens: int) -> None:
        lease = place.give(place.spec(SYSTEM, (f"ask{place.jobs}", 1)))
        place.router.hit_seen(lease, worker, cached_tokens=cached_tokens)
        place.prefill(lease)
        place.end(lease)

    for _ in range(12):
        ask(cached_tokens=0)
    assert 1920 * worker.trust < place.policy.prefix_tokens_min
    for _ in range(40):
        ask(cached_tokens=1920)
    assert worker.trust > 0.95


def test_small_predictions_prove_nothing() -> None:
    """A hit too short to count says nothing of a worker's cache, found or not."""
    place = Place(2)
    lease = place.give(place.spec(SYSTEM))
    lease.hit_tokens = 1023
    place.router.hit_seen(lease, place.workers[lease.worker], cached_tokens=0)
    assert place.workers[lease.worker].trust == 1.0
    lease.hit_tokens = 1024
    place.router.hit_seen(lease, place.workers[lease.worker], cached_tokens=0)
    assert place.workers[lease.worker].trust == pytest.approx(0.9)
