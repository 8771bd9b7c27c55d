"""A scenario of the fuzz, drawn from its seed: workload, fleet, policy, and what goes wrong.

Times are short (a lease of under a second, requests of some hundred milliseconds), so that a run of
half a minute of virtual time goes through every silence, back-off and takeover many times.
"""

import random
from collections.abc import Mapping
from enum import StrEnum
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from broker.core.policy import (
    BandPolicy,
    BreakerPolicy,
    LanePolicy,
    LeasePolicy,
    OrderPolicy,
    Policy,
    PolicyName,
    QuotaRow,
    RoutingPolicy,
)
from broker.engine_model.profile import Curve, Profile
from broker.sim.mind import MODEL, Terms
from broker.sim.network import Network
from broker.sim.request import Request

BLOCK_TOKENS = 64
PROMPT_TOKENS_MAX = 1536
OUTPUT_TOKENS_MAX = 256
SEQUENCE_TOKENS_MAX = PROMPT_TOKENS_MAX + OUTPUT_TOKENS_MAX
"""Every worker holds one such request at least: what fits nowhere is the caller's error."""

LANES = ("acme", "beta", "crawl")
ADAPTERS = ("law", "med")
LAST_WISH_S = 12.0
"""Requests come, and things go wrong, within this time."""

REQUESTS_MAX = 70
WORKERS_MAX = 5
FAULTS_MAX = 9
SPELLS_MAX = 3
"""Spells of sickness."""


class FaultKind(StrEnum):
    """What goes wrong, or is done, at an instant."""

    JOIN = "join"
    LOSE = "lose"
    RESTART = "restart"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    ENGINE = "engine"
    """The engine dies under its agent and starts anew."""
    CUT = "cut"
    """Nothing passes between broker and worker for a while."""
    LINK = "link"
    """The broker's own link is down for a while."""
    LEADER = "leader"
    """The leader dies; another takes over soon, while much still runs. Drawn most: what a new
    leader finds is what it can least know beforehand."""
    SICK = "sick"
    """For a while an engine answers each request with an error, at once. Drawn apart."""


class Fault(Struct, frozen=True, kw_only=True):
    """One of them."""

    at_s: float
    kind: FaultKind
    host: int = 0
    """Counted over the workers there are then, round and round."""
    for_s: float = 0.0
    profile: Profile | None = None
    """Of one that joins."""


class Scenario(Struct, frozen=True, kw_only=True):
    """All that a run needs."""

    seed: int
    requests: tuple[Request, ...]
    terms: Mapping[int, Terms]
    cancels: tuple[tuple[float, int], ...]
    """At which instant which request is cancelled, if it is there."""
    profiles: tuple[Profile, ...]
    adapters: tuple[tuple[str, ...], ...]
    """Of each worker, round and round."""
    policy: Policy
    network: Network
    faults: tuple[Fault, ...]


def draw(seed: int) -> Scenario:
    """Draw a scenario. Half of the seeds leave some kinds of faults out, to see others alone."""
    rng, apart = random.Random(seed), random.Random(f"sick {seed}")
    policy = replace(_policy(rng), breaker=_breaker(apart))
    requests = _requests(rng)
    profiles = tuple(_profile(rng) for _ in range(rng.randint(1, WORKERS_MAX)))
    terms = _terms(rng, requests)
    later = random.Random(f"adapters and lending {seed}")
    asked = _asked_adapters(later, requests)
    return Scenario(
        seed=seed,
        requests=tuple(_seeded(request, asked.get(request.index, "")) for request in requests),
        terms={
            index: replace(terms.get(index, Terms()), adapter=asked.get(index, ""))
            for index in sorted({*terms, *asked})
        },
        cancels=_cancels(rng, requests),
        profiles=profiles,
        adapters=tuple(_served_adapters(later) for _ in range(2 * WORKERS_MAX)),
        policy=replace(
            policy,
            quotas=(*policy.quotas, *_lending(later)),
            adapters={MODEL: ADAPTERS} if _hits(later, 0.5) else {},
        ),
        network=_network(rng, policy.leases),
        faults=tuple(sorted((*_faults(rng), *_spells(apart)), key=lambda fault: fault.at_s)),
    )


def _hits(rng: random.Random, ratio: float) -> bool:
    return rng.random() < ratio


# ---- workload ------------------------------------------------------------------------------------


def _requests(rng: random.Random) -> tuple[Request, ...]:
    count = rng.randint(10, REQUESTS_MAX)
    lanes = LANES[: rng.randint(1, len(LANES))]
    bands = rng.choice(((1,), (0, 1), (0, 1, 2, 3)))
    groups = rng.randint(1, 6)
    bursts = _hits(rng, 0.3)
    arrivals = sorted(_arrival_s(rng, bursts=bursts) for _ in range(count))
    last: dict[int, int] = {}
    requests: list[Request] = []
    for index, at_s in enumerate(arrivals):
        group = rng.randrange(groups)
        follows = last.get(group) if _hits(rng, 0.25) else None
        prompt_tokens = rng.randint(1, PROMPT_TOKENS_MAX)
        shared = rng.randint(0, prompt_tokens // BLOCK_TOKENS)
        whole = prompt_tokens // BLOCK_TOKENS
        output_tokens = rng.randint(1, OUTPUT_TOKENS_MAX)
        requests.append(
            Request(
                index=index,
                at_s=rng.random() if follows is not None else at_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                output_tokens_max=rng.randint(output_tokens, OUTPUT_TOKENS_MAX),
                blocks=tuple(
                    1000 * (group + 1) + place if place < shared else 100_000 * (index + 1) + place
                    for place in range(whole)
                ),
                block_tokens=BLOCK_TOKENS,
                lane=rng.choice(lanes),
                band=rng.choice(bands),
                session=f"s{group}" if _hits(rng, 0.5) else "",
                after=follows,
            )
        )
        last[group] = index
    return tuple(requests)


def _arrival_s(rng: random.Random, *, bursts: bool) -> float:
    at_s = rng.random() * LAST_WISH_S
    return at_s // 3.0 * 3.0 if bursts else at_s


def _terms(rng: random.Random, requests: tuple[Request, ...]) -> dict[int, Terms]:
    with_deadlines, with_streams = _hits(rng, 0.4), _hits(rng, 0.4)
    terms: dict[int, Terms] = {}
    for request in requests:
        deadline_s = rng.uniform(0.0, 8.0) if with_deadlines and _hits(rng, 0.3) else None
        streamed = with_streams and _hits(rng, 0.5)
        if streamed or deadline_s is not None:
            terms[request.index] = Terms(
                deadline_s=deadline_s, streamed=streamed, restart_visible=_hits(rng, 0.3)
            )
    return terms


def _asked_adapters(rng: random.Random, requests: tuple[Request, ...]) -> dict[int, str]:
    if _hits(rng, 0.6):
        return {}
    return {request.index: rng.choice(ADAPTERS) for request in requests if _hits(rng, 0.4)}


def _seeded(request: Request, adapter: str) -> Request:
    """Return it with a prefix of the adapter's own: adapters of one model share no hits."""
    if not adapter:
        return request
    apart = 1_000_000_000 * (ADAPTERS.index(adapter) + 1)
    return replace(request, blocks=tuple(apart + block for block in request.blocks))


def _cancels(rng: random.Random, requests: tuple[Request, ...]) -> tuple[tuple[float, int], ...]:
    if _hits(rng, 0.5):
        return ()
    cancelled = [request for request in requests if _hits(rng, 0.2)]
    return tuple((request.at_s + rng.random() * 2.0, request.index) for request in cancelled)


# ---- fleet ---------------------------------------------------------------------------------------


def _profile(rng: random.Random) -> Profile:
    return Profile(
        name="drawn",
        source="drawn from the seed",
        slots=rng.choice((1, 2, 4, 8)),
        step_tokens_max=rng.choice((256, 1024, 4096)),
        kv_tokens_max=int(SEQUENCE_TOKENS_MAX * rng.choice((1.0, 1.5, 4.0, 16.0))),
        block_tokens=BLOCK_TOKENS,
        prefill_s=Curve(4e-3, rng.choice((5e-5, 2e-4)), 0.0),
        decode_s=Curve(rng.choice((5e-3, 12e-3)), 1e-2, 0.0),
    )


def _served_adapters(rng: random.Random) -> tuple[str, ...]:
    return tuple(adapter for adapter in ADAPTERS if _hits(rng, 0.5))


def _network(rng: random.Random, leases: LeasePolicy) -> Network:
    def ratio(most: float) -> float:
        return rng.random() * most if _hits(rng, 0.5) else 0.0

    return Network(
        hop_s=rng.choice((0.0005, 0.02)),
        heartbeat_s=leases.heartbeat_s,
        report_lag_s=rng.choice((0.0, 0.0, leases.heartbeat_s)),
        lost_ratio=ratio(0.4),
        reordered_ratio=ratio(0.3),
        late_ratio=ratio(0.3),
        late_s_max=2.0 * leases.heartbeat_s,
        lost_order_ratio=ratio(0.2),
        late_order_ratio=ratio(0.2),
        lost_answer_ratio=ratio(0.3),
        lost_note_ratio=ratio(0.5),
        faults_until_s=LAST_WISH_S,
    )


def _faults(rng: random.Random) -> tuple[Fault, ...]:
    kinds = [kind for kind in FaultKind if kind is not FaultKind.SICK]
    if _hits(rng, 0.5):
        kinds = rng.sample(kinds, rng.randint(1, len(kinds)))
    faults = [
        Fault(
            at_s=rng.random() * LAST_WISH_S,
            kind=rng.choice((*kinds, FaultKind.LEADER)),
            host=rng.randrange(2 * WORKERS_MAX),
            for_s=rng.uniform(0.1, 4.0),
            profile=_profile(rng),
        )
        for _ in range(rng.randint(0, FAULTS_MAX))
    ]
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _spells(rng: random.Random) -> list[Fault]:
    return [
        Fault(
            at_s=rng.random() * LAST_WISH_S,
            kind=FaultKind.SICK,
            host=rng.randrange(2 * WORKERS_MAX),
            for_s=rng.uniform(0.1, 4.0),
        )
        for _ in range(rng.randint(0, SPELLS_MAX))
    ]


# ---- policy --------------------------------------------------------------------------------------


def _policy(rng: random.Random) -> Policy:
    heartbeat_s = 0.25
    return Policy(
        models=(MODEL,),
        lanes=tuple(LanePolicy(name=lane, weight=rng.choice((1.0, 3.0))) for lane in LANES),
        quotas=_quotas(rng),
        bands=_bands(rng),
        routing=RoutingPolicy(
            policy=rng.choice(get_args(PolicyName)),
            hold_for_affinity=_hits(rng, 0.7),
            backlog_s_max=rng.choice((0.010, 0.1, 1e9)),
            kv_fill_ratio_max=rng.choice((0.9, 1.0)),
            prefix_tokens_min=rng.choice((0, 256)),
        ),
        order=OrderPolicy(candidates_max=rng.choice((1, 4, 64))),
        leases=LeasePolicy(
            heartbeat_s=heartbeat_s,
            lease_s=3.0 * heartbeat_s,
            revoke_s=10.0 * heartbeat_s,
            grace_s=2.0 * heartbeat_s,
            stall_s=rng.choice((4.0, 120.0)),
            retry_base_s=0.1,
            retry_s_max=2.0,
            dispatch_answer_s=0.5,
        ),
    )


def _breaker(rng: random.Random) -> BreakerPolicy:
    return BreakerPolicy(failures_max=rng.choice((0, 1, 3)), open_s=0.5, open_s_max=2.0)


def _bands(rng: random.Random) -> tuple[BandPolicy, BandPolicy, BandPolicy, BandPolicy]:
    wait_s_max = rng.choice((None, 3.0, 60.0))
    return (
        BandPolicy(guaranteed_share=0.0, wait_s_max=wait_s_max),
        BandPolicy(guaranteed_share=0.2, wait_s_max=wait_s_max),
        BandPolicy(guaranteed_share=0.1, aging_s=rng.choice((1.0, 60.0))),
        BandPolicy(guaranteed_share=0.05),
    )


def _quotas(rng: random.Random) -> tuple[QuotaRow, ...]:
    """Draw rows. A token row lets the largest request pass, and a bucket fills within the run."""
    cost_tokens_max = PROMPT_TOKENS_MAX + 2 * OUTPUT_TOKENS_MAX
    lane = rng.choice(LANES)
    rows = (
        QuotaRow(inflight_jobs_max=rng.randint(1, 8)),
        QuotaRow(lane=lane, inflight_jobs_max=rng.randint(1, 3)),
        QuotaRow(lane=lane, band=1, inflight_jobs_max_per_worker=rng.choice((0.5, 1.0, 2.0))),
        QuotaRow(model=MODEL, inflight_tokens_max=cost_tokens_max * rng.randint(1, 4)),
        QuotaRow(band=1, queued_jobs_max=rng.randint(1, 8)),
        QuotaRow(lane=lane, tokens_per_min=cost_tokens_max * rng.randint(60, 240)),
    )
    return tuple(row for row in rows if _hits(rng, 0.25))


def _lending(rng: random.Random) -> list[QuotaRow]:
    """Draw rows of lanes, or of bands, that lend each other seats."""
    lanes = tuple((lane, None) for lane in LANES)
    cohorts = [kind for kind in (lanes, ((None, 1), (None, 3))) if _hits(rng, 0.3)]
    return [
        QuotaRow(
            lane=lane,
            band=band,
            inflight_jobs_max=rng.randint(1, 4),
            lendable_share=rng.choice((0.0, 0.5, 1.0)),
            ceiling_ratio=rng.choice((1.0, 1.5, 3.0)),
        )
        for cohort in cohorts
        for lane, band in cohort
    ]
