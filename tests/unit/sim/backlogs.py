"""Backlogs and lanes on modelled engines: what isolation is measured with, small and full size."""

import random
from collections.abc import Callable, Iterable
from itertools import pairwise

from broker.core.policy import DEFAULT_BANDS, BandPolicy, LanePolicy, Policy, QuotaRow
from broker.engine_model.profile import DEMO
from broker.sim.mind import MODEL, MindRouter
from broker.sim.request import Request
from broker.sim.world import World

Row = tuple[float, str, int, int, int]
"""At (s), lane, band, prompt and output tokens."""


def jobs(
    rng: random.Random,
    *,
    count: int,
    per_s: float = 0.0,
    band: int = 1,
    lane: str = "main",
    prompt_tokens: int = 500,
    output_tokens: int = 150,
) -> list[Row]:
    """Draw jobs that come at random, or (`per_s` 0) all at once; sizes vary by half."""
    at_s, rows = 0.0, list[Row]()
    for _ in range(count):
        at_s += rng.expovariate(per_s) if per_s else 0.0
        prompt = rng.randint(prompt_tokens // 2, prompt_tokens * 3 // 2)
        output = rng.randint(output_tokens // 2, output_tokens * 3 // 2)
        rows.append((at_s, lane, band, prompt, output))
    return rows


def a_world(rows: Iterable[Row], *, workers: int) -> World:
    """Engines of the `demo` profile, and requests without anything in common."""
    requests = [
        Request(
            index=index,
            at_s=at_s,
            lane=lane,
            band=band,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            output_tokens_max=1024,
            blocks=(),
            block_tokens=DEMO.block_tokens,
        )
        for index, (at_s, lane, band, prompt_tokens, output_tokens) in enumerate(sorted(rows))
    ]
    return World(requests, profiles=[DEMO] * workers, journal=True)


def under(world: World, *quotas: QuotaRow, lanes: tuple[str, ...] = ("main",)) -> MindRouter:
    """Run a world under the shipped policy, without longest waits."""
    patient = [
        BandPolicy(guaranteed_share=b.guaranteed_share, aging_s=b.aging_s) for b in DEFAULT_BANDS
    ]
    policy = Policy(
        models=(MODEL,),
        lanes=tuple(LanePolicy(name=lane) for lane in lanes),
        bands=(patient[0], patient[1], patient[2], patient[3]),
        quotas=quotas,
    )
    router = MindRouter(world, policy, seed=1)
    world.run(router)
    return router


def p99(values: Iterable[float]) -> float:
    """Return the 99th percentile."""
    ordered = sorted(values)
    return ordered[int(0.99 * len(ordered))]


def waits_s(world: World, of: Callable[[Request], bool]) -> list[float]:
    """List how long requests waited until they were given to an engine."""
    records = world.records
    chosen = [request.index for request in world.requests if of(request)]
    return [records.given_s[index] - records.arrived_s[index] for index in chosen]


def residual_s(world: World, *, begin_s: float, end_s: float) -> float:
    """Return the time in which a slot frees in 99 % of cases, by how jobs were given in between."""
    given_s = sorted(at_s for at_s in world.records.given_s if begin_s < at_s < end_s)
    assert given_s[-1] > end_s - 1.0, "the backlog must last"
    return p99(later - earlier for earlier, later in pairwise(given_s))


def work_while_both_wait(world: World, lanes: tuple[str, str]) -> dict[str, int]:
    """Sum the weighted tokens given to two lanes until the first of them has nothing left."""
    records = world.records
    last_s = {
        lane: max(records.given_s[r.index] for r in world.requests if r.lane == lane)
        for lane in lanes
    }
    until_s = min(last_s.values())
    return {
        lane: sum(
            r.prompt_tokens + 2 * r.output_tokens
            for r in world.requests
            if r.lane == lane and records.given_s[r.index] <= until_s
        )
        for lane in lanes
    }
