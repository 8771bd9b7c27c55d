"""Answers are kept while they stand, and knobs change them."""

from dataclasses import replace

import pytest

from broker.core.cache_router import KNOWN_JOBS_MAX, CacheAwareRouter
from broker.core.decode_rate import DecodeRate
from broker.core.policy import RoutingPolicy
from broker.core.routing import RoundRobinRouter, make_router
from broker.wire.messages import CacheSummary
from tests.unit.core.routing_builders import (
    CACHE_AWARE,
    SYSTEM,
    Place,
    a_spec,
    a_worker,
    chain,
    where,
)


def a_line(slope_s: float) -> DecodeRate:
    """Steps of 20 ms, and so much more for each KV token."""
    return DecodeRate(64.0, 0.0, 0.02, 1e9, 1e9 * slope_s)


def test_asking_again_costs_nothing_until_something_changes() -> None:
    """The same answer is returned without a look-up or a score."""
    place = Place(8)
    place.warm("w0", SYSTEM)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    for job in (place.spec(SYSTEM), place.spec(("cold", 9)), place.spec()):
        placement = place.place(job)
        before = (router.index.probes_count, router.scored_count)
        assert place.place(job) is placement
        assert (router.index.probes_count, router.scored_count) == before


def test_an_equal_answer_is_the_same_answer() -> None:
    """A change of the chosen worker that leaves a cold job's answer as it was gives an equal one;
    where its prefill takes another time now, the answer says so.
    """
    place = Place(2)
    job = place.spec(("cold", 9))
    placement = place.place(job)
    place.change("w0", trust=0.5)
    assert place.place(job) == placement
    place.change("w0", prefill_tokens_s=16_000.0)
    assert place.place(job).prefill_s == pytest.approx(placement.prefill_s / 2)


def test_a_lone_worker_s_new_holdings_are_seen() -> None:
    """A kept answer takes in what its only worker has been given since."""
    place = Place(1)
    job = place.spec(SYSTEM, ("ask", 1))
    assert place.place(job).hit_tokens == 0
    place.run(place.spec(SYSTEM, ("other", 1)))
    assert place.place(job).hit_tokens > 29 * 64


def test_a_kept_answer_is_given_up_when_its_worker_is_overdue() -> None:
    """A backlog that takes longer than was predicted is a worker that may be stuck: without any
    event, the job goes elsewhere.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=400), "w0")
    job = place.spec(SYSTEM)
    placement = place.place(job)
    assert placement.worker is place.workers["w0"]
    place.at_s += 0.05
    assert place.place(job) is placement
    place.at_s += 5.0
    assert place.place(job).worker is place.workers["w1"]


def test_shorter_steps_per_token_make_a_worker_better() -> None:
    """A worker may be the answer once its line is flatter, though a usual job, with more to prefill
    than to write, would fare worse there than before.
    """
    place = Place(2)
    for name, slope_s in (("w0", 3e-6), ("w1", 5e-6)):
        place.workers[name].decode_rate = a_line(slope_s)
        place.change(name, decode_tokens_s=50.0)
    job = place.spec(prompt_tokens=200, output_tokens_max=2000)
    assert place.place(job).worker is place.workers["w0"]
    place.workers["w1"].decode_rate = a_line(2e-6)
    place.change("w1", prefill_tokens_s=7000.0)
    assert place.place(job).worker is place.workers["w1"]


def test_a_dispatch_elsewhere_can_make_a_job_wait() -> None:
    """A worker that was just given the job's prefix is worth waiting for, though it only got
    busier.
    """
    place = Place(2)
    job = place.spec(SYSTEM, ("ask", 1))
    assert place.place(job).worker is place.workers["w0"]
    place.give(place.spec(SYSTEM, ("other", 1)), "w1")
    assert place.place(job).held_for == "w1"


def test_a_job_can_be_explained_without_having_been_placed() -> None:
    """An explanation looks for itself."""
    place = Place(3)
    place.warm("w1", SYSTEM)
    job = place.spec(SYSTEM)
    placement = place.place(place.spec(SYSTEM))
    explanation = place.router.explain(job, placement, at_s=place.at_s)
    assert explanation.candidates[0].worker == "w1"
    assert explanation.candidates[0].hit_tokens > 0


def test_a_session_s_last_worker_is_waited_for_while_leaving_costs_more() -> None:
    """Stickiness counts in a hold as in any choice: up to what leaving is said to cost."""
    for prompt_tokens, held in ((900, True), (1100, False)):
        place = Place(2, switch_penalty_s=0.125)
        home = place.run(place.spec(session="s"))
        place.give(place.spec(prompt_tokens=prompt_tokens), home)
        placement = place.place(place.spec(session="s"))
        assert placement.held_for == (home if held else "")
        assert (placement.worker is None) is held


def test_a_worker_that_got_worse_elsewhere_changes_no_answer() -> None:
    """A dispatch to another worker leaves a job's answer as it is, without a score."""
    place = Place(8)
    place.warm("w0", SYSTEM)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    job = place.spec(SYSTEM)
    placement = place.place(job)
    place.give(place.spec(("cold", 9)), "w3")
    before = (router.index.probes_count, router.scored_count)
    assert place.place(job) is placement
    assert (router.index.probes_count, router.scored_count) == before


def test_an_improved_worker_is_looked_at_alone() -> None:
    """A worker that became better costs one score; only if it may win are all looked at."""
    place = Place(8)
    place.warm("w0", SYSTEM)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    lease = place.give(place.spec(("cold", 9)), "w3")
    job = place.spec(SYSTEM)
    placement = place.place(job)
    place.prefill(lease)
    place.end(lease)
    before = router.scored_count
    assert place.place(job) is placement
    assert router.scored_count <= before + 2


def test_a_holder_that_gets_room_wins_its_job_back() -> None:
    """An answer elsewhere is given up when a better holder becomes free."""
    place = Place(3)
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(prompt_tokens=100_000), "w0")
    job = place.spec(SYSTEM)
    assert place.place(job).worker is place.workers["w1"]
    place.prefill(lease)
    assert place.place(job).worker is place.workers["w0"]


def test_any_worker_with_room_ends_a_wait_for_room() -> None:
    """A job that found no room goes to the first worker that gets some."""
    place = Place(2)
    leases = [place.give(place.spec(prompt_tokens=9000), f"w{n}") for n in range(2)]
    for job in (place.spec(), place.spec(SYSTEM), place.spec(session="s")):
        assert place.place(job).worker is None
        assert place.place(job).prefill_s == 0.0
    job = place.spec(SYSTEM)
    assert place.place(job).worker is None
    place.prefill(leases[1])
    assert place.place(job).worker is place.workers["w1"]


def test_more_improvements_than_are_kept_mean_a_new_look() -> None:
    """Of many improved workers only the last few are remembered; then the job is looked at anew."""
    place = Place(40)
    leases = [place.give(place.spec(prompt_tokens=9000), f"w{n}") for n in range(40)]
    job = place.spec()
    assert place.place(job).worker is None
    for lease in leases:
        place.prefill(lease)
    place.change("w0", prefill_tokens_s=99_000.0)
    for n in range(1, 20):
        place.change(f"w{n}", trust=0.9 + n / 1000)
    assert place.place(job).worker is place.workers["w0"]


def test_a_kept_answer_of_a_worker_that_left_is_not_given() -> None:
    """Case 8: a gone worker is never named again, whatever it had cached."""
    place = Place(3)
    place.warm("w0", SYSTEM)
    job = place.spec(SYSTEM)
    assert place.place(job).worker is place.workers["w0"]
    place.router.gone(place.workers["w0"])
    assert place.place(job).worker is not place.workers["w0"]
    for n in range(10):
        assert place.run(place.spec(SYSTEM, (f"ask{n}", 1))) != "w0"


def test_another_expected_output_or_exclusion_is_another_question() -> None:
    """A kept answer is for the same question only."""
    place = Place([a_worker(kv_tokens_max=1000)])
    place.prefill(place.give(place.spec(prompt_tokens=50)))
    job = place.spec(prompt_tokens=700)
    assert place.place(job, output_tokens=10).worker is not None
    assert place.place(job, output_tokens=400).worker is None
    assert place.place(job, output_tokens=10).worker is not None


def test_a_new_job_of_the_same_name_is_another_job() -> None:
    """What was known of a job is not used for a later one with its key."""
    place = Place(3)
    place.warm("w2", SYSTEM)
    assert place.place(a_spec("same", blocks=chain(("x", 9)))).hit_tokens == 0
    assert place.place(a_spec("same", blocks=chain(SYSTEM))).hit_tokens > 0


def test_known_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are kept for so many jobs; the oldest asked about goes first."""
    monkeypatch.setattr("broker.core.cache_router.KNOWN_JOBS_MAX", 3)
    assert KNOWN_JOBS_MAX > 3
    place = Place(2)
    jobs = [place.spec() for _ in range(4)]
    for job in jobs:
        place.place(job)
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    assert list(router._known) == [job.key for job in jobs[1:]]
    place.give(jobs[2])
    assert jobs[2].key not in router._known


def test_new_knobs_take_effect_and_forget_nothing() -> None:
    """Kept answers are given anew under new knobs; what is cached where is still known."""
    place = Place(2)
    place.warm("w1", SYSTEM)
    job = place.spec(SYSTEM)
    assert place.place(job).worker is place.workers["w1"]
    place.router.reconfigured(RoutingPolicy(saving_s_min=5.0))
    assert place.place(job).worker is place.workers["w0"]
    place.router.reconfigured(RoutingPolicy(prefix_tokens_min=5000))
    assert place.place(job).hit_tokens == 0
    place.router.reconfigured(RoutingPolicy(policy="weighted", prefix_tokens_min=0))
    placement = place.place(job)
    assert placement.worker is place.workers["w1"]
    assert place.router.explain(job, placement, at_s=place.at_s).policy == "weighted"
    lease = place.give(place.spec(prompt_tokens=10), "w1")
    lease.hit_tokens = 5
    place.router.hit_seen(lease, place.workers["w1"], cached_tokens=0)
    assert place.workers["w1"].trust < 1.0
    place.prefill(lease)
    place.end(lease)
    place.router.reconfigured(RoutingPolicy(prefill_tokens_s=100.0))
    assert place.place(place.spec(prompt_tokens=50)).prefill_s == pytest.approx(0.5)


def test_new_knobs_reach_round_robin() -> None:
    """The baseline takes a new room rule as well."""
    place = Place(1, policy="round_robin")
    place.give(place.spec(prompt_tokens=800))
    assert where(place) == ""
    place.router.reconfigured(RoutingPolicy(policy="round_robin", backlog_s_max=1.0))
    assert where(place) == "w0"


def test_the_policy_names_the_router() -> None:
    """Each policy has its router."""
    assert isinstance(make_router(RoutingPolicy(policy="round_robin")), RoundRobinRouter)
    for policy in CACHE_AWARE:
        assert isinstance(make_router(RoutingPolicy(policy=policy)), CacheAwareRouter)


def test_a_prompt_longer_than_its_blocks_counts_whole_blocks_only() -> None:
    """Blocks of a prompt too long to be hashed to its end stand for a usual number of tokens; and a
    block is never more tokens than bytes.
    """
    place = Place(2)
    long = a_spec("long", blocks=chain(("a", 8192)), prompt_tokens=10_000_000)
    place.report("w0", 1, added=long.blocks, full=True)
    assert place.place(long).hit_tokens == 8192 * 64
    cached_whole = a_spec("whole", blocks=long.blocks, prompt_tokens=500_000)
    assert place.place(cached_whole).uncached_tokens == 1
    odd = a_spec("odd", blocks=chain(("b", 10)), prompt_tokens=1_000_000)
    place.report("w1", 1, added=odd.blocks, full=True)
    assert place.place(odd).hit_tokens == 10 * 256


def test_the_last_token_is_always_computed() -> None:
    """A prompt that is cached whole still has one token to prefill."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    job = a_spec("whole", blocks=chain(SYSTEM), prompt_tokens=1920)
    hit_tokens = place.place(job).hit_tokens
    assert hit_tokens < 1920
    assert place.place(a_spec("none", prompt_tokens=0)).uncached_tokens == 0


def test_sweeping_forgets_in_time() -> None:
    """Old stickiness and unused blocks are forgotten by sweeps."""
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.run(place.spec(SYSTEM, session="s"))
    router = place.router
    assert isinstance(router, CacheAwareRouter)
    assert len(router._sticky) > 0
    for _ in range(100):
        place.at_s += 10
        router.sweep(place.at_s)
    assert len(router._sticky) == 0
    assert router.index.entries_count == 0
    round_robin = make_router(RoutingPolicy(policy="round_robin"))
    round_robin.sweep(1.0)
    assert round_robin.summary(a_worker(), CacheSummary(sequence=9), at_s=1.0)
    round_robin.hit_seen(place.give(place.spec()), a_worker(), cached_tokens=1)


def test_a_dispatch_beyond_those_followed_loses_the_oldest_credit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unconfirmed chains are bounded per worker: the oldest is uncredited, not trusted for ever."""
    monkeypatch.setattr("broker.core.unconfirmed.UNCONFIRMED_CHAINS_MAX", 2)
    place = Place(1)
    for name in ("a", "b", "c"):
        place.run(place.spec((name, 20)))
    hits = [place.place(place.spec((name, 20))).hit_tokens > 0 for name in ("a", "b", "c")]
    assert hits == [False, True, True]


def test_an_answer_is_explained_by_the_scores_it_was_picked_by() -> None:
    """Nobody is scored again while nothing has changed, and everybody once something has."""
    place = Place(4)
    place.warm("w2", SYSTEM)
    job = place.spec(SYSTEM)
    answer = place.place(job)
    before = place.router.scored_count  # type: ignore[attr-defined]
    told = place.router.explain(job, answer, at_s=place.at_s)
    assert place.router.scored_count == before  # type: ignore[attr-defined]
    again = place.router.explain(job, answer, at_s=place.at_s + 0.001)
    assert place.router.scored_count > before  # type: ignore[attr-defined]
    assert again == replace(told, queue_s=again.queue_s)
    place.change("w2", backlog_tokens=4000, prefill_began_at_s=place.at_s)
    changed = place.router.explain(job, answer, at_s=place.at_s)
    assert changed.candidates != told.candidates
