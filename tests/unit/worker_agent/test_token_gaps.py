"""Which gaps between tokens are decode steps alone."""

import random

import pytest

from broker.engine_model.events import Finished, FirstToken, SequenceRequest, TokenGenerated
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import REFERENCE
from worker_agent.token_gaps import TokenGaps


def decoding(*names: str, at_s: float = 0.0) -> TokenGaps:
    """Gaps of attempts that have their first token."""
    gaps = TokenGaps()
    for name in names:
        gaps.began(name)
    for name in names:
        gaps.came(name, tokens=1, at_s=at_s)
    return gaps


def test_gaps_of_all_answers_count() -> None:
    """Two answers of 5 and 10 tokens more in a second each: 15 tokens in 2 s."""
    gaps = decoding("a", "b")
    gaps.came("a", tokens=6, at_s=1.0)
    gaps.came("b", tokens=11, at_s=1.0)
    assert gaps.meter.read() == 7.5


def test_several_tokens_in_one_read_count_as_they_are() -> None:
    """A stretch is told by its ends: 20 a second, read late and all at once."""
    gaps = decoding("a")
    gaps.came("a", tokens=2, at_s=0.9)
    gaps.came("a", tokens=21, at_s=1.0)
    assert gaps.meter.read() == 20.0


def test_a_gap_in_which_a_prompt_was_prefilled_does_not_count() -> None:
    """From its start to its first token, and the gap of another answer that its token falls in."""
    gaps = decoding("a")
    gaps.came("a", tokens=11, at_s=1.0)
    gaps.began("b")
    gaps.came("a", tokens=12, at_s=1.5)  # It was prefilled at the end of this one, ...
    gaps.came("a", tokens=13, at_s=2.5)  # ... all through this one ...
    gaps.came("b", tokens=1, at_s=2.6)
    gaps.came("a", tokens=14, at_s=3.5)  # ... and at the beginning of this.
    assert gaps.meter.read() == 10.0
    gaps.came("a", tokens=34, at_s=4.5)
    assert gaps.meter.read() == 20.0


def test_a_prompt_that_came_and_left_within_a_gap_spoils_it() -> None:
    """An attempt that was stopped, or refused by its engine, before its first token."""
    gaps = decoding("a")
    gaps.began("b")
    gaps.ended("b", at_s=0.5)
    gaps.came("a", tokens=2, at_s=1.0)
    assert gaps.meter.read() == 0.0
    gaps.came("a", tokens=12, at_s=2.0)
    assert gaps.meter.read() == 10.0


def test_an_answer_that_ends_spoils_nothing() -> None:
    """Its own gaps were counted, those of the others go on."""
    gaps = decoding("a", "b")
    gaps.ended("b", at_s=0.5)
    gaps.came("a", tokens=11, at_s=1.0)
    assert gaps.meter.read() == 10.0


@pytest.mark.parametrize("seed", range(5))
def test_what_an_agent_sees_is_what_the_modelled_engine_counts(seed: int) -> None:
    """Prompts come at random; the gaps of the answers tell the steps that decoded alone.

    A gap that began with another attempt's start is left out, so a few steps are seen less.
    """
    rng, gaps = random.Random(seed), TokenGaps()
    model = EngineModel(REFERENCE, progress=True)
    starts = sorted(rng.uniform(0.0, 20.0) for _ in range(40))
    begun = 0
    while begun < len(starts) or model.running or model.waiting:
        next_at_s = model.next_event_at_s()
        start_at_s = starts[begun] if begun < len(starts) else None
        if next_at_s is None or (start_at_s is not None and start_at_s < next_at_s):
            assert start_at_s is not None
            see(gaps, model, start_at_s)
            gaps.began(f"r{begun}")
            request = SequenceRequest(
                request_id=f"r{begun}",
                prompt_tokens=rng.randint(100, 12_000),
                output_tokens=rng.randint(1, 300),
            )
            model.submit(request, start_at_s)
            begun += 1
        else:
            see(gaps, model, next_at_s)
    seen = gaps.meter.read()
    assert 0 < model.decoded_tokens < model.generated_tokens
    assert seen == pytest.approx(model.decoded_tokens / model.decoded_s, rel=0.01)


def see(gaps: TokenGaps, model: EngineModel, at_s: float) -> None:
    """Let time pass, and the agent see each token."""
    for event in model.advance(at_s):
        match event:
            case FirstToken(request_id, event_at_s, _):
                gaps.came(request_id, tokens=1, at_s=event_at_s)
            case TokenGenerated(request_id, event_at_s, output_tokens):
                gaps.came(request_id, tokens=output_tokens, at_s=event_at_s)
            case Finished(request_id, event_at_s, _):
                gaps.ended(request_id, at_s=event_at_s)
