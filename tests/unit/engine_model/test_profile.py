"""The reference profile reproduces the measured engine, the demo profile shows routing's worth."""

import random
from statistics import median

import pytest

from broker.engine_model.events import EngineEvent, Finished, FirstToken, SequenceRequest
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import DEMO, PROFILES, REFERENCE, Curve

TTFT_MS_BY_PROMPT_TOKENS = {
    128: 24.2,
    512: 30.2,
    1_024: 38.3,
    2_048: 55.2,
    4_096: 91.7,
    8_192: 175,
    16_384: 345,
    32_768: 684,
    65_536: 1_362,
    100_000: 2_084,
}
ITL_MS_BY_SHARE = {
    0: 5.74,
    0.0094: 6.25,
    0.031: 7.4,
    0.05: 8.4,
    0.075: 9.65,
    0.1: 10.9,
    0.125: 12.1,
    0.15: 13.3,
    0.2: 15.5,
    0.25: 17.7,
    0.4: 23.2,
}
TTFT_MS_MEAN_BY_PROMPTS_AT_ONCE = {1: 54, 4: 171, 16: 435, 32: 789, 64: 1_491}


def first_tokens_s(model: EngineModel) -> list[float]:
    """Run to the end, and return when each first token came."""
    found: list[float] = []
    while (at_s := model.next_event_at_s()) is not None:
        found += [event.at_s for event in model.advance(at_s) if isinstance(event, FirstToken)]
    return found


def ask(
    model: EngineModel, name: str, *, prompt: int, output: int, blocks: tuple[int, ...] = ()
) -> None:
    """Submit a request at the start."""
    request = SequenceRequest(
        request_id=name, prompt_tokens=prompt, output_tokens=output, blocks=blocks
    )
    model.submit(request, 0.0)


@pytest.mark.parametrize(("prompt_tokens", "ttft_ms"), TTFT_MS_BY_PROMPT_TOKENS.items())
def test_reference_ttft_alone(prompt_tokens: int, ttft_ms: float) -> None:
    """Alone on an idle engine, a first token comes when the measured one did, within 1 %."""
    model = EngineModel(REFERENCE)
    ask(model, "a", prompt=prompt_tokens, output=16)
    assert first_tokens_s(model) == [pytest.approx(ttft_ms / 1000, rel=0.01)]


def test_prefill_alone_is_by_steps() -> None:
    """Three steps of a prompt that takes two and a bit; none of nothing."""
    whole_s = REFERENCE.prefill_s.at(8192)
    assert REFERENCE.prefill_alone_s(8192) == whole_s
    assert REFERENCE.prefill_alone_s(16_385) == 2 * whole_s + REFERENCE.prefill_s.at(1)
    assert REFERENCE.prefill_alone_s(0) == 0.0


@pytest.mark.parametrize(("share", "itl_ms"), ITL_MS_BY_SHARE.items())
def test_reference_itl_by_share(share: float, itl_ms: float) -> None:
    """A token takes what it took at that share of the KV cache in use, within 1 %."""
    model = EngineModel(REFERENCE)
    tokens = max(1, round(share * REFERENCE.kv_tokens_max) - 50)
    ask(model, "a", prompt=tokens, output=101)
    first_s = None
    last_s = 0.0
    while (at_s := model.next_event_at_s()) is not None:
        for event in model.advance(at_s):
            match event:
                case FirstToken():
                    first_s = event.at_s
                case Finished():
                    last_s = event.at_s
                case _:
                    pass
    assert first_s is not None
    assert (last_s - first_s) / 100 == pytest.approx(itl_ms / 1000, rel=0.01)


@pytest.mark.parametrize(("prompts", "ttft_ms"), TTFT_MS_MEAN_BY_PROMPTS_AT_ONCE.items())
def test_reference_prompts_at_once(prompts: int, ttft_ms: float) -> None:
    """Prompts that come together are prefilled in turn; their mean is the measured one, ± 2 %."""
    model = EngineModel(REFERENCE)
    for index in range(prompts):
        ask(model, f"{index}", prompt=2_000, output=400)
    found = first_tokens_s(model)
    assert len(found) == prompts
    assert sum(found) / prompts == pytest.approx(ttft_ms / 1000, rel=0.02)


def test_demo_hit_is_eight_times_faster_than_miss() -> None:
    """On the demo profile a 2,000-token prompt in the cache answers at least 8 times sooner."""
    blocks = tuple(range(31))
    model = EngineModel(DEMO)
    ask(model, "cold", prompt=2_100, output=32, blocks=blocks)
    (cold_s,) = first_tokens_s(model)
    start_s = 100.0
    warm = SequenceRequest(
        request_id="warm", prompt_tokens=2_100, output_tokens=32, blocks=(*blocks, 99)
    )
    model.submit(warm, start_s)
    (warm_s,) = first_tokens_s(model)
    assert cold_s / (warm_s - start_s) >= 8


def test_demo_holds_a_quarter_of_the_prompts() -> None:
    """Of the demo's 20 system prompts an engine keeps 5 to 7: affinity has something to win."""
    model = EngineModel(DEMO)
    at_s = 0.0
    for index in range(20):
        blocks = tuple(range(100 * index, 100 * index + 31))
        request = SequenceRequest(
            request_id=f"{index}", prompt_tokens=2_100, output_tokens=32, blocks=blocks
        )
        model.submit(request, at_s)
        at_s += 10.0
        model.advance(at_s)
    assert 5 <= model.kv.block_count / 31 <= 7


def demo_run(*, by_prompt: bool) -> tuple[float, float]:
    """The demo's load on four engines: cached share and median TTFT, by prompt or in turn."""
    draw = random.Random(1)
    models = [EngineModel(DEMO) for _ in range(4)]
    came_s: dict[str, float] = {}
    events: list[EngineEvent] = []
    at_s = 0.0
    for index in range(240):
        at_s += draw.expovariate(6.0)
        system = draw.randrange(20)
        request = SequenceRequest(
            request_id=f"{index}",
            prompt_tokens=2_080,
            output_tokens=32,
            blocks=(*range(100 * system, 100 * system + 31), 10_000 + index),
        )
        model = models[(system if by_prompt else index) % 4]
        events += model.advance(at_s)
        came_s[request.request_id] = at_s
        model.submit(request, at_s)
    for model in models:
        events += model.advance(1e6)
    usages = [event.usage for event in events if isinstance(event, Finished)]
    share = sum(u.cached_tokens for u in usages) / sum(u.prompt_tokens for u in usages)
    ttft_s = [
        event.at_s - came_s[event.request_id] for event in events if isinstance(event, FirstToken)
    ]
    return share, median(ttft_s)


def test_demo_shows_what_affinity_is_worth() -> None:
    """On the demo's load affinity at least doubles the cached share and halves the median TTFT."""
    in_turn, by_prompt = demo_run(by_prompt=False), demo_run(by_prompt=True)
    assert by_prompt[0] >= 2 * in_turn[0]
    assert by_prompt[1] <= in_turn[1] / 2


def test_every_profile_names_its_source() -> None:
    """A profile says where its figures come from."""
    assert all(profile.source and name == profile.name for name, profile in PROFILES.items())


def test_curve_over_is_the_sum_of_at() -> None:
    """The closed form equals adding up each point."""
    curve = Curve(1.5, -0.25, 0.125)
    points = [curve.at(2.0 + 0.5 * k) for k in range(37)]
    assert curve.over(2.0, 0.5, 37) == pytest.approx(sum(points), rel=1e-12)
    assert curve.over(2.0, 0.5, 0) == 0.0
