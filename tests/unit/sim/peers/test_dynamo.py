"""Dynamo's cost: uncached prefill times scale, plus blocks held."""

import random

import pytest

from broker.sim.peers.dynamo import BLOCK_TOKENS, Dynamo, variants
from broker.sim.request import Request
from tests.unit.sim.peers.workers import FakeWorker, a_request


def ten_blocks() -> Request:
    """Build the worked example's request: ten blocks of the router's own size."""
    return Request(
        index=0,
        at_s=0.0,
        prompt_tokens=10 * BLOCK_TOKENS,
        output_tokens=1,
        output_tokens_max=1,
        blocks=tuple(range(10)),
        block_tokens=BLOCK_TOKENS,
    )


def the_worked_example() -> list[FakeWorker]:
    """Build its three workers: 2, 5 and 8 blocks cached; 10, 5 and 9 decode blocks."""
    return [
        FakeWorker(
            id=place, cached=set(range(cached)), active_block_tokens=decode_blocks * BLOCK_TOKENS
        )
        for place, (cached, decode_blocks) in enumerate(((2, 10), (5, 5), (8, 9)))
    ]


@pytest.mark.parametrize(("scale", "place"), [(1.0, 1), (2.0, 2), (32.0, 2)])
def test_the_worked_example_goes_where_the_page_says(scale: float, place: int) -> None:
    """Source: the routing concepts page: prefill 8, 5, 2 and decode 10, 5, 9 cost 18, 10, 11.

    So worker 2 is taken at scale 1; at 2 they cost 26, 15 and 13, and worker 3 is.
    """
    peer = Dynamo(random.Random(1), scale=scale)
    assert peer.choose(ten_blocks(), the_worked_example(), at_s=0.0) == place


def test_costs_differ_as_in_the_worked_example() -> None:
    """The request's own ten decode blocks come on top of every worker's alike."""
    peer = Dynamo(random.Random(1))
    costs = [peer.cost(ten_blocks(), worker) for worker in the_worked_example()]
    assert costs == [18.0 + 10.0, 10.0 + 10.0, 11.0 + 10.0]


def test_prompts_that_wait_there_count_as_prefill() -> None:
    """Three blocks queued cost three times the scale, though the request itself is cached."""
    peer = Dynamo(random.Random(1), scale=4.0)
    busy = FakeWorker(prefill_tokens=3 * BLOCK_TOKENS, cached=set(range(10)))
    assert peer.cost(ten_blocks(), busy) == 4.0 * 3.0 + 10.0


def test_a_credit_above_1_may_cost_less_than_nothing() -> None:
    """Source: its options: such a credit can make the prefill cost negative."""
    peer = Dynamo(random.Random(1), credit=2.0)
    worker = FakeWorker(prefill_tokens=3 * BLOCK_TOKENS, cached=set(range(10)))
    assert peer.cost(ten_blocks(), worker) == (3.0 - 10.0) + 10.0


def test_requests_weigh_what_the_preset_says() -> None:
    """Source: the agentic preset: 64 blocks of 16 tokens are 1,024 tokens a request."""
    worker = FakeWorker(requests=3)
    plain = Dynamo(random.Random(1)).cost(ten_blocks(), worker)
    weighed = Dynamo(random.Random(1), request_tokens=1024).cost(ten_blocks(), worker)
    assert (weighed - plain) * BLOCK_TOKENS == 3 * 1024


def test_a_block_that_active_requests_share_counts_once() -> None:
    """The same request again adds nothing to a worker that holds it, until it ends."""
    peer = Dynamo(random.Random(1), scale=0.0)
    worker = FakeWorker(id=0)
    peer.choose(ten_blocks(), [worker], at_s=0.0)
    peer.choose(ten_blocks(), [worker], at_s=0.0)
    peer.ended(ten_blocks(), worker, at_s=1.0)
    assert peer.cost(ten_blocks(), worker) == 0.0
    peer.ended(ten_blocks(), worker, at_s=2.0)
    assert peer.cost(ten_blocks(), worker) == 10.0


def test_a_lost_worker_holds_nothing() -> None:
    """Its books are void, and an end told late doesn't harm."""
    peer = Dynamo(random.Random(1), scale=0.0)
    worker = FakeWorker(id=0)
    peer.choose(ten_blocks(), [worker], at_s=0.0)
    peer.lost(worker, at_s=1.0)
    assert peer.cost(ten_blocks(), worker) == 10.0
    peer.ended(ten_blocks(), worker, at_s=2.0)
    assert peer.cost(ten_blocks(), worker) == 10.0


def test_equal_costs_are_drawn_by_chance() -> None:
    """Source: the selector's own case: three idle workers, 120 draws, more than one is taken."""
    workers = [FakeWorker(id=place) for place in range(3)]
    peer = Dynamo(random.Random(1))
    drawn = [peer.choose(a_request(), workers, at_s=0.0) for _ in range(120)]
    assert sorted(dict.fromkeys(drawn)) == [0, 1, 2]


def test_the_default_comes_first_and_scales_reach_32() -> None:
    """The sweep is labelled by scale; the preset comes last."""
    labels = list(variants())
    assert labels[0] == "dynamo scale=1"
    assert labels[-2:] == ["dynamo scale=32", "dynamo agentic"]
