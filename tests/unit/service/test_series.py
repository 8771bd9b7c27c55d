"""Counters and histograms of one thread: right counts, and bounded series."""

import pytest
from prometheus_client.core import Metric

from broker.service.series import OTHER, CounterFamily, HistogramFamily


def _values(family: Metric) -> dict[tuple[str, ...], float]:
    return {(one.name, *one.labels.values()): one.value for one in family.samples}


def test_counts_by_label() -> None:
    """Each set of labels has its own count."""
    counter = CounterFamily("jobs", "Jobs.", ("lane",))
    counter.add(("acme",))
    counter.add(("acme",), 2.5)
    counter.add(("bolt",))
    (family,) = counter.collect()
    assert _values(family) == {("jobs_total", "acme"): 3.5, ("jobs_total", "bolt"): 1.0}


def test_counter_without_labels_starts_at_zero() -> None:
    """A rate over it is right from the first scrape."""
    (family,) = CounterFamily("jobs", "Jobs.").collect()
    assert _values(family) == {("jobs_total",): 0.0}


def test_counter_past_its_bound() -> None:
    """The sets past the bound are counted together; the sum stays right."""
    counter = CounterFamily("jobs", "Jobs.", ("lane", "band"), series_max=2)
    for lane in ("a", "b", "c", "d", "a"):
        counter.add((lane, "1"))
    (family,) = counter.collect()
    assert _values(family) == {
        ("jobs_total", "a", "1"): 2.0,
        ("jobs_total", "b", "1"): 1.0,
        ("jobs_total", OTHER, OTHER): 2.0,
    }


@pytest.mark.parametrize(
    ("value", "buckets"),
    [
        (0.0, (1, 1, 1)),
        (1.0, (1, 1, 1)),
        (1.5, (0, 1, 1)),
        (2.0, (0, 1, 1)),
        (9.0, (0, 0, 1)),
    ],
)
def test_value_in_its_bucket(value: float, buckets: tuple[int, ...]) -> None:
    """Buckets are cumulative, and a bound belongs to its bucket, as Prometheus has it."""
    histogram = HistogramFamily("wait", "Wait.", buckets=(1.0, 2.0))
    histogram.observe((), value)
    (family,) = histogram.collect()
    told = _values(family)
    assert tuple(told["wait_bucket", bound] for bound in ("1.0", "2.0", "+Inf")) == buckets
    assert told["wait_count",] == 1
    assert told["wait_sum",] == value


def test_histogram_past_its_bound() -> None:
    """Like the counter's: one more set for all others."""
    histogram = HistogramFamily("wait", "Wait.", ("lane",), buckets=(1.0,), series_max=1)
    for lane in ("a", "b", "c", "a"):
        histogram.observe((lane,), 0.5)
    (family,) = histogram.collect()
    told = _values(family)
    assert told["wait_count", "a"] == 2
    assert told["wait_count", OTHER] == 2
    assert told["wait_sum", OTHER] == 1.0
