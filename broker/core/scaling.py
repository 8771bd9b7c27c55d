"""How many workers a model's work calls for: signals for whoever starts and stops them.

By work and by waits, never by how busy a GPU is: a full batch is what a GPU is for. What runs
counts as well as what waits, so that nobody scales down under running jobs (keda #3787).
"""

import math
from dataclasses import dataclass

from broker.core.queues import WAIT_S_UNBOUNDED, Pool, Queue
from broker.wire.ids import BATCH_BAND

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
    """Tell the signals of a pool that takes up so many weighted tokens a second."""
    work = {queue: _work_tokens(queue) for queue in pool.queues.values()}
    total = sum(work.values())
    online = sum(tokens for queue, tokens in work.items() if queue.band != BATCH_BAND)
    oldest = [queue.oldest_enqueued_at_s for queue in work]
    return Scaling(
        _takes_s(total, rate_tokens_s),
        max((at_s - one for one in oldest if one is not None), default=0.0),
        _desired_workers(pool, total, _takes_s(online, rate_tokens_s)),
    )


def _work_tokens(queue: Queue) -> float:
    """Weigh what waits of a queue; messages not pulled yet are taken to be as large as the rest."""
    if not queue.waiting_jobs:
        return float(queue.pending_jobs)
    return queue.work_tokens * (1 + queue.pending_jobs / queue.waiting_jobs)


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
