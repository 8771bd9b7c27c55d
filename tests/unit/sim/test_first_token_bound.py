"""The bound on quick first tokens, against sums that can be made by hand."""

import pytest

from broker.engine_model.profile import REFERENCE
from broker.sim.request import Request
from tests.bench.first_token_bound import Load, Size, load_of, most_quick


def test_one_kind_of_work_is_best_spread_evenly() -> None:
    """Half a worker's time over two: a quarter of the repeats find their worker at it."""
    load = Load(sizes={1: Size(repeats=100, work_s=5.0)})
    assert most_quick(load, workers=2, lasts_s=10.0) == pytest.approx(75.0)


def test_what_can_go_anywhere_goes_where_least_is_prefilled() -> None:
    """Against every split of the work between the two, in steps of a hundredth."""
    load = Load(quick=100, sizes={1: Size(repeats=100, work_s=5.0)})
    splits = [part / 200 for part in range(101)]
    by_hand = max(
        100 * (1 - x) + 100 * (2 * x) * (1 - x) + 100 * (1 - 2 * x) * (0.5 + x) for x in splits
    )
    assert most_quick(load, workers=2, lasts_s=10.0) == pytest.approx(by_hand, rel=1e-3)


def test_lengths_with_most_repeats_stand_where_least_is_prefilled() -> None:
    """What nobody repeats has a worker for itself, and the rest finds the other idle."""
    load = Load(sizes={1: Size(repeats=0, work_s=9.0), 2: Size(repeats=50, work_s=0.001)})
    assert most_quick(load, workers=2, lasts_s=10.0) == pytest.approx(50.0, rel=1e-3)


def test_a_worker_has_no_more_than_all_of_its_time() -> None:
    """Work for two workers leaves nobody quick on either of them."""
    load = Load(sizes={1: Size(repeats=100, work_s=20.0)})
    assert most_quick(load, workers=2, lasts_s=10.0) == pytest.approx(0.0, abs=1e-6)


def test_requests_are_sorted_by_what_they_need() -> None:
    """Short: quick anywhere. Long: work. Long and cached: quick where that is, and only there."""
    short, long, again = (
        Request(
            index=index,
            at_s=0.0,
            prompt_tokens=tokens,
            output_tokens=1,
            output_tokens_max=1,
            block_tokens=512,
            blocks=tuple(range(tokens // 512)),
        )
        for index, tokens in enumerate((100, 20_480, 20_480))
    )
    load = load_of((short, long, again), (0, 0, 20_400), REFERENCE, limit_s=0.037)
    assert load.quick == 1
    assert [size.repeats for size in load.sizes.values()] == [1]
    assert 0.3 < sum(size.work_s for size in load.sizes.values()) < 0.5
