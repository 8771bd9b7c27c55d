"""Starvation and inversion are bounded in any stretch of work, whatever the sizes and the blocks.

All bands have more than can be served, much of it aged; now and then a row keeps some bands from
running at all. What each band got, and by what right, is kept as it happens, and every window of it
is held against its bound.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.bands import CREDIT_TOKENS_MAX, BandShares, Way
from broker.core.decisions import Dispatch
from broker.core.events import PolicyChanged
from broker.core.policy import DEFAULT_BANDS, BandPolicy, OrderPolicy, Policy, QuotaRow
from broker.wire.ids import BANDS
from tests.unit.core.cluster import LANE, MODEL, Cluster, a_policy, a_spec, of
from tests.unit.core.one_slot import one_slot

AGED_SHARE_MAX = 0.25
SPELL_JOBS_MAX = 40

Sizes = tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]
"""Tokens of the jobs of each band, to be drawn from."""

SMALL: Sizes = ((4000,), (4000,), (4000,), (4000,))


@dataclass(frozen=True, slots=True)
class Given:
    """One dispatch."""

    band: int
    way: Way
    tokens: float
    blocked: frozenset[int]
    """Bands that could not run then."""


def worst(values: Iterable[float]) -> float:
    """Return by how much a sum of these rises at most between any two places."""
    rise = most = 0.0
    for value in values:
        rise = max(0.0, rise + value)
        most = max(most, rise)
    return most


def largest(given: Sequence[Given]) -> float:
    """Return U: the largest job."""
    return max(one.tokens for one in given)


def check_starvation(given: Sequence[Given]) -> None:
    """While a band can run it gets its share of all, but for what it may be owed, and owe."""
    top = largest(given)
    for band in BANDS[1:]:
        share = DEFAULT_BANDS[band].guaranteed_share
        bound = 2.0 * (CREDIT_TOKENS_MAX + share * top) + max(CREDIT_TOKENS_MAX, top)
        lacks = (
            -math.inf
            if band in one.blocked
            else share * one.tokens - one.tokens * (one.band == band)
            for one in given
        )
        assert worst(lacks) <= bound, f"band {band} starves"


def check_inversion(given: Sequence[Given]) -> None:
    """By aging nobody takes more than the cap, by shares no more than these."""
    top = largest(given)
    for bands in ((1,), (2, 3), (3,)):
        aged = (
            one.tokens * (one.band in bands and one.way is Way.AGED) - AGED_SHARE_MAX * one.tokens
            for one in given
        )
        assert worst(aged) <= CREDIT_TOKENS_MAX + top, f"bands {bands} rise too much"
    for band in BANDS[1:]:
        share = DEFAULT_BANDS[band].guaranteed_share
        shares = (
            one.tokens * (one.band == band and one.way is Way.SHARE) - share * one.tokens
            for one in given
        )
        most = 2.0 * (CREDIT_TOKENS_MAX + share * top) + top
        assert worst(shares) <= most, f"band {band} takes more than its share"


def policy_of(blocked: Iterable[int]) -> Policy:
    """All bands but the first age, and some can't run."""
    bands = tuple(
        BandPolicy(guaranteed_share=band.guaranteed_share, aging_s=60.0 if number else None)
        for number, band in enumerate(DEFAULT_BANDS)
    )
    rows = (QuotaRow(band=band, inflight_jobs_max=0) for band in sorted(blocked))
    order = OrderPolicy(lane_slack_tokens=0.0, aged_share_max=AGED_SHARE_MAX)
    return a_policy(*rows, bands=bands, order=order)


class Served:
    """One slot under work without end."""

    def __init__(self, seed: int, sizes: Sizes, aged_ratio: float) -> None:
        self.rng = random.Random(seed)
        self.sizes = sizes
        self.aged_ratio = aged_ratio
        self.cluster = Cluster(policy_of(()))
        self.cluster.join("w1", slots=1)
        self.count = 0
        self.given: list[Given] = []
        self.work: dict[tuple[int, Way], float] = {}
        for band in BANDS:
            for _ in range(3):
                self.submit(band)

    @property
    def shares(self) -> BandShares:
        return self.cluster.scheduler._mind.queues.pool(MODEL).shares

    def submit(self, band: int) -> None:
        """Let a job come, maybe one that has waited for long elsewhere."""
        self.count += 1
        cluster, rng = self.cluster, self.rng
        cluster.hold(
            a_spec(
                f"j{self.count}",
                lane=rng.choice((LANE, "beta")),
                band=band,
                prompt_tokens=rng.choice(self.sizes[band]),
                output_tokens_max=0,
                enqueued_at_s=cluster.at_s - 100.0 * (rng.random() < self.aged_ratio),
                stream_sequence=self.count,
            )
        )

    def spell(self, blocked: frozenset[int], jobs: int) -> None:
        """Let so many jobs run while some bands can't."""
        cluster = self.cluster
        cluster.step(PolicyChanged(cluster.at_s, policy_of(blocked)))
        for _ in range(jobs):
            (lease,) = cluster.scheduler.leases()
            running = [one for one in of(Dispatch, cluster.decisions) if one.key == lease.job.key]
            before = dict(self.shares.work)
            cluster.decisions.clear()
            cluster.end(running[-1])
            ((band, way),) = (key for key in self.shares.work if self._grew(key, before))
            tokens = self.shares.work[band, way] - before.get((band, way), 0.0)
            self.given.append(Given(band, way, tokens, blocked))
            self.submit(band)
            least = min(self.shares.owed_tokens(band) for band in BANDS[1:])
            assert least >= -max(CREDIT_TOKENS_MAX, *map(max, self.sizes)), "debt without bound"

    def _grew(self, key: tuple[int, Way], before: dict[tuple[int, Way], float]) -> bool:
        return self.shares.work[key] > before.get(key, 0.0)


spells = st.lists(
    st.tuples(st.frozensets(st.sampled_from(BANDS), max_size=3), st.integers(1, SPELL_JOBS_MAX)),
    min_size=1,
    max_size=6,
)
some = st.lists(st.sampled_from((10, 200, 4000, 30_000, 500_000)), min_size=1, max_size=3)


def served(
    seed: int,
    sizes: Sizes,
    aged_ratio: float,
    spells: Sequence[tuple[frozenset[int], int]],
) -> Served:
    """Serve some spells."""
    world = Served(seed, sizes, aged_ratio)
    for blocked, jobs in spells:
        world.spell(blocked, jobs)
    return world


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.tuples(some, some, some, some),
    aged_ratio=st.sampled_from((0.0, 0.5, 1.0)),
    spells=spells,
)
def test_shares_and_the_aging_cap_hold_in_any_window(
    seed: int, sizes: Sizes, aged_ratio: float, spells: list[tuple[frozenset[int], int]]
) -> None:
    """No band starves while it can run, and none takes more by exceptions than it may."""
    world = served(seed, sizes, aged_ratio, spells)
    check_starvation(world.given)
    check_inversion(world.given)


def test_a_share_holds_beside_jobs_that_dwarf_it() -> None:
    """Band 0 in jobs of 128,000 tokens, band 1 in jobs of 200: it gets its 20 %, not 12.8."""
    cluster, running = one_slot(policy_of(()))
    cluster.hold(
        *(a_spec(f"{n}", band=0, prompt_tokens=128_000, output_tokens_max=0) for n in range(6))
    )
    cluster.hold_many(1200, prefix="small", band=1)
    work = {0: 0.0, 1: 0.0}
    for _ in range(1000):
        (running,) = of(Dispatch, cluster.end(running))
        lease = cluster.scheduler._mind.ledger.get(running.key)
        assert lease is not None
        if lease.job.key.endswith(".5"):
            break
        work[lease.job.band] += lease.cost_tokens
    assert work[1] / sum(work.values()) == pytest.approx(0.2, abs=0.002)


def test_a_band_that_is_owed_and_passed_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: strict priority, no share."""
    monkeypatch.setattr(BandShares, "owed", lambda *_: [])
    with pytest.raises(AssertionError, match="starves"):
        check_starvation(served(1, SMALL, 0.0, [(frozenset(), 200)]).given)


def test_aging_without_a_cap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: an aged job always rises."""
    monkeypatch.setattr(BandShares, "may_age", lambda _, band, *__: band > 0)
    with pytest.raises(AssertionError, match="rise too much"):
        check_inversion(served(1, SMALL, 1.0, [(frozenset({0}), 100)]).given)


def test_a_debt_of_aged_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: what aged jobs took is paid back in full, out of the share."""
    monkeypatch.setattr(Way, "forgives", property(lambda way: way is Way.PRIORITY))
    with pytest.raises(AssertionError, match="debt without bound"):
        served(1, SMALL, 1.0, [(frozenset({0, 3}), 100)])
