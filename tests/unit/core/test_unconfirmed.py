"""Dispatched chains wait for a report that confirms them, for a while."""

import pytest

from broker.core.state import Lease, Worker
from broker.core.unconfirmed import CONFIRM_REPORTS_MAX, Unconfirmed
from broker.wire.messages import Attempt
from tests.unit.core.routing_builders import a_spec, a_worker, chain

BLOCKS = chain(("a", 10))


def a_lease(worker: Worker, name: str = "j", *, prefilled: bool = True) -> Lease:
    """A lease on a job of ten blocks, its prefill over by default."""
    job = a_spec(name, blocks=BLOCKS)
    lease = Lease(job, Attempt(1, 1), worker.id, 1, 0.0, 1.0, 10, 0, 50)
    worker.add(lease)
    if prefilled:
        worker.mark_prefilled(lease, at_s=0.0)
    return lease


def failed(unconfirmed: Unconfirmed, worker: Worker, *reports: list[int]) -> list[list[int]]:
    """Send reports; return the unconfirmed blocks of each chain that failed."""
    return [
        list(one.unconfirmed) for added in reports for one in unconfirmed.reported(worker, added)
    ]


def test_an_unconfirmed_chain_fails_after_so_many_reports() -> None:
    """Only what the worker did not hold before is in question."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    assert unconfirmed.add(a_lease(worker), start=4) is None
    assert failed(unconfirmed, worker, *[[]] * (CONFIRM_REPORTS_MAX - 1)) == []
    assert failed(unconfirmed, worker, []) == [BLOCKS[4:]]
    assert failed(unconfirmed, worker, []) == []


def test_a_confirmed_chain_is_no_longer_followed() -> None:
    """The last block confirms all before it."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    unconfirmed.add(a_lease(worker), start=0)
    assert failed(unconfirmed, worker, BLOCKS[9:], *[[]] * 9) == []


def test_a_part_confirmed_leaves_the_rest_in_question() -> None:
    """Each confirmation gives the rest new time; what never comes fails alone."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    unconfirmed.add(a_lease(worker), start=0)
    quiet = [[]] * (CONFIRM_REPORTS_MAX - 2)
    assert failed(unconfirmed, worker, *quiet, BLOCKS[:6], *quiet) == []
    assert failed(unconfirmed, worker, [], []) == [BLOCKS[6:]]


def test_the_first_block_in_question_can_be_confirmed_alone() -> None:
    """A report that lists no more than the first of the blocks in question confirms that one."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    unconfirmed.add(a_lease(worker), start=3)
    reports = [BLOCKS[3:4], *[[]] * CONFIRM_REPORTS_MAX]
    assert failed(unconfirmed, worker, *reports) == [BLOCKS[4:]]


def test_time_begins_with_the_end_of_the_prefill() -> None:
    """A long prefill may take any number of reports; a job that ended without one is done, too."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    lease = a_lease(worker, prefilled=False)
    unconfirmed.add(lease, start=0)
    assert failed(unconfirmed, worker, *[[]] * 20) == []
    assert [one.lease for one in unconfirmed.running(worker)] == [lease]
    worker.remove(lease.job.key)
    assert unconfirmed.running(worker) == []
    assert failed(unconfirmed, worker, *[[]] * CONFIRM_REPORTS_MAX) == [BLOCKS]


def test_nothing_is_followed_of_a_chain_that_was_held_whole() -> None:
    """What the worker held already needs no confirmation."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    unconfirmed.add(a_lease(worker), start=10)
    assert unconfirmed.running(worker) == []
    assert failed(unconfirmed, worker, *[[]] * 9) == []


def test_chains_are_bounded_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the bound the oldest is no longer followed, and is returned to be dropped."""
    monkeypatch.setattr("broker.core.unconfirmed.UNCONFIRMED_CHAINS_MAX", 2)
    worker, unconfirmed = a_worker(), Unconfirmed()
    leases = [a_lease(worker, f"j{n}", prefilled=False) for n in range(3)]
    assert [unconfirmed.add(lease, start=0) for lease in leases[:2]] == [None, None]
    overflow = unconfirmed.add(leases[2], start=0)
    assert overflow is not None
    assert overflow.lease is leases[0]
    assert [one.lease for one in unconfirmed.running(worker)] == leases[1:]


def test_a_worker_can_be_forgotten() -> None:
    """A lost cache leaves nothing to confirm; a stranger neither."""
    worker, unconfirmed = a_worker(), Unconfirmed()
    unconfirmed.add(a_lease(worker), start=0)
    unconfirmed.forget(worker.id)
    unconfirmed.forget("stranger")
    assert failed(unconfirmed, worker, *[[]] * 9) == []
