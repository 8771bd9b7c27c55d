"""Who may take a job: alive, ready, the right model, and room."""

import pytest

from broker.core.placement import Placement
from broker.core.policy import PolicyName
from broker.core.state import Phase
from tests.unit.core.routing_builders import (
    CACHE_AWARE,
    MODEL,
    SYSTEM,
    Place,
    a_worker,
    where,
)


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
    found = place.place(job)
    assert found == Placement(
        place.workers["w0"], 0, 80, 80 / 8000, least_tokens=found.least_tokens
    )
    assert found.least_tokens == (0 if policy == "round_robin" else 80)


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
        assert found == Placement(None, 0, 77, 0.0, full=True, servable=servable)
    unheard = place.spec(model="unheard", prompt_tokens=77)
    assert place.place(unheard) == Placement(None, 0, 77, 0.0, full=True, servable=False)


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
    """A job fits up to 0.95 of the KV tokens, its expected output included; a job alone always."""
    place = Place([a_worker(kv_tokens_max=1000)], policy=policy)
    lease = place.give(place.spec(prompt_tokens=50, output_tokens_max=50), output_tokens=50)
    place.prefill(lease)
    fits = place.spec(prompt_tokens=750, output_tokens_max=500)
    assert place.place(fits, output_tokens=100).worker is not None
    assert place.place(fits, output_tokens=101).worker is None
    assert place.place(fits).worker is None
    place.end(lease)
    assert place.place(place.spec(prompt_tokens=5000)).worker is not None


def test_a_large_job_finds_the_one_worker_with_room() -> None:
    """However many less loaded workers are too full for it, the one that has KV room is found."""
    workers = [a_worker(f"w{n}", index=n, kv_tokens_max=1000, slots=8) for n in range(100)]
    place = Place(workers, hold_for_affinity=False)
    for n in range(100):
        place.prefill(place.give(place.spec(prompt_tokens=300), f"w{n}"))
    place.change("w77", kv_tokens_max=4000, prefill_tokens_s=10.0)
    assert where(place, prompt_tokens=800) == "w77"


def test_of_equally_roomy_workers_the_one_given_nothing_for_longest_is_found() -> None:
    """Where nobody near the front has KV room, those with the most of it take turns."""
    workers = [a_worker(f"w{n}", index=n, kv_tokens_max=1000, slots=8) for n in range(200)]
    place = Place(workers, hold_for_affinity=False)
    for n in range(200):
        place.prefill(place.give(place.spec(prompt_tokens=300), f"w{n}"))
    for name in ("w150", "w77"):
        place.change(name, kv_tokens_max=4000, prefill_tokens_s=10.0)
    assert where(place, prompt_tokens=800) == "w77"
    place.run(place.spec(prompt_tokens=1), "w77")
    assert where(place, prompt_tokens=800) == "w150"


def test_the_unprefilled_backlog_bounds_what_a_worker_takes() -> None:
    """Late binding: prompts are prefilled together while all of them, the new one included, take
    less than θ (80 ms: 640 tokens); a worker without any takes a job of any size.
    """
    place = Place(1)
    small = place.give(place.spec(prompt_tokens=400))
    assert where(place, prompt_tokens=239) == "w0"
    assert where(place, prompt_tokens=241) == ""
    place.give(place.spec(prompt_tokens=239))
    assert where(place, prompt_tokens=2) == ""
    place.prefill(small)
    assert where(place, prompt_tokens=400) == "w0"
    assert where(place, prompt_tokens=402) == ""


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
def test_a_long_prompt_lands_behind_no_short_one(policy: str) -> None:
    """What takes θ or more waits for a worker with nothing to prefill, and then goes there; behind
    it goes nobody.
    """
    place = Place(1, policy=policy)
    short = place.give(place.spec(prompt_tokens=1))
    long = place.spec(prompt_tokens=640)
    assert place.place(long).worker is None
    assert where(place, prompt_tokens=638) == "w0"
    place.prefill(short)
    running = place.give(long)
    assert where(place, prompt_tokens=1) == ""
    place.prefill(running)
    assert where(place, prompt_tokens=1) == "w0"


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_only_what_is_not_cached_takes_prefill_room(policy: str) -> None:
    """A long prompt whose uncached part is short is prefilled beside others, where a cold one of
    its length is not.
    """
    place = Place(1, policy=policy)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=400))
    assert where(place, ("cold", 30)) == ""
    assert where(place, SYSTEM, ("ask", 3)) == "w0"
    assert where(place, SYSTEM, ("ask", 4)) == ""


def test_a_lack_of_prefill_room_is_not_told_as_full() -> None:
    """Where a long prompt lacks only what a cached one needs not, another may still go: nobody is
    full. Slots, and KV cache for the answer, lack for all that are as large.
    """
    place = Place([a_worker(slots=3, kv_tokens_max=5000)])
    place.prefill(place.give(place.spec(prompt_tokens=10)))
    short = place.give(place.spec(prompt_tokens=10))
    long = place.place(place.spec(prompt_tokens=700))
    assert (long.worker, long.full) == (None, False)
    place.prefill(short)
    large = place.place(place.spec(prompt_tokens=4900))
    assert (large.worker, large.full) == (None, False)
    for output_tokens, full in ((4630, False), (4631, True)):
        wordy = place.place(place.spec(prompt_tokens=10, output_tokens_max=output_tokens))
        assert (wordy.worker, wordy.full) == (None, full)
    place.give(place.spec(prompt_tokens=10))
    none = place.place(place.spec(prompt_tokens=1))
    assert (none.worker, none.full) == (None, True)


def test_a_backlog_past_its_bound_is_full() -> None:
    """With θ used up not even a cached prompt goes: its last token is always computed."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=640))
    found = place.place(place.spec(SYSTEM))
    assert (found.worker, found.full) == (None, True)


@pytest.mark.parametrize(("base_tokens", "home"), [(0, "w0"), (1, "")])
def test_kv_room_counts_what_the_engine_uses_beside_its_jobs(base_tokens: int, home: str) -> None:
    """What stands there before counts once, what was given since with its expected output."""
    place = Place([a_worker(kv_tokens_max=1000)])
    place.prefill(place.give(place.spec(prompt_tokens=100)))
    place.change("w0", kv_base_tokens=base_tokens)
    assert where(place, prompt_tokens=750) == home


def test_what_is_cached_takes_no_more_kv_room() -> None:
    """A warm prompt needs room for its uncached part and its answer: 82 tokens here."""
    place = Place([a_worker(kv_tokens_max=1000)])
    place.warm("w0", SYSTEM)
    place.prefill(place.give(place.spec(prompt_tokens=100)))
    for base_tokens, home in ((718, "w0"), (719, "")):
        place.change("w0", kv_base_tokens=base_tokens)
        assert where(place, SYSTEM) == home
    assert where(place, ("cold", 30)) == ""


def test_faster_workers_hold_more_backlog_within_the_same_time() -> None:
    """θ is time: at a reported 80,000 tokens a second 6,399 tokens are prefilled together."""
    place = Place(1)
    place.change("w0", prefill_tokens_s=80_000.0)
    place.give(place.spec(prompt_tokens=6000))
    assert where(place, prompt_tokens=399) == "w0"
    assert where(place, prompt_tokens=401) == ""


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
