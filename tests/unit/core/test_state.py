"""A worker's sums: what goes in comes out."""

import pytest

from broker.core.state import Lease, Worker
from tests.builders import an_attempt
from tests.unit.core.cluster import a_spec


def a_lease(name: str = "j1", *, prefilled: bool = False) -> Lease:
    """A lease of 100 prompt tokens, 60 of them uncached, 50 of output: 110 of KV cache."""
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
    assert sums(worker) == (2, 220, 60, 1)
    assert worker.mark_prefilled(lease, at_s=0.0)
    assert not worker.mark_prefilled(lease, at_s=0.0)
    assert sums(worker) == (2, 220, 0, 2)
    assert worker.remove("acme.j1") is lease
    assert worker.remove("acme.j1") is None
    assert worker.remove("acme.j2") is decoding
    assert sums(worker) == (0, 0, 0, 0)


def running(*output_tokens: int) -> Worker:
    """A worker whose jobs had 60 of 100 prompt tokens to compute and wrote so many."""
    worker = Worker("w1", 0)
    for number, tokens in enumerate(output_tokens):
        lease = a_lease(f"j{number}", prefilled=True)
        lease.output_tokens = tokens
        worker.add(lease)
    return worker


def test_kv_in_use_is_what_was_there_and_what_jobs_add() -> None:
    """A prefix that two hold takes its room once: 40 tokens here, though both had them as hits."""
    worker = running(30, 20)
    worker.learn_kv_use(60 + 30 + 60 + 20 + 40)
    assert worker.kv_base_tokens == 40
    assert worker.kv_tokens_in_use == 40 + 2 * (60 + 50)


@pytest.mark.parametrize(
    ("used", "base_tokens"), [(1, 0), (170, 0), (171, 1), (2**53, 2**53 - 170)]
)
def test_kv_base_is_never_less_than_nothing(used: int, base_tokens: int) -> None:
    """Whatever is reported, and as often: each report stands alone."""
    worker = running(30, 20)
    for _ in range(3):
        worker.learn_kv_use(used)
        assert worker.kv_base_tokens == base_tokens


def test_an_engine_that_tells_nothing_counts_each_hit_in_full() -> None:
    """Then nothing is known of what they share."""
    worker = running(30, 20)
    worker.learn_kv_use(0)
    assert (worker.kv_base_tokens, worker.kv_tokens_in_use) == (80, 300)
    idle = Worker("w2", 1)
    idle.learn_kv_use(0)
    assert idle.kv_tokens_in_use == 0
