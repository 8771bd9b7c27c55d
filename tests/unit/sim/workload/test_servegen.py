"""ServeGen's clients: windows, distributions, lanes."""

import os
import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from broker.sim.errors import TraceError
from broker.sim.request import Workload
from broker.sim.workload.loading import load

DEEPSEEK = "servegen/deepseek-r1"


def a_folder(folder: Path, *clients: str) -> str:
    """Write one file per client, and return the folder's path."""
    for number, rows in enumerate(clients):
        (folder / f"chunk-{number}-trace.csv").write_text(rows)
    (folder / "chunk-0-dataset.json").write_text("{}")
    return str(folder)


def variation(workload: Workload) -> float:
    """Return the coefficient of variation of the gaps."""
    gaps = [later.at_s - earlier.at_s for earlier, later in pairwise(workload.requests)]
    return statistics.stdev(gaps) / statistics.mean(gaps)


def test_each_client_is_a_lane(tmp_path: Path) -> None:
    """Each file's requests stand under its number, as many as its rate says."""
    path = a_folder(tmp_path, "0,0.5,1,Gamma,1,2\n600,0,0,,0,0", "0,0.1,1,Weibull,1,2")
    requests = load(path + "?start_h=0&hours=1").requests
    assert Counter(request.lane for request in requests) == {"client-0": 300, "client-1": 60}
    assert [request.index for request in requests] == list(range(360))
    assert all(0 <= request.at_s < 600 for request in requests)
    assert all(request.blocks == () for request in requests)


@pytest.mark.parametrize(
    ("distribution", "expected"),
    [("Gamma,4,9", 0.5), ("Gamma,1,9", 1.0), ("Weibull,2,9", 0.523), ("Weibull,1,9", 1.0)],
)
def test_gaps_have_the_named_shape(tmp_path: Path, *, distribution: str, expected: float) -> None:
    """Gamma's variation is 1/√shape, Weibull's follows from its shape; the scale is the rate's."""
    workload = load(a_folder(tmp_path, f"0,20,1,{distribution}") + "?start_h=0")
    assert len(workload.requests) == 12_000
    assert variation(workload) == pytest.approx(expected, rel=0.05)


def test_only_the_asked_hours_count(tmp_path: Path) -> None:
    """Windows outside are left out, and the first arrival is at 0 s."""
    rows = "0,9,1,Gamma,1,1\n3600,0.1,1,Gamma,1,1\n4200,9,1,Gamma,1,1"
    workload = load(a_folder(tmp_path, rows) + "?start_h=1&hours=0.15")
    assert len(workload.requests) == 60
    assert workload.requests[0].at_s == 0.0


def test_the_seed_decides(tmp_path: Path) -> None:
    """The same seed draws the same workload, another one another."""
    path = a_folder(tmp_path, "0,0.5,1,Gamma,1,2") + "?start_h=0"
    assert load(path, seed=3).requests == load(path, seed=3).requests
    assert load(path, seed=3).requests != load(path, seed=4).requests


def test_gaps_too_small_to_tell_apart(tmp_path: Path) -> None:
    """A client so bursty that its gaps round to nothing still has its requests."""
    path = a_folder(tmp_path, "0,0.01,99,Gamma,0.0001,1") + "?start_h=0"
    assert len(load(path).requests) == 6


@pytest.mark.parametrize("drawn", ["Gamma,1e6,1e300", "Weibull,1e-300,1", "Weibull,0.01,1e300"])
def test_gaps_too_large_to_count(tmp_path: Path, *, drawn: str) -> None:
    """Whatever is drawn, the window has its requests, each at an instant within it."""
    workload = load(a_folder(tmp_path, f"0,0.1,1,{drawn}") + "?start_h=0")
    assert len(workload.requests) == 60
    assert all(0 <= request.at_s <= 600 for request in workload.requests)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("0,1,1,Pareto,1,1", "unknown distribution 'Pareto'"),
        ("0,1,1,Gamma,0,1", "shape and scale"),
        ("0,1,1,Gamma,1,-1", "shape and scale"),
        ("0,1,1,Gamma,1", "no row"),
        ("0,much,1,Gamma,1,1", "no row"),
        ("nan,1,1,Gamma,1,1", "the start is a number of seconds"),
        ("0,nan,1,Gamma,1,1", "at most 1,000"),
        ("0,-1,1,Gamma,1,1", "at most 1,000"),
        ("0,inf,1,Gamma,1,1", "at most 1,000"),
        ("0,1000.1,1,Gamma,1,1", "at most 1,000"),
        ("0,1,1,Gamma,1e7,1", "shape at most 1,000,000"),
        ("0,1,1,Gamma,1,inf", "shape and scale"),
        ("0,1,1,Weibull,nan,1", "shape and scale"),
    ],
)
def test_bad_row_is_named(tmp_path: Path, *, row: str, problem: str) -> None:
    """The error names the client's file and the line."""
    with pytest.raises(TraceError, match=problem) as caught:
        load(a_folder(tmp_path, "0,0,0,,0,0\n" + row) + "?start_h=0")
    assert caught.value.where.endswith("chunk-0-trace.csv")
    assert caught.value.line == 2


def test_silent_hours_say_so(tmp_path: Path) -> None:
    """Hours in which nobody asks are no workload."""
    with pytest.raises(TraceError, match="no requests in"):
        load(a_folder(tmp_path, "0,1,1,Gamma,1,1") + "?start_h=5")


@pytest.mark.trace(DEEPSEEK)
def test_published_clients() -> None:
    """Of 73 clients about 30 are awake in the default half hour, at about 20 requests a second."""
    traces = Path(os.environ.get("INFERLANE_TRACES", "traces"))
    workload = load("servegen", traces=traces)
    assert len({request.lane for request in workload.requests}) == 32
    assert len(workload.requests) / 1800 == pytest.approx(19.4, abs=0.1)
