"""Overloaded clusters in which waits are long, for the measurement of wait estimates.

Arrivals are Poisson, in phases: most loads swing between under and over what the cluster can do, so
that queues grow and shrink. Fleets are bound by slots, by KV cache or by prefill. In two scenarios,
told apart by `IN_WAVES`, what goes before the jobs that wait swings itself by more than twice every
40 s: no estimate can know that, and they show what is lost then.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import replace as replaced
from itertools import takewhile

from msgspec import Struct

from broker.core.policy import BandPolicy, LanePolicy, Policy, QuotaRow
from broker.engine_model.profile import A100_QWEN_32B, DEMO, REFERENCE, Profile
from broker.sim.mind import MODEL
from broker.sim.request import Request
from broker.sim.runs import Setting
from broker.sim.workload.arrivals import Popularity, around, poisson
from broker.sim.workload.assembly import assembled
from broker.sim.workload.prefixes import BLOCK_TOKENS, Prefix
from broker.sim.world import Change, FleetChange

NO_LONGEST_WAITS = (
    BandPolicy(guaranteed_share=0.0),
    BandPolicy(guaranteed_share=0.20),
    BandPolicy(guaranteed_share=0.10, aging_s=60.0),
    BandPolicy(guaranteed_share=0.05),
)
"""As they ship, but nobody gives up: all waits are measured."""

OUTPUT_TOKENS_MAX = 2048
"""What every sender allows: far more than most use."""

IN_WAVES = ("lanes, in waves", "bands, in waves")

SLOTS = replaced(DEMO, kv_tokens_max=32 * 2304)
"""Six slots, and KV cache for all of them and 26 prompts: bound by slots."""

PREFILL = replaced(REFERENCE, block_tokens=BLOCK_TOKENS)
"""256 slots and a large KV cache: bound by prefill."""

KV_CACHE = replaced(A100_QWEN_32B, block_tokens=BLOCK_TOKENS)
"""256 slots and 39,200 tokens: bound by KV cache."""


class Phase(Struct, frozen=True):
    """A time of a steady rate."""

    for_s: float
    requests_per_s: float


class LaneLoad(Struct, frozen=True, kw_only=True):
    """What one lane sends in one band."""

    phases: tuple[Phase, ...]
    lane: str = "main"
    band: int = 1
    prompts: int = 0
    """Shared beginnings, by Zipf's law; 0: nothing is shared, and the question is all."""
    prompt_tokens: int = 2000
    question_tokens: int = 200
    output_tokens: int = 200
    tail: float = 0.0
    """Sigma of a lognormal output; 0: uniform within half of the mean around it."""


class Overload(Struct, frozen=True, kw_only=True):
    """A scenario."""

    name: str
    loads: tuple[LaneLoad, ...]
    setting: Setting
    quotas: tuple[QuotaRow, ...] = ()
    weights: tuple[tuple[str, float], ...] = ()
    """Of lanes; 1 where nothing is said."""

    def policy(self) -> Policy:
        """Return the mind's policy."""
        weights = dict(self.weights)
        lanes = sorted({load.lane for load in self.loads})
        return Policy(
            models=(MODEL,),
            lanes=tuple(LanePolicy(name=lane, weight=weights.get(lane, 1.0)) for lane in lanes),
            quotas=self.quotas,
            bands=NO_LONGEST_WAITS,
        )

    def requests(self, seed: int, *, until_s: float = math.inf) -> list[Request]:
        """Return what is sent, all of it or until then."""
        rng, root = random.Random(seed), Prefix()
        sent = [
            request
            for number, load in enumerate(self.loads)
            for request in _sent(load, rng, root.then(number, 0))
            if request.at_s < until_s
        ]
        return list(assembled(sent, name=self.name, source="generated").requests)


def _sent(load: LaneLoad, rng: random.Random, root: Prefix) -> Iterator[Request]:
    popular = Popularity(load.prompts, zipf=1.0) if load.prompts else None
    tokens = load.question_tokens if popular else load.prompt_tokens + load.question_tokens
    for at_s in _arrivals(rng, load.phases):
        prefix = root.then(popular.one(rng), load.prompt_tokens) if popular else root
        prompt = prefix.alone(around(rng, tokens))
        yield Request(
            index=0,
            at_s=at_s,
            prompt_tokens=prompt.tokens,
            output_tokens=_output_tokens(rng, load),
            output_tokens_max=OUTPUT_TOKENS_MAX,
            blocks=prompt.blocks,
            block_tokens=BLOCK_TOKENS,
            lane=load.lane,
            band=load.band,
        )


def _output_tokens(rng: random.Random, load: LaneLoad) -> int:
    if not load.tail:
        return around(rng, load.output_tokens)
    drawn = rng.lognormvariate(0.0, load.tail) * load.output_tokens
    return min(OUTPUT_TOKENS_MAX, max(1, round(drawn)))


def _arrivals(rng: random.Random, phases: tuple[Phase, ...]) -> Iterator[float]:
    start_s = 0.0
    for phase in phases:
        end_s = start_s + phase.for_s
        if phase.requests_per_s:
            every = poisson(rng, requests_per_s=phase.requests_per_s, start_s=start_s)
            yield from takewhile(end_s.__gt__, every)
        start_s = end_s


# ---- loads and fleets ----------------------------------------------------------------------------


def _waves(low: float, high: float) -> tuple[Phase, ...]:
    return (Phase(40.0, low), Phase(40.0, high)) * 3 + (Phase(40.0, low),)


def _steady(requests_per_s: float) -> tuple[Phase, ...]:
    return (Phase(280.0, requests_per_s),)


def _fleet(profile: Profile, workers: int = 8, *changes: FleetChange) -> Setting:
    return Setting(profiles=(profile,) * workers, changes=changes)


def lose_half(at_s: float, workers: int) -> tuple[FleetChange, ...]:
    """Let half of so many workers go at once, as a rack does."""
    return tuple(
        FleetChange(at_s=at_s, change=Change.LOSE, host=host) for host in range(workers // 2)
    )


def _join(at_s: float, workers: int) -> tuple[FleetChange, ...]:
    return (FleetChange(at_s=at_s, change=Change.JOIN),) * workers


# ---- scenarios -----------------------------------------------------------------------------------


def scenarios() -> dict[str, Overload]:
    """Return all, by name."""
    every = (*_one_lane(), *_lanes(), *_bands(), *_quotas(), *_fleets_that_change())
    return {one.name: one for one in every}


def _one_lane() -> Iterator[Overload]:
    slots = _fleet(SLOTS)
    yield Overload(name="slots", setting=slots, loads=(LaneLoad(phases=_waves(4, 18)),))
    yield Overload(
        name="prefill",
        setting=_fleet(PREFILL, 2),
        loads=(LaneLoad(phases=_waves(5, 13), prompt_tokens=8000, output_tokens=100),),
    )
    yield Overload(
        name="KV cache",
        setting=_fleet(KV_CACHE),
        loads=(LaneLoad(phases=_waves(2, 8), output_tokens=400),),
    )
    yield Overload(
        name="heavy tail",
        setting=slots,
        loads=(LaneLoad(phases=_waves(3, 13), output_tokens=150, tail=1.3),),
    )
    yield Overload(
        name="cache hits",
        setting=slots,
        loads=(LaneLoad(phases=_waves(20, 75), prompts=20, output_tokens=60),),
    )
    bursts = (Phase(25.0, 5.0), Phase(5.0, 45.0)) * 8
    yield Overload(name="bursts", setting=slots, loads=(LaneLoad(phases=bursts),))


def _lanes() -> Iterator[Overload]:
    slots = _fleet(SLOTS)
    yield Overload(
        name="lanes",
        setting=slots,
        weights=(("gold", 3.0),),
        loads=(
            LaneLoad(lane="gold", phases=_steady(4)),
            LaneLoad(lane="silver", phases=_waves(2, 9)),
            LaneLoad(lane="light", phases=_steady(2), output_tokens=50),
        ),
    )
    yield Overload(
        name="ten lanes",
        setting=slots,
        weights=(("lane-0", 4.0), ("lane-1", 2.0)),
        loads=tuple(
            LaneLoad(lane=f"lane-{n}", phases=_waves(0.4, 0.4 + 0.25 * n)) for n in range(10)
        ),
    )
    yield Overload(
        name="short and long",
        setting=slots,
        loads=(
            LaneLoad(lane="short", phases=_waves(8, 35), prompt_tokens=300, output_tokens=40),
            LaneLoad(lane="long", phases=_waves(0.5, 2), prompt_tokens=6000, output_tokens=500),
        ),
    )
    yield Overload(
        name="lanes, in waves",
        setting=slots,
        weights=(("gold", 3.0),),
        loads=(
            LaneLoad(lane="gold", phases=_waves(3, 10)),
            LaneLoad(lane="silver", phases=_waves(3, 8)),
        ),
    )


def _bands() -> Iterator[Overload]:
    slots = _fleet(SLOTS)
    yield Overload(
        name="bands",
        setting=slots,
        loads=(
            LaneLoad(lane="people", phases=_steady(5), output_tokens=150),
            LaneLoad(lane="crowd", band=2, phases=_waves(2, 11)),
        ),
    )
    yield Overload(
        name="batch below",
        setting=slots,
        loads=(
            LaneLoad(lane="people", phases=_waves(4, 18), output_tokens=150),
            LaneLoad(lane="night", band=3, phases=(Phase(20.0, 0.0), Phase(1.0, 300.0))),
        ),
    )
    yield Overload(
        name="bands, in waves",
        setting=slots,
        loads=(
            LaneLoad(lane="people", phases=_waves(3, 8), output_tokens=150),
            LaneLoad(lane="crowd", band=2, phases=_waves(3, 10)),
        ),
    )


def _quotas() -> Iterator[Overload]:
    slots = _fleet(SLOTS)
    yield Overload(
        name="quota of jobs",
        setting=slots,
        quotas=(QuotaRow(lane="held", inflight_jobs_max=10),),
        loads=(
            LaneLoad(lane="held", phases=_waves(1, 4)),
            LaneLoad(lane="free", phases=_waves(4, 14)),
        ),
    )
    yield Overload(
        name="quota of tokens",
        setting=slots,
        quotas=(QuotaRow(lane="held", tokens_per_min=600_000),),
        loads=(
            LaneLoad(lane="held", phases=_waves(2, 6)),
            LaneLoad(lane="free", phases=_waves(4, 11)),
        ),
    )


def _fleets_that_change() -> Iterator[Overload]:
    yield Overload(
        name="half lost",
        setting=_fleet(SLOTS, 8, *lose_half(40.0, 8)),
        loads=(LaneLoad(phases=(Phase(40.0, 17.0), Phase(60.0, 4.0), Phase(40.0, 9.0))),),
    )
    yield Overload(
        name="half lost, prefill",
        setting=_fleet(PREFILL, 4, *lose_half(40.0, 4)),
        loads=(
            LaneLoad(
                phases=(Phase(40.0, 24.0), Phase(40.0, 7.0), Phase(40.0, 13.0)),
                prompt_tokens=8000,
                output_tokens=100,
            ),
        ),
    )
    yield Overload(
        name="workers join",
        setting=_fleet(SLOTS, 4, *_join(60.0, 4)),
        loads=(LaneLoad(phases=(Phase(120.0, 11.0),)),),
    )
