"""A worker's sums: what goes in comes out."""

from broker.core.state import Lease, Worker
from tests.builders import an_attempt
from tests.unit.core.cluster import a_spec


def a_lease(name: str = "j1", *, prefilled: bool = False) -> Lease:
    """A lease of 100 prompt tokens, 60 of them uncached, 50 of output."""
    return Lease(
        a_spec(name),
        an_attempt(),
        "w1",
        number=1,
        granted_at_s=1000.0,
        cost_tokens=160.0,
        uncached_tokens=60,
        hit_tokens=40,
        output_tokens_expected=50,
        prefilled=prefilled,
    )


def sums(worker: Worker) -> tuple[int, int, int, int]:
    """Leases, KV tokens, backlog, decoding."""
    return (
        len(worker.leases),
        worker.kv_tokens,
        worker.backlog_tokens,
        worker.decoding_jobs,
    )


def test_a_lease_counts_until_it_is_removed() -> None:
    """Before and after its first token; a second removal finds nothing."""
    worker = Worker("w1", 0)
    lease, decoding = a_lease(), a_lease("j2", prefilled=True)
    worker.add(lease)
    worker.add(decoding)
    assert sums(worker) == (2, 300, 60, 1)
    assert worker.mark_prefilled(lease, at_s=0.0)
    assert not worker.mark_prefilled(lease, at_s=0.0)
    assert sums(worker) == (2, 300, 0, 2)
    assert worker.remove("acme.j1") is lease
    assert worker.remove("acme.j1") is None
    assert worker.remove("acme.j2") is decoding
    assert sums(worker) == (0, 0, 0, 0)


def test_a_lease_without_an_order_was_found_running() -> None:
    """Orders are numbered from 1."""
    lease = a_lease()
    assert not lease.is_adopted
    lease.number = 0
    assert lease.is_adopted
