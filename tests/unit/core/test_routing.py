"""Where a job runs: cached prefixes pull, load pushes, and what all hold pulls nobody."""

from collections import Counter

import pytest

from broker.core.decisions import Candidate
from broker.core.policy import RoutingPolicy
from broker.core.state import Worker
from tests.unit.core.routing_builders import (
    CACHE_AWARE,
    SYSTEM,
    Place,
    a_worker,
    chain,
    where,
)


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_job_goes_where_its_prefix_is_cached(policy: str) -> None:
    """A holder with equal load is chosen, with the hit that its report promises."""
    place = Place(4, policy=policy)
    place.warm("w2", SYSTEM)
    placement = place.place(place.spec(SYSTEM, ("ask", 2)))
    assert placement.worker is place.workers["w2"]
    assert placement.hit_tokens == 30 * 64
    assert placement.uncached_tokens == round(2.5 * 64)
    assert placement.prefill_s == pytest.approx(160 / 8000)


def test_the_deeper_hit_wins_among_equals() -> None:
    """Of two holders the one that holds more is chosen."""
    place = Place(3)
    place.warm("w0", ("system", 20))
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == "w1"


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_dispatch_is_credited_at_once(policy: str) -> None:
    """The next job of the same prefix follows the first before any report."""
    place = Place(4, policy=policy)
    home = place.run(place.spec(SYSTEM, ("ask1", 1)))
    for number in range(2, 5):
        assert place.run(place.spec(SYSTEM, (f"ask{number}", 1))) == home


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_prefix_that_all_hold_earns_nothing(policy: str) -> None:
    """Case 6: all requests of a trace share their first blocks: jobs still spread evenly."""
    place = Place(4, policy=policy)
    for n in range(4):
        place.warm(f"w{n}", SYSTEM)
    homes = Counter(place.run(place.spec(SYSTEM, (f"own{n}", 8))) for n in range(40))
    assert set(homes.values()) == {10}


def test_a_short_hit_earns_nothing() -> None:
    """Under `prefix_tokens_min` (1,024) a hit is not worth a detour; from there on it is."""
    place = Place(2)
    place.warm("w0", ("system", 15))
    place.run(place.spec(("x", 40)), "w0")
    assert where(place, ("system", 15), ("ask", 40)) == "w1"
    place.report("w0", 2, added=chain(("system", 16)))
    job = place.spec(("system", 16), ("ask", 40))
    assert place.place(job).worker is place.workers["w0"]


def test_a_saving_below_the_floor_is_a_tie() -> None:
    """A hit that saves less than `saving_s_min` seconds leaves the choice to the turn."""
    place = Place(2, saving_s_min=2.0)
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == "w0"
    place = Place(2, saving_s_min=0.1)
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == "w1"


def test_without_a_floor_any_saving_counts() -> None:
    """With `saving_s_min` 0 the lowest score wins, however small the difference."""
    place = Place(2, saving_s_min=0.0)
    place.change("w1", prefill_tokens_s=8001.0)
    assert where(place, ("cold", 40), session="s") == "w1"
    place.warm("w0", ("system", 16))
    assert where(place, ("system", 16), ("ask", 40)) == "w0"


def test_load_outweighs_a_small_hit() -> None:
    """Without holding, a holder without room loses to one with room."""
    place = Place(2, hold_for_affinity=False)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("long", 400)), "w0")
    placement = place.place(place.spec(SYSTEM))
    assert placement.worker is place.workers["w1"]
    assert placement.held_for == ""


def test_jobs_of_a_worker_push_work_away() -> None:
    """Of two workers alike the one with fewer jobs is chosen, though given to last, where the
    prefill that holds them up is long enough to matter.
    """
    for weight, prompt_tokens, home in ((0.01, 2000, "w1"), (0.01, 1000, "w0"), (0.0, 2000, "w0")):
        place = Place(2, interference_weight=weight)
        place.prefill(place.give(place.spec(), "w0"))
        place.run(place.spec(), "w1")
        assert where(place, prompt_tokens=prompt_tokens) == home


def learned(worker: Worker, *, step_s: float, slope_s: float, kv_tokens: int) -> None:
    """Let a worker report steps along a line: so long at so many KV tokens."""
    for off in (-1, 1, 0):
        kv = kv_tokens * (1 + off / 4)
        worker.decode_rate.learn(kv_tokens=kv, step_s=step_s + slope_s * (kv - kv_tokens))


def test_long_contexts_gather_where_few_jobs_run() -> None:
    """Where each KV token makes a step longer for all who run there, a long context goes to the
    worker with fewer jobs, a short one to the worker that waited longest for one.
    """
    for weight, long_home in ((0.03, "w1"), (0.0, "w0")):
        place = Place(2, slowdown_weight=weight, interference_weight=0.0)
        for name in ("w0", "w1"):
            learned(place.workers[name], step_s=0.02, slope_s=1e-6, kv_tokens=10_000)
        for name, jobs in (("w0", 3), ("w1", 1)):
            for _ in range(jobs):
                place.prefill(place.give(place.spec(prompt_tokens=1, output_tokens_max=1), name))
        place.run(place.spec(prompt_tokens=1), "w1")
        assert where(place, prompt_tokens=100) == "w0"
        assert where(place, prompt_tokens=4000) == long_home


def test_of_equals_weighted_takes_the_one_that_is_quicker() -> None:
    """Its score knows nothing of speed: the turn decides among workers that are as fast only."""
    place = Place(3, policy="weighted")
    for name in ("w1", "w2"):
        place.change(name, prefill_tokens_s=16_000.0)
    assert [place.run(place.spec()) for _ in range(4)] == ["w1", "w2", "w1", "w2"]


@pytest.mark.parametrize(("output_tokens", "home"), [(2, "w0"), (200, "w1")])
def test_a_long_answer_goes_where_steps_are_short(output_tokens: int, home: str) -> None:
    """A worker that is slower to prefill and quicker to decode gets the long answers."""
    place = Place(2)
    learned(place.workers["w0"], step_s=0.04, slope_s=0.0, kv_tokens=10_000)
    learned(place.workers["w1"], step_s=0.02, slope_s=0.0, kv_tokens=10_000)
    place.change("w0", prefill_tokens_s=10_000.0)
    place.change("w1", prefill_tokens_s=8_000.0)
    assert where(place, prompt_tokens=400, output_tokens_max=output_tokens) == home


def test_the_first_token_score_is_predicted_seconds() -> None:
    """Backlog, then the own prefill weighted by 1 + bias (2) + a hundredth for each job there;
    then the own steps at γ, and at the slowdown weight for each job there what its KV adds to them.
    """
    knobs = RoutingPolicy()
    workers = [a_worker("w0", slots=9), a_worker("w1", index=1, slots=9)]
    learned(workers[1], step_s=0.03, slope_s=2e-6, kv_tokens=10_000)
    place = Place(workers, policy="first_token", hold_for_affinity=False)
    for name in ("w0", "w1"):
        for _ in range(3):
            place.prefill(place.give(place.spec(prompt_tokens=100), name))
        place.give(place.spec(prompt_tokens=40), name)
    assert workers[1].kv_tokens == 540
    scores: dict[str, float] = {}
    job = place.spec(prompt_tokens=400, output_tokens_max=200)
    for name, other in (("w0", "w1"), ("w1", "w0")):
        placement = place.place(job, excluded=[other])
        for one in place.router.explain(job, placement, at_s=place.at_s).candidates:
            scores[one.worker] = one.score
            assert one.worker == name
    prefill_s = 0.005 + (3 + 4 * knobs.interference_weight) * 0.05
    assert scores["w0"] == pytest.approx(prefill_s + knobs.decode_weight * 200 / 50)
    step_s = 0.015  # Half the mean at least: the line is at 0.011 for so little KV.
    growth_s = 2e-6 * 600
    own_s, others_s = knobs.decode_weight, knobs.slowdown_weight * 4
    decode_s = 200 * (own_s * (step_s + growth_s) + others_s * growth_s)
    assert scores["w1"] == pytest.approx(prefill_s + decode_s)


def test_the_wait_for_a_backlog_shrinks_with_time_and_grows_when_overdue() -> None:
    """What remains of a backlog is predicted from when it began; one that is overdue by some time
    is expected to take as long again, so a stuck worker looks the worse the longer it is stuck.
    """
    place = Place(1)
    place.give(place.spec(prompt_tokens=400))
    job = place.spec(prompt_tokens=80)
    began_at_s = place.at_s
    waits = {0.0: 0.05, 0.02: 0.03, 0.05: 0.0, 0.06: 0.01, 0.25: 0.2, -5.0: 0.05}
    for passed_s, wait_s in waits.items():
        at_s = began_at_s + passed_s
        explanation = place.router.explain(job, place.place(job), at_s=at_s)
        assert explanation.predicted_ttft_s == pytest.approx(wait_s + 0.01, abs=1e-9)


def test_the_clock_of_a_backlog_starts_with_each_prompt() -> None:
    """It starts with the first prompt given and anew when one is prefilled; an idle worker has
    none.
    """
    place = Place(1)
    worker = place.workers["w0"]
    first = place.give(place.spec(prompt_tokens=160))
    place.at_s += 0.01
    second = place.give(place.spec(prompt_tokens=80))
    assert worker.prefill_began_at_s == place.at_s - 0.01
    place.at_s += 0.02
    place.prefill(first)
    assert worker.prefill_began_at_s == place.at_s
    place.at_s += 0.01
    place.prefill(second)
    place.at_s += 60.0
    third = place.give(place.spec(prompt_tokens=80))
    assert worker.prefill_began_at_s == place.at_s
    job = place.spec(prompt_tokens=80)
    explanation = place.router.explain(job, place.place(job), at_s=place.at_s)
    assert explanation.predicted_ttft_s == pytest.approx(0.02)
    place.prefill(third)
    explanation = place.router.explain(job, place.place(job), at_s=place.at_s + 9.0)
    assert explanation.predicted_ttft_s == pytest.approx(0.01)


def test_a_faster_worker_is_preferred() -> None:
    """Reported prefill rates count: the faster of two idle workers takes a cold job."""
    place = Place(2)
    place.change("w1", prefill_tokens_s=32_000.0)
    placement = place.place(place.spec(("long", 100)))
    assert placement.worker is place.workers["w1"]
    assert placement.prefill_s == pytest.approx(6432 / 32_000)


def test_weighted_adds_load_miss_and_leaving() -> None:
    """1.2 · load + 0.7 · miss + 0.3 · leaving; load is prefill against 2 s and decoding against
    slots, and a miss counts more the longer the prompt, up to twice.
    """
    place = Place([a_worker(f"w{n}", index=n, slots=10) for n in range(2)], policy="weighted")
    place.run(place.spec(session="s"), "w1")
    place.prefill(place.give(place.spec(), "w0"))
    place.give(place.spec(prompt_tokens=4000), "w0")
    place.warm("w0", SYSTEM)
    job = place.spec(SYSTEM, session="s")
    placement = place.place(job)
    candidates = place.router.explain(job, placement, at_s=place.at_s).candidates
    scores = {one.worker: one.score for one in candidates}
    miss = 0.7 * (1 + job.prompt_tokens / 8192)
    hit_ratio = int(job.prompt_tokens * 30 / 30.5) / job.prompt_tokens
    assert scores["w1"] == pytest.approx(miss)
    assert scores["w0"] == pytest.approx(1.2 * (0.25 + 0.1) + miss * (1 - hit_ratio) + 0.3)
    long = place.spec(prompt_tokens=100_000)
    candidates = place.router.explain(long, place.place(long), at_s=place.at_s).candidates
    assert candidates[0].score == pytest.approx(2 * 0.7)


def test_weighted_ignores_a_hit_of_less_than_a_third() -> None:
    """The 30 % rule: a smaller cached share of the prompt is no reason to go there."""
    for ask, home in ((75, "w1"), (65, "w0")):
        place = Place(2, policy="weighted")
        place.warm("w0", SYSTEM)
        place.run(place.spec(("x", 40)), "w0")
        assert where(place, SYSTEM, ("ask", ask)) == home


def test_weighted_gives_cache_more_weight_for_long_prompts() -> None:
    """Under the same load a long prompt stays with its cache where a short one leaves it."""
    homes: list[str] = []
    for system in (30, 200):
        place = Place([a_worker(f"w{n}", index=n, slots=10) for n in range(2)], policy="weighted")
        place.warm("w0", ("system", system))
        for _ in range(7):
            place.prefill(place.give(place.spec(), "w0"))
        homes.append(where(place, ("system", system), ("ask", system // 10)))
    assert homes == ["w1", "w0"]


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
@pytest.mark.parametrize("names", [["a", "b", "c"], ["z", "y", "x"], ["w10", "w9", "w1"]])
def test_equals_share_evenly_whatever_their_names(policy: str, names: list[str]) -> None:
    """Case 4: equal workers get the same number of jobs, in turn, whatever they are called and
    however they are numbered.
    """
    workers = [a_worker(name, index=9 - n) for n, name in enumerate(names)]
    place = Place(workers, policy=policy)
    homes = [place.run(place.spec()) for _ in range(9)]
    assert homes == names * 3


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_equal_cold_jobs_between_two_reports_spread(policy: str) -> None:
    """Case 3: with nothing heard from workers in between, N equal jobs differ by one at most."""
    place = Place([a_worker(f"w{n}", index=n, slots=8) for n in range(5)], policy=policy)
    counts = Counter(dict.fromkeys(place.workers, 0))
    for number in range(40):
        placement = place.place(place.spec((f"own{number}", 1)))
        if placement.worker is None:
            break
        lease = place.give(place.spec((f"own{number}", 1)))
        counts[lease.worker] += 1
        assert max(counts.values()) - min(counts.values()) <= 1
    assert min(counts.values()) >= 1


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_stuck_worker_gets_no_new_cold_jobs(policy: str) -> None:
    """Case 5: a worker that prefills nothing keeps its backlog, and no miss is sent there, though
    its cache is the smallest and it was given nothing for longest.
    """
    place = Place(3, policy=policy)
    place.give(place.spec(("stuck", 50)), "w0")
    homes = Counter(place.run(place.spec((f"own{n}", 50))) for n in range(20))
    assert homes == {"w1": 10, "w2": 10}


def test_holders_alike_take_turns() -> None:
    """Of several holders with the same hit the one given nothing for longest is next."""
    place = Place(6, switch_penalty_s=0.0)
    for n in (1, 3, 5):
        place.warm(f"w{n}", SYSTEM)
    homes = [place.run(place.spec(SYSTEM, (f"ask{n}", 1))) for n in range(6)]
    assert homes == ["w1", "w3", "w5", "w1", "w3", "w5"]


def test_a_worker_without_a_place_in_the_index_still_gets_cold_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While too many lost caches linger a worker is unknown to the index: it holds nothing, and
    takes its turn with those that do.
    """
    monkeypatch.setattr("broker.core.prefix_index.RETIRED_BITS_MAX", 0)
    place = Place(0)
    for n in range(2):
        place.workers[f"w{n}"] = a_worker(f"w{n}", index=n)
    monkeypatch.setattr("broker.core.prefix_index.RETIRED_BITS_MAX", 1)
    place.router.joined(place.workers["w0"])
    monkeypatch.setattr("broker.core.prefix_index.RETIRED_BITS_MAX", 0)
    place.router.joined(place.workers["w1"])
    place.warm("w0", SYSTEM)
    assert where(place, SYSTEM) == "w0"
    place.give(place.spec(prompt_tokens=100_000), "w0")
    assert where(place, SYSTEM) == "w1"


@pytest.mark.parametrize("holders", [6, 70])
def test_of_many_holders_the_least_loaded_is_chosen(holders: int) -> None:
    """A prefix that many hold, listed or a crowd, goes to the least loaded of them."""
    place = Place(150, switch_penalty_s=0.0)
    for n in range(holders):
        place.warm(f"w{n}", SYSTEM)
        if n != 4:
            place.prefill(place.give(place.spec(), f"w{n}"))
    placement = place.place(place.spec(SYSTEM))
    assert placement.worker is place.workers["w4"]
    assert placement.hit_tokens > 1900


def test_an_explanation_tells_all_that_was_scored() -> None:
    """The decision log shows each candidate's score, best first, the hit and the predicted time."""
    place = Place(3)
    place.warm("w1", SYSTEM)
    place.run(place.spec(SYSTEM, ("ask", 1)), "w1")
    place.at_s += 2.0
    job = place.spec(SYSTEM, ("other", 1), enqueued_at_s=place.at_s - 1.5)
    placement = place.place(job)
    explanation = place.router.explain(job, placement, at_s=place.at_s)
    assert explanation.policy == "first_token"
    assert [one.worker for one in explanation.candidates] == ["w1", "w0", "w2"]
    first, second, third = explanation.candidates
    own_s = (job.prompt_tokens - placement.hit_tokens) / 8000
    decode_s = RoutingPolicy().decode_weight * job.output_tokens_max / 50
    assert first.score == pytest.approx(3 * own_s + decode_s)
    assert second.score == pytest.approx(3 * job.prompt_tokens / 8000 + decode_s + 0.05)
    assert third.score == second.score
    assert (first.hit_tokens, second.hit_tokens) == (placement.hit_tokens, 0)
    assert explanation.previous_worker == "w1"
    assert explanation.predicted_hit_tokens == placement.hit_tokens
    assert explanation.predicted_ttft_s == pytest.approx(own_s)
    assert explanation.queue_s == pytest.approx(1.5)


def test_an_explanation_shows_the_backlog() -> None:
    """A candidate's unprefilled tokens are told, and its wait counts in the prediction."""
    place = Place(1)
    place.give(place.spec(prompt_tokens=60))
    job = place.spec(prompt_tokens=100)
    explanation = place.router.explain(job, place.place(job), at_s=place.at_s)
    assert explanation.candidates[0].backlog_tokens == 60
    assert explanation.predicted_ttft_s == pytest.approx(160 / 8000)


def test_an_explanation_of_nowhere_is_empty() -> None:
    """With nobody to score there is nothing to tell, and nothing breaks."""
    place = Place(1)
    job = place.spec(model="unheard")
    explanation = place.router.explain(job, place.place(job), at_s=0.0)
    assert (explanation.candidates, explanation.previous_worker) == ((), "")
    assert explanation.queue_s == 0.0
    round_robin = Place(1, policy="round_robin")
    job = round_robin.spec()
    explanation = round_robin.router.explain(job, round_robin.place(job), at_s=1001.0)
    assert explanation.candidates == (Candidate("w0", 0.0, 0, 0),)
    assert (explanation.policy, explanation.queue_s) == ("round_robin", 1.0)
    nowhere = round_robin.spec(model="unheard")
    placement = round_robin.place(nowhere)
    assert not round_robin.router.explain(nowhere, placement, at_s=1.0).candidates
