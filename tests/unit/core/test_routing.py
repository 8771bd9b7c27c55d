"""Where a job runs: cached prefixes pull, load pushes, and what all hold pulls nobody."""

from collections import Counter

import pytest

from broker.core.cache_router import KNOWN_JOBS_MAX, TRUST_MIN, CacheAwareRouter
from broker.core.decisions import Candidate
from broker.core.placement import Placement
from broker.core.policy import PolicyName, RoutingPolicy
from broker.core.routing import RoundRobinRouter, make_router
from broker.core.state import Phase
from broker.core.unconfirmed import CONFIRM_REPORTS_MAX
from broker.wire.messages import CacheSummary
from tests.unit.core.routing_builders import MODEL, Place, a_spec, a_worker, chain

SYSTEM = ("system", 30)
"""1,920 tokens: 0.24 s of prefill."""

CACHE_AWARE: list[PolicyName] = ["first_token", "weighted"]


def where(place: Place, *runs: tuple[str, int], **fields: object) -> str:
    """Say where a new job with this chain would go."""
    worker = place.place(place.spec(*runs, **fields)).worker
    return worker.id if worker is not None else ""


# ---- the filter
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        {"ready": False},
        {"draining": True},
        {"phase": Phase.SUSPECT},
        {"phase": Phase.GONE},
        {"models": ("other",)},
        {"slots": 0},
        {"held_off": True},
    ],
)
@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_a_worker_that_may_not_serve_gets_nothing(policy: str, field: dict[str, object]) -> None:
    """Not ready, draining, silent, gone, without the model or said busy: the other worker is
    chosen, and without another nobody, until it is well again.
    """
    place = Place(2, policy=policy)
    before = {name: getattr(place.workers["w0"], name) for name in field}
    place.change("w0", **field)
    assert {where(place) for _ in range(3)} == {"w1"}
    place.router.gone(place.workers["w1"])
    assert where(place) == ""
    place.change("w0", **before)
    job = place.spec(prompt_tokens=80)
    assert place.place(job) == Placement(place.workers["w0"], 0, 80, 80 / 8000)


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
@pytest.mark.parametrize(
    ("field", "servable"),
    [
        ({}, True),
        ({"held_off": True}, True),
        ({"phase": Phase.SUSPECT}, True),
        ({"phase": Phase.GONE}, False),
        ({"ready": False}, False),
        ({"draining": True}, False),
        ({"draining": True, "phase": Phase.SUSPECT}, False),
        ({"models": ("other",)}, False),
    ],
)
def test_a_model_is_servable_while_some_worker_could_serve_it(
    policy: str, field: dict[str, object], servable: bool
) -> None:
    """A full, busy or silent worker may serve later; one that drains, loads or is gone will not."""
    place = Place(1, policy=policy)
    place.change("w0", **field)
    found = place.place(place.spec(prompt_tokens=77))
    assert found.servable is servable
    if field:
        assert found == Placement(None, 0, 77, 0.0, servable=servable)
    unheard = place.spec(model="unheard", prompt_tokens=77)
    assert place.place(unheard) == Placement(None, 0, 77, 0.0, servable=False)


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_a_worker_may_fall_silent_any_number_of_times(policy: PolicyName) -> None:
    """Silent workers are counted as they come and go: while one is left, the model is servable."""
    place = Place(2, policy=policy)
    for _ in range(2):
        place.change("w0", phase=Phase.SUSPECT)
        place.change("w0", phase=Phase.LIVE)
    place.change("w0", phase=Phase.SUSPECT)
    place.change("w1", phase=Phase.SUSPECT)
    assert place.place(place.spec()).servable
    place.router.gone(place.workers["w0"])
    assert place.place(place.spec()).servable
    place.router.gone(place.workers["w1"])
    assert not place.place(place.spec()).servable


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_a_worker_takes_no_more_than_its_slots(policy: str) -> None:
    """A worker with all slots taken gets nothing until a job ends."""
    place = Place([a_worker(slots=2)], policy=policy)
    leases = [place.give(place.spec()) for _ in range(2)]
    for lease in leases:
        place.prefill(lease)
    job = place.spec()
    assert place.place(job).worker is None
    place.end(leases[0])
    assert place.place(job).worker is not None


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_kv_room_is_prompt_and_expected_output_of_all(policy: str) -> None:
    """A job fits up to 0.9 of the KV tokens, its expected output included; a job alone always."""
    place = Place([a_worker(kv_tokens_max=1000)], policy=policy)
    lease = place.give(place.spec(prompt_tokens=50, output_tokens_max=50), output_tokens=50)
    place.prefill(lease)
    fits = place.spec(prompt_tokens=700, output_tokens_max=500)
    assert place.place(fits, output_tokens=100).worker is not None
    assert place.place(fits, output_tokens=101).worker is None
    assert place.place(fits).worker is None
    place.end(lease)
    assert place.place(place.spec(prompt_tokens=5000)).worker is not None


def test_a_large_job_finds_the_one_worker_with_room() -> None:
    """However many less loaded workers are too full for it, the one that has KV room is found."""
    workers = [a_worker(f"w{n}", index=n, kv_tokens_max=1000, slots=8) for n in range(100)]
    place = Place(workers)
    for n in range(100):
        place.prefill(place.give(place.spec(prompt_tokens=300), f"w{n}"))
    place.change("w77", kv_tokens_max=4000, prefill_tokens_s=10.0)
    assert where(place, prompt_tokens=800) == "w77"


def test_the_unprefilled_backlog_bounds_what_a_worker_takes() -> None:
    """Late binding: the next job goes once what is not prefilled takes less than θ (10 ms: 80
    tokens); a worker without any takes a job of any size.
    """
    place = Place(1)
    small = place.give(place.spec(prompt_tokens=79))
    big = place.give(place.spec(prompt_tokens=5000))
    assert where(place) == ""
    place.prefill(big)
    assert where(place) == "w0"
    place.give(place.spec(prompt_tokens=1))
    assert where(place) == ""
    place.prefill(small)
    assert where(place) == "w0"


def test_faster_workers_hold_more_backlog_within_the_same_time() -> None:
    """θ is time: at a reported 80,000 tokens a second 790 tokens are no backlog to wait for."""
    place = Place(1)
    place.change("w0", prefill_tokens_s=80_000.0)
    place.give(place.spec(prompt_tokens=790))
    assert where(place) == "w0"
    place.give(place.spec(prompt_tokens=20))
    assert where(place) == ""


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_excluded_workers_are_passed_over_while_there_is_another(policy: str) -> None:
    """A job does not return to where it failed, unless nobody else serves the model."""
    place = Place(2, policy=policy)
    job = place.spec(SYSTEM)
    if policy != "round_robin":
        place.warm("w0", SYSTEM)
    for _ in range(3):
        chosen = place.place(job, excluded=["w0"]).worker
        assert chosen is not None
        assert chosen.id == "w1"
    assert place.place(job, excluded=["w0", "w1"]).worker is not None
    place.router.gone(place.workers["w1"])
    chosen = place.place(job, excluded=["w0"]).worker
    assert chosen is not None
    assert chosen.id == "w0"


def test_excluded_holders_and_crowds_are_passed_over() -> None:
    """Of many holders an excluded one is not taken, be it the least loaded, free or waited for."""
    place = Place(100)
    for n in range(100):
        place.warm(f"w{n}", ("system", 30))
    job = place.spec(("system", 30), session="s")
    first = place.place(job).worker
    assert first is not None
    second = place.place(job, excluded=[first.id]).worker
    assert second is not None
    assert second is not first


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_an_adapter_runs_where_it_is_loaded(policy: str) -> None:
    """A job with an adapter goes to a worker that lists the adapter beside its model."""
    place = Place([a_worker("w0"), a_worker("w1", index=1, models=(MODEL, "lora"))], policy=policy)
    assert {where(place, adapter="lora") for _ in range(3)} == {"w1"}
    assert not place.place(place.spec(adapter="unknown")).servable
    place.change("w1", models=("lora",))
    assert where(place, adapter="lora") == ""


# ---- pull and push
# ---------------------------------------------------------------------------------


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
    """Under `prefix_tokens_min` (256) a hit is not worth a detour; from there on it is."""
    place = Place(2)
    place.warm("w0", ("system", 3))
    place.run(place.spec(("x", 40)), "w0")
    assert where(place, ("system", 3), ("ask", 40)) == "w1"
    place.report("w0", 2, added=chain(("system", 4)))
    job = place.spec(("system", 4), ("ask", 40))
    assert place.place(job).worker is place.workers["w0"]


def test_a_saving_below_the_floor_is_a_tie() -> None:
    """A hit that saves less than `saving_s_min` seconds leaves the choice to the turn."""
    place = Place(2, saving_s_min=2.0)
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == "w0"
    place = Place(2, saving_s_min=0.1)
    place.warm("w1", SYSTEM)
    assert where(place, SYSTEM) == "w1"


def test_load_outweighs_a_small_hit() -> None:
    """Without holding, a holder without room loses to one with room."""
    place = Place(2, hold_for_affinity=False)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("long", 400)), "w0")
    placement = place.place(place.spec(SYSTEM))
    assert placement.worker is place.workers["w1"]
    assert placement.held_for == ""


def test_decoding_jobs_push_work_away() -> None:
    """γ: of two workers alike the one with fewer decoding jobs is chosen, though given to last."""
    place = Place(2)
    first = place.give(place.spec(), "w0")
    place.prefill(first)
    place.run(place.spec(), "w1")
    assert where(place) == "w1"
    without = Place(2, decode_weight=0.0)
    without.prefill(without.give(without.spec(), "w0"))
    without.run(without.spec(), "w1")
    assert where(without) == "w0"


def test_a_long_growth_in_a_small_cache_costs_the_jobs_that_decode_there() -> None:
    """Where two workers hold the prefix and both decode, the one whose cache the job fills less
    wins.
    """
    workers = [
        a_worker("w0", kv_tokens_max=20_000),
        a_worker("w1", index=1, kv_tokens_max=200_000),
        a_worker("w2", index=2),
    ]
    place = Place(workers)
    for name in ("w1", "w0"):
        place.prefill(place.give(place.spec(("own", 1)), name))
        place.warm(name, SYSTEM)
    assert where(place, SYSTEM, output_tokens_max=4000) == "w1"
    assert where(place, SYSTEM, output_tokens_max=1) == "w1"
    place.run(place.spec(), "w1")
    assert where(place, SYSTEM, output_tokens_max=1) == "w0"
    assert where(place, SYSTEM, output_tokens_max=4000) == "w1"


def test_the_first_token_score_is_predicted_seconds() -> None:
    """Backlog, three times the own prefill (bias 2), and for each job decoding there a share (γ) of
    this prefill and, where the KV cache's size is known, of what this job's growth costs each
    step.
    """
    workers = [a_worker("w0", slots=9), a_worker("w1", index=1, slots=9, kv_tokens_max=10_000)]
    place = Place(workers, policy="first_token", hold_for_affinity=False)
    for name in ("w0", "w1"):
        for _ in range(3):
            place.prefill(place.give(place.spec(prompt_tokens=100), name))
        place.give(place.spec(prompt_tokens=40), name)
        place.warm(name, ("x", 1))
    scores: dict[str, float] = {}
    job = place.spec(prompt_tokens=800, output_tokens_max=200)
    for name, other in (("w0", "w1"), ("w1", "w0")):
        placement = place.place(job, excluded=[other])
        for one in place.router.explain(job, placement, at_s=place.at_s).candidates:
            scores[one.worker] = one.score
            assert one.worker == name
    growth_s = (1000 / 10_000) * 200 / 50
    assert scores["w0"] == pytest.approx(0.005 + 3 * 0.1 + 0.05 * 3 * 0.1)
    assert scores["w1"] == pytest.approx(0.005 + 3 * 0.1 + 0.05 * 3 * (0.1 + growth_s))


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


# ---- ties and turns
# --------------------------------------------------------------------------------


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


# ---- stickiness
# ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_prefix_sticks_to_its_last_worker(policy: str) -> None:
    """Two holders alike: the last one is kept for `sticky_s`, then turns decide again."""
    place = Place(6, policy=policy)
    for n in (1, 3):
        place.warm(f"w{n}", SYSTEM)
    assert place.run(place.spec(SYSTEM, ("ask", 1))) == "w1"
    place.at_s += 29.9
    assert where(place, SYSTEM, ("other", 1)) == "w1"
    place.at_s += 0.2
    assert where(place, SYSTEM, ("other", 1)) == "w3"


def test_a_kept_answer_ends_with_the_sticky_time() -> None:
    """An answer that rests on stickiness is given anew once that time is over, without any
    event.
    """
    place = Place(6)
    for n in (1, 3):
        place.warm(f"w{n}", SYSTEM)
    place.run(place.spec(SYSTEM, ("ask", 1)))
    job = place.spec(SYSTEM, ("other", 1))
    assert place.place(job).worker is place.workers["w1"]
    place.at_s += 30.0
    assert place.place(job).worker is place.workers["w3"]


def test_a_conversation_s_next_turn_sticks_to_the_worker_of_the_last() -> None:
    """The whole of a turn's prompt is the key of the next."""
    place = Place(4)
    home = place.run(place.spec(("turn1", 20)))
    job = place.spec(("turn1", 20), ("turn2", 5))
    placement = place.place(job)
    assert place.router.explain(job, placement, at_s=place.at_s).previous_worker == home


def test_a_session_that_went_elsewhere_takes_its_waiting_jobs_along() -> None:
    """A kept answer follows the session's last dispatch."""
    place = Place(3)
    job = place.spec(session="s")
    assert place.place(job).worker is place.workers["w0"]
    place.run(place.spec(session="s"), "w2")
    assert place.place(job).worker is place.workers["w2"]


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_session_sticks_without_blocks(policy: str) -> None:
    """A session whose prompts have no blocks stays with its worker, in its own lane and model."""
    place = Place(3, policy=policy)
    home = place.run(place.spec(session="s"))
    for _ in range(3):
        assert place.run(place.spec(session="s")) == home
    assert place.run(place.spec(session="other")) != home
    assert where(place, session="s") == home


def test_stickiness_is_void_past_the_hard_threshold() -> None:
    """When the last worker's predicted first token is 2 s behind the best, nobody pays for
    leaving.
    """
    for tokens, prompt_tokens, penalised in (
        (15_000, 32, True),
        (17_000, 32, False),
        (8_000, 16_000, True),
    ):
        place = Place(2, hold_for_affinity=False)
        home = place.run(place.spec(session="s"))
        place.give(place.spec(prompt_tokens=tokens), home)
        job = place.spec(session="s", prompt_tokens=prompt_tokens)
        placement = place.place(job)
        candidates = place.router.explain(job, placement, at_s=place.at_s).candidates
        other = next(one for one in candidates if one.worker != home)
        cost = 3 * job.prompt_tokens / 8000
        assert other.score == pytest.approx(cost + (0.05 if penalised else 0.0))


@pytest.mark.parametrize("field", [{"draining": True}, {"phase": Phase.GONE}])
def test_stickiness_is_void_when_the_worker_may_not_serve(field: dict[str, object]) -> None:
    """A drained or gone last worker is named, and costs nobody anything."""
    place = Place(3)
    home = place.run(place.spec(session="s"))
    place.change(home, **field)
    job = place.spec(session="s")
    placement = place.place(job)
    explanation = place.router.explain(job, placement, at_s=place.at_s)
    assert explanation.previous_worker == home
    assert explanation.candidates[0].score == pytest.approx(3 * job.prompt_tokens / 8000)
    assert home not in {one.worker for one in explanation.candidates}


def test_what_most_hold_sticks_to_nobody() -> None:
    """A prefix that half of the workers or more hold has no last worker."""
    for holders, previous in ((1, "w0"), (2, "")):
        place = Place(4)
        for n in range(holders):
            place.warm(f"w{n}", SYSTEM)
        place.run(place.spec(SYSTEM, ("ask", 1)), "w0")
        job = place.spec(SYSTEM, ("other", 1))
        placement = place.place(job)
        explanation = place.router.explain(job, placement, at_s=place.at_s)
        assert explanation.previous_worker == previous


# ---- late binding
# ----------------------------------------------------------------------------------


def test_a_job_is_held_for_its_best_worker() -> None:
    """While the holder is still the best by its predicted wait, the job waits for it; the moment it
    has room, the job goes there.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(("other", 2)), "w0")
    job = place.spec(SYSTEM, ("ask", 1))
    held = place.place(job)
    assert (held.worker, held.held_for) == (None, "w0")
    assert (held.hit_tokens, held.servable) == (1920, True)
    place.prefill(lease)
    assert place.place(job).worker is place.workers["w0"]


def test_a_cold_job_is_never_held() -> None:
    """Where no cache is to be won, any worker with room will do."""
    place = Place(2)
    place.change("w1", prefill_tokens_s=1000.0)
    place.give(place.spec(("other", 2)), "w0")
    assert where(place, ("own", 30)) == "w1"


def test_no_hold_where_nobody_has_room() -> None:
    """When no worker has room at all, the job waits for room, not for one worker."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 100)), "w0")
    placement = place.place(place.spec(SYSTEM))
    assert (placement.worker, placement.held_for) == (None, "")


def test_a_hold_ends_where_waiting_costs_more_than_it_saves() -> None:
    """A holder with too long a backlog loses to a cold worker at once."""
    saving_s = 3 * 1920 / 8000
    for backlog_s, held in ((saving_s - 0.02, True), (saving_s + 0.02, False)):
        place = Place(2)
        place.warm("w0", SYSTEM)
        place.give(place.spec(prompt_tokens=round(backlog_s * 8000)), "w0")
        placement = place.place(place.spec(SYSTEM))
        assert bool(placement.held_for) is held


def test_a_hold_ends_past_the_hard_threshold() -> None:
    """However much is cached, 2 s longer than the best is too long to wait for one worker."""
    for threshold_s, held in ((2.0, False), (100.0, True)):
        place = Place(2, wait_s_over_best_max=threshold_s)
        place.warm("w0", ("system", 400))
        place.give(place.spec(prompt_tokens=45_000), "w0")
        placement = place.place(place.spec(("system", 400)))
        assert bool(placement.held_for) is held


def test_a_hold_lasts_no_longer_than_it_gains() -> None:
    """If the holder gets no room in the time that waiting was to save, the job goes elsewhere: a
    wrong guess costs twice at most.
    """
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 10)), "w0")
    job = place.spec(SYSTEM)
    began_at_s = place.at_s
    while place.place(job).held_for:
        place.at_s += 0.01
        assert place.at_s - began_at_s < 3 * 1920 / 8000
    assert place.place(job).worker is place.workers["w1"]
    assert place.at_s - began_at_s > 0.5


def test_a_hold_is_not_started_anew_by_every_change() -> None:
    """Changes elsewhere, and reports, don't restart the time that a job may be held."""
    place = Place(2)
    place.warm("w0", SYSTEM)
    place.give(place.spec(("other", 10)), "w0")
    job = place.spec(SYSTEM)
    held = ""
    for number in range(90):
        held = place.place(job).held_for
        assert bool(held) is (number < 60) or 60 <= number < 80
        place.at_s += 0.01
        place.report("w0", 2 + number, added=chain((f"x{number}", 1)))
        place.change("w1", trust=0.5 + number / 200)
    assert not held


def test_a_full_holder_is_waited_for_by_when_a_slot_frees() -> None:
    """A holder without a slot is worth waiting for when the first of its jobs ends soon, not
    else.
    """
    for output_tokens, held in ((10, True), (500, False)):
        place = Place([a_worker("w0", slots=2), a_worker("w1", index=1)])
        place.warm("w0", SYSTEM)
        for tokens in (1000, output_tokens):
            place.prefill(place.give(place.spec(), "w0", output_tokens=tokens))
        placement = place.place(place.spec(SYSTEM))
        assert (placement.held_for == "w0") is held


def test_progress_of_its_jobs_brings_a_full_holder_nearer() -> None:
    """What a job has put out already no longer counts to the wait for its slot."""
    place = Place([a_worker("w0", slots=1), a_worker("w1", index=1)])
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(), "w0", output_tokens=500)
    place.prefill(lease)
    place.change("w0", trust=0.97)
    job = place.spec(SYSTEM)
    assert place.place(job).worker is place.workers["w1"]
    lease.output_tokens = 495
    place.change("w0", trust=0.98)
    assert place.place(job).held_for == "w0"
    lease.output_tokens = 700
    place.change("w0", trust=0.99)
    assert place.place(job).held_for == "w0"


def test_a_holder_without_kv_room_is_waited_for_like_a_full_one() -> None:
    """KV cache frees when a job ends, as a slot does."""
    for output_tokens, held in ((10, True), (500, False)):
        place = Place([a_worker("w0", kv_tokens_max=2500), a_worker("w1", index=1)])
        place.warm("w0", SYSTEM)
        place.prefill(place.give(place.spec(("x", 5)), "w0", output_tokens=output_tokens))
        placement = place.place(place.spec(SYSTEM), output_tokens=50)
        assert (placement.held_for == "w0") is held


def test_a_worker_that_said_busy_is_expected_back_at_its_next_report() -> None:
    """A held-off holder counts as a second's wait: too long for a small saving, not for a large
    one.
    """
    for system, held in ((30, ""), (100, "w0")):
        place = Place(2)
        place.warm("w0", ("system", system))
        place.change("w0", held_off=True)
        assert place.place(place.spec(("system", system))).held_for == held


@pytest.mark.parametrize("holders", [3, 8, 80])
def test_of_many_holders_without_room_the_soonest_is_waited_for(holders: int) -> None:
    """When all that hold a prefix are busy, the job is held for the one that is free first."""
    place = Place(200)
    for n in range(holders):
        place.warm(f"w{n}", SYSTEM)
        place.give(place.spec(prompt_tokens=3000 if n != 2 else 400), f"w{n}")
    place.give(place.spec(prompt_tokens=100), "w190")
    assert place.place(place.spec(SYSTEM)).held_for == "w2"
    placement = place.place(place.spec(SYSTEM), excluded=["w2"])
    assert placement.held_for not in {"w2", "w190"}
    assert placement.held_for


# ---- kept answers
# ----------------------------------------------------------------------------------


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
    """Where a change of the chosen worker leaves a cold job's answer as it was, it is not made
    anew; where its prefill takes another time now, it is.
    """
    place = Place(2)
    job = place.spec(("cold", 9))
    placement = place.place(job)
    place.change("w0", trust=0.5)
    assert place.place(job) is placement
    place.change("w0", prefill_tokens_s=16_000.0)
    assert place.place(job).prefill_s == pytest.approx(placement.prefill_s / 2)


def test_a_lone_worker_s_new_holdings_are_seen() -> None:
    """A kept answer takes in what its only worker has been given since."""
    place = Place(1)
    job = place.spec(SYSTEM, ("ask", 1))
    assert place.place(job).hit_tokens == 0
    place.run(place.spec(SYSTEM, ("other", 1)))
    assert place.place(job).hit_tokens > 29 * 64


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


def test_a_session_s_last_worker_is_not_waited_for_without_a_hit() -> None:
    """Stickiness alone holds no job: what may be cached there is not known."""
    place = Place(2, switch_penalty_s=5.0)
    home = place.run(place.spec(session="s"))
    place.give(place.spec(prompt_tokens=100), home)
    placement = place.place(place.spec(session="s"))
    assert placement.worker is not None
    assert placement.worker.id != home


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


# ---- reports
# ---------------------------------------------------------------------------------------


def test_a_restarted_broker_learns_from_a_full_report() -> None:
    """Case 9: a delta calls for a full report, and with that one the worker's cache is known."""
    place = Place(4)
    assert not place.report("w2", 57, added=chain(("late", 1)))
    assert place.report("w2", 58, added=chain(SYSTEM), full=True)
    assert place.report("w2", 59, added=chain(SYSTEM, ("more", 5)))
    assert place.place(place.spec(SYSTEM, ("more", 5))).hit_tokens > 34 * 64
    assert where(place, SYSTEM) == "w2"


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
    assert place.report("w2", 9, added=chain(("b", 9)), full=True)
    assert place.place(place.spec(SYSTEM)).hit_tokens == 0
    assert place.place(place.spec(("done", 20))).hit_tokens == 0
    place.prefill(running)
    assert place.place(place.spec(("running", 20))).hit_tokens == 20 * 64
    assert place.place(place.spec(("b", 9))).hit_tokens == 9 * 64


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
    place.warm("w1", ("seen", 5))
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
    assert place.place(place.spec(("seen", 5))).hit_tokens > 0


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


# ---- trust
# -----------------------------------------------------------------------------------------


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
        place.router.hit_seen(lease, worker, cached_tokens=lease.hit_tokens * 2)
    assert 0.99 < worker.trust <= 1.0


def test_small_predictions_prove_nothing() -> None:
    """A hit too short to count says nothing of a worker's cache, found or not."""
    place = Place(2)
    lease = place.give(place.spec(SYSTEM))
    lease.hit_tokens = 255
    place.router.hit_seen(lease, place.workers[lease.worker], cached_tokens=0)
    assert place.workers[lease.worker].trust == 1.0
    lease.hit_tokens = 256
    place.router.hit_seen(lease, place.workers[lease.worker], cached_tokens=0)
    assert place.workers[lease.worker].trust == pytest.approx(0.9)


# ---- explanations
# ----------------------------------------------------------------------------------


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
    assert [one.worker for one in explanation.candidates] == ["w1", "w0"]
    first, second = explanation.candidates
    own_s = (job.prompt_tokens - placement.hit_tokens) / 8000
    assert first.score == pytest.approx(3 * own_s)
    assert second.score == pytest.approx(3 * job.prompt_tokens / 8000 + 0.05)
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


# ---- knobs
# -----------------------------------------------------------------------------------------


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
