"""LMetric: new prefill tokens times the batch."""

import random
from functools import partial

from broker.sim.peers.lmetric import LMetric
from tests.unit.sim.peers.workers import FakeWorker, a_request

OWN_TOKENS = partial(LMetric, queued=False)


def test_a_cached_prefix_wins_at_low_load() -> None:
    """Source: lmetric.rs: the worker that served the prefix serves its continuation."""
    workers = [FakeWorker(id=0), FakeWorker(id=1, cached={1})]
    for make in (LMetric, OWN_TOKENS):
        assert make(random.Random(1)).choose(a_request((1, 2)), workers, at_s=0.0) == 1


def test_load_multiplies_what_is_left_to_compute() -> None:
    """Source: lmetric.rs: 6 of 7 cached under 20 requests cost 21, nothing cached costs 7."""
    cached = FakeWorker(id=0, requests=20, cached=set(range(6)))
    workers = [cached, FakeWorker(id=1)]
    for make in (LMetric, OWN_TOKENS):
        peer = make(random.Random(1))
        assert peer.choose(a_request(range(7)), workers, at_s=0.0) == 1
    cached.requests = 5
    assert OWN_TOKENS(random.Random(1)).choose(a_request(range(7)), workers, at_s=0.0) == 0


def test_without_a_prefix_load_decides() -> None:
    """Source: lmetric.rs: of two and no requests the idle worker is taken."""
    workers = [FakeWorker(id=0, requests=2), FakeWorker(id=1)]
    assert LMetric(random.Random(1)).choose(a_request(prompt_tokens=3), workers, at_s=0.0) == 1


def test_prompts_that_wait_count_by_default() -> None:
    """The paper's indicator is the worker's; the ports' is the request's own."""
    workers = [FakeWorker(id=0, prefill_tokens=40, requests=1), FakeWorker(id=1, requests=2)]
    request = a_request(prompt_tokens=10)
    assert LMetric(random.Random(1)).choose(request, workers, at_s=0.0) == 1
    assert OWN_TOKENS(random.Random(1)).choose(request, workers, at_s=0.0) == 0


def test_a_product_of_zero_falls_back_on_load() -> None:
    """A prompt cached everywhere goes to the fewest requests."""
    workers = [FakeWorker(id=0, requests=3, cached={1}), FakeWorker(id=1, requests=2, cached={1})]
    assert LMetric(random.Random(1)).choose(a_request((1,)), workers, at_s=0.0) == 1
