"""What a gateway tells of batches: those it runs itself, and what there is in the whole cluster."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from producers.batches.runner import BatchRunner


class BatchMetrics(Collector):
    """Read from a runner when somebody asks."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        """Give each metric with its values of now."""
        counts = self._runner.counts
        yield GaugeMetricFamily(
            "inferlane_gateway_batches_running",
            "Batches that this gateway runs now.",
            value=self._runner.running,
        )
        taken = CounterMetricFamily(
            "inferlane_gateway_batches_taken",
            "Batches that this gateway took: new ones, and those of another runner that left them.",
            labels=["how"],
        )
        taken.add_metric(["new"], counts.taken - counts.taken_over)
        taken.add_metric(["takeover"], counts.taken_over)
        yield taken
        yield CounterMetricFamily(
            "inferlane_gateway_batch_faults",
            "Runs of a batch that ended by a fault; the batch is taken up again.",
            value=counts.failed,
        )
        lines = CounterMetricFamily(
            "inferlane_gateway_batch_lines",
            "Lines that this gateway brought to their end, by lane and result file.",
            labels=["lane", "result"],
        )
        for (lane, completed), count in sorted(counts.lines.items()):
            lines.add_metric([lane, "completed" if completed else "failed"], count)
        yield lines
        yield from self._of_the_cluster()

    def _of_the_cluster(self) -> Iterator[Metric]:
        """What each gateway tells alike, up to `census_s` old; nothing where it can't be read."""
        for name, field, told in (
            ("inferlane_batches_open", "open", "Batches that have not ended."),
            ("inferlane_batches_untaken", "untaken", "Those that no gateway runs."),
            ("inferlane_batches_late", "late", "Those whose window was over minutes ago."),
            ("inferlane_batches_oldest_seconds", "oldest_s", "Age of the oldest that is open."),
            ("inferlane_files_bytes", "files_bytes", "Files stored, by lane."),
            ("inferlane_files_bytes_max", "files_bytes_max", "What they may take; 0: no bound."),
        ):
            metric = GaugeMetricFamily(name, told, labels=["lane"])
            for lane, census in self._runner.census.items():
                metric.add_metric([lane], getattr(census, field))
            yield metric
