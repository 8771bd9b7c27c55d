"""What holds of the engine model whatever it is asked, and that its shortcuts change nothing."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.engine_model.events import (
    EngineEvent,
    Finished,
    FirstToken,
    SequenceRequest,
    TokenGenerated,
)
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import Curve, Profile

SMALL = Profile(
    name="small",
    source="this test",
    slots=3,
    step_tokens_max=16,
    kv_tokens_max=96,
    block_tokens=4,
    prefill_s=Curve(0.01, 0.003, 0.0001),
    decode_s=Curve(0.02, 0.05, -0.01),
)
"""Everything is scarce: slots, budget and memory."""

Script = list[tuple[float, SequenceRequest, float | None]]
"""When each request comes, and how long after that it is cancelled, if it is."""


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Requests of few prefixes, in order of time, some of them cancelled."""
    script: Script = []
    at_s = 0.0
    for index in range(draw(st.integers(1, 12))):
        at_s += draw(st.sampled_from([0.0, 0.0, 0.01, 0.07, 0.5]))
        prompt = draw(st.integers(1, 50))
        family = 100 * draw(st.integers(0, 2))
        own = draw(st.integers(0, 3))
        count = prompt // SMALL.block_tokens
        blocks = tuple(family + i if i < own else 1000 * (index + 1) + i for i in range(count))
        request = SequenceRequest(
            request_id=f"{index}",
            prompt_tokens=prompt,
            output_tokens=draw(st.integers(1, 40)),
            blocks=blocks,
        )
        script.append((at_s, request, draw(st.none() | st.sampled_from([0.0, 0.05, 0.3]))))
    return script


def actions(script: Script) -> list[tuple[float, int, SequenceRequest, bool]]:
    """Submissions and cancellations in order of time."""
    found = [(at_s, i, request, True) for i, (at_s, request, _) in enumerate(script)]
    found += [
        (at_s + after_s, len(script) + i, request, False)
        for i, (at_s, request, after_s) in enumerate(script)
        if after_s is not None
    ]
    return sorted(found, key=lambda action: action[:2])


def check(model: EngineModel) -> None:
    """Memory is never over-committed, and what is kept for reuse is counted right."""
    kv = model.kv
    assert kv.used_tokens >= 0
    assert kv.idle_tokens >= 0
    assert kv.used_tokens + kv.idle_tokens <= kv.capacity_tokens
    assert model.running <= model.profile.slots


def play(
    script: Script,
    *,
    profile: Profile = SMALL,
    progress: bool = False,
    stride_s: float | None = None,
) -> tuple[EngineModel, list[EngineEvent]]:
    """Run a script to its end; with a stride, look in at every so many seconds."""
    model = EngineModel(profile, progress=progress)
    events: list[EngineEvent] = []
    now_s = 0.0
    for at_s, _, request, submits in actions(script):
        while stride_s is not None and now_s + stride_s < at_s:
            now_s += stride_s
            events += model.advance(now_s)
            check(model)
        events += model.advance(at_s)
        now_s = at_s
        if submits:
            model.submit(request, at_s)
        else:
            model.cancel(request.request_id, at_s)
        check(model)
    while (next_at_s := model.next_event_at_s()) is not None:
        events += model.advance(next_at_s)
        check(model)
    return model, events


@given(scripts())
@settings(max_examples=200, deadline=None)
def test_every_request_ends_once_and_everything_is_given_back(script: Script) -> None:
    """Each request that isn't cancelled has one first token and one end, with its own usage.

    All memory is free again but for what is kept for reuse.
    """
    model, events = play(script)
    assert events == sorted(events, key=lambda event: event.at_s)
    first = [event.request_id for event in events if isinstance(event, FirstToken)]
    ended = {event.request_id: event for event in events if isinstance(event, Finished)}
    assert len(first) == len(set(first))
    assert len(ended) == sum(isinstance(event, Finished) for event in events)
    for at_s, request, cancelled_after_s in script:
        if cancelled_after_s is None:
            assert request.request_id in first
            usage = ended[request.request_id].usage
            assert (usage.prompt_tokens, usage.output_tokens) == (
                request.prompt_tokens,
                request.output_tokens,
            )
            assert 0 <= usage.cached_tokens < request.prompt_tokens
            assert ended[request.request_id].at_s > at_s
    assert (model.running, model.waiting, model.kv.used_tokens) == (0, 0, 0)
    assert model.kv.idle_tokens == model.kv.block_count * SMALL.block_tokens


@given(scripts(), st.sampled_from([0.001, 0.013, 0.1]))
@settings(max_examples=100, deadline=None)
def test_looking_in_changes_nothing(script: Script, stride_s: float) -> None:
    """However often the model is looked at, the same things happen at the same instants."""
    assert play(script, stride_s=stride_s)[1] == play(script)[1]


@given(scripts())
@settings(max_examples=100, deadline=None)
def test_progress_only_adds_tokens(script: Script) -> None:
    """With progress the other events are the same, and each request's tokens count up by one."""
    _, plain = play(script)
    _, told = play(script, progress=True)
    assert [event for event in told if not isinstance(event, TokenGenerated)] == plain
    for _, request, cancelled_after_s in script:
        counts = [
            event.output_tokens if isinstance(event, TokenGenerated) else 1
            for event in told
            if event.request_id == request.request_id and not isinstance(event, Finished)
        ]
        expected = len(counts) if cancelled_after_s is not None else request.output_tokens
        assert counts == list(range(1, expected + 1))


def step_by_step(script: Script, profile: Profile) -> list[tuple[str, str, float]]:
    """The model's rules a token at a time, plainly: no cache, no cancel, ample memory."""
    waiting = [(at_s, request) for at_s, request, _ in script]
    running: list[tuple[SequenceRequest, list[int]]] = []  # [prefilled, generated]
    told: list[tuple[str, str, float]] = []
    now_s = waiting[0][0]
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        decoding = [entry for entry in running if entry[1][1]]
        budget, prefilled = profile.step_tokens_max - len(decoding), 0
        while waiting and waiting[0][0] <= now_s and len(running) < profile.slots:
            ahead = sum(request.prompt_tokens - c[0] for request, c in running)
            if ahead >= budget:
                break
            running.append((waiting.pop(0)[1], [0, 0]))
        held = [request.prompt_tokens + max(0, c[1] - 1) for request, c in running]
        share = sum(held) / profile.kv_tokens_max
        completed: list[tuple[SequenceRequest, list[int]]] = []
        for request, counts in running:
            size = min(budget - prefilled, request.prompt_tokens - counts[0])
            counts[0] += size
            prefilled += size
            if size and counts[0] == request.prompt_tokens:
                completed.append((request, counts))
        now_s += profile.prefill_s.at(prefilled) if prefilled else 0.0
        now_s += profile.decode_s.at(share) if decoding or completed else 0.0
        for _, counts in decoding + completed:
            counts[1] += 1
        told += [("first", request.request_id, now_s) for request, _ in completed]
        ended = [entry for entry in running if entry[1][1] == entry[0].output_tokens]
        told += [("end", request.request_id, now_s) for request, _ in ended]
        running = [entry for entry in running if entry not in ended]
    return told


@given(scripts())
@settings(max_examples=200, deadline=None)
def test_same_as_step_by_step(script: Script) -> None:
    """Skipping over steps in closed form gives what doing each step gives."""
    profile = replace(SMALL, kv_tokens_max=100_000, decode_s=Curve(0.02, 50.0, -300.0))
    plain: Script = [
        (
            at_s,
            SequenceRequest(
                request_id=r.request_id,
                prompt_tokens=r.prompt_tokens,
                output_tokens=r.output_tokens,
            ),
            None,
        )
        for at_s, r, _ in script
    ]
    _, events = play(plain, profile=profile)
    told = [
        ("first" if isinstance(event, FirstToken) else "end", event.request_id, event.at_s)
        for event in events
    ]
    expected = step_by_step(plain, profile)
    assert sorted(e[:2] for e in told) == sorted(e[:2] for e in expected)
    instants = {e[:2]: e[2] for e in expected}
    assert all(abs(at_s - instants[kind, name]) < 1e-9 for kind, name, at_s in told)
