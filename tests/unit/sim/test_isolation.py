"""What one band's backlog, or one lane's, may cost the others: the mind on modelled engines."""

import random

import pytest

from broker.core.lanes import DEBT_TOKENS_MAX
from broker.core.policy import BandPolicy, LanePolicy, OrderPolicy, Policy, QuotaRow
from broker.engine_model.profile import DEMO
from broker.sim.mind import MODEL, MindRouter
from broker.sim.request import Request
from tests.unit.sim.backlogs import (
    a_world,
    jobs,
    p99,
    residual_s,
    under,
    waits_s,
    work_while_both_wait,
)

WORKERS = 4
CAPACITY_JOBS_S = 10.0
"""What four `demo` engines do of the jobs below, 500 tokens in and 150 out."""

BEGUN_S = 5.0
"""The backlog comes first, to an idle fleet: those who come next wait for its first jobs to end."""


def is_later_person(request: Request) -> bool:
    """Say whether somebody came when both loads were under way."""
    return request.band == 1 and request.at_s > BEGUN_S


@pytest.mark.parametrize(("band", "count"), [(2, 700), (3, 700)])
def test_a_backlog_costs_people_no_more_than_a_slot_that_frees(band: int, count: int) -> None:
    """Interactive at half of the capacity, behind it a backlog that takes all the rest: their p99
    wait is at most 1.2 times that of an empty queue, and the time in which a slot frees.
    """
    people = jobs(random.Random(2), count=250, per_s=CAPACITY_JOBS_S / 2)
    calm = a_world(people, workers=WORKERS)
    under(calm)
    world = a_world([*people, *jobs(random.Random(3), count=count, band=band)], workers=WORKERS)
    under(world)
    frees_s = residual_s(world, begin_s=BEGUN_S, end_s=people[-1][0])
    empty_s = p99(waits_s(calm, is_later_person))
    assert p99(waits_s(world, is_later_person)) <= 1.2 * empty_s + frees_s


def test_a_lane_at_20_times_its_quota_leaves_another_s_wait_as_it_is() -> None:
    """Its jobs wait behind its own row: the other lane's p99 wait moves by less than a tenth."""
    row = QuotaRow(lane="greedy", inflight_jobs_max=3)
    other = jobs(random.Random(2), count=250, per_s=CAPACITY_JOBS_S / 2, lane="other")
    rate = CAPACITY_JOBS_S * 3 / (WORKERS * DEMO.slots)
    p99_s: list[float] = []
    for times in (1, 20):
        count = round(50 * rate * times)
        greedy = jobs(random.Random(4), count=count, per_s=rate * times, lane="greedy")
        world = a_world([*other, *greedy], workers=WORKERS)
        under(world, row, lanes=("greedy", "other"))
        p99_s.append(p99(waits_s(world, lambda request: request.lane == "other")))
    assert p99_s[1] == pytest.approx(p99_s[0], rel=0.1)


@pytest.mark.parametrize("seed", [1, 2])
def test_case_18_short_against_long_jobs_is_half_and_half_in_work(seed: int) -> None:
    """While both lanes wait, their work differs by no more than the published bound, and that is
    little of it all, though long jobs often find no room where short ones do.
    """
    short = jobs(
        random.Random(seed), count=700, band=2, lane="short", prompt_tokens=100, output_tokens=20
    )
    long = jobs(
        random.Random(-seed), count=80, band=2, lane="long", prompt_tokens=1500, output_tokens=400
    )
    world = a_world([*short, *long], workers=WORKERS)
    router = under(world, lanes=("short", "long"))
    work = work_while_both_wait(world, ("short", "long"))
    (pool,) = router.scheduler.views.pools()
    apart = abs(work["short"] - work["long"])
    assert apart <= pool.fairness_bound
    assert apart <= 0.1 * sum(work.values())


def test_what_never_fits_banks_a_bounded_debt() -> None:
    """Jobs that need a whole engine wait while small ones fill every gap; when those end, the lane
    is behind by no more than it may be.
    """
    small = jobs(random.Random(1), count=900, band=2, lane="small")
    huge = [(0.0, "huge", 2, 12_500, 10)] * 20
    world = a_world([*small, *huge], workers=1)
    gaps: list[float] = []
    bounds: list[float] = []
    router: list[MindRouter] = []

    def look(at_s: float) -> None:
        if router:
            (pool,) = router[0].scheduler.views.pools()
            gaps.append(pool.fairness_gap)
            bounds.append(pool.fairness_bound)
        world.call_at(at_s + 1.0, look) if world.open else None

    free = BandPolicy(guaranteed_share=0.0)
    policy = Policy(
        models=(MODEL,),
        lanes=(LanePolicy(name="small"), LanePolicy(name="huge")),
        bands=(free, free, free, free),
    )
    world.call_at(1.0, look)
    router.append(MindRouter(world, policy, seed=1))
    world.run(router[0])
    slack = OrderPolicy().lane_slack_tokens
    assert max(gaps) > 2 * slack
    assert max(gaps) <= DEBT_TOKENS_MAX + slack + 16_384
    assert all(gap <= bound for gap, bound in zip(gaps, bounds, strict=True))
