"""Yesterday once more: simulated as it ran it is near the log, and a change shows what it does."""

from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

import pytest
from msgspec.structs import replace

from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.engine_model.profile import REFERENCE, Curve
from broker.sim.decisions import LoggedJob
from broker.sim.errors import SimError
from broker.sim.logged_engine import logged_engine
from broker.sim.mind import MODEL
from broker.sim.network import NETWORK
from broker.sim.replay import as_workload, for_one_model, replayable
from broker.sim.replay_figures import Ending, Row
from broker.sim.replay_run import Plan, ReplayReport, replay
from tests.replays import (
    ENGINE,
    IN_TURN,
    LANES,
    START_S,
    TIGHT,
    a_logged_day,
    some_requests,
)


def a_day(count: int = 300, *, policy: Policy | None = None, **traffic: Any) -> list[LoggedJob]:
    """A day of two lanes on two workers, under turns in order unless told otherwise."""
    requests = some_requests(count, systems=24, **traffic)
    return a_logged_day(requests, ENGINE, policy=policy or IN_TURN)


def a_plan(jobs: Sequence[LoggedJob], **fields: Any) -> Plan:
    """Replay it on the engines that its log tells of."""
    profile = logged_engine(jobs, REFERENCE).profile
    defaults: dict[str, Any] = {
        "model": "tiny",
        "profile": profile,
        "workers": 2,
        "ran": "round_robin",
    }
    return Plan(**{**defaults, **fields})


def whole(found: ReplayReport) -> Row:
    """All lanes and bands together."""
    return found.rows[0]


def ended(found: ReplayReport, reason: str, row: str = "") -> tuple[int, int, int]:
    """Count jobs without an answer for a reason: logged, as it ran, under the change."""
    (one,) = [one for one in found.endings if (one.ending.reason, one.ending.row) == (reason, row)]
    return one.logged, one.as_it_ran, one.changed


def test_simulation_as_it_ran_is_near_the_log() -> None:
    """On an engine fitted to the log alone, as on one that is known, over a day that is long enough
    for turns that fall otherwise to make no difference.
    """
    jobs = a_day(900)
    for profile in (logged_engine(jobs, REFERENCE).profile, ENGINE):
        one = whole(replay(jobs, a_plan(jobs, policy="first_token", profile=profile)))
        assert one.as_it_ran.ttft_s.mean == pytest.approx(one.logged.ttft_s.mean, rel=0.15)
        assert one.as_it_ran.ttft_s.p50 == pytest.approx(one.logged.ttft_s.p50, rel=0.15)
        ratio = one.logged.cached_token_ratio
        assert one.as_it_ran.cached_token_ratio == pytest.approx(ratio, abs=0.06)
        tokens_s = one.logged.throughput_tokens_s
        assert one.as_it_ran.throughput_tokens_s == pytest.approx(tokens_s, rel=0.02)


def test_what_another_policy_would_have_brought() -> None:
    """What the replay foretells of a policy is what a day under it comes to."""
    jobs = a_day()
    found = whole(replay(jobs, a_plan(jobs, policy="first_token")))
    ours = Policy(models=(MODEL,), lanes=LANES)
    truth = a_day(policy=ours)
    real = sum(job.cached_tokens for job in truth) / sum(job.counted_prompt_tokens for job in truth)
    assert found.changed.cached_token_ratio == pytest.approx(real, abs=0.1)
    assert found.changed.cached_token_ratio > found.as_it_ran.cached_token_ratio + 0.2
    ttft_s = sum(job.ttft_s or 0.0 for job in truth) / len(truth)
    assert found.changed.ttft_s.mean == pytest.approx(ttft_s, rel=0.25)
    assert found.verdict == "gains"


def test_no_change_is_no_difference() -> None:
    """The policy that ran, named or under its own quota file, simulates alike."""
    jobs = a_day(120)
    named = replay(jobs, a_plan(jobs, policy="round_robin"))
    assert {one.verdict for one in named.rows} == {"same"}
    assert all(one.changed == one.as_it_ran for one in named.rows)
    file = replace(IN_TURN, models=("tiny",))
    same = replay(jobs, a_plan(jobs, quotas=file, quotas_before=file))
    assert all(one.changed == one.as_it_ran for one in same.rows)


def test_policy_of_a_router() -> None:
    """It binds on arrival: nothing waits, and no lane's quota is asked."""
    jobs = a_day(120)
    found = replay(jobs, a_plan(jobs, policy="least-requests"))
    assert found.binds_on_arrival
    assert whole(found).changed.queue_s.mean == pytest.approx(NETWORK.hop_s)
    with pytest.raises(SimError, match="knows no quotas; with --quotas take one of the broker's"):
        replay(jobs, a_plan(jobs, policy="least-requests", quotas=TIGHT))


def test_tighter_quotas() -> None:
    """The lane they bear on has jobs refused, by its row; the other one gains."""
    jobs = a_day(per_s=8.0)
    found = replay(jobs, a_plan(jobs, quotas=TIGHT))
    logged, as_it_ran, under = ended(found, "queue_full", "lane=acme")
    assert (logged, as_it_ran) == (0, 0)
    assert under > 20
    assert found.unanswered_now == under
    assert len(found.unanswered_now_keys) == 20
    assert all(key.startswith("acme.") for key in found.unanswered_now_keys)
    verdicts = {one.lane: one.verdict for one in found.rows}
    assert (verdicts["acme"], verdicts["bolt"]) == ("loses", "gains")


def test_looser_quotas() -> None:
    """What was refused is let in, and has answers as long as its lane's are."""
    day = replace(TIGHT, models=(MODEL,))
    jobs = a_day(per_s=8.0, policy=day)
    refused = sum(not job.dispatches for job in jobs)
    loose = replace(TIGHT, quotas=())
    found = replay(jobs, a_plan(jobs, ran="first_token", quotas=loose))
    assert refused > 20
    assert ended(found, "queue_full", "all")[:2] == (refused, refused)
    assert found.answered_now == refused
    assert {one.lane: one.verdict for one in found.rows}["acme"] == "gains"


def test_quotas_that_ran() -> None:
    """Where they are known, the simulation refuses by itself, about as often as the log says."""
    day = replace(TIGHT, models=(MODEL,))
    jobs = a_day(per_s=8.0, policy=day)
    found = replay(jobs, a_plan(jobs, ran="first_token", quotas_before=TIGHT, policy="weighted"))
    simulated = ended(found, "queue_full", "lane=acme")[1]
    assert simulated == pytest.approx(ended(found, "queue_full", "all")[0], rel=0.3)


def test_jobs_that_expire() -> None:
    """A deadline that was logged, and the longest wait of the file's band, end jobs again."""
    jobs = [
        replace(job, deadline_at_s=job.enqueued_at_s + 0.05) if job.lane == "bolt" else job
        for job in a_day(200, per_s=12.0)
    ]
    found = replay(jobs, a_plan(jobs, quotas=replace(TIGHT, quotas=())))
    assert ended(found, "deadline_expired")[2] > 0


def test_quota_that_lets_nothing_start() -> None:
    """Batch jobs that would wait for ever are given up and counted: the replay ends."""
    jobs = [replace(job, band=3) for job in a_day(60)]
    none = replace(TIGHT, quotas=(QuotaRow(band=3, inflight_jobs_max=0),))
    found = replay(jobs, a_plan(jobs, quotas=none))
    (one,) = found.endings
    assert one.ending == Ending(kind="unfinished", reason="never started")
    assert one.changed == 60


def test_unknown_policies() -> None:
    """Of the log, or of the command."""
    jobs = a_day(60)
    with pytest.raises(SimError, match="under a policy that is not known here: newer"):
        replay(jobs, a_plan(jobs, ran="newer", policy="first_token"))
    with pytest.raises(SimError, match="no policy is called 'nope'"):
        replay(jobs, a_plan(jobs, policy="nope"))


def test_file_speaks_of_several_models() -> None:
    """Rows of others do not bear on this one's jobs; a lane that may not use it may not."""
    file = Policy(
        models=("tiny", "big"),
        lanes=(LanePolicy(name="acme", models=("big",)), LanePolicy(name="bolt")),
        quotas=(
            QuotaRow(model="big", queued_jobs_max=1),
            QuotaRow(model="tiny", queued_jobs_max=9),
        ),
    )
    one = for_one_model(file, "tiny", ["acme", "bolt"])
    assert [(row.model, row.queued_jobs_max) for row in one.quotas] == [(MODEL, 9)]
    assert MODEL in one.models
    assert [MODEL in lane.models for lane in one.lanes] == [False, False]
    assert one.lanes[1].models == ()
    jobs = a_day(60)
    found = replay(jobs, a_plan(jobs, quotas=file))
    assert ended(found, "unknown_model", "lane=acme model=tiny")[2] == 30


# ---- from jobs to requests -----------------------------------------------------------------------


def a_refused(key: str, *, came_s: float) -> LoggedJob:
    """Turned away as it came."""
    return LoggedJob(
        key=key,
        lane="acme",
        band=1,
        model="tiny",
        enqueued_at_s=START_S + came_s,
        prompt_tokens=700,
        output_tokens_max=40,
        dispatches=0,
        ended_at_s=START_S + came_s + 0.1,
        kind="rejected",
        reason="queue_full",
    )


def a_ran(key: str, *, came_s: float, **fields: Any) -> LoggedJob:
    """Ran at once."""
    return replace(
        a_refused(key, came_s=came_s),
        **{
            "dispatches": 1,
            "dispatched_at_s": START_S + came_s,
            "kind": "completed",
            "reason": "",
            "counted_prompt_tokens": 720,
            "output_tokens": 16,
            **fields,
        },
    )


def test_tries_of_one_job() -> None:
    """Refused twice, and run at last: one job that comes when it first did; else as logged."""
    jobs = [
        a_refused("acme.a", came_s=0),
        a_refused("acme.a", came_s=2),
        a_ran("acme.a", came_s=5),
        a_refused("acme.b", came_s=6),
    ]
    asked, left_out = replayable(jobs, refused=True, kv_tokens_max=10_000)
    assert [(job.key, job.enqueued_at_s - START_S) for job in asked] == [
        ("acme.a", 0),
        ("acme.b", 6),
    ]
    assert left_out.tries == 2
    ran, _ = replayable(jobs, refused=False, kv_tokens_max=10_000)
    assert [(job.key, job.enqueued_at_s - START_S) for job in ran] == [("acme.a", 5)]


def test_jobs_that_can_not_be_replayed() -> None:
    """Cancelled before a token, or larger than any cache."""
    jobs = [
        a_ran("acme.a", came_s=0, kind="cancelled", output_tokens=0, counted_prompt_tokens=0),
        a_ran("acme.b", came_s=1, counted_prompt_tokens=20_000),
        a_ran("acme.c", came_s=2),
    ]
    chosen, left_out = replayable(jobs, refused=True, kv_tokens_max=10_000)
    assert [job.key for job in chosen] == ["acme.c"]
    assert (left_out.without_tokens, left_out.too_large) == (1, 1)


def test_answers_of_jobs_that_never_ran() -> None:
    """As long as its lane's are on average; of a lane without any, as everyone's; within bounds."""
    jobs = [
        a_ran("acme.a", came_s=0, output_tokens=10),
        a_ran("acme.b", came_s=1, output_tokens=20),
        a_refused("acme.c", came_s=2),
        replace(a_refused("bolt.d", came_s=3), lane="bolt", output_tokens_max=9),
    ]
    requests = as_workload(jobs, kv_tokens_max=10_000).workload.requests
    assert [one.output_tokens for one in requests] == [10, 20, 15, 9]
    assert [one.prompt_tokens for one in requests] == [720, 720, 700, 700]
    assert [one.at_s for one in requests] == [0, 1, 2, 3]


def test_job_from_long_before_the_log() -> None:
    """A batch of the day before comes as the log begins, and not into a day of nothing."""
    jobs = [
        a_ran("acme.a", came_s=0, dispatched_at_s=START_S + 86_400),
        a_ran("acme.b", came_s=86_390),
        a_ran("acme.c", came_s=86_400),
    ]
    requests = as_workload(jobs, kv_tokens_max=10_000).workload.requests
    assert [one.at_s for one in requests] == [0, 0, 10]


def test_the_same_log_gives_the_same_report() -> None:
    """Nothing in a replay is random."""
    jobs = a_day(80)
    assert replay(jobs, a_plan(jobs, policy="dynamo")) == replay(
        jobs, a_plan(jobs, policy="dynamo")
    )


def test_a_slow_engine_is_told_apart() -> None:
    """The same log on engines half as fast has larger figures: the profile is used."""
    jobs = a_day(100)
    slow = changed(ENGINE, prefill_s=Curve(1e-2, 3e-4, 0.0))
    quick = whole(replay(jobs, a_plan(jobs, policy="first_token", profile=ENGINE)))
    found = whole(replay(jobs, a_plan(jobs, policy="first_token", profile=slow)))
    assert found.as_it_ran.ttft_s.mean > 1.5 * quick.as_it_ran.ttft_s.mean


def test_a_clock_that_was_wrong_is_told() -> None:
    """Jobs of 1970 before those of today: the years between were simulated second by second."""
    jobs = a_day(30)
    early = replace(
        jobs[0], key="acme.early", enqueued_at_s=1.0, dispatched_at_s=2.0, ended_at_s=3.0
    )
    late = [replace(job, enqueued_at_s=job.enqueued_at_s + 1.7e9) for job in jobs]
    with pytest.raises(
        SimError, match=r"came 19,\d+ days after the log's begin: a clock was wrong"
    ):
        replay([early, *late], a_plan(jobs, policy="weighted"))


def test_a_log_that_begins_long_after_all_its_jobs_came() -> None:
    """A night's batch in a file rotated at nine: they come with its first word, all at once.

    Counted from 1970, they came after fifty years of nothing.
    """
    jobs = [
        replace(
            job,
            enqueued_at_s=1.7e9,
            dispatched_at_s=job.dispatched_at_s + 1.7e9,
            ended_at_s=job.ended_at_s + 1.7e9,
        )
        for job in a_day(30)
    ]
    replayed = as_workload(jobs, kv_tokens_max=100_000)
    assert {request.at_s for request in replayed.workload.requests} == {0.0}


def test_no_job_that_fits() -> None:
    """It is no table of zeros."""
    jobs = a_day(30)
    plan = a_plan(jobs, policy="weighted", profile=changed(REFERENCE, kv_tokens_max=512))
    with pytest.raises(SimError, match="no job fits the 512 tokens of a worker's KV cache"):
        replay(jobs, plan)


def test_refusals_name_the_model_as_the_log_does() -> None:
    """Simulated, it has another name: what one row refused was counted as of two."""
    jobs = a_day(30)
    plan = a_plan(jobs, quotas=Policy(models=("big",), lanes=LANES))
    found = replay(jobs, plan)
    assert {one.ending.row for one in found.endings} == {
        "lane=acme model=tiny",
        "lane=bolt model=tiny",
    }
