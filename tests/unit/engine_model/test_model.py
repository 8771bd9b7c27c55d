"""The engine model's behaviour, case by case, on a profile whose sums are done in the head."""

from dataclasses import replace
from typing import Any, cast

import pytest

from broker.engine_model.events import (
    EngineEvent,
    Finished,
    FirstToken,
    SequenceRequest,
    TokenGenerated,
)
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import Curve, Profile
from broker.wire.messages import Usage

PLAIN = Profile(
    name="plain",
    source="this test",
    slots=2,
    step_tokens_max=100,
    kv_tokens_max=1_000,
    block_tokens=10,
    prefill_s=Curve(0.0, 0.01, 0.0),
    decode_s=Curve(1.0, 0.0, 0.0),
)
"""A prompt token takes 10 ms, a step that yields tokens 1 s more."""


def a_request(name: str = "a", **fields: Any) -> SequenceRequest:
    """50 tokens of prompt without blocks, 3 of answer."""
    defaults: dict[str, Any] = {"request_id": name, "prompt_tokens": 50, "output_tokens": 3}
    return SequenceRequest(**{**defaults, **fields})


def about(at_s: float) -> float:
    """An instant, but for the last digits of its sum."""
    return cast("float", pytest.approx(at_s))


def run(model: EngineModel) -> list[EngineEvent]:
    """Run until idle."""
    events: list[EngineEvent] = []
    while (at_s := model.next_event_at_s()) is not None:
        events += model.advance(at_s)
    return events


def test_one_request_from_end_to_end() -> None:
    """Prefill and first token share a step; each further token is a step."""
    model = EngineModel(PLAIN)
    model.submit(a_request(), 10.0)
    assert run(model) == [
        FirstToken("a", about(11.5), 0),
        Finished("a", about(13.5), Usage(50, 0, 3)),
    ]
    assert model.next_event_at_s() is None
    assert (model.running, model.waiting, model.kv.used_tokens) == (0, 0, 0)
    assert (model.prefilled_tokens, model.generated_tokens) == (50, 3)


def test_single_token_answer_ends_with_its_first_token() -> None:
    """An answer of one token (an embedding) is first and last at once."""
    model = EngineModel(PLAIN)
    model.submit(a_request(output_tokens=1), 0.0)
    assert run(model) == [
        FirstToken("a", 1.5, 0),
        Finished("a", 1.5, Usage(50, 0, 1)),
    ]


def test_progress_tells_every_token() -> None:
    """Asked for progress, each token is an event, and the other events stay the same."""
    model = EngineModel(PLAIN, progress=True)
    model.submit(a_request(), 0.0)
    assert run(model) == [
        FirstToken("a", 1.5, 0),
        TokenGenerated("a", 2.5, 2),
        TokenGenerated("a", 3.5, 3),
        Finished("a", 3.5, Usage(50, 0, 3)),
    ]


def test_long_prompt_is_prefilled_in_chunks() -> None:
    """250 tokens take three steps of at most 100, and only the last one yields a token."""
    model = EngineModel(PLAIN)
    model.submit(a_request(prompt_tokens=250, output_tokens=1), 0.0)
    first, _ = run(model)
    assert first.at_s == pytest.approx(2.5 + 1.0)


def test_running_request_decodes_beside_a_prefill() -> None:
    """A step with a chunk of another's prompt still gives each running request its token."""
    model = EngineModel(PLAIN, progress=True)
    model.submit(a_request("a", output_tokens=4), 0.0)
    model.advance(1.5)
    model.submit(a_request("b", prompt_tokens=150), 1.5)
    # 99 tokens beside one decode, then 51: 1.99 s and 1.51 s.
    assert run(model)[:3] == [
        TokenGenerated("a", about(3.49), 2),
        TokenGenerated("a", about(5.0), 3),
        FirstToken("b", about(5.0), 0),
    ]


def test_arrival_waits_for_the_step_under_way() -> None:
    """A request that comes in mid-step is taken up when the step ends, not before."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a", output_tokens=100), 0.0)
    model.advance(5.0)  # Steps end at 1.5, 2.5, ...
    model.submit(a_request("b"), 5.2)
    first = next(e for e in run(model) if isinstance(e, FirstToken))
    assert (first.request_id, first.at_s) == ("b", pytest.approx(5.5 + 1.5))


def test_arrival_at_a_steps_end_joins_the_next_step() -> None:
    """Coming at the very end of a step is in time for the next one."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a", output_tokens=100), 0.0)
    model.advance(5.5)
    model.submit(a_request("b"), 5.5)
    first = next(e for e in run(model) if isinstance(e, FirstToken))
    assert (first.request_id, first.at_s) == ("b", pytest.approx(7.0))


def test_requests_of_one_instant_share_a_step() -> None:
    """What is submitted at one instant is prefilled together while the budget lasts."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a"), 0.0)
    model.submit(a_request("b"), 0.0)
    assert [event.at_s for event in run(model) if isinstance(event, FirstToken)] == [2.0, 2.0]


def test_slots_bound_what_runs() -> None:
    """With two slots the third request waits, first come first served, until one is free."""
    model = EngineModel(PLAIN)
    for name in "abc":
        model.submit(a_request(name), 0.0)
    model.advance(2.0)
    assert (model.running, model.waiting) == (2, 1)
    events = run(model)
    freed_s = next(e.at_s for e in events if isinstance(e, Finished))
    started = next(e for e in events if isinstance(e, FirstToken))
    assert (started.request_id, started.at_s) == ("c", pytest.approx(freed_s + 1.5))


def test_second_request_hits_the_first_ones_blocks() -> None:
    """Blocks serve the next request with the same prefix, also while the first still runs."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a", blocks=(1, 2, 3, 4), output_tokens=50), 0.0)
    model.advance(1.5)
    model.submit(a_request("b", blocks=(1, 2, 9)), 1.5)
    first = next(e for e in run(model) if isinstance(e, FirstToken))
    assert first == FirstToken("b", about(1.5 + 0.3 + 1.0), 20)


def test_blocks_match_as_soon_as_they_are_prefilled() -> None:
    """Two equal prompts of one step are both computed; a third in the next step is served."""
    profile = replace(PLAIN, slots=3)
    model = EngineModel(profile)
    for name in "abc":
        model.submit(a_request(name, blocks=(1, 2, 3, 4, 5)), 0.0)
    found = [e for e in run(model) if isinstance(e, FirstToken)]
    assert [(e.request_id, e.cached_tokens) for e in found] == [("a", 0), ("b", 0), ("c", 40)]


def test_whole_prompt_in_the_cache_still_computes_its_last_block() -> None:
    """An engine needs at least one token's computation to say what comes next."""
    model = EngineModel(PLAIN)
    for at_s in (0.0, 10.0):
        model.submit(a_request(f"{at_s}", blocks=(1, 2, 3, 4, 5)), at_s)
        events = model.advance(at_s + 10.0)
    assert [e.cached_tokens for e in events if isinstance(e, FirstToken)] == [40]


def test_block_of_another_size() -> None:
    """A request may say what its blocks stand for: hits are counted in its tokens."""
    model = EngineModel(PLAIN)
    blocks = (1, 2)
    for at_s in (0.0, 10.0):
        model.submit(a_request(f"{at_s}", blocks=blocks, block_tokens=20), at_s)
        events = model.advance(at_s + 10.0)
    assert [e.cached_tokens for e in events if isinstance(e, FirstToken)] == [40]


def test_block_is_never_more_than_its_share_of_the_prompt() -> None:
    """Where the estimate of a prompt runs short of its blocks, the blocks shrink to fit it."""
    model = EngineModel(PLAIN)
    model.submit(a_request(prompt_tokens=12, blocks=tuple(range(5))), 0.0)
    run(model)
    assert model.match_tokens(a_request(prompt_tokens=100, blocks=tuple(range(5)))) == 10
    model.submit(a_request("b", prompt_tokens=3, blocks=tuple(range(100, 110))), 100.0)
    run(model)
    assert model.kv.idle_tokens == 10 + 3


def test_lru_evicts_for_new_prompts() -> None:
    """A full cache makes room for what comes, and the prompt used longest ago is gone."""
    profile = replace(PLAIN, kv_tokens_max=170, slots=1)
    model = EngineModel(profile)

    def ask(name: str, first_block: int, at_s: float) -> int:
        blocks = tuple(range(first_block, first_block + 5))
        model.submit(a_request(f"{name}{at_s}", blocks=blocks), at_s)
        events = model.advance(at_s + 10.0)
        return next(e.cached_tokens for e in events if isinstance(e, FirstToken))

    assert ask("a", 0, 0.0) == ask("b", 10, 20.0) == ask("c", 20, 40.0) == 0
    assert ask("a", 0, 60.0) == 40
    assert ask("d", 30, 80.0) == 0
    assert ask("b", 10, 100.0) == 10  # All but its first block.
    assert ask("a", 0, 120.0) == 40


def test_cancel_while_waiting() -> None:
    """A cancelled request in the queue is never run, and the one behind it moves up."""
    model = EngineModel(PLAIN)
    for name in "abcd":
        model.submit(a_request(name), 0.0)
    assert model.cancel("c", 0.5)
    events = run(model)
    assert [e.request_id for e in events if isinstance(e, Finished)] == ["a", "b", "d"]


def test_cancel_while_prefilling_and_while_decoding() -> None:
    """Slot and memory are free at once, in every stage; nothing more is heard of the request."""
    for at_s in (0.5, 1.5, 7.0):
        model = EngineModel(PLAIN)
        model.submit(a_request("a", output_tokens=40, blocks=(1, 2)), 0.0)
        model.advance(at_s)
        assert model.cancel("a", at_s)
        assert (model.running, model.waiting, model.kv.used_tokens) == (0, 0, 0)
        assert run(model) == []
        assert not model.cancel("a", at_s + 100.0)


def test_cancel_keeps_prefilled_blocks() -> None:
    """What was computed before a cancel still serves the next request; what was not, does not."""
    model = EngineModel(PLAIN)
    blocks = tuple(range(20))
    model.submit(a_request("a", prompt_tokens=205, blocks=blocks), 0.0)
    model.advance(1.2)  # The first chunk of 100 is over, the second under way.
    model.cancel("a", 1.2)
    assert model.match_tokens(a_request("b", prompt_tokens=205, blocks=blocks)) == 100


def test_cancel_frees_the_head_of_the_queue() -> None:
    """A prompt too large for the room left blocks the queue; cancelled, the next one runs."""
    profile = replace(PLAIN, kv_tokens_max=120)
    model = EngineModel(profile)
    model.submit(a_request("a", output_tokens=60), 0.0)
    model.submit(a_request("big", prompt_tokens=100), 0.0)
    model.submit(a_request("c"), 0.0)
    model.advance(5.0)
    assert model.waiting == 2
    model.cancel("big", 5.2)
    first = next(e for e in run(model) if isinstance(e, FirstToken))
    assert (first.request_id, first.at_s) == ("c", pytest.approx(5.5 + 1.5))


def test_request_waits_for_memory() -> None:
    """A prompt that doesn't fit beside what runs waits until memory is free."""
    profile = replace(PLAIN, kv_tokens_max=99)
    model = EngineModel(profile)
    model.submit(a_request("a", output_tokens=10), 0.0)
    model.submit(a_request("b", output_tokens=10), 0.0)
    events = run(model)
    ended_s = next(e.at_s for e in events if isinstance(e, Finished))
    started_s = next(e.at_s for e in events if isinstance(e, FirstToken) and e.request_id == "b")
    assert started_s == pytest.approx(ended_s + 1.5)


def test_preempted_request_is_computed_again() -> None:
    """When answers outgrow the memory, the youngest makes way and later goes on where it was."""
    profile = replace(PLAIN, kv_tokens_max=130)
    model = EngineModel(profile, progress=True)
    model.submit(a_request("a", output_tokens=60), 0.0)
    model.submit(a_request("b", output_tokens=60), 0.0)
    events = run(model)
    assert model.preemptions == 1
    assert [e.request_id for e in events if isinstance(e, FirstToken)] == ["a", "b"]
    assert [e.request_id for e in events if isinstance(e, Finished)] == ["a", "b"]
    counts = [
        e.output_tokens for e in events if isinstance(e, TokenGenerated) and e.request_id == "b"
    ]
    assert counts == list(range(2, 61))
    assert model.prefilled_tokens > 100
    assert model.kv.used_tokens == 0


def test_memory_may_be_used_to_the_last_token() -> None:
    """A request that fits exactly runs, alone, and is never preempted."""
    profile = replace(PLAIN, kv_tokens_max=100)
    model = EngineModel(profile)
    request = a_request(prompt_tokens=60, output_tokens=40)
    assert model.fits(request)
    assert not model.fits(a_request(prompt_tokens=60, output_tokens=41))
    model.submit(request, 0.0)
    assert isinstance(run(model)[-1], Finished)
    assert model.preemptions == 0


def test_output_tokens_can_be_asked_at_any_time() -> None:
    """Counted progress needs no events: the count follows the steps that are over."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a", output_tokens=10), 0.0)
    counts: list[int] = []
    for at_s in (0.0, 1.4, 1.5, 2.4, 2.5, 6.7, 100.0):
        model.advance(at_s)
        counts.append(model.output_tokens("a"))
    assert counts == [0, 0, 1, 1, 2, 6, 0]


def test_decode_slows_with_the_share_in_use() -> None:
    """A fuller cache makes each token slower, and a long answer slows itself down."""
    profile = replace(PLAIN, decode_s=Curve(1.0, 10.0, 0.0))
    model = EngineModel(profile)
    model.submit(a_request(prompt_tokens=100, output_tokens=3), 0.0)
    first, last = run(model)
    assert first.at_s == pytest.approx(1.0 + 2.0)
    assert last.at_s - first.at_s == pytest.approx(2.0 + 2.01)


def test_time_does_not_go_back() -> None:
    """A call with an earlier instant is a programming error."""
    model = EngineModel(PLAIN)
    model.advance(5.0)
    with pytest.raises(AssertionError):
        model.submit(a_request(), 4.0)


def test_clear_cache_forgets_what_nobody_holds() -> None:
    """An engine whose cache was reset serves the next prompt cold."""
    model = EngineModel(PLAIN)
    model.submit(a_request(blocks=(1, 2)), 0.0)
    run(model)
    assert model.match_tokens(a_request(blocks=(1, 2))) == 20
    model.clear_cache()
    assert model.match_tokens(a_request(blocks=(1, 2))) == 0


def test_what_happened_is_told_before_what_will() -> None:
    """Events that a submit or cancel came upon are due at once, and none is lost or told twice."""
    model = EngineModel(PLAIN)
    model.submit(a_request("a", output_tokens=2), 0.0)
    model.submit(a_request("b"), 5.0)
    assert model.next_event_at_s() == 5.0
    assert [e.request_id for e in model.advance(5.0)] == ["a", "a"]
    assert [e.request_id for e in run(model)] == ["b", "b"]
