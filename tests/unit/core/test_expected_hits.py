"""What is told of a hit that is too short to count is what the engine finds, and moves no job."""

import pytest

from broker.core.events import JobSpec
from broker.core.expected_hits import HEAD_SHARE
from broker.core.placement import Placement
from broker.core.state import Lease
from tests.unit.core.breaker_world import BreakerWorld
from tests.unit.core.routing_builders import BLOCK_TOKENS, SYSTEM, Place, chain
from tests.unit.core.test_slot_cache import a_place

SHORT = ("short", 10)
"""640 tokens: below the floor of 1,024."""


def told(place: Place, job: JobSpec, placement: Placement | None = None) -> int:
    """Say what the decision log would have as predicted."""
    placement = placement or place.place(job)
    return place.router.explain(job, placement, at_s=place.at_s).predicted_hit_tokens


def find(place: Place, lease: Lease, cached_tokens: int) -> None:
    """Let the engine say what it found."""
    place.router.hit_seen(lease, place.workers[lease.worker], cached_tokens=cached_tokens)


def run_cold(place: Place, *, cached_tokens: int) -> None:
    """Run a prompt like no other; of it the engine finds so much."""
    lease = place.give(place.spec((f"cold{place.jobs}", 5)))
    find(place, lease, cached_tokens)
    place.prefill(lease)
    place.end(lease)


def given_to(place: Place, answer: Placement, name: str) -> Placement:
    """Let the answer be this worker."""
    return Placement(
        place.workers[name], answer.hit_tokens, answer.uncached_tokens, answer.prefill_s
    )


def test_a_hit_below_the_floor_is_told_and_earns_nothing() -> None:
    """Who holds 640 tokens of a job is no better for it, and finds them if it runs there."""
    place = Place(1)
    place.warm("w0", SHORT)
    job = place.spec(SHORT, ("ask", 1))
    answer = place.place(job)
    assert (answer.hit_tokens, answer.uncached_tokens) == (0, job.prompt_tokens)
    assert told(place, job) == 10 * BLOCK_TOKENS
    explanation = place.router.explain(job, answer, at_s=place.at_s)
    assert [one.hit_tokens for one in explanation.candidates] == [0]


def test_it_is_told_of_the_worker_that_was_chosen() -> None:
    """Held elsewhere, it is found elsewhere."""
    place = Place(2)
    place.warm("w0", SHORT)
    place.change("w0", ready=False)
    assert told(place, place.spec(SHORT, ("ask", 1))) == 0


def test_a_hit_that_counts_is_told_as_it_counts() -> None:
    """From the floor on, what is told is what the score was given."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    job = place.spec(SYSTEM, ("ask", 1))
    assert told(place, job) == place.place(job).hit_tokens == 30 * BLOCK_TOKENS


def test_trust_lowers_a_short_hit_too() -> None:
    """A worker that found half of what was predicted is expected to do so again."""
    place = Place(1)
    place.warm("w0", SHORT)
    place.change("w0", trust=0.5)
    assert told(place, place.spec(SHORT, ("ask", 1))) == 5 * BLOCK_TOKENS


def test_never_the_whole_prompt() -> None:
    """The engine computes the last token always; of an empty prompt it finds nothing."""
    place = Place(1)
    place.warm("w0", SHORT)
    place.change("w0", head_tokens=20.0)
    whole = place.spec(SHORT, prompt_tokens=10 * BLOCK_TOKENS, block_tokens=float(BLOCK_TOKENS))
    assert told(place, whole) == 10 * BLOCK_TOKENS - 1
    assert [told(place, place.spec(prompt_tokens=tokens)) for tokens in (0, 1, 8)] == [0, 0, 7]


def test_of_a_slot_in_use_nothing_is_told() -> None:
    """A short prefix that one sequence holds serves who runs with it alone."""
    place = a_place()
    place.run(place.spec(SHORT), "w0")
    job = place.spec(SHORT, ("b", 1))
    answer = given_to(place, place.place(job), "w0")
    assert told(place, job, answer) == 10 * BLOCK_TOKENS
    place.give(place.spec(SHORT, ("a", 1)), "w0")
    assert told(place, job, answer) == 0


def test_what_all_prompts_begin_with_is_learned() -> None:
    """Nine tokens of a template are found of each prompt: after some, nine are told."""
    place = Place(1)
    assert told(place, place.spec(("other", 5))) == 0
    run_cold(place, cached_tokens=9)
    assert place.workers["w0"].head_tokens == pytest.approx(9 * HEAD_SHARE)
    for _ in range(40):
        run_cold(place, cached_tokens=9)
    assert told(place, place.spec(("other", 5))) == 9
    for _ in range(40):
        run_cold(place, cached_tokens=0)
    assert told(place, place.spec(("other", 5))) == 0


@pytest.mark.parametrize(("cached_tokens", "is_head"), [(63, True), (64, False)])
def test_a_whole_block_was_shared_and_is_no_head(cached_tokens: int, is_head: bool) -> None:
    """From a block on, what is found of a prompt that was thought cold says nothing of the next."""
    place = Place(1)
    run_cold(place, cached_tokens=cached_tokens)
    assert (place.workers["w0"].head_tokens > 0) is is_head


def test_a_hit_that_counted_teaches_no_head() -> None:
    """It was predicted, and moves trust."""
    place = Place(1)
    place.warm("w0", SYSTEM)
    lease = place.give(place.spec(SYSTEM))
    find(place, lease, 9)
    worker = place.workers["w0"]
    assert (worker.head_tokens, worker.trust < 1.0) == (0.0, True)


def test_no_head_and_no_short_hit_moves_a_job() -> None:
    """Of two workers one finds 20 tokens of all prompts and 640 of these: they spread as before."""
    spread: list[list[str]] = []
    for head_tokens, held in ((0.0, ("none", 10)), (20.0, SHORT)):
        place = Place(2)
        place.warm("w1", held)
        place.change("w1", head_tokens=head_tokens)
        spread.append([])
        for number in range(6):
            lease = place.give(place.spec(SHORT, (f"ask{number}", 1)))
            place.prefill(lease)
            spread[-1].append(lease.worker)
    assert spread[0] == spread[1]


def test_a_dispatch_carries_it_and_its_lease_is_charged_in_full() -> None:
    """The agent hears what is expected; quotas, load and fairness count what was credited."""
    world = BreakerWorld(workers=1, slots=2)
    world.warm("w0", chain(SHORT))
    tokens = 12 * BLOCK_TOKENS + 32
    world.submit(prompt_tokens=tokens, blocks=chain(SHORT, ("ask", 2)))
    (dispatch,) = world.running.values()
    (lease,) = world.scheduler._mind.ledger
    assert dispatch.predicted_hit_tokens == 10 * BLOCK_TOKENS
    assert dispatch.explanation.predicted_hit_tokens == 10 * BLOCK_TOKENS
    assert (lease.hit_tokens, lease.uncached_tokens) == (0, tokens)
