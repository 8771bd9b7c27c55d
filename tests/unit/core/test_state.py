"""A worker's sums: what goes in comes out."""

import pytest

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


def running(*output_tokens: int) -> Worker:
    """A worker whose jobs have prompts of 100 tokens and wrote so many."""
    worker = Worker("w1", 0)
    for number, tokens in enumerate(output_tokens):
        lease = a_lease(f"j{number}", prefilled=True)
        lease.output_tokens = tokens
        worker.add(lease)
    return worker


def test_kv_use_follows_what_the_engine_says() -> None:
    """Slowly: a tenth of the way with each report, towards used ÷ (prompts + answers so far)."""
    worker = running(100, 300)
    worker.learn_kv_use(300)
    assert worker.kv_use_ratio == pytest.approx(0.95)
    for _ in range(200):
        worker.learn_kv_use(300)
    assert worker.kv_use_ratio == pytest.approx(0.5)


@pytest.mark.parametrize(("used", "ratio"), [(1, 0.0), (601, 1.0), (2**53, 1.0)])
def test_kv_use_stays_between_none_and_all(used: int, ratio: float) -> None:
    """Whatever is reported: more than the jobs' tokens is what others left there."""
    worker = running(100, 300)
    for _ in range(500):
        worker.learn_kv_use(used)
        assert 0.0 <= worker.kv_use_ratio <= 1.0
    assert worker.kv_use_ratio == pytest.approx(ratio, abs=0.01)


def test_kv_use_is_not_learned_from_nothing() -> None:
    """An engine that reports none, and one that has only begun its prompts, tell nothing."""
    worker = running(100)
    worker.learn_kv_use(0)
    idle = Worker("w2", 1)
    idle.learn_kv_use(100)
    idle.add(a_lease())
    idle.learn_kv_use(100)
    assert (worker.kv_use_ratio, idle.kv_use_ratio) == (1.0, 1.0)
