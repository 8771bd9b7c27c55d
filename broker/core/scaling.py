"""How many workers a model's work calls for: signals for whoever starts and stops them.

By work and by waits, never by how busy a GPU is: a full batch is what a GPU is for. What runs
counts as well as what waits, so that nobody scales down under running jobs (keda #3787).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from broker.core.queues import WAIT_S_UNBOUNDED, Pool
from broker.wire.ids import BANDS, BATCH_BAND

WAIT_S_MAX = 5.0
"""More workers are called for where the backlog of bands 0-2 takes longer than this."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """The signals of one model."""

    backlog_s: float
    """All that waits, in the streams too, at the rate that the pool works at."""
    oldest_wait_s: float
    desired_workers: int
    """At least as many as what runs fills; batch waits for idle capacity and calls for one at
    most."""


def scaling_of(pool: Pool, *, rate_tokens_s: float, at_s: float) -> Scaling:
    """Tell the signals of a pool that takes up so many weighted tokens a second.

    Costs as many steps as queues have somebody in line.
    """
    work = [_work_tokens(pool, band) for band in BANDS]
    online_s = _takes_s(sum(work[:BATCH_BAND]), rate_tokens_s)
    oldest_at_s = min(_oldest_at_s(pool), default=at_s)
    return Scaling(
        _takes_s(sum(work), rate_tokens_s),
        at_s - oldest_at_s,
        _desired_workers(pool, sum(work), online_s),
    )


def _work_tokens(pool: Pool, band: int) -> float:
    """Weigh what waits of a band; messages not pulled yet are taken to be as large as the rest."""
    held = pool.waiting_jobs[band]
    if not held:
        return pool.work_tokens[band] + pool.pending_jobs[band]
    return pool.work_tokens[band] * (1 + pool.pending_jobs[band] / held)


def _oldest_at_s(pool: Pool) -> Iterator[float]:
    for band in BANDS:
        for _, lane in chain(pool.fresh[band], pool.aged[band]):
            oldest_at_s = pool.queues[lane, band].oldest_enqueued_at_s
            if oldest_at_s is not None:
                yield oldest_at_s


def _takes_s(tokens: float, rate_tokens_s: float) -> float:
    if tokens <= 0:
        return 0.0
    return min(WAIT_S_UNBOUNDED, tokens / rate_tokens_s) if rate_tokens_s > 0 else WAIT_S_UNBOUNDED


def _desired_workers(pool: Pool, waiting_tokens: float, online_s: float) -> int:
    workers = len(pool.workers)
    if not workers or not pool.slots:
        return int(waiting_tokens > 0 or pool.inflight_jobs > 0)
    filled = math.ceil(pool.inflight_jobs * workers / pool.slots)
    needed = math.ceil(workers * online_s / WAIT_S_MAX)
    return max(filled, needed, int(waiting_tokens > 0))
