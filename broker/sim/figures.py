"""What a run came to: the measures that policies are compared by.

Times are seconds. TTFT is counted from the request's arrival, so the wait at the broker is in it.
ITL (inter-token latency) of a request is (end - first token) ÷ (output tokens - 1). Percentile p of
n values is the one of rank ⌊p·n/100⌋, counted from 0: always a value that occurred.
"""

from collections.abc import Iterable, Sequence

from msgspec import Struct


class Spread(Struct, frozen=True, kw_only=True):
    """A distribution in a few numbers; all 0 of nothing."""

    mean: float
    p50: float
    p90: float
    p99: float


class Figures(Struct, frozen=True, kw_only=True):
    """One run of one policy."""

    requests: int
    """That got an answer."""
    refused: int
    """That ended without one."""
    reruns: int
    """Attempts beyond the first of each."""
    ttft_s: Spread
    itl_s: Spread
    e2e_s: Spread
    queue_s: Spread
    """From arrival until it was given to a worker."""
    cached_token_ratio: float
    """Prompt tokens that an engine served from its cache ÷ all prompt tokens."""
    utilisation_mean: float
    """Share of its time that an engine computes, mean over workers."""
    utilisation_std: float
    """Spread of that share between workers."""
    throughput_tokens_s: float
    """Prompt and output tokens ÷ the span."""
    span_s: float
    """From the first arrival to the last end."""
    prefix_switch_ratio: float
    """Of the requests whose prefix was served before, the share that went to another worker than
    the last such. Its prefix is its deepest block seen before, of PREFIX_TOKENS_MIN at least."""
    hot_switch_ratio: float
    """The same, of the tenth of prefixes that is asked for most."""
    duplicate_kv_ratio: float
    """Share of cached blocks of which another worker has a copy too, mean over samples."""
    hit_dip: float
    """Cached share in the minute before a worker joins, restarts or is lost, less that in the
    minute after, mean over such changes; 0 without any."""
    jain_index: float
    """Fairness over lanes of speed: the mean of (seconds alone on a cold engine ÷ seconds end to
    end) of each lane's requests. 1 is equal, 1/lanes the worst."""
    ttft_quantiles_s: tuple[float, ...] = ()
    """From the least to the most in steps of 1 %, to draw the distribution; empty of nothing."""
    decision_s: Spread | None = None
    """Real time of one step of the mind; of ours only, where it was timed."""


def spread(values: Iterable[float]) -> Spread:
    """Sum a distribution up."""
    ordered = sorted(values)
    if not ordered:
        return Spread(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
    return Spread(
        mean=sum(ordered) / len(ordered),
        p50=_rank(ordered, 50),
        p90=_rank(ordered, 90),
        p99=_rank(ordered, 99),
    )


def quantiles(values: Iterable[float]) -> tuple[float, ...]:
    """Return 101 of them, 0 % to 100 %; empty of nothing."""
    ordered = sorted(values)
    return tuple(_rank(ordered, percent) for percent in range(101)) if ordered else ()


def jain(shares: Sequence[float]) -> float:
    """Return the index of Jain, Chiu and Hawe (1984): (Σx)² ÷ (n·Σx²); 1 of nothing."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, percent * len(ordered) // 100)]
