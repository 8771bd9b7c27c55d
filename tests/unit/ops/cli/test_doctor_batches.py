"""What doctor makes of batches and their files."""

import math

import pytest

from broker.service.config import loads
from ops.cli.doctor_batches import FULL_RATIO, SCARCE_RATIO, batches, files, smaller_files
from ops.cli.doctor_facts import Facts, StreamFact
from ops.cli.doctor_findings import Level
from ops.cli.doctor_judge import judge
from producers.batches.census import LATE_S, UNTAKEN_S
from producers.batches.records import Batch, Lease, Status
from tests.stored_batches import a_batch
from tests.unit.ops.cli.test_doctor import a_cluster

NOW_S = 10_000.0
CONFIG = """
[policy]
models = ["tiny"]
[[policy.lanes]]
name = "acme"
"""
WAITING = a_batch(created_at_s=NOW_S - UNTAKEN_S - 30)
RUNNING = a_batch(id="batch_2", lease=Lease(runner="gw-1", until_s=NOW_S + 5, number=1))
LATE = a_batch(id="batch_3", created_at_s=NOW_S - LATE_S - 160, window_s=100.0)


def with_batches(*given: Batch) -> Facts:
    """A healthy cluster with these."""
    return a_cluster(batches=list(given), seen_at_s=NOW_S)


def test_files_that_got_less_than_configured() -> None:
    """The server had no room: that is told, and is no stream that is set wrong."""
    facts = a_cluster(config=loads(CONFIG))
    stream = facts.streams["FILES_acme"]
    assert list(smaller_files(facts)) == []
    facts.streams["FILES_acme"] = StreamFact({**stream.config, "max_bytes": 2**30}, 0, 0)
    (found,) = smaller_files(facts)
    assert (found.level, found.about) == (Level.WARN, "files")
    assert found.found.startswith("FILES_acme may hold 1.0 GiB of the 20.0 GiB configured")
    assert "max_file" in found.to_do
    assert not [
        one
        for one in judge(facts, line_bytes=2000)
        if one.about == "streams" and one.level is not Level.OK
    ]
    facts.config = None
    assert list(smaller_files(facts)) == []


def test_batches_that_are_run_are_counted() -> None:
    """One line; none where there never was a batch."""
    (found,) = batches(with_batches(RUNNING, a_batch(status=Status.COMPLETED)))
    assert (found.level, found.found) == (Level.OK, "1 of 2 under way, each is run")
    assert list(batches(with_batches())) == []


def test_a_batch_that_nobody_runs_since_no_gateway_is_up() -> None:
    """The way out is a gateway."""
    (found,) = batches(with_batches(WAITING))
    assert found.level is Level.FAIL
    assert found.found == "nobody runs a batch; acme.batch_1 waits since 1 min"
    assert "start `inferlane gateway" in found.to_do


def test_batches_that_wait_while_others_are_run() -> None:
    """The way out is more room."""
    (found,) = batches(with_batches(WAITING, WAITING, RUNNING))
    assert (found.level, "2 batches" in found.found) == (Level.WARN, True)
    assert "batches_running_max" in found.to_do


def test_a_batch_past_its_window() -> None:
    """Whose gateway to ask, or that one is lacking."""
    lease = Lease(runner="gw-7", until_s=NOW_S + 5, number=2)
    held = a_batch(
        id="batch_3",
        created_at_s=LATE.created_at_s,
        window_s=100.0,
        status=Status.IN_PROGRESS,
        lease=lease,
    )
    (found,) = batches(with_batches(held))
    assert found.level is Level.FAIL
    assert found.found == "acme.batch_3 is in_progress 3 min after the end of its window"
    assert "gw-7" in found.to_do
    nobody, late = batches(with_batches(LATE))
    assert (nobody.level, late.level) == (Level.FAIL, Level.FAIL)
    assert "start `inferlane gateway`" in late.to_do


@pytest.mark.parametrize(
    ("share", "level", "told"),
    [
        (SCARCE_RATIO - 0.01, Level.OK, "there is room for more in each lane"),
        (SCARCE_RATIO, Level.WARN, "soon lane acme can store no results"),
        (FULL_RATIO - 0.01, Level.WARN, "soon lane acme can store no results"),
        (FULL_RATIO, Level.FAIL, "batches of lane acme wait for room"),
    ],
)
def test_room_for_files(share: float, level: Level, told: str) -> None:
    """Said before a lane is full, and when it is."""
    facts = a_cluster()
    stream = facts.streams["FILES_acme"]
    stored = math.ceil(share * int(stream.config["max_bytes"]))
    facts.streams["FILES_acme"] = StreamFact(stream.config, 1000, stored)
    (found,) = files(facts)
    assert found.level is level
    assert told in found.found
