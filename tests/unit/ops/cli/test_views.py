"""`workers`, `lanes`, `reconcile`: the broker's answer as people and scripts read it."""

import orjson
import pytest

from broker.service.snapshot import (
    DifferenceView,
    LanesView,
    ReconcileView,
    RowView,
    WorkersView,
    encode,
)
from ops.cli import lanes, reconcile, workers
from ops.cli.errors import CommandError
from tests.views import a_gone_view, a_lane_view, a_queue_view, a_worker_view


def _rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line.strip()]


def test_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """In order of name: state, jobs of slots, cached share, age; and a count below."""
    views = (
        a_worker_view(worker="b", kv_tokens_max=0, prefill_tokens_s=0.0),
        a_worker_view(worker="a", phase="suspect", inflight_jobs=3, signal_age_s=4.0),
    )
    workers.show(encode(WorkersView(workers=views)), as_json=False)
    rows = _rows(capsys.readouterr().out)
    assert rows[2] == [
        *("a", "suspect", "tiny", "3/6", "300", "25%", "75%", "8,000/s", "50/s", "4.0", "s", "ago")
    ]
    assert rows[3] == [
        *("b", "ready", "tiny", "1/6", "300", "?", "75%", "?", "50/s", "400", "ms", "ago")
    ]
    assert rows[4] == ["1", "of", "2", "ready,", "4", "jobs", "on", "12", "slots"]


@pytest.mark.parametrize(
    ("fields", "state"),
    [
        ({}, "ready"),
        ({"ready": False}, "not ready"),
        ({"draining": True}, "draining"),
        ({"draining": True, "drained": True}, "drained"),
        ({"phase": "gone", "draining": True}, "gone"),
        ({"breaker": "open"}, "breaker open"),
        ({"breaker": "half_open"}, "breaker half-open"),
        ({"breaker": "open", "ready": False}, "not ready"),
    ],
)
def test_state_of_a_worker(fields: dict[str, object], state: str) -> None:
    """The word that matters most."""
    assert workers.state(a_worker_view(**fields)) == state


def test_no_workers(capsys: pytest.CaptureFixture[str]) -> None:
    """Says how to start one."""
    workers.show(encode(WorkersView(workers=())), as_json=False)
    assert capsys.readouterr().out.startswith("No workers. Start one")


def test_workers_that_went(capsys: pytest.CaptureFixture[str]) -> None:
    """How, how long ago, and what of theirs waits again; also where none is left."""
    gone = (a_gone_view(), a_gone_view(worker="gpu-8", how="left", back=True, ago_s=7200.0))
    gone += (a_gone_view(worker="gpu-7", how="restarted", back=True, times=4),)
    workers.show(encode(WorkersView(workers=(), gone=gone)), as_json=False)
    told = capsys.readouterr().out
    assert told.startswith("No workers.")
    ago = ["5", "min", "ago"]
    assert _rows(told)[-3:] == [
        ["gpu-9", "lost", *ago, "1", "3", "2", "no", "responders"],
        ["gpu-8", "left,", "back", "2", "h", "ago", "1", "3", "2", "no", "responders"],
        ["gpu-7", "restarted", *ago, "4", "3", "2", "no", "responders"],
    ]


def test_workers_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The broker's own answer, fields that this version does not know included."""
    workers.show(b'{"workers":[],"new":1}', as_json=True)
    assert orjson.loads(capsys.readouterr().out) == {"workers": [], "new": 1}


def test_fields_of_a_newer_broker(capsys: pytest.CaptureFixture[str]) -> None:
    """A table is made of what is known."""
    data = orjson.loads(encode(WorkersView(workers=(a_worker_view(),))))
    data["workers"][0]["new"] = 1
    workers.show(orjson.dumps(data), as_json=False)
    assert "gpu-1" in capsys.readouterr().out


def test_lanes(capsys: pytest.CaptureFixture[str]) -> None:
    """Queues by band, the quota rows once, a lane without a job said to be so."""
    views = (
        a_lane_view(queues=(a_queue_view(band=3, queued_jobs_max=0), a_queue_view(band=0))),
        a_lane_view(lane="bolt", queues=(), paused=True),
    )
    lanes.show(encode(LanesView(lanes=views)), lane=None, as_json=False)
    rows = _rows(capsys.readouterr().out)
    assert rows[2] == ["acme", "0", "critical", "tiny", "3", "400", "2", "1.5", "s"]
    assert rows[3] == ["acme", "3", "batch", "tiny", "3", "-", "2", "1.5", "s"]
    assert rows[4] == ["bolt", "(paused)", "(no", "job", "yet)"]
    assert rows[7:] == [["band=1", "2", "200", "7", "0"]]


def test_one_lane(capsys: pytest.CaptureFixture[str]) -> None:
    """Only its queues and rows."""
    row = RowView(
        row="lane=bolt",
        inflight_jobs=1,
        inflight_tokens_max=5000,
        queued_jobs=12,
        queued_jobs_max=400,
        bucket_tokens=-1500.0,
        tokens_per_min=2_000_000,
        result_bytes=3 * 1024,
        result_bytes_max=10 * 1024**2,
    )
    rows = (row,)
    views = LanesView(lanes=(a_lane_view(), a_lane_view(lane="bolt", rows=rows)))
    lanes.show(encode(views), lane="bolt", as_json=False)
    told = capsys.readouterr().out
    assert "acme" not in told
    heads = "QUOTA JOBS OF LENT BORROWED WAITING OF TOKENS OF MAY START A MINUTE RESULTS OF"
    assert heads.split() in _rows(told)
    bounded = ["12", "400", "0", "5,000", "-1,500", "2,000,000", "3.0", "KiB", "10.0", "MiB"]
    assert _rows(told)[-1] == ["lane=bolt", "1", "-", "0", "0", *bounded]


def test_lane_that_is_none() -> None:
    """Says which there are, and which was meant."""
    views = LanesView(lanes=(a_lane_view(), a_lane_view(lane="bolt")))
    with pytest.raises(CommandError, match=r'no such lane: bolr. Did you mean "bolt"\? Known: a'):
        lanes.show(encode(views), lane="bolr", as_json=False)


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (ReconcileView(checked_jobs=1, differences=(), repaired=0), "Checked 1 job: no diff"),
        (ReconcileView(checked_jobs=1200, differences=(), repaired=0), "Checked 1,200 jobs: no d"),
        (
            ReconcileView(
                checked_jobs=7,
                differences=(DifferenceView(kind="lost", key="a.j", worker="w1", detail="x"),),
                repaired=1,
            ),
            "Checked 7 jobs: 1 difference, 1 repaired.",
        ),
    ],
)
def test_reconcile(report: ReconcileView, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """How much was looked at, and each difference."""
    reconcile.show(encode(report), as_json=False)
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith(told)
    assert all(one.key in out for one in report.differences)


def test_reconcile_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """The broker's own answer."""
    report = ReconcileView(checked_jobs=1, differences=(), repaired=0)
    reconcile.show(encode(report), as_json=True)
    assert orjson.loads(capsys.readouterr().out)["checked_jobs"] == 1
