"""What it costs to run a job at one worker: two policies behind one call; lower is better.

`first_token` predicts seconds. The wait for room and for the backlog there, then the job's own
prefill, weighted by 1 + bias because prefill that a cache could have saved also costs the cache of
others (more where that is filled anew sooner: `turnover`); then, at small weights, how long its
answer will take there, and what its prefill and its KV cost the jobs that run there (a step of the
engine takes longer for all of them). So long contexts gather where few jobs run and short ones
elsewhere: the sum of jobs x KV per worker is what decode time under load follows, and it is least
when the two are apart.

`weighted` is the operators' published sum of load, miss and leaving the last worker, each in 0..1.

Which prefixes earn nothing follows from comparison: candidates whose scores differ by less than
`tie` are equal, and what all hold, all have. So only the marginal saving over the best alternative
counts.
"""

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from msgspec import Struct

from broker.core.events import JobSpec
from broker.core.policy import RoutingPolicy
from broker.core.seat import Seat
from broker.core.size_intervals import Pull
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX
from broker.wire.prompt import BYTES_PER_TOKEN

LONG_PROMPT_TOKENS = 8192
"""weighted: a prompt this long counts misses twice, and longer ones no more."""

COLD_LOAD_RATIO = 0.5
"""What the load of a worker with a new cache counts."""

TRUST_MAX = 1.25
"""Most that a worker is credited beyond what our blocks tell: engines match to the token, so of the
block in which two prompts part they find some too."""

WEIGHTED_TIE = 0.005
"""weighted: smaller differences are noise: half a percent of the whole range of one term."""


class Need(Struct, frozen=True):
    """A job as scoring sees it."""

    job: JobSpec
    output_tokens: int
    prompt_tokens: int
    kv_tokens: int
    """KV cache it takes when it ends."""


class Scored(Struct):
    """One candidate."""

    seat: Seat
    hit_tokens: int
    prefill_s: float
    """Of what is not cached."""
    wait_s: float
    """Until this prefill begins."""
    fits: bool
    is_cold: bool = False
    """Its cache is new: it is filled first, by counting half its load."""
    score: float = 0.0
    decode_s: float = 0.0
    """Of the score, what stands for decoding."""

    @property
    def ttft_s(self) -> float:
        """Predicted seconds until the first token."""
        return self.wait_s + self.prefill_s


def need_of(job: JobSpec, output_tokens: int) -> Need:
    """Return what a job needs, at an answer so long."""
    return Need(job, output_tokens, job.prompt_tokens, job.prompt_tokens + output_tokens)


def tokens_per_block(job: JobSpec) -> float:
    """Return the tokens of a block; where nobody told, the prompt's are spread over its text."""
    if job.block_tokens:
        return job.block_tokens
    blocks = len(job.blocks)
    if not 0 < blocks < BLOCKS_MAX:
        # Nothing to share, or a prompt too long to tell where its text ends.
        return BLOCK_BYTES / BYTES_PER_TOKEN
    # The last, partial block has no hash: half of one, on average. A token is a byte at least.
    return min(float(BLOCK_BYTES), job.prompt_tokens / (blocks + 0.5))


CROWDED = 8.0
"""Jobs a worker from which on what they cost each other counts more, in proportion: there most of
a job's time is spent decoding, and each that joins holds up so many more."""


CROWDING_MAX = 4.0
"""Where more run than so many times that, a fleet has more work than it can do, and jobs wait for
room: then first tokens would wait for nothing but where to."""


def crowding(jobs: float) -> float:
    """Return by how much more decoding counts where so many run beside each other; 1 at least."""
    return min(CROWDING_MAX, max(1.0, jobs / CROWDED))


Score = Callable[[RoutingPolicy, Need, Iterable["Scored"]], None]
"""Scores candidates whose way is predicted."""


def scored_each(
    policy: RoutingPolicy,
    score: Score,
    need: Need,
    seats: Iterable[Seat],
    *,
    hit_tokens: float,
    at_s: float,
) -> list[Scored]:
    """Predict a job's way at each of some workers that hold so many tokens of it, and score it.

    All in one loop: this is most of what a decision does, and calls are much of what it costs.
    """
    job, uncached, output_tokens = need.job, need.prompt_tokens, need.output_tokens
    hit = 0
    scored: list[Scored] = []
    for seat in seats:
        if hit_tokens:
            hit = _believed_tokens(seat, need, hit_tokens)
            uncached = need.prompt_tokens - hit
        wait_s = seat.backlog_wait_s(at_s) if seat.backlog_s else 0.0
        kv_tokens = uncached + output_tokens
        fits = seat.has_room and seat.fits(job, kv_tokens, uncached)
        if not fits:
            wait_s += seat.room_wait_s(kv_tokens)
        prefill_s = uncached / seat.prefill_tokens_s
        scored.append(Scored(seat, hit, prefill_s, wait_s, fits, at_s < seat.cold_until_s))
    score(policy, need, scored)
    return scored


def _believed_tokens(seat: Seat, need: Need, hit_tokens: float) -> int:
    """Return how much of what a worker holds of a job is taken to be found there."""
    if seat.slot_cache is not None:
        reusable = seat.slot_cache.reusable_blocks(need.job.blocks)
        if reusable is not None:
            hit_tokens = min(hit_tokens, reusable * tokens_per_block(need.job))
    # The engine computes the last token always, or it would have nothing to begin the answer from.
    return min(int(hit_tokens * seat.trust), max(0, need.prompt_tokens - 1))


def first_token(policy: RoutingPolicy, need: Need, scored: Iterable[Scored]) -> None:
    """Predict seconds, the job's own and (in part) those it costs others."""
    kv_tokens, output_tokens = need.kv_tokens, need.output_tokens
    own_weight = policy.decode_weight
    for one in scored:
        # As `Seat.decode_cost_s`, which is asked of a worker at a time: a call for each is dear.
        seat, wait_s = one.seat, one.wait_s
        growth_s = seat.step_slope_s * (kv_tokens - one.hit_tokens)
        own_s = own_weight * (seat.step_s + growth_s)
        decode_s = output_tokens * (own_s + seat.slowdown_weight * growth_s)
        if one.is_cold:
            wait_s *= COLD_LOAD_RATIO
            decode_s *= COLD_LOAD_RATIO
        one.decode_s = decode_s
        one.score = wait_s + decode_s + seat.prefill_weight * one.prefill_s


def set_apart(scored: Scored, need: Need, pull: Pull, place: float) -> None:
    """Let a job pay for a worker among jobs of other sizes, for the part that is not cached there.

    Like the other costs of decoding this one comes late and is a guess.
    """
    cost_s = pull.cost_s(place)
    if scored.hit_tokens:
        cost_s *= 1.0 - scored.hit_tokens / need.prompt_tokens
    scored.score += cost_s
    scored.decode_s += cost_s


def weighted(policy: RoutingPolicy, need: Need, scored: Iterable[Scored]) -> None:
    """Add up load and miss, each in 0..1; leaving the last worker is added by the caller."""
    prompt_tokens = need.prompt_tokens
    miss_weight = policy.miss_weight * (1 + min(1.0, prompt_tokens / LONG_PROMPT_TOKENS))
    for one in scored:
        hit_ratio = one.hit_tokens / prompt_tokens if one.hit_tokens else 0.0
        if hit_ratio < policy.hit_ratio_min:
            hit_ratio = 0.0
        one.score = policy.load_weight * _load_ratio(policy, one) + miss_weight * (1 - hit_ratio)


def leave_cost(policy: RoutingPolicy) -> float:
    """Return what leaving the last worker costs, in the units of the policy's score."""
    return policy.leave_weight if policy.policy == "weighted" else policy.switch_penalty_s


def tie(policy: RoutingPolicy) -> float:
    """Return the difference below which two scores are equal."""
    return WEIGHTED_TIE if policy.policy == "weighted" else policy.saving_s_min


def of_equals(policy: RoutingPolicy) -> Callable[[Scored], Any]:
    """Return what is least at the one to take of equals.

    Its turn; before that, where the score knows nothing of speed, its load in seconds.
    """
    return attrgetter("seat.entry" if policy.policy == "weighted" else "seat.turn")


def score_of(policy: RoutingPolicy) -> Score:
    """Return the policy's score."""
    return weighted if policy.policy == "weighted" else first_token


def _load_ratio(policy: RoutingPolicy, scored: Scored) -> float:
    """Work ÷ capacity: prefill against the hard threshold, decoding against the slots."""
    seat = scored.seat
    horizon_s = max(policy.wait_s_over_best_max, policy.backlog_s_max)
    ratio = scored.wait_s / horizon_s + seat.decoding_jobs / max(1, seat.worker.slots)
    return min(1.0, COLD_LOAD_RATIO * ratio if scored.is_cold else ratio)
