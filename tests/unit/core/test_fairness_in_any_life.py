"""Lanes that wait in the same band get the same work, whatever goes wrong.

Estimates that are far off, attempts that fail and are given back, lanes of long jobs beside lanes
of short ones, lanes that wait in several bands, that sleep and wake, or whose row holds them: the
gap between counters keeps within its published bound at every step. The work itself is summed by
the test, from what jobs came to cost: in every stretch in which two lanes had jobs in line in a
band all the time, what they got of it differs by no more than twice that.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
)
from msgspec import structs

from broker.core.costs import cost_tokens
from broker.core.decisions import Dispatch
from broker.core.events import PolicyChanged
from broker.core.lanes import DEBT_TOKENS_MAX, PERIOD_JOBS, LaneCounters
from broker.core.mind import Mind
from broker.core.order import Order
from broker.core.policy import (
    DEFAULT_BANDS,
    BreakerPolicy,
    LanePolicy,
    OrderPolicy,
    Policy,
    QuotaRow,
)
from broker.core.queues import Queue
from broker.core.state import Lease
from broker.wire.messages import Usage
from tests.unit.core.cluster import MODEL, Cluster, a_policy, a_spec, of

WEIGHTS = {"acme": 1.0, "beta": 1.0, "crawl": 3.0}
BANDS_USED = (1, 2, 3)
SIZES = (100, 1000, 6000)
SLOTS = 3

ROUNDING = 1e-6
"""Counters are sums of floats: two orders of adding differ by less."""


def a_fair_policy(*rows: QuotaRow, slack_tokens: float, ages: bool) -> Policy:
    """Three lanes, the last of three times the weight."""
    standard = structs.replace(DEFAULT_BANDS[2], aging_s=60.0 if ages else None)
    policy = a_policy(
        *rows,
        bands=(*DEFAULT_BANDS[:2], standard, DEFAULT_BANDS[3]),
        order=OrderPolicy(lane_slack_tokens=slack_tokens),
        breaker=BreakerPolicy(failures_max=0),
    )
    lanes = tuple(LanePolicy(name=lane, weight=weight) for lane, weight in WEIGHTS.items())
    return structs.replace(policy, lanes=lanes)


@dataclass(slots=True)
class Stretch:
    """How far one lane led another since both are in line in a band."""

    least: float
    greatest: float


class Shares(RuleBasedStateMachine):
    """Three slots, three lanes, three bands."""

    @initialize(
        seed=st.integers(0, 2**32),
        slack_tokens=st.sampled_from((0.0, 8192.0)),
        ages=st.booleans(),
        period_jobs=st.sampled_from((1, 7, 50, PERIOD_JOBS)),
    )
    def begin(
        self, seed: int, slack_tokens: float, *, ages: bool, period_jobs: int = PERIOD_JOBS
    ) -> None:
        self.rng = random.Random(seed)
        self.slack_tokens, self.ages = slack_tokens, ages
        self.held_lane: str | None = None
        self.cluster = Cluster(a_fair_policy(slack_tokens=slack_tokens, ages=ages))
        counters = self.cluster.scheduler._mind.queues.pool(MODEL).counters
        counters.period_jobs = counters._period_jobs_left = period_jobs
        self.cluster.join("w1", slots=SLOTS)
        self.bound_seen = 0.0
        """Most that the bound ever was: work that was given under it stays given."""
        self.count = self.seen = 0
        self.sizes = {lane: self.rng.choice(SIZES) for lane in WEIGHTS}
        self.used_ratios = {lane: self.rng.choice((0.05, 0.5, 1.0)) for lane in WEIGHTS}
        """Of their output limit, what a lane's jobs use."""
        self.runs: dict[str, Dispatch] = {}
        self.charged: dict[str, float] = {}
        """What each running job counts for."""
        self.work: defaultdict[tuple[str, int], float] = defaultdict(float)
        """By lane and band, work ÷ weight: of what ended by its real cost."""
        self.stretches: dict[tuple[str, str, int], Stretch] = {}

    # ---- what happens --------------------------------------------------------------------------

    @rule(
        lane=st.sampled_from(sorted(WEIGHTS)),
        band=st.sampled_from(BANDS_USED),
        count=st.integers(1, 30),
    )
    def jobs_come(self, lane: str, band: int, count: int) -> None:
        for _ in range(count):
            self.count += 1
            tokens = self.rng.choice((self.sizes[lane], self.rng.choice(SIZES)))
            spec = a_spec(
                f"j{self.count}",
                lane=lane,
                band=band,
                prompt_tokens=tokens,
                output_tokens_max=self.rng.choice((0, tokens)),
                enqueued_at_s=self.cluster.at_s - self.rng.choice((0.0, 100.0)),
                stream_sequence=self.count,
            )
            self.cluster.hold(spec)
            self.look()

    @rule(count=st.integers(1, 40))
    def jobs_end(self, count: int) -> None:
        for lease in self.some(count):
            job = lease.job
            output_tokens = round(self.used_ratios[job.lane] * job.output_tokens_max)
            real = cost_tokens(uncached_tokens=job.prompt_tokens, output_tokens=output_tokens)
            usage = Usage(job.prompt_tokens, 0, output_tokens)
            self.counts(lease, float(real))
            self.cluster.end(self.runs[job.key], usage=usage)
            self.look()

    @rule(count=st.integers(1, 6))
    def attempts_fail(self, count: int) -> None:
        for lease in self.some(count):
            self.counts(lease, 0.0)
            self.cluster.fail(self.runs[lease.job.key])
            self.look()

    @rule(lane=st.sampled_from((None, *sorted(WEIGHTS))))
    def a_row_holds(self, lane: str | None) -> None:
        rows = () if lane is None else (QuotaRow(lane=lane, inflight_jobs_max=0),)
        policy = a_fair_policy(*rows, slack_tokens=self.slack_tokens, ages=self.ages)
        self.held_lane = lane
        self.cluster.step(PolicyChanged(self.cluster.at_s, policy))
        self.look()

    @rule(seconds=st.sampled_from((0.5, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.cluster.wait(seconds)
        self.stretches.clear()  # Lines may have been empty in between.
        self.look()

    def some(self, count: int) -> Iterator[Lease]:
        """Pick jobs that run, one after the other."""
        for _ in range(count):
            leases = self.cluster.scheduler.leases()
            if leases:
                yield self.rng.choice(leases)

    def counts(self, lease: Lease, tokens: float) -> None:
        """Let a job count for what it came to cost, instead of what was expected."""
        job = lease.job
        charged = self.charged.pop(job.key)
        self.work[job.lane, job.band] += (tokens - charged) / WEIGHTS[job.lane]

    # ---- what must hold ------------------------------------------------------------------------

    def look(self) -> None:
        """Sum the work of new jobs, and look at every stretch that ends now."""
        scheduler = self.cluster.scheduler
        for dispatch in of(Dispatch, self.cluster.decisions[self.seen :]):
            lease = scheduler._mind.ledger.get(dispatch.key)
            assert lease is not None
            self.runs[dispatch.key] = dispatch
            self.charged[dispatch.key] = lease.cost_tokens
            self.work[lease.job.lane, lease.job.band] += lease.cost_tokens / WEIGHTS[lease.job.lane]
        self.seen = len(self.cluster.decisions)
        counters = scheduler._mind.queues.pool(MODEL).counters
        bound = counters.bound(slack_tokens=self.slack_tokens)
        self.bound_seen = max(self.bound_seen, bound)
        assert counters.period.passed_max <= DEBT_TOKENS_MAX, "lanes bank what others got"
        assert counters.gap <= bound + ROUNDING, "the gap is over its bound"
        if not self.ages:  # Who rises goes before its lane's turn.
            self._compare(2.0 * self.bound_seen)

    def _compare(self, most: float) -> None:
        queues = self.cluster.scheduler._mind.queues.pool(MODEL).queues
        for band in BANDS_USED:
            for one, other in combinations(sorted(WEIGHTS), 2):
                pair = (one, other, band)
                if not self._competes(queues, one, band) or not self._competes(queues, other, band):
                    self.stretches.pop(pair, None)
                    continue
                lead = self.work[one, band] - self.work[other, band]
                stretch = self.stretches.setdefault(pair, Stretch(lead, lead))
                stretch.least = min(stretch.least, lead)
                stretch.greatest = max(stretch.greatest, lead)
                apart = max(lead - stretch.least, stretch.greatest - lead)
                assert apart <= most, f"{one} and {other} got unequal work in band {band}"

    def _competes(self, queues: dict[tuple[str, int], Queue], lane: str, band: int) -> bool:
        queue = queues.get((lane, band))
        return queue is not None and bool(queue.fresh or queue.aged) and lane != self.held_lane


SETTINGS = settings(
    max_examples=25,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestShares = Shares.TestCase
TestShares.settings = SETTINGS


# ---- broken on purpose ---------------------------------------------------------------------------


def a_long_life() -> None:
    """Three lanes in one band: one is held by a row for long, some attempts fail, one comes late.

    Raises AssertionError where something does not hold.
    """
    life = Shares()
    life.begin(seed=3, slack_tokens=0.0, ages=False)
    life.sizes = dict.fromkeys(WEIGHTS, max(SIZES))
    life.used_ratios = {"acme": 0.05, "beta": 1.0, "crawl": 1.0}
    for lane in ("acme", "beta"):
        life.jobs_come(lane, 2, 600)
    life.jobs_end(300)
    life.attempts_fail(3)
    life.a_row_holds("beta")
    life.jobs_end(100)
    life.a_row_holds(None)
    life.jobs_come("crawl", 2, 100)
    life.jobs_end(100)


def found(monkeypatch: pytest.MonkeyPatch, broken: type, name: str, value: object) -> str:
    """What is said of a mind that was broken on purpose."""
    monkeypatch.setattr(broken, name, value)
    with pytest.raises(AssertionError) as caught:
        a_long_life()
    return str(caught.value)


def test_a_long_life_is_sound() -> None:
    """What is noticed below is the fault."""
    a_long_life()


def test_a_mind_that_refunds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane whose jobs cost less than was expected, or failed, would pay for nothing."""
    said = found(monkeypatch, Mind, "refunds", lambda *_: None)
    assert "unequal work" in said


def test_a_mind_that_lifts_no_lane_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that slept would take its band over when it wakes."""
    sound = LaneCounters.lined_up

    def line_up(self: LaneCounters, lane: str, *, band: int) -> None:
        before = self._books[band].counters.get(lane, 0.0)
        sound(self, lane, band=band)
        self._put(self._books[band], lane, before)

    assert "over its bound" in found(monkeypatch, LaneCounters, "lined_up", line_up)


def test_a_mind_that_serves_the_most_served_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane that got least goes first."""
    monkeypatch.setattr(Order, "_lift", lambda *_: None)
    entries = Order._entries

    def backwards(self: Order, *args: Any) -> Any:
        return reversed([*entries(self, *args)])

    said = found(monkeypatch, Order, "_entries", backwards)
    assert "bank" in said or "unequal work" in said or "over its bound" in said


def test_a_mind_that_lets_a_held_lane_bank_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row held it while others were served: it would take all of it back at once."""
    assert "bank" in found(monkeypatch, Order, "_lift", lambda *_: None)


def test_a_mind_that_counts_no_failed_attempt_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refunded moves lanes apart: a bound without it would be untrue."""
    assert "over its bound" in found(monkeypatch, Mind, "_errs", lambda *_: None)
