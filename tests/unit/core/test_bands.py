"""Strict priority, guaranteed shares, capped aging: the accounts alone."""

import random

import pytest

from broker.core.bands import CREDIT_TOKENS_MAX, BandShares, Way
from broker.core.policy import DEFAULT_BANDS, BandPolicy

SHARES = tuple(band.guaranteed_share for band in DEFAULT_BANDS)


class Account:
    """Shares under the default bands."""

    def __init__(self) -> None:
        self.shares = BandShares()

    def dispatched(
        self,
        band: int,
        cost_tokens: float,
        *,
        way: Way = Way.PRIORITY,
        waiting: tuple[int, int, int, int] = (1, 1, 1, 1),
        bands: tuple[BandPolicy, BandPolicy, BandPolicy, BandPolicy] = DEFAULT_BANDS,
    ) -> None:
        self.shares.dispatched(
            band,
            cost_tokens,
            way=way,
            waiting_jobs=list(waiting),
            bands=bands,
            aged_share_max=0.25,
        )

    def turns(self, *waiting: int, cost_tokens: float = 1.0) -> list[int]:
        """Which bands go before higher ones, with so many jobs of a cost waiting in each."""
        return self.shares.owed(waiting, lambda _: cost_tokens)

    @property
    def may_age(self) -> bool:
        return self.shares.may_age(2, (1, 1, 1, 1), lambda _: 1.0)

    @property
    def owed(self) -> list[float]:
        return [self.shares.owed_tokens(band) for band in range(4)]


def test_a_band_with_demand_is_owed_its_share_of_all_work() -> None:
    """Of 1,000 tokens given to band 0, bands 1-3 are owed 200, 100 and 50."""
    account = Account()
    account.dispatched(0, 1000.0)
    assert account.owed == [-1000.0, 200.0, 100.0, 50.0]
    assert account.turns(1, 1, 1, 1) == [1, 2, 3]


def test_a_band_without_demand_is_owed_nothing() -> None:
    """Shares are not banked while nobody waits; those in debt go on paying."""
    account = Account()
    account.dispatched(0, 1000.0, waiting=(1, 0, 1, 0))
    assert account.owed[1:] == [0.0, 100.0, 0.0]
    account.dispatched(3, 400.0, way=Way.SHARE, waiting=(1, 0, 0, 1))
    assert account.owed[3] == pytest.approx(20.0 - 400.0)
    account.dispatched(0, 1000.0, waiting=(1, 0, 0, 0))
    assert account.owed[3] == pytest.approx(-330.0)


def test_only_a_band_that_waits_under_others_is_owed_a_turn() -> None:
    """Without higher demand priority alone serves it; without own, nobody waits."""
    account = Account()
    account.dispatched(0, 1000.0)
    assert account.turns(0, 1, 1, 1) == [2, 3]
    assert account.turns(0, 0, 0, 5) == []
    assert account.turns(3, 0, 0, 1) == [3]
    assert account.turns(1, 0, 0, 0) == []


def test_a_band_that_got_its_share_is_owed_no_more() -> None:
    """What was given is taken off, the whole cost of it; one job may run it into debt."""
    account = Account()
    account.dispatched(0, 1000.0)
    account.dispatched(2, 600.0, way=Way.SHARE)
    assert account.owed[2] == pytest.approx(100.0 + 60.0 - 600.0)
    assert 2 not in account.turns(1, 1, 1, 1)


def test_a_share_is_earned_before_it_is_taken() -> None:
    """A band owed 100 takes a job of 100, and waits for its turn when its jobs cost more."""
    account = Account()
    account.dispatched(0, 1000.0)
    assert account.turns(1, 0, 3, 0, cost_tokens=100.0) == [2]
    assert account.turns(1, 0, 3, 0, cost_tokens=100.1) == []


def test_a_job_larger_than_the_bound_has_its_turn_at_the_bound() -> None:
    """What is owed is bounded, so no job is too large ever to be owed."""
    account = Account()
    for _ in range(1000):
        account.dispatched(0, 10_000.0)
    assert account.turns(1, 0, 1, 0, cost_tokens=1e9) == [2]


def test_what_is_owed_is_bounded() -> None:
    """Demand that could not run for an hour doesn't take over the pool afterwards."""
    account = Account()
    for _ in range(1000):
        account.dispatched(0, 10_000.0)
    bounds = [2.0 * (CREDIT_TOKENS_MAX + share * 10_000.0) for share in SHARES[1:]]
    assert account.owed[1:] == bounds


def test_what_one_huge_job_earns_others_is_not_cut_off() -> None:
    """Of 512,000 tokens given to band 0, bands 1-3 are owed 20, 10 and 5 %, before they have their
    turn and while the others have theirs.
    """
    account = Account()
    account.dispatched(0, 512_000.0)
    assert account.owed[1:] == pytest.approx([102_400.0, 51_200.0, 25_600.0])
    account.dispatched(1, 100_000.0, way=Way.SHARE)
    assert account.owed[1:] == pytest.approx([22_400.0, 61_200.0, 30_600.0])


def test_aged_work_leaves_a_bounded_debt() -> None:
    """After an hour in which its aged jobs took more than its share a band waits no longer for the
    next share than after an hour of idle capacity.
    """
    account = Account()
    for _ in range(1000):
        account.dispatched(1, 30_000.0)
        account.dispatched(2, 10_000.0, way=Way.AGED)
    assert -CREDIT_TOKENS_MAX <= account.owed[2] <= 0.0


def test_idle_capacity_used_ahead_is_bounded_too() -> None:
    """A band that had the pool for a day waits for its share, but not for a day."""
    account = Account()
    for _ in range(1000):
        account.dispatched(2, 10_000.0, waiting=(0, 0, 1, 0))
    assert account.owed[2] == -CREDIT_TOKENS_MAX


def test_debt_by_shares_is_not_forgiven() -> None:
    """A huge job taken on a share is paid back in full, else large jobs beat shares."""
    account = Account()
    account.dispatched(0, 1000.0)
    account.dispatched(3, 100_000.0, way=Way.SHARE)
    assert account.owed[3] == pytest.approx(50.0 + 5_000.0 - 100_000.0)
    account.dispatched(3, 10.0)
    assert account.owed[3] == pytest.approx(50.0 + 5_000.0 - 100_000.0 + 0.5)


def test_priority_service_never_forgives_debt_either() -> None:
    """A band deeper in debt than the bound stays there."""
    account = Account()
    account.dispatched(3, 100_000.0, way=Way.SHARE)
    before = account.owed[3]
    account.dispatched(3, 1000.0)
    assert account.owed[3] == pytest.approx(before + 50.0)


def test_aged_jobs_may_rise_within_the_cap() -> None:
    """A quarter of the work under higher demand is theirs, and no more."""
    account = Account()
    assert not account.may_age
    account.dispatched(1, 1000.0)
    assert account.may_age
    account.dispatched(2, 400.0, way=Way.AGED)
    assert not account.may_age  # 250 + 100 - 400
    account.dispatched(1, 100.0)
    assert not account.may_age  # -25
    account.dispatched(1, 104.0)
    assert account.may_age


def test_aging_is_earned_first_too() -> None:
    """A credit of 250 lets an aged job of 250 rise, not one of 251; so it does one of band 1, from
    what band 0 got.
    """
    account = Account()
    account.dispatched(1, 1000.0)
    assert account.shares.may_age(2, (0, 1, 2, 0), lambda _: 250.0)
    assert not account.shares.may_age(2, (0, 1, 2, 0), lambda _: 250.5)
    assert not account.shares.may_age(2, (0, 1, 0, 0), lambda _: 0.0)
    assert not account.shares.may_age(1, (1, 1, 2, 0), lambda _: 1e9)
    account.dispatched(0, 1000.0)
    assert account.shares.may_age(1, (1, 1, 0, 0), lambda _: 500.0)
    assert not account.shares.may_age(1, (1, 1, 0, 0), lambda _: 500.1)
    account.dispatched(1, 400.0, way=Way.AGED)
    assert not account.shares.may_age(1, (1, 1, 0, 0), lambda _: 200.1)


def test_shares_of_low_bands_count_against_the_cap() -> None:
    """Bands 2 and 3 together, by whatever exception; band 1's share does not count."""
    account = Account()
    account.dispatched(1, 1000.0)
    account.dispatched(1, 10_000.0, way=Way.SHARE)
    assert account.may_age
    account.dispatched(3, 8000.0, way=Way.SHARE)
    assert not account.may_age


def test_low_bands_by_priority_cost_the_cap_nothing() -> None:
    """What runs because nothing higher could is no exception."""
    account = Account()
    account.dispatched(1, 1000.0)
    account.dispatched(2, 5000.0)
    account.dispatched(3, 5000.0)
    assert account.may_age


def test_the_cap_is_not_banked() -> None:
    """A day of chats allows no burst beyond the bound; without demand none is saved."""
    account = Account()
    for _ in range(1000):
        account.dispatched(1, 10_000.0)
    account.dispatched(2, CREDIT_TOKENS_MAX / 0.75, way=Way.AGED)
    assert not account.may_age
    account = Account()
    account.dispatched(2, 1000.0, waiting=(0, 0, 1, 1))
    assert not account.may_age
    account.dispatched(2, 1000.0, waiting=(0, 1, 1, 1))
    assert account.may_age


def test_work_is_told_by_band_and_way() -> None:
    """How much each exception took."""
    account = Account()
    account.dispatched(0, 10.0)
    account.dispatched(0, 5.0)
    account.dispatched(2, 3.0, way=Way.AGED)
    assert account.shares.work == {(0, Way.PRIORITY): 15.0, (2, Way.AGED): 3.0}


@pytest.mark.parametrize("seed", range(5))
def test_shares_hold_in_the_long_run_whatever_the_sizes(seed: int) -> None:
    """All bands saturated: each gets its share within one bound, the highest the rest."""
    rng = random.Random(seed)
    account = Account()
    given = [0.0] * 4
    for _ in range(4000):
        owed = account.turns(9, 9, 9, 9)
        band = owed[0] if owed else 0
        cost_tokens = float(rng.choice((100, 3000, 12_000)))
        account.dispatched(band, cost_tokens, way=Way.SHARE if owed else Way.PRIORITY)
        given[band] += cost_tokens
    total = sum(given)
    for band in (1, 2, 3):
        assert given[band] == pytest.approx(SHARES[band] * total, abs=CREDIT_TOKENS_MAX)
