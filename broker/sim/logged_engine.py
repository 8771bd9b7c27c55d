"""What a decision log tells of its engines: rates by least squares, and the size of the cache.

A run's first token comes after P(uncached tokens) + D, each further one after D(tokens in use) and
what the prompts of others take meanwhile: the engine model's own terms, so the fit is a profile. A
run that waited in its engine says nothing of P, and is left out of the fit as an outlier. The size
of the cache is the one with which least-recently-used replacement, on the workers that the log
names, comes to the cached tokens that it counts.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import inf
from statistics import fmean, median

from msgspec import Struct

from broker.engine_model.profile import Curve, Profile
from broker.sim.decision_trace import BlockTokens
from broker.sim.decisions import LoggedJob

RUNS_MIN = 20
"""Fewer runs fit anything."""

CACHE_JOBS_MAX = 50_000
"""Jobs that the size of the cache is found by: 20 replays of each in some 10 s."""

CACHE_STEP = 1.25
"""Sizes tried grow by this factor: hits change by a few percent from one to the next."""

OUTLIER = 3.0
"""Runs slower than the fit by this many medians of its errors have waited in the engine."""

QUIET_MAX = 0.2
"""Share of its time that a run decodes between prompts of others, up to which it tells what a token
takes: their prefills overlap with one another, so what they took is known roughly only."""

FIT_ROUNDS = 4
"""Fits, each without the outliers of the one before."""


class LoggedEngine(Struct, frozen=True, kw_only=True):
    """A profile, and what in it comes from the log."""

    profile: Profile
    runs: int
    """That the rates were fitted to; 0: the rates are those of the profile it began with."""
    error: float
    """Median of |fitted ÷ logged - 1| over first tokens of runs that did not wait."""
    kv_is_estimated: bool


class _Run(Struct, frozen=True, kw_only=True):
    """One run on its worker. Times are Unix time."""

    begin_s: float
    first_s: float
    end_s: float
    uncached_tokens: int
    tokens: int
    """Of prompt and answer."""
    output_tokens: int


def logged_engine(jobs: Sequence[LoggedJob], base: Profile) -> LoggedEngine:
    """Fit what the log tells; all else is as in `base`. Jobs of one model."""
    kv_tokens_max = _cache_tokens(jobs)
    profile = replace(
        base,
        name="fitted",
        source=f"a decision log, else {base.name}",
        kv_tokens_max=kv_tokens_max or base.kv_tokens_max,
    )
    by_worker = _runs(jobs)
    runs = [run for worker in by_worker.values() for run in worker]
    prefill = _line([(float(run.uncached_tokens), run.first_s - run.begin_s) for run in runs])
    error = 0.0
    if prefill is None or prefill[1] <= 0:
        runs = []
    else:
        constant_s, slope_s = max(0.0, prefill[0]), prefill[1]
        decode_s = _decode(by_worker, prefill_s=Curve(constant_s, slope_s, 0.0), profile=profile)
        prefill_s = Curve(max(0.0, constant_s - decode_s.constant_s), slope_s, 0.0)
        decode_s = _decode(by_worker, prefill_s=prefill_s, profile=profile)
        profile = replace(profile, prefill_s=prefill_s, decode_s=decode_s)
        error = _error(runs, constant_s, slope_s)
    return LoggedEngine(
        profile=profile,
        runs=len(runs),
        error=error,
        kv_is_estimated=kv_tokens_max is not None,
    )


# ---- rates -------------------------------------------------------------------------------------


def _runs(jobs: Iterable[LoggedJob]) -> dict[str, list[_Run]]:
    """Collect, by worker, the runs whose times are all known."""
    found: dict[str, list[_Run]] = {}
    for job in jobs:
        if job.kind != "completed" or job.ttft_s is None or job.run_s is None:
            continue
        run = _Run(
            begin_s=job.ended_at_s - job.run_s,
            first_s=job.enqueued_at_s + job.ttft_s,
            end_s=job.ended_at_s,
            uncached_tokens=max(1, job.counted_prompt_tokens - job.cached_tokens),
            tokens=job.counted_prompt_tokens + job.output_tokens,
            output_tokens=job.output_tokens,
        )
        if run.begin_s < run.first_s <= run.end_s:
            found.setdefault(job.worker, []).append(run)
    return found


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Fit constant and slope by least squares, again without what lies far above the line."""
    kept = list(points)
    fit: tuple[float, float] | None = None
    for _ in range(FIT_ROUNDS):
        if len(kept) < RUNS_MIN:
            return fit
        fit = _least_squares(kept)
        errors = [y - fit[0] - fit[1] * x for x, y in kept]
        bound = OUTLIER * median([abs(error) for error in errors])
        kept = [point for point, error in zip(kept, errors, strict=True) if error <= bound]
    return fit


def _least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return constant and slope; a level line where all points stand at one x."""
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return mean_y, 0.0
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return mean_y - slope * mean_x, slope


def _decode(by_worker: dict[str, list[_Run]], *, prefill_s: Curve, profile: Profile) -> Curve:
    """Fit the seconds of a token over the share of KV in use; the profile's where none decodes."""
    found: list[tuple[float, float, float]] = []
    for runs in by_worker.values():
        busy = _Busy(runs, prefill_s)
        for run in runs:
            steps, took_s = run.output_tokens - 1, run.end_s - run.first_s
            if steps < 1 or took_s <= 0:
                continue
            others_s = busy.prefill_s(run)
            share = busy.tokens(run) / profile.kv_tokens_max
            found.append((others_s / took_s, share, max(0.0, took_s - others_s) / steps))
    found.sort()
    quiet = max(bisect_right(found, (QUIET_MAX, inf)), len(found) // 4)
    points = [(share, token_s) for _, share, token_s in found[:quiet]]
    fit = _line(points)
    if fit is None:
        return profile.decode_s
    constant_s, slope_s = fit
    if slope_s < 0 or constant_s <= 0:
        return Curve(max(1e-6, fmean(y for _, y in points)), 0.0, 0.0)
    return Curve(constant_s, slope_s, 0.0)


class _Busy:
    """What went on at a worker while one of its runs decoded."""

    def __init__(self, runs: Sequence[_Run], prefill_s: Curve) -> None:
        by_first = sorted(runs, key=lambda run: run.first_s)
        self._first_s = [run.first_s for run in by_first]
        self._prefilled_s = [
            0.0,
            *accumulate(prefill_s.at(run.uncached_tokens) for run in by_first),
        ]
        changes = sorted(
            [(run.begin_s, run.tokens) for run in runs] + [(run.end_s, -run.tokens) for run in runs]
        )
        self._at_s = [at_s for at_s, _ in changes]
        self._in_use = list(accumulate(tokens for _, tokens in changes))
        self._token_s = [0.0]
        for index in range(1, len(changes)):
            lasted_s = self._at_s[index] - self._at_s[index - 1]
            self._token_s.append(self._token_s[-1] + lasted_s * self._in_use[index - 1])

    def prefill_s(self, run: _Run) -> float:
        """Return the time that prompts of others took while it decoded."""
        after = bisect_right(self._first_s, run.first_s)
        return self._prefilled_s[bisect_right(self._first_s, run.end_s)] - self._prefilled_s[after]

    def tokens(self, run: _Run) -> float:
        """Return the mean of tokens in use while it decoded."""
        span_s = run.end_s - run.first_s
        return (self._until(run.end_s) - self._until(run.first_s)) / span_s

    def _until(self, at_s: float) -> float:
        index = bisect_right(self._at_s, at_s) - 1
        return self._token_s[index] + (at_s - self._at_s[index]) * self._in_use[index]


def _error(runs: Sequence[_Run], constant_s: float, slope_s: float) -> float:
    """Return the median error of those first tokens that did not wait."""
    pairs = [
        (constant_s + slope_s * run.uncached_tokens, run.first_s - run.begin_s) for run in runs
    ]
    bound = OUTLIER * median([abs(logged_s - fitted_s) for fitted_s, logged_s in pairs])
    near = [abs(fit / took - 1) for fit, took in pairs if took - fit <= bound]
    return median(near) if near else 0.0


# ---- the cache ---------------------------------------------------------------------------------


class _Prompt(Struct, frozen=True, kw_only=True):
    """What one run reads from its worker's cache and leaves there."""

    blocks: "array[int]"
    tokens: int
    block_tokens: int
    cached_tokens: int


def _cache_tokens(jobs: Sequence[LoggedJob]) -> int | None:
    """Return the size with which the logged hits come about; None where nothing was evicted."""
    ran = [job for job in jobs if job.counted_prompt_tokens and job.has_prefix][:CACHE_JOBS_MAX]
    workers = _prompts(ran)
    everything = max((sum(p.tokens for p in each) for each in workers), default=0)
    sizes = [max((job.counted_prompt_tokens + job.output_tokens for job in ran), default=1)]
    while sizes[-1] < everything:
        sizes.append(int(sizes[-1] * CACHE_STEP) + 1)
    hits = _Hits(workers)
    if not hits.logged or hits.logged >= hits.most:
        return None
    return sizes[min(bisect_left(sizes, hits.logged, key=hits.of), len(sizes) - 1)]


def _prompts(ran: Iterable[LoggedJob]) -> list[list[_Prompt]]:
    """Collect what runs read and leave, by worker, in the order in which they began."""
    in_order = sorted(ran, key=lambda job: job.ended_at_s - (job.run_s or 0.0))
    block_tokens = BlockTokens()
    for job in in_order:
        block_tokens.add(job)
    by_worker: dict[str, list[_Prompt]] = {}
    for job in in_order:
        size = block_tokens.of(job.model)
        prompt = _Prompt(
            blocks=job.blocks[: job.counted_prompt_tokens // size],
            tokens=job.counted_prompt_tokens + job.output_tokens,
            block_tokens=size,
            cached_tokens=job.cached_tokens,
        )
        by_worker.setdefault(job.worker, []).append(prompt)
    return list(by_worker.values())


class _Hits:
    """Runs that find in a cache of some size at least half of what one without bounds has.

    Runs and not tokens, for the log's blocks are larger than the engine's.
    """

    def __init__(self, workers: Sequence[Sequence[_Prompt]]) -> None:
        self._workers = workers
        self._best = [_lru_tokens(prompts, None) for prompts in workers]
        self.most = sum(tokens > 0 for best in self._best for tokens in best)
        """With a cache without bounds."""
        self.logged = self._count([[p.cached_tokens for p in prompts] for prompts in workers])
        self._known: dict[int, int] = {}

    def of(self, capacity_tokens: int) -> int:
        """Return their number with caches of this size; more in larger ones."""
        if capacity_tokens not in self._known:
            found = [_lru_tokens(prompts, capacity_tokens) for prompts in self._workers]
            self._known[capacity_tokens] = self._count(found)
        return self._known[capacity_tokens]

    def _count(self, found: Sequence[Sequence[int]]) -> int:
        return sum(
            2 * tokens >= most > 0
            for each, best in zip(found, self._best, strict=True)
            for tokens, most in zip(each, best, strict=True)
        )


def _lru_tokens(prompts: Iterable[_Prompt], capacity_tokens: int | None) -> list[int]:
    """Return the tokens that each run finds; None: nothing is ever evicted."""
    kept: OrderedDict[int, int] = OrderedDict()
    used = 0
    found: list[int] = []
    for prompt in prompts:
        missing = (place for place, block in enumerate(prompt.blocks) if block not in kept)
        found.append(next(missing, len(prompt.blocks)) * prompt.block_tokens)
        for block in reversed(prompt.blocks):
            if block not in kept:
                kept[block] = prompt.block_tokens
                used += prompt.block_tokens
            kept.move_to_end(block)
        rest = prompt.tokens - len(prompt.blocks) * prompt.block_tokens
        while capacity_tokens is not None and kept and used + rest > capacity_tokens:
            used -= kept.popitem(last=False)[1]
    return found
