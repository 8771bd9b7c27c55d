"""Every counter and histogram of the broker: name, labels, and the help text that explains it."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from broker.service.series import CounterFamily, HistogramFamily

_WAIT_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5),
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""From a small job on a free worker to a batch job that waited half an hour."""

_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.0)

_STEP_BUCKETS_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0004, 0.001, 0.002, 0.005, 0.02)
"""Around the targets of one decision: 0.2 ms at 64 workers, 0.4 ms at 4,000."""


class FamilyGroup:
    """Families that are told together."""

    def collect(self) -> Iterator[Metric]:
        """Tell the counts of all, in order of their making."""
        for family in vars(self).values():
            yield from family.collect()


class Jobs(FamilyGroup):
    """What became of jobs."""

    def __init__(self) -> None:
        self.admitted = CounterFamily(
            "inferlane_jobs_admitted",
            "Jobs taken from their queue and not refused; each of them ends once.",
            ("lane", "band", "model"),
        )
        self.rejected = CounterFamily(
            "inferlane_jobs_rejected",
            "Jobs refused, by reason. queue_full: as many wait as the queue's bound allows."
            " duplicate: a second message of a job at hand, answered with the first one's end.",
            ("reason", "lane", "band"),
        )
        self.dispatched = CounterFamily(
            "inferlane_jobs_dispatched",
            "Jobs given to a worker; a retried job counts each time.",
            ("lane", "band", "model"),
        )
        self.held_by = CounterFamily(
            "inferlane_dispatches_held",
            "Dispatches by what held the job before: nothing, quota (a row), floor (slots kept for"
            " people), pressure (people wait too long), room (no worker had any), affinity (it"
            " waited for the worker with its prefix), batch_share (workers with room hold people's"
            " prefixes), order (others first), back_off (a retry), no_workers, breaker (all that"
            " serve it had failed), start.",
            ("held_by",),
        )
        self.ended = CounterFamily(
            "inferlane_jobs_ended",
            "Jobs whose one terminal record stands, by kind. found: it was written by another.",
            ("kind", "lane", "band"),
        )
        self.tokens = CounterFamily(
            "inferlane_tokens",
            "Tokens of ended jobs as engines counted them. prompt; cached: those of the prompt that"
            " were not computed again; output. predicted_cached: cached as routing expected.",
            ("kind", "lane"),
        )
        self.usage_counted = CounterFamily(
            "inferlane_usage_records_counted",
            "Terminal records added to the accounts; see `inferlane usage`.",
            ("lane",),
        )
        self.attempts_failed = CounterFamily(
            "inferlane_attempts_failed", "Attempts that came to nothing, by reason.", ("reason",)
        )
        self.dead_lettered = CounterFamily(
            "inferlane_jobs_dead_lettered",
            "Jobs given up after too many failures; see `inferlane dlq list`.",
            ("lane",),
        )


class Troubles(FamilyGroup):
    """What went wrong, or changed hands."""

    def __init__(self) -> None:
        self.differences = CounterFamily(
            "inferlane_reconcile_differences",
            "Disagreements between ledger, workers and streams, found and repaired, by kind."
            " A steady rate means that something loses messages.",
            ("kind",),
        )
        self.reconciles = CounterFamily(
            "inferlane_reconciles", "Comparisons of ledger, workers and streams."
        )
        self.malformed = CounterFamily(
            "inferlane_messages_malformed", "Messages that could not be read, by place.", ("where",)
        )
        self.usage_gone = CounterFamily(
            "inferlane_usage_records_gone",
            "Terminal records that left their stream before they were counted. Any is an alarm.",
            ("lane",),
        )
        self.unanswered = CounterFamily(
            "inferlane_orders_unanswered",
            "Orders to workers without an answer: no_responders, timeout, unsent.",
            ("cause",),
        )
        self.workers_gone = CounterFamily(
            "inferlane_workers_gone", "Workers whose leases were revoked, by cause.", ("cause",)
        )
        self.leaderships = CounterFamily(
            "inferlane_leaderships", "Times this process became leader or standby.", ("to",)
        )
        self.loop_errors = CounterFamily(
            "inferlane_loop_errors",
            "Surprises caught at the edge of a loop, by place; the log has their tracebacks.",
            ("where",),
        )


class Times(FamilyGroup):
    """How long things took."""

    def __init__(self) -> None:
        self.ttft = HistogramFamily(
            "inferlane_ttft_seconds",
            "From queued to first token, of jobs that reported one: what a person waits.",
            ("lane", "band"),
            buckets=_WAIT_BUCKETS_S,
        )
        self.queue = HistogramFamily(
            "inferlane_queue_seconds",
            "From queued to dispatched.",
            ("lane", "band"),
            buckets=_WAIT_BUCKETS_S,
        )
        self.e2e = HistogramFamily(
            "inferlane_e2e_seconds",
            "From queued to ended.",
            ("lane", "band"),
            buckets=_WAIT_BUCKETS_S,
        )
        self.wait_error = HistogramFamily(
            "inferlane_wait_estimate_error_seconds",
            "Distance between the wait that a caller was told and the wait that it had.",
            ("band",),
            buckets=_WAIT_BUCKETS_S,
        )
        self.lag = HistogramFamily(
            "inferlane_loop_lag_seconds",
            "How late the loop woke up; above 10 ms something holds it.",
            buckets=_LAG_BUCKETS_S,
        )
        self.held = HistogramFamily(
            "inferlane_loop_held_seconds",
            "Of that, what the loop's own thread can have worked: the rest is other programs'.",
            buckets=_LAG_BUCKETS_S,
        )
        self.step = HistogramFamily(
            "inferlane_step_seconds", "Time to think about one event.", buckets=_STEP_BUCKETS_S
        )
