"""Chats beside a batch sweep, under the mind as it ships but for what a case names."""

import random
from dataclasses import dataclass
from statistics import fmean

from msgspec.structs import replace

from broker.core.policy import LanePolicy, Policy, RoutingPolicy
from broker.engine_model.profile import H100X2_LLAMA_70B, Profile
from broker.sim.contestants import contestant
from broker.sim.figures import Spread, spread
from broker.sim.mind import MODEL, MindRouter
from broker.sim.request import Request
from broker.sim.workload.chats import SWEEP_LANE, Habits, Sweep, chats
from broker.sim.world import World
from broker.wire.ids import BATCH_BAND

LINES_PER_WORKER_S = 10
"""More than any engine here can do, so that the sweep outlasts the measurement."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What people and batch got in the time that is measured."""

    turns: int
    cached_ratio: float
    """Of people's prompt tokens."""
    ttft_s: Spread
    """People's."""
    e2e_s_mean: float
    batch_tokens_s: float
    """Prompt tokens of lines that ended."""


def beside(
    *,
    share: float,
    users: int,
    workers: int,
    strands: int,
    think_s: float = 30.0,
    seed: int = 1,
    span_s: tuple[float, float] = (200.0, 600.0),
    profile: Profile = H100X2_LLAMA_70B,
    routing: RoutingPolicy | None = None,
) -> Beside:
    """Run chats and a sweep until the end of a span; what comes before it warms the caches up."""
    _, until_s = span_s
    sweep = Sweep(strands=strands, lines=round(until_s) * LINES_PER_WORKER_S * workers)
    asked = chats(
        random.Random(seed), Habits(users=users, think_s=think_s), sweep, duration_s=until_s
    )
    world = World(asked.requests, profiles=(profile,) * workers, journal=True)
    world.begin(MindRouter(world, a_policy(share, routing or RoutingPolicy()), seed=seed))
    world.run_until(until_s)
    return _measured(world, *span_s)


def a_policy(share: float, routing: RoutingPolicy) -> Policy:
    """The policy that the simulator compares with others, at a share of workers for batch."""
    shipped = contestant("first_token").policy
    assert shipped is not None
    return replace(
        shipped,
        models=(MODEL,),
        lanes=(LanePolicy(name="main"), LanePolicy(name=SWEEP_LANE)),
        routing=replace(routing, batch_cache_share=share),
    )


def _measured(world: World, from_s: float, until_s: float) -> Beside:
    records = world.records

    def ended_in_time(request: Request) -> bool:
        arrived_s, ended_s = records.arrived_s[request.index], records.ended_s[request.index]
        since_s = ended_s if request.band == BATCH_BAND else arrived_s
        return from_s <= since_s and 0 <= ended_s <= until_s

    ended = [request for request in world.requests if ended_in_time(request)]
    turns = [request for request in ended if request.band != BATCH_BAND]
    lines = [request for request in ended if request.band == BATCH_BAND]
    cached = sum(records.cached_tokens[turn.index] for turn in turns)
    arrived_s = [records.arrived_s[turn.index] for turn in turns]
    first_s = [records.first_token_s[turn.index] for turn in turns]
    ended_s = [records.ended_s[turn.index] for turn in turns]
    return Beside(
        turns=len(turns),
        cached_ratio=cached / sum(turn.prompt_tokens for turn in turns),
        ttft_s=spread(first - at for first, at in zip(first_s, arrived_s, strict=True)),
        e2e_s_mean=fmean(end - at for end, at in zip(ended_s, arrived_s, strict=True)),
        batch_tokens_s=sum(line.prompt_tokens for line in lines) / (until_s - from_s),
    )
