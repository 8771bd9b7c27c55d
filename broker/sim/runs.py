"""One run: a workload under one contestant, in a setting; and what it came to."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import xxhash
from msgspec import Struct

from broker.engine_model.profile import REFERENCE, Profile
from broker.sim.contestants import Contestant, run_world
from broker.sim.errors import SimError
from broker.sim.figures import Figures, spread
from broker.sim.measure import CacheSampler, measure
from broker.sim.mind import NETWORK, Network, Timer
from broker.sim.records import Records
from broker.sim.request import SPAN_S_MAX, Request, Workload
from broker.sim.workload.shaping import scaled
from broker.sim.world import FleetChange, World

JITTER = 0.1
"""Each seed draws every gap between arrivals anew, within this share of it."""

PROGRESS_S = 1.0
"""Simulated time between two reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the number of requests that ended, and of all."""


class Setting(Struct, frozen=True, kw_only=True):
    """Where a workload runs."""

    workers: int = 8
    blocks_per_worker: int = 2000
    """KV cache of each, in blocks of the profile (512 tokens for `reference`)."""
    speed: float = 1.0
    """How much faster than recorded the requests arrive."""
    profile: Profile = REFERENCE
    profiles: tuple[Profile, ...] = ()
    """Of workers that differ, instead of `workers` alike; their caches are their own."""
    network: Network = NETWORK
    changes: tuple[FleetChange, ...] = ()
    """What happens to the fleet, in seconds of the simulation."""

    def fleet(self) -> tuple[Profile, ...]:
        """Return the profile of each worker."""
        if self.profiles:
            return self.profiles
        kv_tokens_max = self.blocks_per_worker * self.profile.block_tokens
        return (replace(self.profile, kv_tokens_max=kv_tokens_max),) * self.workers


class Outcome(Struct, frozen=True, kw_only=True):
    """What a run came to."""

    figures: Figures
    digest: str
    """Of all that happened to each request: equal runs have equal ones."""


def run(
    workload: Workload,
    contestant: Contestant,
    setting: Setting,
    *,
    seed: int = 0,
    timer: Timer | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Run it. Seed 0 takes the arrivals as recorded, any other jitters them.

    Raises SimError when a request fits no worker.
    """
    jitter = JITTER if seed else 0.0
    shaped = scaled(workload, rng=random.Random(seed), speed=setting.speed, jitter=jitter)
    fleet = setting.fleet()
    last_at_s, lanes = _survey(shaped, kv_tokens_max=min(one.kv_tokens_max for one in fleet))
    world = World(
        shaped.requests, profiles=fleet, changes=setting.changes, journal=contestant.is_ours
    )
    sampler = CacheSampler(world, until_s=last_at_s)
    if progress is not None:
        report_progress(world, progress)
    step_s = run_world(
        world, contestant, lanes=lanes, seed=seed, network=setting.network, timer=timer
    )
    figures = measure(
        world,
        duplicate_kv_ratio=sampler.duplicate_ratio,
        decision_s=spread(step_s) if step_s else None,
    )
    return Outcome(figures=figures, digest=digest(world.records))


def digest(records: Records) -> str:
    """Return a hash over all that happened."""
    seen = xxhash.xxh3_64()
    for column in (records.given_s, records.first_token_s, records.ended_s, records.host):
        seen.update(column.tobytes())
    return seen.hexdigest()


def _survey(workload: Workload, *, kv_tokens_max: int) -> tuple[float, Sequence[str]]:
    """Return the last arrival that is known, and the lanes.

    Raises SimError for a request that fits no worker, or comes too late.
    """
    last_at_s = 0.0
    lanes: dict[str, None] = {}
    for request in workload.requests:
        tokens = request.prompt_tokens + request.output_tokens
        if tokens > kv_tokens_max:
            message = (
                f"request {request.index} of {workload.name} needs {tokens} tokens of KV cache, "
                f"and a worker has {kv_tokens_max}: give it more blocks (--blocks-per-worker)"
            )
            raise SimError(message)
        if request.at_s > SPAN_S_MAX:
            raise SimError(_too_late(workload, request))
        lanes[request.lane] = None
        if request.after is None:
            last_at_s = request.at_s
    return last_at_s, sorted(lanes)


def _too_late(workload: Workload, request: Request) -> str:
    before = "the first" if request.after is None else "the end of the turn before it"
    return (
        f"request {request.index} of {workload.name} comes {request.at_s / 86_400:,.0f} days after "
        f"{before}, and a run has {SPAN_S_MAX / 86_400:.0f} at most: timestamps and delays of a "
        "trace are in ms (or give a larger --speed)"
    )


def report_progress(world: World, progress: Progress) -> None:
    """Let a world report as it runs, each simulated second."""
    requests = len(world.requests)

    def look(at_s: float) -> None:
        progress(world.ended_count, requests)
        world.call_at(at_s + PROGRESS_S, look)

    world.call_at(0.0, look)
