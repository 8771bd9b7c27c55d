"""How far a decision log's predictions were from what came: cached tokens, and first tokens."""

from collections.abc import Iterable
from statistics import median

from msgspec import Struct

from broker.sim.decisions import LoggedJob, Tally, read_jobs

SOURCES = {"": "not told", "model": "the agent's guess", "events": "the engine's events"}
"""Whose word on the cache a prediction went by."""

FIRST_TOKENS_MAX = 200_000
"""Jobs whose first token is compared; medians of the first so many are medians enough."""


class HitAccuracy(Struct, kw_only=True):
    """Predicted against real cached tokens, of the jobs by one word on the cache."""

    source: str
    jobs: int = 0
    prompt_tokens: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    error_tokens: int = 0
    """Σ |predicted - cached| over jobs: what sums hide."""

    @property
    def ratio(self) -> float | None:
        """Predicted ÷ cached; None where nothing was cached."""
        return self.predicted_tokens / self.cached_tokens if self.cached_tokens else None

    @property
    def error_ratio(self) -> float | None:
        """Error ÷ cached; None where nothing was cached."""
        return self.error_tokens / self.cached_tokens if self.cached_tokens else None


class Accuracy(Struct, kw_only=True):
    """What was found."""

    hits: list[HitAccuracy]
    """By source, the one with most jobs first."""
    first_tokens: int
    """Jobs whose first token is compared."""
    first_token_error_ratio: float | None
    """Median of |predicted - real| ÷ real, from the dispatch on; None without any."""
    first_token_bias_ratio: float | None
    """Median of (predicted - real) ÷ real: below 0 came later than predicted."""
    tally: Tally


def accuracy_of(lines: Iterable[bytes], *, skip_jobs: int) -> Accuracy:
    """Compare, over a log's lines in the order of time, all but the first `skip_jobs` jobs."""
    tally = Tally()
    hits: dict[str, HitAccuracy] = {}
    errors: list[float] = []
    seen = 0
    for job in read_jobs(lines, tally):
        if not job.counted_prompt_tokens or job.dispatches != 1:
            continue  # It came to nothing, or what is told is of another attempt.
        seen += 1
        if seen <= skip_jobs:
            continue
        _count(hits.setdefault(job.cache_source, HitAccuracy(source=job.cache_source)), job)
        real_s = None if job.ttft_s is None else job.ttft_s - job.queue_s
        if real_s is not None and real_s > 0 and len(errors) < FIRST_TOKENS_MAX:
            errors.append((job.predicted_ttft_s - real_s) / real_s)
    return Accuracy(
        hits=sorted(hits.values(), key=lambda one: -one.jobs),
        first_tokens=len(errors),
        first_token_error_ratio=median(map(abs, errors)) if errors else None,
        first_token_bias_ratio=median(errors) if errors else None,
        tally=tally,
    )


def _count(hits: HitAccuracy, job: LoggedJob) -> None:
    hits.jobs += 1
    hits.prompt_tokens += job.counted_prompt_tokens
    hits.predicted_tokens += job.predicted_hit_tokens
    hits.cached_tokens += job.cached_tokens
    hits.error_tokens += abs(job.predicted_hit_tokens - job.cached_tokens)
