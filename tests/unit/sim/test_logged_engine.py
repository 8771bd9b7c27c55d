"""An engine known from its log: rates and cache come out as they were put in."""

from dataclasses import replace as changed

import pytest
from msgspec.structs import replace

from broker.core.policy import LanePolicy, Policy, RoutingPolicy
from broker.engine_model.profile import REFERENCE, Curve, Profile
from broker.sim.logged_engine import RUNS_MIN, logged_engine
from broker.sim.mind import MODEL
from tests.replays import a_logged_day, some_requests

ENGINE = Profile(
    name="truth",
    source="chosen",
    slots=64,
    step_tokens_max=4096,
    kv_tokens_max=24_000,
    block_tokens=512,
    prefill_s=Curve(5e-3, 1.5e-4, 0.0),
    decode_s=Curve(12e-3, 8e-3, 0.0),
)

SPREADS = Policy(
    models=(MODEL,),
    lanes=(LanePolicy(name="acme"), LanePolicy(name="bolt")),
    routing=RoutingPolicy(policy="round_robin"),
)
"""Puts every prompt everywhere, so that caches are too small."""


@pytest.mark.parametrize("slope_s", [5e-5, 1.5e-4, 4e-4])
def test_rates(slope_s: float) -> None:
    """Prefill within 5 %, a token's time at an idle engine within 15 %."""
    truth = changed(ENGINE, prefill_s=Curve(5e-3, slope_s, 0.0), kv_tokens_max=100_000)
    found = logged_engine(a_logged_day(some_requests(400, per_s=3.0), truth), REFERENCE)
    assert found.runs > 300
    assert found.profile.prefill_s.slope_s == pytest.approx(slope_s, rel=0.05)
    assert found.profile.decode_s.constant_s == pytest.approx(12e-3, rel=0.15)
    assert found.error < 0.08


def test_rates_of_a_busy_engine() -> None:
    """Runs that waited in the engine, and decoded between others' prompts, do not mislead it."""
    truth = changed(ENGINE, kv_tokens_max=100_000)
    jobs = a_logged_day(some_requests(400, per_s=9.0), truth, policy=SPREADS)
    found = logged_engine(jobs, REFERENCE)
    assert found.profile.prefill_s.slope_s == pytest.approx(1.5e-4, rel=0.2)
    assert found.profile.decode_s.constant_s == pytest.approx(12e-3, rel=0.3)


@pytest.mark.parametrize("kv_tokens_max", [12_000, 18_000, 24_000])
def test_cache(kv_tokens_max: int) -> None:
    """Where prefixes were evicted, the size of the cache is found within a third."""
    truth = changed(ENGINE, kv_tokens_max=kv_tokens_max)
    jobs = a_logged_day(some_requests(500, systems=24), truth, policy=SPREADS)
    found = logged_engine(jobs, REFERENCE)
    assert found.kv_is_estimated
    assert found.profile.kv_tokens_max == pytest.approx(kv_tokens_max, rel=0.35)


def test_cache_that_never_was_full() -> None:
    """Nothing was evicted: its size can't be known, and is that of the profile it began with."""
    truth = changed(ENGINE, kv_tokens_max=10_000_000)
    found = logged_engine(a_logged_day(some_requests(200), truth), REFERENCE)
    assert not found.kv_is_estimated
    assert found.profile.kv_tokens_max == REFERENCE.kv_tokens_max


def test_few_runs_say_nothing() -> None:
    """The profile it began with stays."""
    jobs = a_logged_day(some_requests(RUNS_MIN - 1), ENGINE)
    found = logged_engine(jobs, REFERENCE)
    assert (found.runs, found.error) == (0, 0.0)
    assert found.profile.prefill_s == REFERENCE.prefill_s
    assert found.profile.decode_s == REFERENCE.decode_s
    assert logged_engine([], REFERENCE).profile.kv_tokens_max == REFERENCE.kv_tokens_max


def test_log_without_times_or_tokens() -> None:
    """Jobs that streamed nothing, or failed, are passed over."""
    jobs = a_logged_day(some_requests(100), ENGINE)
    silent = [replace(job, ttft_s=None) for job in jobs[:50]]
    failed = [replace(job, kind="failed") for job in jobs[50:]]
    assert logged_engine(silent + failed, REFERENCE).runs == 0


def test_prompts_that_are_all_alike() -> None:
    """Equal lengths show no slope: the rates stay those of the profile it began with."""
    jobs = [
        replace(job, counted_prompt_tokens=700, cached_tokens=0)
        for job in a_logged_day(some_requests(100), ENGINE)
    ]
    assert logged_engine(jobs, REFERENCE).profile.prefill_s == REFERENCE.prefill_s
