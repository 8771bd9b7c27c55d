"""The figures of a run, each by hand on records that are written down."""

import pytest

from broker.engine_model.events import SequenceRequest
from broker.engine_model.profile import REFERENCE
from broker.sim.figures import jain, quantiles, spread
from broker.sim.measure import DIP_WINDOW_S, CacheSampler, measure
from broker.sim.request import Request
from broker.sim.world import Change, FleetChange, World
from tests.unit.sim.worlds import Told, a_request, a_world


def written(
    world: World,
    index: int,
    *,
    given_s: float | None = None,
    first_s: float = 1.0,
    ended_s: float = 2.0,
    cached_tokens: int = 0,
    host: int = 0,
    attempts: int = 1,
) -> None:
    """Write what happened to a request; it arrived at its `at_s` and was given then."""
    records, arrived_s = world.records, world.requests[index].at_s
    records.arrived_s[index] = arrived_s
    records.given_s[index] = arrived_s if given_s is None else given_s
    records.first_token_s[index] = first_s
    records.ended_s[index] = ended_s
    records.cached_tokens[index] = cached_tokens
    records.host[index] = host
    records.attempts[index] = attempts
    world.at_s = max(world.at_s, ended_s)


def followed(*steps: tuple[tuple[int, ...], int]) -> World:
    """Return a world whose requests had these blocks of 500 tokens and went to these workers."""
    requests = [
        a_request(n, blocks=blocks, block_tokens=500, prompt_tokens=500 * len(blocks) + 1)
        for n, (blocks, _) in enumerate(steps)
    ]
    world = a_world(*requests, workers=4)
    for index, (_, host) in enumerate(steps):
        written(world, index, host=host)
    return world


# ---- distributions -------------------------------------------------------------------------------


def test_a_percentile_is_the_value_at_that_share_of_the_order() -> None:
    """Of 100 values in order, p50 is the 51st, p90 the 91st and p99 the last; nothing between."""
    figures = spread(reversed(range(1, 101)))
    assert (figures.mean, figures.p50, figures.p90, figures.p99) == (50.5, 51, 91, 100)


def test_few_values_have_percentiles_too() -> None:
    """Of one value all are that one; of two, p50 is the greater; of none, all are 0."""
    one, two, none = spread([7.0]), spread([1.0, 2.0]), spread([])
    assert (one.mean, one.p50, one.p90, one.p99) == (7.0, 7.0, 7.0, 7.0)
    assert (two.mean, two.p50) == (1.5, 2.0)
    assert (none.mean, none.p50, none.p90, none.p99) == (0.0, 0.0, 0.0, 0.0)


def test_quantiles_go_from_the_least_to_the_most() -> None:
    """101 of them, each at its share of the order."""
    found = quantiles([3.0, 1.0, 2.0, 4.0])
    assert len(found) == 101
    assert (found[0], found[24], found[25], found[50], found[75], found[100]) == (1, 1, 2, 3, 4, 4)
    assert quantiles(range(100)) == (*range(100), 99)
    assert quantiles([]) == ()


def test_jain_is_one_where_all_get_the_same() -> None:
    """1 of equal shares, 1/n where one has all: (1 + 3)^2 / (2 * 10) = 0.8; 1 of nothing."""
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 3.0]) == pytest.approx(0.8)
    assert jain([]) == 1.0


# ---- times, tokens, workers ----------------------------------------------------------------------


def test_times_count_from_arrival_and_itl_from_the_first_token() -> None:
    """Queue, TTFT and end to end from arrival; ITL over the tokens after the first."""
    world = a_world(a_request(0, 1.0, output_tokens=5), a_request(1, 2.0, output_tokens=1))
    written(world, 0, given_s=1.25, first_s=2.0, ended_s=4.0)
    written(world, 1, first_s=2.5, ended_s=2.5)
    figures = measure(world)
    assert figures.ttft_s.mean == pytest.approx((1.0 + 0.5) / 2)
    assert figures.e2e_s.mean == pytest.approx((3.0 + 0.5) / 2)
    assert figures.queue_s.mean == pytest.approx(0.125)
    assert figures.itl_s.mean == pytest.approx(2.0 / 4)
    assert figures.ttft_quantiles_s[0] == 0.5
    assert (figures.requests, figures.refused, figures.reruns) == (2, 0, 0)
    assert figures.span_s == pytest.approx(3.0)


def test_tokens_are_summed_over_requests_not_averaged_over_them() -> None:
    """50 of 100 and 0 of 300 cached is one eighth; throughput counts prompt and output tokens."""
    world = a_world(a_request(0), a_request(1, prompt_tokens=300))
    written(world, 0, cached_tokens=50, attempts=3)
    written(world, 1, ended_s=4.0)
    figures = measure(world)
    assert figures.cached_token_ratio == pytest.approx(50 / 400)
    assert figures.throughput_tokens_s == pytest.approx((400 + 10) / 4.0)
    assert figures.reruns == 2


def test_the_refused_are_counted_apart() -> None:
    """A request without an answer is in no other figure than that."""
    world = a_world(a_request(0), a_request(1, prompt_tokens=900))
    written(world, 0, cached_tokens=100)
    written(world, 1, first_s=-1.0, ended_s=1.0)
    world.records.refused[1] = 1
    figures = measure(world)
    assert (figures.requests, figures.refused) == (1, 1)
    assert figures.ttft_s.mean == 1.0
    assert figures.cached_token_ratio == 1.0


def test_utilisation_is_the_share_of_time_in_steps() -> None:
    """0.15 of 2 seconds and nothing: mean 0.0375, spread 0.0375; a lost worker counts nowhere."""
    world = a_world(a_request(0), workers=3)
    written(world, 0, ended_s=2.0)
    sequence = SequenceRequest(request_id="0", prompt_tokens=100, output_tokens=5)
    world.hosts[0].model.submit(sequence, 0.0)
    world.hosts[0].model.advance(2.0)
    world.hosts[2].busy_before_s = 2.0
    world.hosts[2].alive = False
    figures = measure(world)
    assert figures.utilisation_mean == pytest.approx(0.075 / 2)
    assert figures.utilisation_std == pytest.approx(0.075 / 2)


def test_a_worker_that_joined_late_counts_from_then() -> None:
    """Busy for half a second of the one it was there."""
    world = a_world(a_request(0))
    written(world, 0, ended_s=4.0)
    world.hosts[0].joined_at_s = 3.0
    world.hosts[0].busy_before_s = 0.5
    assert measure(world).utilisation_mean == pytest.approx(0.5)


def test_fairness_compares_the_speed_of_lanes() -> None:
    """Speed is the time alone (100 ms and 5 tokens: 150 ms) over the time it took, by lane.

    Lane a at full speed and half of it, lane b at a quarter: 0.75 and 0.25 make 1 / (2 * 0.625).
    """
    lanes = ("a", "a", "b")
    world = a_world(*(a_request(n, lane=lane) for n, lane in enumerate(lanes)))
    for index, ended_s in enumerate((0.15, 0.3, 0.6)):
        written(world, index, first_s=0.1, ended_s=ended_s)
    assert measure(world).jain_index == pytest.approx(1.0 / (2 * 0.625))


def test_long_prompts_alone_are_as_fast_as_short_ones() -> None:
    """A prompt of many steps takes their sum; each lane has an engine to itself, so all is fair."""
    long, short = (
        a_request(0, lane="long", prompt_tokens=65_536, output_tokens=1),
        a_request(1, 10.0, lane="short", prompt_tokens=1024, output_tokens=1),
    )
    world = a_world(long, short, profile=REFERENCE)
    world.run(Told(world))
    assert measure(world).jain_index == pytest.approx(1.0, abs=1e-3)


# ---- prefixes ------------------------------------------------------------------------------------


def test_a_prefix_switches_where_it_goes_elsewhere_than_the_last_time() -> None:
    """0, 0, 1, 1, 0: two of the four that followed another went elsewhere."""
    world = followed(*(((1, 2), host) for host in (0, 0, 1, 1, 0)))
    assert measure(world).prefix_switch_ratio == pytest.approx(2 / 4)


def test_the_deepest_prefix_seen_before_counts() -> None:
    """A longer conversation is followed by its own last turn, not by others on its beginning."""
    world = followed(((1, 2), 0), ((1, 2, 3), 1), ((1, 2, 4), 0), ((1, 2, 3, 5), 1))
    # 2nd: switches. 3rd: its beginning was at 1 last, switches. 4th: its turn was at 1, stays.
    assert measure(world).prefix_switch_ratio == pytest.approx(2 / 3)


def test_a_short_beginning_is_nobodys_prefix() -> None:
    """Under 1,000 tokens nothing is followed, and what has no blocks neither."""
    world = followed(((1,), 0), ((1,), 1), ((), 0), ((), 1))
    figures = measure(world)
    assert (figures.prefix_switch_ratio, figures.hot_switch_ratio) == (0.0, 0.0)


def test_the_hot_tenth_is_what_is_asked_for_most() -> None:
    """Of ten prefixes the one of six requests that never moves; the others always do."""
    hot = [((100, 101), 0)] * 6
    cold = [((10 * n, 10 * n + 1), host) for n in range(1, 10) for host in (0, 1)]
    figures = measure(followed(*hot, *cold))
    assert figures.hot_switch_ratio == 0.0
    assert figures.prefix_switch_ratio == pytest.approx(9 / 14)


# ---- caches --------------------------------------------------------------------------------------


def caching(world: World, host: int, *blocks: int) -> None:
    """Let an engine compute a prompt of these blocks."""
    world.hosts[host].model.submit(
        SequenceRequest(
            request_id=f"{blocks}",
            prompt_tokens=100 * len(blocks) + 1,
            output_tokens=1,
            blocks=blocks,
            block_tokens=100,
        ),
        0.0,
    )
    world.hosts[host].model.advance(1.0)


def test_duplicates_are_the_share_of_blocks_with_a_copy_elsewhere() -> None:
    """Blocks 1, 2, 3 here and 2, 3, 4 there: four of six cached blocks have a copy."""
    world = a_world(a_request(0), workers=3)
    caching(world, 0, 1, 2, 3)
    caching(world, 1, 2, 3, 4)
    sampler = CacheSampler(world, until_s=40.0)
    world.run_until(40.0)
    assert sampler.duplicate_ratio == pytest.approx(4 / 6)


def test_duplicates_are_averaged_over_samples_of_what_is_cached() -> None:
    """Nothing cached is no sample; before the copy 0, after it 1, each half of the time."""
    world = a_world(a_request(0), workers=2)
    sampler = CacheSampler(world, until_s=40.0)
    assert sampler.duplicate_ratio == 0.0
    world.call_at(20.5, lambda _: caching(world, 0, 1))
    world.call_at(30.5, lambda _: caching(world, 1, 1))
    world.run_until(40.0)
    assert sampler.duplicate_ratio == pytest.approx(10 / 20)


def dipped(*requests: tuple[float, int], changes: tuple[FleetChange, ...]) -> float:
    """Return the dip where first tokens came at these instants with these cached tokens of 100."""
    made: list[Request] = [a_request(n, at_s - 0.1) for n, (at_s, _) in enumerate(requests)]
    world = a_world(*made, changes=changes)
    for index, (at_s, cached_tokens) in enumerate(requests):
        written(world, index, first_s=at_s, ended_s=at_s + 1, cached_tokens=cached_tokens)
    return measure(world).hit_dip


def test_a_dip_is_what_is_cached_less_after_a_change_than_before() -> None:
    """0.8 and 0.6 before, 0.1 after: 0.6 less. Beyond a minute nothing counts."""
    joins = (FleetChange(at_s=100.0, change=Change.JOIN),)
    near = ((90.0, 80), (99.0, 60), (100.0, 10))
    assert dipped(*near, changes=joins) == pytest.approx(0.7 - 0.1)
    far = ((100.0 - DIP_WINDOW_S, 0), *near, (100.0 + DIP_WINDOW_S, 100))
    assert dipped(*far, changes=joins) == pytest.approx(0.7 - 0.1)


def test_dips_are_averaged_over_changes_that_have_both_sides() -> None:
    """0.5 and 0.1 make 0.3; a change that nothing precedes doesn't count, nor does a drain."""
    seen = ((190.0, 50), (210.0, 0), (390.0, 20), (410.0, 10))
    changes = tuple(
        FleetChange(at_s=at_s, change=change)
        for at_s, change in (
            (0.0, Change.JOIN),
            (200.0, Change.RESTART),
            (400.0, Change.LOSE),
            (405.0, Change.DRAIN),
        )
    )
    assert dipped(*seen, changes=changes) == pytest.approx(0.3)
    assert dipped(*seen, changes=()) == 0.0
