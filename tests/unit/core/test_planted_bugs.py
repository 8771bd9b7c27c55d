"""Bugs of other systems, planted here one by one: a test of ours notices each.

What a test notices is shown by breaking the mind on purpose and running it. Others of this kind
stand beside what they break: refunds, lifts and banking in `test_fairness_in_any_life`, shares and
aging in `test_bands_in_any_window`, breakers in `test_breaker_lives`, drains, fencing, adapters and
lending in `tests/sim/test_fuzz`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from broker.core.cache_router import CacheAwareRouter
from broker.core.choice import Chooser
from broker.core.decisions import Release
from broker.core.endings import Endings
from broker.core.events import JobSpec
from broker.core.leases import Leases
from broker.core.mind import Mind
from broker.core.order import Order
from broker.core.queues import Pool, Waiting
from broker.core.reports import Reports
from broker.core.rows import Borrow
from broker.core.scoring import Scored
from broker.core.state import Lease, Worker
from broker.wire.messages import CacheSummary, Finished, Heartbeat
from tests.unit.core import (
    test_cases_retries,
    test_endings,
    test_lending,
    test_reports,
    test_routing,
    test_routing_reports,
)

OLD_S = 300.0


def _by_index(_: Chooser, scored: Sequence[Scored]) -> Scored | None:
    """Pick the best; of equals the first by its number."""
    return min(scored, key=lambda one: (one.score, one.seat.bit), default=None)


def _most_cached(_: Chooser, scored: Sequence[Scored]) -> Scored | None:
    """Pick who holds most, however many hold as much."""
    return max(scored, key=lambda one: (one.hit_tokens, one.seat.bit), default=None)


def _release_by_time(self: Leases) -> None:
    """Give seats back whose jobs have run for long."""
    mind = self._mind
    for lease in mind.ledger:
        if lease.granted_at_s < mind.at_s - OLD_S:
            mind.quotas.give_back(mind.ledger.queue_of(lease).rows, 0.0, unstarted=False)
            lease.granted_at_s = mind.at_s


def _any_epoch(self: Reports, beat: Heartbeat, *, take: Any = Reports.take) -> None:
    """Believe an echo, whoever's orders it counts."""
    take(self, structs.replace(beat, epoch=self._mind.epoch))


def _keep_the_load(
    self: Endings, lease: Lease, finished: Finished, *, settled: Any = Endings._settled
) -> None:
    """Tell a cancelled job's end, and leave its load where it is."""
    if lease.cancelled:
        self._mind.out.append(Release(lease.job.key))
    else:
        settled(self, lease, finished)


def _any_report(
    self: CacheAwareRouter,
    worker: Worker,
    summary: CacheSummary,
    *,
    at_s: float,
    take: Any = CacheAwareRouter.summary,
) -> bool:
    """Believe a report, however old."""
    seat = self._roster.seat(worker.id)
    if seat is not None:
        seat.report_sequence = summary.sequence - 1
    return take(self, worker, summary, at_s=at_s)


def _borrower_first(self: Order, pool: Pool) -> Any:
    """Let borrowers compete with lenders for a seat."""
    return self._choose_by_band(pool, Borrow.ANY)


def _young_again(self: Mind, job: JobSpec, *, waits: Any = Mind.waits, **fields: Any) -> Waiting:
    """Let a retry wait as if it came now."""
    is_retry = fields.get("retried", False)
    return waits(self, replace(job, enqueued_at_s=self.at_s) if is_retry else job, **fields)


@pytest.mark.parametrize(
    ("broken", "name", "bug", "test"),
    [
        (
            Chooser,
            "_best",
            _by_index,
            lambda: test_routing.test_equals_share_evenly_whatever_their_names(
                "first_token", ["z", "y", "x"]
            ),
        ),
        (
            Chooser,
            "_best",
            _most_cached,
            lambda: test_routing.test_a_prefix_that_all_hold_earns_nothing("first_token"),
        ),
        (
            Leases,
            "time_passed",
            _release_by_time,
            test_endings.test_case_14_usage_is_the_set_of_leases_however_long_they_run,
        ),
        (Reports, "take", _any_epoch, test_reports.test_an_echo_of_another_epoch_does_not_count),
        (
            Endings,
            "_settled",
            _keep_the_load,
            test_endings.test_case_2_a_cancel_at_any_moment_leaves_the_ledger_empty,
        ),
        (
            CacheAwareRouter,
            "cache_lost",
            lambda *_: None,
            test_routing_reports.test_a_restarted_engine_has_no_credit_and_fresh_trust,
        ),
        (
            CacheAwareRouter,
            "summary",
            _any_report,
            test_routing_reports.test_an_old_report_says_nothing,
        ),
        (
            Order,
            "_choose",
            _borrower_first,
            test_lending.test_a_lender_with_demand_goes_before_any_borrower,
        ),
        (Mind, "waits", _young_again, test_cases_retries.test_a_retry_keeps_its_place),
    ],
    ids=[
        "tie by index",
        "absolute instead of marginal hit",
        "release on a timer",
        "epoch ignored",
        "cancel keeps load",
        "cache of an earlier life credited",
        "stale summary credited",
        "borrower first",
        "retry resets enqueue",
    ],
)
def test_a_planted_bug_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
    broken: type,
    name: str,
    bug: Callable[..., Any],
    test: Callable[[], None],
) -> None:
    """The test passes as it is, and fails with the bug."""
    test()
    monkeypatch.setattr(broken, name, bug)
    with pytest.raises(AssertionError):
        test()
