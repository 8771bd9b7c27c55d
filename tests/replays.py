"""Builds logs of simulated days: what a broker would have logged of a run whose truth is known."""

import random
from array import array
from collections.abc import Sequence

from msgspec.structs import replace

from broker.core.policy import LanePolicy, Policy, QuotaRow, RoutingPolicy
from broker.engine_model.profile import Curve, Profile
from broker.sim.decisions import LoggedJob
from broker.sim.mind import MODEL, MindRouter
from broker.sim.request import Request
from broker.sim.world import World
from broker.wire.prefix import pack_hashes

START_S = 1_000_000.0
BLOCK_TOKENS = 512

ENGINE = Profile(
    name="truth",
    source="chosen",
    slots=16,
    step_tokens_max=4096,
    kv_tokens_max=20_000,
    block_tokens=512,
    prefill_s=Curve(5e-3, 1.5e-4, 0.0),
    decode_s=Curve(12e-3, 8e-3, 0.0),
)
LANES = (LanePolicy(name="acme"), LanePolicy(name="bolt"))
IN_TURN = Policy(models=(MODEL,), lanes=LANES, routing=RoutingPolicy(policy="round_robin"))
TIGHT = Policy(
    models=("tiny",),
    lanes=LANES,
    quotas=(QuotaRow(lane="acme", inflight_jobs_max=1, queued_jobs_max=1),),
)


def some_requests(
    count: int,
    *,
    per_s: float = 4.0,
    systems: int = 12,
    blocks: int = 3,
    lanes: Sequence[str] = ("acme", "bolt"),
) -> list[Request]:
    """Prompts with one of `systems` beginnings of `blocks` blocks, and a block and a half alone."""
    rng = random.Random(11)
    at_s = 0.0
    made: list[Request] = []
    for index in range(count):
        at_s += rng.expovariate(per_s)
        system = rng.randrange(systems)
        shared = range(100 * (system + 1), 100 * (system + 1) + blocks)
        made.append(
            Request(
                index=index,
                at_s=at_s,
                prompt_tokens=BLOCK_TOKENS * (blocks + 1) + rng.randrange(BLOCK_TOKENS),
                output_tokens=rng.randint(8, 60),
                output_tokens_max=64,
                blocks=(*shared, 1_000_000 + index),
                block_tokens=BLOCK_TOKENS,
                lane=lanes[index % len(lanes)],
            )
        )
    return made


def a_logged_day(
    requests: Sequence[Request], profile: Profile, *, workers: int = 2, policy: Policy | None = None
) -> list[LoggedJob]:
    """Run requests under our mind, and log them as the broker does."""
    lanes = tuple(LanePolicy(name=lane) for lane in sorted({one.lane for one in requests}))
    ran = policy or Policy(models=(MODEL,), lanes=lanes)
    world = World(requests, profiles=(profile,) * workers, journal=True)
    world.run(MindRouter(world, ran, seed=1))
    return [_logged(world, request, ran) for request in requests]


def _logged(world: World, request: Request, policy: Policy) -> LoggedJob:
    records, index = world.records, request.index
    came_s, given_s, ended_s = (
        column[index] for column in (records.arrived_s, records.given_s, records.ended_s)
    )
    asked = LoggedJob(
        key=f"{request.lane}.j{index}",
        lane=request.lane,
        band=request.band,
        model="tiny",
        enqueued_at_s=START_S + came_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens_max=request.output_tokens_max,
        prompt_blocks=8 * len(request.blocks),
        has_prefix=True,
        packed_blocks=pack_hashes(array("Q", request.blocks)),
        dispatches=0,
        ended_at_s=START_S + ended_s,
        kind="rejected",
        reason="queue_full",
        row="all",
    )
    if records.refused[index]:
        return asked
    return replace(
        asked,
        dispatched_at_s=START_S + given_s,
        queue_s=given_s - came_s,
        dispatches=records.attempts[index],
        policy=policy.routing.policy,
        worker=f"w{records.host[index]}",
        kind="completed",
        reason="",
        row="",
        counted_prompt_tokens=request.prompt_tokens,
        cached_tokens=records.cached_tokens[index],
        output_tokens=request.output_tokens,
        ttft_s=records.first_token_s[index] - came_s,
        run_s=ended_s - given_s,
    )
