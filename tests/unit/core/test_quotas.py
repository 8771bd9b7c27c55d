"""Quota rows: what matches, what is used, what refuses, and when that ends."""

import math

import pytest

from broker.core.policy import QuotaRow
from broker.core.quotas import (
    Quotas,
    jobs_refusal,
    never_fits,
    queue_refusal,
    refusal,
)
from broker.core.rows import RowUsage
from tests.unit.core.cluster import a_spec

A_JOB = a_spec()


def quotas_of(*rows: QuotaRow) -> Quotas:
    """Rows first looked at at 100 s; they know the fleet: two workers, one of them with `tiny`."""
    quotas = Quotas(rows)
    for usage in quotas.rows:
        usage.refill(100.0)
    quotas.fleet_changed({"tiny": 1, "other": 2}, live_workers_all=2)
    return quotas


def rows_of(quotas: Quotas, **fields: str | int) -> tuple[RowUsage, ...]:
    """Rows that a band-1 job of acme's tiny must pass."""
    told = {"lane": "acme", "band": 1, "model": "tiny"} | fields
    return quotas.matching(lane=str(told["lane"]), band=int(told["band"]), model=str(told["model"]))


@pytest.mark.parametrize(
    ("row", "matches"),
    [
        (QuotaRow(), True),
        (QuotaRow(lane="acme"), True),
        (QuotaRow(lane="beta"), False),
        (QuotaRow(band=1), True),
        (QuotaRow(band=0), False),
        (QuotaRow(model="tiny"), True),
        (QuotaRow(model="other"), False),
        (QuotaRow(lane="acme", band=1, model="tiny"), True),
        (QuotaRow(lane="acme", band=2, model="tiny"), False),
        (QuotaRow(lane="acme", band=1, model="other"), False),
        (QuotaRow(lane="beta", band=1, model="tiny"), False),
    ],
)
def test_a_row_bounds_the_jobs_that_match_all_it_names(row: QuotaRow, *, matches: bool) -> None:
    """Each of lane, band and model that a row names must be the job's."""
    assert bool(rows_of(quotas_of(row))) is matches


def test_jobs_in_flight_are_bounded() -> None:
    """The row refuses the job that would be one too many, and says what is used of what."""
    quotas = quotas_of(QuotaRow(inflight_jobs_max=2))
    rows = rows_of(quotas)
    quotas.take(rows, 10, starts=True)
    assert jobs_refusal(rows) is None
    assert refusal(rows, A_JOB, 10, at_s=100.0) is None
    quotas.take(rows, 10, starts=True)
    for blocked in (jobs_refusal(rows), refusal(rows, A_JOB, 10, at_s=100.0)):
        assert blocked is not None
        assert (blocked.used, blocked.limit, blocked.retry_at_s) == (2, 2, math.inf)
    quotas.give_back(rows, 10, unstarted=False)
    assert jobs_refusal(rows) is None


def test_tokens_in_flight_are_bounded() -> None:
    """Exactly the limit passes, one token more does not."""
    quotas = quotas_of(QuotaRow(inflight_tokens_max=100))
    rows = rows_of(quotas)
    quotas.take(rows, 60, starts=True)
    assert refusal(rows, A_JOB, 40, at_s=100.0) is None
    blocked = refusal(rows, A_JOB, 41, at_s=100.0)
    assert blocked is not None
    assert (blocked.used, blocked.limit) == (60, 100)
    quotas.correct(rows, -20)
    assert refusal(rows, A_JOB, 60, at_s=100.0) is None
    quotas.correct(rows, 50)
    assert refusal(rows, A_JOB, 11, at_s=100.0) is not None


def test_a_row_without_limits_refuses_nothing() -> None:
    """Rows may exist for their queue bound alone."""
    rows = rows_of(quotas_of(QuotaRow()))
    assert jobs_refusal(rows) is None
    assert refusal(rows, A_JOB, 1e9, at_s=100.0) is None
    assert never_fits(rows, 1e9) is None
    assert queue_refusal(rows) is None


def test_a_bucket_starts_empty_and_fills_by_the_minute() -> None:
    """600 a minute are 10 a second: a cost of 50 passes after 5 s, and the refusal says so."""
    quotas = quotas_of(QuotaRow(tokens_per_min=600))
    rows = rows_of(quotas)
    blocked = refusal(rows, A_JOB, 50, at_s=100.0)
    assert blocked is not None
    assert (blocked.used, blocked.limit, blocked.retry_at_s) == (600, 600, 105.0)
    later = refusal(rows, A_JOB, 50, at_s=104.0)
    assert later is not None
    assert later.retry_at_s == pytest.approx(105.0)
    assert later.used == pytest.approx(560)
    assert refusal(rows, A_JOB, 50, at_s=105.0) is None


def test_a_bucket_never_holds_more_than_a_minute() -> None:
    """After an hour of rest a burst of one minute's worth passes, and no more."""
    rows = rows_of(quotas_of(QuotaRow(tokens_per_min=600)))
    assert refusal(rows, A_JOB, 600, at_s=3700.0) is None
    assert refusal(rows, A_JOB, 601, at_s=3700.0) is not None


def test_a_start_empties_the_bucket_and_an_end_does_not_fill_it() -> None:
    """The row bounds what is started a minute, however soon it ends."""
    quotas = quotas_of(QuotaRow(tokens_per_min=600))
    rows = rows_of(quotas)
    assert refusal(rows, A_JOB, 600, at_s=160.0) is None
    quotas.take(rows, 600, starts=True)
    quotas.give_back(rows, 600, unstarted=False)
    assert rows[0].bucket_tokens == 0


def test_a_start_that_never_was_goes_back_into_the_bucket() -> None:
    """A job that no worker ran has not used its lane's minute; the bucket stays bounded."""
    quotas = quotas_of(QuotaRow(tokens_per_min=600))
    rows = rows_of(quotas)
    rows[0].refill(130.0)
    quotas.take(rows, 100, starts=True)
    assert rows[0].bucket_tokens == 200
    quotas.give_back(rows, 100, unstarted=True)
    assert rows[0].bucket_tokens == 300
    quotas.give_back(rows, 900, unstarted=True)
    assert rows[0].bucket_tokens == 600


def test_a_job_found_running_takes_nothing_from_the_bucket() -> None:
    """Its start was counted by another broker, or is not known."""
    quotas = quotas_of(QuotaRow(tokens_per_min=600))
    rows = rows_of(quotas)
    rows[0].refill(130.0)
    quotas.take(rows, 100, starts=False)
    assert rows[0].bucket_tokens == 300
    assert (rows[0].inflight_jobs, rows[0].inflight_tokens) == (1, 100)


def test_a_bucket_of_zero_never_lets_anything_pass() -> None:
    """A limit of 0 has no time at which a job may go."""
    blocked = refusal(rows_of(quotas_of(QuotaRow(tokens_per_min=0))), A_JOB, 1, at_s=500.0)
    assert blocked is not None
    assert blocked.retry_at_s == math.inf


def test_time_does_not_run_backwards_in_a_bucket() -> None:
    """An event that comes late neither fills nor empties it."""
    rows = rows_of(quotas_of(QuotaRow(tokens_per_min=600)))
    rows[0].refill(130.0)
    rows[0].refill(110.0)
    assert (rows[0].bucket_tokens, rows[0].bucket_at_s) == (300, 130.0)


def test_all_rows_must_pass() -> None:
    """The first row that refuses is named; the order is the policy's."""
    quotas = quotas_of(
        QuotaRow(inflight_jobs_max=5), QuotaRow(lane="acme", inflight_jobs_max=0), QuotaRow(band=1)
    )
    blocked = jobs_refusal(rows_of(quotas))
    assert blocked is not None
    assert blocked.row.row.name == "lane=acme"


def test_limits_per_worker_follow_the_fleet() -> None:
    """A row of a model counts that model's workers, others all; fractions are rounded down."""
    quotas = quotas_of(
        QuotaRow(model="tiny", inflight_jobs_max_per_worker=2.5),
        QuotaRow(inflight_jobs_max_per_worker=2.5),
        QuotaRow(model="absent", inflight_jobs_max_per_worker=2.5),
        QuotaRow(inflight_jobs_max=3, inflight_jobs_max_per_worker=2.5),
        QuotaRow(inflight_jobs_max=7),
    )
    assert [usage.jobs_limit for usage in quotas.rows] == [2, 5, 0, 3, 7]
    quotas.fleet_changed({"tiny": 3}, live_workers_all=0)
    assert [usage.jobs_limit for usage in quotas.rows] == [7, 0, 0, 0, 7]


@pytest.mark.parametrize("row", [QuotaRow(inflight_tokens_max=99), QuotaRow(tokens_per_min=99)])
def test_a_job_larger_than_a_limit_never_fits(row: QuotaRow) -> None:
    """Waiting can't help a job whose cost alone is over a row's tokens."""
    rows = rows_of(quotas_of(row))
    assert never_fits(rows, 99) is None
    never = never_fits(rows, 100)
    assert never is not None
    assert (never.used, never.limit) == (100, 99)


def test_a_queue_is_full_at_its_bound() -> None:
    """`queued_jobs_max` waiting jobs are the last that may wait."""
    quotas = quotas_of(QuotaRow(queued_jobs_max=2))
    rows = rows_of(quotas)
    rows[0].queued_jobs = 1
    assert queue_refusal(rows) is None
    rows[0].queued_jobs = 2
    full = queue_refusal(rows)
    assert full is not None
    assert (full.used, full.limit) == (2, 2)


@pytest.mark.parametrize("how", ["end", "correction", "fleet"])
def test_a_row_that_gives_way_names_whom_it_held_back(how: str) -> None:
    """Models with refused jobs are released once, by whatever made room."""
    quotas = quotas_of(QuotaRow(inflight_jobs_max_per_worker=1.0, inflight_tokens_max=50))
    rows = rows_of(quotas)
    quotas.take(rows, 40, starts=True)
    rows[0].refused_models["tiny"] = None
    assert not quotas.released
    match how:
        case "end":
            quotas.give_back(rows, 40, unstarted=False)
        case "correction":
            quotas.correct(rows, -1)
        case _:
            quotas.fleet_changed({}, live_workers_all=3)
    assert list(quotas.released) == ["tiny"]
    assert not rows[0].refused_models


def test_a_row_that_tightens_releases_nobody() -> None:
    """Fewer workers or a dearer job make no room."""
    quotas = quotas_of(QuotaRow(inflight_jobs_max_per_worker=1.0))
    rows = rows_of(quotas)
    rows[0].refused_models["tiny"] = None
    quotas.correct(rows, 0)
    quotas.correct(rows, 5)
    quotas.fleet_changed({}, live_workers_all=2)
    quotas.fleet_changed({}, live_workers_all=1)
    assert not quotas.released


@pytest.mark.parametrize(("per_min", "left"), [(600, 110), (900, 115), (60, 60), (0, 0)])
def test_a_new_policy_keeps_the_bucket_of_the_same_row(per_min: int, left: float) -> None:
    """Rewriting the file gives and takes nobody a minute: what was left is left, up to the limit.

    So a lane that is given more does not stop, and one that is given less does not go on.
    """
    before = quotas_of(QuotaRow(lane="acme", tokens_per_min=600))
    before.rows[0].refill(110.0)
    after = Quotas([QuotaRow(lane="acme", tokens_per_min=per_min)], before=before)
    after.rows[0].refill(111.0)
    assert after.rows[0].bucket_tokens == pytest.approx(left)


def test_a_bucket_that_is_new_starts_empty() -> None:
    """A limit where there was none, or of other jobs."""
    before = quotas_of(QuotaRow(lane="acme", inflight_jobs_max=3), QuotaRow(tokens_per_min=600))
    for usage in before.rows:
        usage.refill(110.0)
    (after,) = Quotas([QuotaRow(lane="acme", tokens_per_min=600)], before=before).rows
    after.refill(111.0)
    assert after.bucket_tokens == 0
