"""A batch sweep beside people who think between turns: what the share of workers for it brings."""

from functools import cache

import pytest

from broker.core.policy import RoutingPolicy
from tests.unit.sim.sweeps import Beside, beside

SPAN_S = (120.0, 300.0)
USERS = 50
WORKERS = 4
STRANDS = 32


@cache
def at_share(share: float, *, users: int = USERS, strands: int = STRANDS, seed: int = 1) -> Beside:
    """Run it in the small: 4 workers, 5 minutes."""
    return beside(
        share=share,
        users=users,
        workers=WORKERS,
        strands=strands,
        seed=seed,
        span_s=SPAN_S,
    )


def test_an_open_sweep_pushes_people_out() -> None:
    """The scenario is one: without a share, most of what people come back to is gone."""
    alone, swept = at_share(1.0, strands=0), at_share(1.0)
    assert alone.cached_ratio > 0.8
    assert swept.cached_ratio < alone.cached_ratio - 0.2
    assert swept.ttft_s.mean > 2 * alone.ttft_s.mean


@pytest.mark.parametrize("seed", [1, 2])
def test_a_share_of_the_workers_keeps_people_their_caches(seed: int) -> None:
    """Under the default, nearly all hits are kept, and first tokens come nearly as soon."""
    share = RoutingPolicy().batch_cache_share
    alone, beside_it = at_share(1.0, strands=0, seed=seed), at_share(share, seed=seed)
    assert beside_it.cached_ratio > alone.cached_ratio - 0.05
    assert beside_it.ttft_s.mean < 1.4 * alone.ttft_s.mean
    assert beside_it.ttft_s.p50 < 1.2 * alone.ttft_s.p50


def test_batch_has_more_than_its_share_of_the_workers() -> None:
    """So few people need fewer workers than three of four, and batch takes the others."""
    everywhere, shared = at_share(1.0, users=1), at_share(RoutingPolicy().batch_cache_share)
    assert shared.batch_tokens_s > RoutingPolicy().batch_cache_share * everywhere.batch_tokens_s


def test_where_hardly_anybody_comes_back_batch_loses_little() -> None:
    """One person's chat closes one worker of four at most."""
    share = RoutingPolicy().batch_cache_share
    everywhere, shared = at_share(1.0, users=1), at_share(share, users=1)
    assert shared.batch_tokens_s > 0.7 * everywhere.batch_tokens_s
