"""The model of one engine's cache, corrected by what the engine counts."""

from typing import Any

import pytest

from broker.wire.messages import Usage
from broker.wire.prefix import unpack_hashes
from worker_agent.cache_model import (
    BYTES_PER_TOKEN_MAX,
    BYTES_PER_TOKEN_MIN,
    MISS_STREAK_MAX,
    CacheLimits,
    CacheModel,
    CacheSource,
    Predictions,
)
from worker_agent.engine.kv_event_wire import BlockRemoved, BlockStored
from worker_agent.engine_blocks import TokenizedPrompt

TOKENS_PER_BLOCK = 64


def a_model(**fields: Any) -> CacheModel:
    """A model of a cache of 100 blocks that reports every prefix."""
    defaults: dict[str, Any] = {"tokens_max": 100 * TOKENS_PER_BLOCK, "prefix_tokens_min": 0}
    return CacheModel(CacheLimits(**{**defaults, **fields}))


def a_chain(start: int, blocks: int) -> list[int]:
    """Blocks that nobody else uses."""
    return list(range(start, start + blocks))


def run(
    model: CacheModel,
    chain: list[int],
    *,
    at_s: float = 0.0,
    cached_tokens: int | None = None,
    output_tokens: int = 0,
    tokens_per_block: float = TOKENS_PER_BLOCK,
) -> int:
    """One request; returns the prediction."""
    predicted = model.begin("r", chain, at_s=at_s)
    model.prefilled("r", at_s=at_s)
    prompt_tokens = round((len(chain) + 0.5) * tokens_per_block)
    usage = Usage(prompt_tokens, cached_tokens or 0, output_tokens)
    model.end("r", at_s=at_s, usage=usage, cached_tokens=cached_tokens)
    return predicted


def told(model: CacheModel) -> tuple[set[int], set[int]]:
    """What the next report adds and removes."""
    report = model.report()
    if report is None:
        return set(), set()
    return set(unpack_hashes(report.added)), set(unpack_hashes(report.removed))


def test_a_prompt_is_predicted_and_reported_after_its_prefill() -> None:
    """Same prompt again: predicted whole, in tokens."""
    model = a_model()
    assert run(model, a_chain(1, 10)) == 0
    assert told(model) == (set(a_chain(1, 10)), set())
    assert run(model, a_chain(1, 10), at_s=1.0) == 640


def test_a_short_prompt_is_not_reported() -> None:
    """Below `prefix_tokens_min` it is not worth a detour; a longer one is told whole."""
    model = a_model(prefix_tokens_min=1000)
    run(model, a_chain(1, 15))
    assert told(model) == (set(), set())
    run(model, a_chain(1, 16), at_s=1.0)
    assert told(model) == (set(a_chain(1, 16)), set())


def test_a_prompt_whose_job_died_before_its_first_token_is_not_reported() -> None:
    """Nothing was computed that could be reused for sure."""
    model = a_model()
    model.begin("r", a_chain(1, 10), at_s=0.0)
    model.end("r", at_s=1.0)
    assert told(model) == (set(), set())


def test_capacity_is_the_engines() -> None:
    """What is beyond the KV cache's tokens is taken back, oldest first."""
    model = a_model(tokens_max=0)
    model.resize(20 * TOKENS_PER_BLOCK)
    for index in range(3):
        run(model, a_chain(100 * index, 10), at_s=float(index))
    added, removed = told(model)
    assert added == {*a_chain(100, 10), *a_chain(200, 10)}
    assert removed == set(a_chain(0, 10))


def test_answers_take_room() -> None:
    """A long answer pushes older prefixes out as a prompt would."""
    model = a_model(tokens_max=20 * TOKENS_PER_BLOCK)
    run(model, a_chain(1, 10))
    run(model, a_chain(50, 5), at_s=1.0, output_tokens=10 * TOKENS_PER_BLOCK)
    told(model)
    assert run(model, a_chain(1, 10), at_s=2.0) == 5 * TOKENS_PER_BLOCK


def test_a_request_without_usage_leaves_no_answer_behind() -> None:
    """Aborted before the engine counted: only its prompt is held, and the cache just full."""
    model = a_model(tokens_max=10 * TOKENS_PER_BLOCK)
    model.begin("r", a_chain(1, 10), at_s=0.0)
    model.prefilled("r", at_s=0.0)
    model.end("r", at_s=1.0)
    assert model.begin("again", a_chain(1, 10), at_s=2.0) == 10 * TOKENS_PER_BLOCK


def test_bytes_per_token_are_learned_from_usage() -> None:
    """A byte-level tokenizer makes 256 tokens of a block; predictions and capacity follow."""
    model = a_model(tokens_max=2560)
    run(model, a_chain(1, 8), tokens_per_block=256)
    assert model.tokens_per_block == 256
    assert run(model, a_chain(1, 8), at_s=1.0, tokens_per_block=256) == 8 * 256
    run(model, a_chain(50, 8), at_s=2.0, tokens_per_block=256)
    assert run(model, a_chain(1, 8), at_s=3.0, tokens_per_block=256) == 2 * 256


def test_what_was_learned_first_is_moved_slowly() -> None:
    """The first usage is taken as it is; each later one counts a tenth."""
    model = a_model()
    run(model, a_chain(1, 10), tokens_per_block=256)
    run(model, a_chain(50, 10), at_s=1.0, tokens_per_block=128)
    assert model.tokens_per_block == pytest.approx(256 / (1 + 0.1 * (2 - 1)))


def test_nonsense_from_an_engine_teaches_within_bounds() -> None:
    """One token for a long prompt, or a million, is no tokenizer."""
    model = a_model()
    run(model, a_chain(1, 10), tokens_per_block=0.1)
    assert model.tokens_per_block == 256 / BYTES_PER_TOKEN_MAX
    other = a_model()
    run(other, a_chain(1, 10), tokens_per_block=1e6)
    assert other.tokens_per_block == 256 / BYTES_PER_TOKEN_MIN


def test_a_prompt_of_few_blocks_teaches_nothing() -> None:
    """Chat templates would distort the rate."""
    model = a_model()
    run(model, a_chain(1, 3), tokens_per_block=500)
    assert model.tokens_per_block == TOKENS_PER_BLOCK


def test_far_fewer_cached_tokens_than_predicted_drop_what_is_as_old() -> None:
    """The cache is smaller than it says, or shared: what was used before the miss is gone."""
    model = a_model()
    run(model, a_chain(1, 10), at_s=1.0)
    run(model, a_chain(50, 10), at_s=2.0)
    run(model, a_chain(80, 10), at_s=3.0)
    told(model)
    assert run(model, a_chain(50, 10), at_s=4.0, cached_tokens=0) == 640
    assert told(model) == (set(), set(a_chain(1, 10)))
    assert run(model, a_chain(80, 10), at_s=5.0) == 640


def test_nearly_as_many_cached_tokens_as_predicted_change_nothing() -> None:
    """Edges of blocks and templates are no miss."""
    model = a_model()
    run(model, a_chain(1, 10), at_s=1.0)
    run(model, a_chain(50, 10), at_s=2.0)
    told(model)
    run(model, a_chain(50, 10), at_s=3.0, cached_tokens=330)
    assert told(model) == (set(), set())


def test_an_engine_that_does_not_tell_is_not_corrected() -> None:
    """No count is not a count of zero."""
    model = a_model()
    for at_s in range(MISS_STREAK_MAX + 2):
        run(model, a_chain(1, 10), at_s=float(at_s), cached_tokens=None)
    assert told(model)[0] == set(a_chain(1, 10))


def test_an_engine_that_reuses_nothing_gets_no_credit() -> None:
    """After a streak of complete misses all is taken back; the first hit gives credit again."""
    model = a_model()
    run(model, a_chain(1, 10), cached_tokens=0)
    told(model)
    for at_s in range(1, MISS_STREAK_MAX):
        run(model, a_chain(1, 10), at_s=float(at_s), cached_tokens=0)
        assert model.report() is None
    run(model, a_chain(1, 10), at_s=8.0, cached_tokens=0)
    report = model.report()
    assert report is not None
    assert (report.full, report.added) == (True, b"")
    run(model, a_chain(1, 10), at_s=9.0, cached_tokens=640)
    run(model, a_chain(1, 10), at_s=10.0, cached_tokens=640)
    assert told(model)[0] == set(a_chain(1, 10))


def test_a_restarted_engine_is_told_in_full() -> None:
    """All credit is gone at once, by a full and empty report."""
    model = a_model()
    run(model, a_chain(1, 10))
    told(model)
    model.clear()
    report = model.report()
    assert report is not None
    assert (report.full, report.added, report.removed) == (True, b"", b"")
    assert model.begin("r", a_chain(1, 10), at_s=8.0) == 0
    model.end("r", at_s=9.0)
    assert model.report() is None


def test_unused_prefixes_expire() -> None:
    """After the time to live they are taken back."""
    model = a_model(ttl_s=600.0)
    run(model, a_chain(1, 10), at_s=0.0)
    run(model, a_chain(50, 10), at_s=300.0)
    told(model)
    model.expire(at_s=700.0)
    assert told(model) == (set(), set(a_chain(1, 10)))


def test_an_engine_of_sequences_holds_one_prompt_a_slot() -> None:
    """llama.cpp: as many prefixes as slots, whatever the KV cache could hold."""
    model = a_model(sequences=2, tokens_max=0)
    for index in range(3):
        run(model, a_chain(100 * index, 10), at_s=float(index))
    added, removed = told(model)
    assert added == {*a_chain(100, 10), *a_chain(200, 10)}
    assert removed == set(a_chain(0, 10))


def test_memory_is_bounded_by_the_capacity() -> None:
    """A million tokens of unique prompts leave no more blocks than the cache has room for."""
    model = a_model(tokens_max=100 * TOKENS_PER_BLOCK)
    for index in range(400):
        run(model, a_chain(1000 * index, 40), at_s=float(index))
        model.report()
    model.ask_full()
    assert len(told(model)[0]) <= 100


TOKENS = tuple(range(640))
PROMPT = TokenizedPrompt(chain=a_chain(1, 10), edges=range(64, 641, 64), tokens=TOKENS)
STORED = BlockStored(names=tuple(range(10)), parent=None, tokens=TOKENS, block_size=64)


def an_engines_model() -> CacheModel:
    """A model that goes by its engine's word, which has told of one prompt."""
    model = a_model()
    model.believe(CacheSource.EVENTS)
    model.heard([STORED], at_s=0.0)
    model.learn(PROMPT, at_s=0.0)
    return model


def test_the_engines_word_is_reported_without_a_request() -> None:
    """And what it evicts, in the next report."""
    model = an_engines_model()
    assert told(model) == (set(a_chain(1, 10)), set())
    model.heard([BlockRemoved(names=(4,))], at_s=1.0)
    assert told(model) == (set(), set(a_chain(5, 6)))


def test_the_guess_of_its_size_takes_nothing_from_the_engines_word() -> None:
    """The guess forgets the prompt behind a longer one; the engine has not."""
    model = an_engines_model()
    run(model, a_chain(1, 10))
    told(model)
    run(model, a_chain(100, 100), at_s=1.0)
    assert told(model) == (set(), set())
    assert run(model, a_chain(1, 10), at_s=2.0, cached_tokens=640) == 640


def test_credit_that_only_the_other_gave_is_taken_back() -> None:
    """At each change of whom to believe."""
    model = a_model()
    run(model, a_chain(50, 5))
    model.heard([STORED], at_s=0.0)
    model.learn(PROMPT, at_s=0.0)
    run(model, a_chain(1, 10))
    assert told(model) == ({*a_chain(1, 10), *a_chain(50, 5)}, set())
    model.believe(CacheSource.EVENTS)
    assert told(model) == (set(), set(a_chain(50, 5)))
    model.believe(CacheSource.MODEL)
    assert told(model) == (set(), set())


def test_what_the_engine_evicted_is_not_guessed_to_be_there() -> None:
    """Also while the guess counts."""
    model = a_model()
    run(model, a_chain(1, 10))
    model.heard([STORED], at_s=0.0)
    model.learn(PROMPT, at_s=0.0)
    told(model)
    model.heard([BlockRemoved(names=(4,))], at_s=1.0)
    assert told(model) == (set(), set(a_chain(5, 6)))


def test_a_place_that_is_forgotten_is_no_eviction() -> None:
    """The guess keeps what only we lost track of; the engine's account can't vouch for it."""
    for source, gone in (
        (CacheSource.MODEL, set[int]()),
        (CacheSource.EVENTS, set(a_chain(1, 10))),
    ):
        model = a_model(ttl_s=10.0)
        model.heard([STORED], at_s=0.0)
        model.learn(PROMPT, at_s=0.0)
        model.believe(source)
        model.begin("r", a_chain(1, 10), at_s=5.0)
        model.prefilled("r", at_s=5.0)
        told(model)
        # What runs is pinned in the guess.
        model.expire(at_s=16.0)
        assert told(model) == (set(), gone)


def test_how_far_each_source_was_off_is_kept() -> None:
    """By the source that predicted, not the one that counts when the answer comes."""
    model = an_engines_model()
    model.begin("r", a_chain(1, 10), at_s=0.0)
    model.believe(CacheSource.MODEL)
    model.end("r", at_s=1.0, usage=Usage(672, 600, 1), cached_tokens=600)
    assert model.predictions[CacheSource.EVENTS] == Predictions(1, 640, 600, 40)
    assert model.predictions[CacheSource.MODEL] == Predictions()


def test_an_engine_that_is_another_starts_from_nothing() -> None:
    """Its tokens are asked anew."""
    model = an_engines_model()
    assert model.knows_tokens(PROMPT.chain)
    model.clear()
    assert not model.knows_tokens(PROMPT.chain)
    assert not model.is_held(PROMPT.chain)
    assert told(model) == (set(), set())


def test_what_the_engine_evicted_under_a_running_request_is_gone() -> None:
    """It is pinned in the guess, but the engine knows better."""
    model = a_model()
    model.heard([STORED], at_s=0.0)
    model.learn(PROMPT, at_s=0.0)
    model.begin("r", a_chain(1, 10), at_s=0.0)
    model.prefilled("r", at_s=0.0)
    told(model)
    model.heard([BlockRemoved(names=(4,))], at_s=1.0)
    assert told(model) == (set(), set(a_chain(5, 6)))
