"""The fake engine keeps an engine's promises, at the speed of its profile."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import orjson
import pytest

from broker.engine_model.profile import DEMO
from tests.builders import MODEL, a_chat_body
from worker_agent.engine.base import (
    Chunk,
    Completed,
    EngineDisconnected,
    EngineOutput,
    EngineRefused,
    EngineRequest,
)
from worker_agent.engine.fake import FakeEngine

SYSTEM = "You are a patient teacher. " * 300
"""8,100 bytes: 2,025 tokens, 31 blocks."""


async def an_engine(**fields: Any) -> FakeEngine:
    """A started engine, 50 times as fast as its profile."""
    defaults: dict[str, Any] = {"models": (MODEL,), "speed": 50.0}
    engine = FakeEngine(DEMO, **{**defaults, **fields})
    await engine.start()
    return engine


def a_request(
    *, endpoint: str = "/v1/chat/completions", stream: bool = True, **fields: Any
) -> EngineRequest:
    """A chat whose caller reads along."""
    body = fields.pop("body", None) or a_chat_body(**fields)
    return EngineRequest(request_id="r", endpoint=endpoint, body=body, stream_to_client=stream)


async def outputs(engine: FakeEngine, request: EngineRequest) -> list[EngineOutput]:
    """All outputs of a request."""
    async with aclosing(engine.run(request)) as stream:
        return [output async for output in stream]


async def until(engine: FakeEngine, *, running: int) -> None:
    """Let the loop turn until so many requests hold a slot."""
    while (await engine.load()).running != running:
        await asyncio.sleep(0)


async def lost(engine: FakeEngine, request: EngineRequest) -> bool:
    """Whether a request ends with the engine."""
    try:
        await outputs(engine, request)
    except EngineDisconnected:
        return True
    return False


async def answer(engine: FakeEngine, request: EngineRequest) -> tuple[dict[str, Any], Completed]:
    """The whole answer of a request."""
    completed = (await outputs(engine, request))[-1]
    assert isinstance(completed, Completed)
    return orjson.loads(completed.body), completed


async def test_stream_adds_up_to_the_answer() -> None:
    """The chunks' text is the answer's, each token counted, and one Completed ends it."""
    engine = await an_engine()
    *chunks, completed = await outputs(engine, a_request())
    assert isinstance(completed, Completed)
    events = [orjson.loads(chunk.data) for chunk in chunks if isinstance(chunk, Chunk)]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    body = orjson.loads(completed.body)
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert body["choices"][0]["message"]["content"] == text
    ends = [event["choices"][0]["finish_reason"] for event in events]
    assert ends[-1] == "length"
    assert set(ends[:-1]) <= {None}, "on a busy machine all may come in one piece"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == completed.usage.output_tokens == 16
    counts = [chunk.output_tokens for chunk in chunks if isinstance(chunk, Chunk)]
    assert counts == sorted(set(counts))
    assert counts[-1] == 16


async def test_usage_report_only_for_who_asked() -> None:
    """The last event of a stream is a usage report if the caller asked for it, and only then."""
    engine = await an_engine()
    *_, last, _ = await outputs(engine, a_request())
    assert isinstance(last, Chunk)
    assert orjson.loads(last.data).get("usage") is None
    asked = a_request(stream_options={"include_usage": True})
    *_, last, _ = await outputs(engine, asked)
    assert isinstance(last, Chunk)
    assert orjson.loads(last.data)["usage"]["prompt_tokens"] > 0


async def test_no_data_for_a_caller_who_does_not_stream() -> None:
    """Progress shows, and nothing goes on the way."""
    engine = await an_engine()
    *chunks, _ = await outputs(engine, a_request(stream=False))
    assert chunks
    assert all(isinstance(chunk, Chunk) and not chunk.data for chunk in chunks)


async def test_same_prompt_same_answer() -> None:
    """The text depends on the prompt alone, so that runs can be compared."""
    one, other = await an_engine(), await an_engine(speed=200.0)
    first, _ = await answer(one, a_request(user="a"))
    again, _ = await answer(other, a_request(user="a"))
    different, _ = await answer(other, a_request(user="b"))
    assert first["choices"] == again["choices"] != different["choices"]


async def test_shared_prefix_is_served_from_the_cache() -> None:
    """The second chat with the same system prompt says how much of it was there, and is faster."""
    engine = await an_engine()
    _, cold = await answer(engine, a_request(system=SYSTEM, user="one"))
    chunk, *_ = await outputs(engine, a_request(system=SYSTEM, user="two"))
    _, warm = await answer(engine, a_request(system=SYSTEM, user="three"))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 31 * 64)
    assert isinstance(chunk, Chunk)
    assert chunk.cached_tokens == 31 * 64
    assert warm.usage.cached_tokens == 31 * 64


async def test_slots_are_never_above_the_profiles() -> None:
    """A worker may offer less than the engine has, not more."""
    assert FakeEngine(DEMO, models=(MODEL,), slots=2).facts.slots == 2
    assert FakeEngine(DEMO, models=(MODEL,), slots=99).facts.slots == DEMO.slots
    assert FakeEngine(DEMO, models=(MODEL,)).facts.slots == DEMO.slots


async def test_closing_frees_slot_and_memory() -> None:
    """A request that is given up leaves nothing behind in the engine."""
    engine = await an_engine(speed=1.0)
    async with aclosing(engine.run(a_request(system=SYSTEM))) as stream:
        await anext(stream)
        assert (await engine.load()).running == 1
    load = await engine.load()
    assert (load.running, load.kv_tokens_used) == (0, 0)


async def test_cancelling_the_reader_aborts_too() -> None:
    """So does the end of the task that reads."""
    engine = await an_engine(speed=1.0)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(outputs(engine, a_request(system=SYSTEM, max_tokens=500)))
        await until(engine, running=1)
        task.cancel()
    assert (await engine.load()).running == 0


async def test_more_requests_than_slots_wait() -> None:
    """What is beyond the slots waits in the engine, and all end."""
    engine = await an_engine(slots=2, speed=20.0)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(engine, a_request(user=f"{i}"))) for i in range(5)]
        await until(engine, running=2)
        assert (await engine.load()).waiting == 3
    assert all(task.result()[1].status_code == 200 for task in tasks)


async def test_stop_loses_what_runs_and_a_new_start_is_a_new_incarnation() -> None:
    """An engine that ends takes its requests and its cache with it."""
    engine = await an_engine(speed=1.0)
    assert engine.facts.incarnation == 1
    async with asyncio.TaskGroup() as group:
        task = group.create_task(lost(engine, a_request(system=SYSTEM)))
        await until(engine, running=1)
        await engine.stop()
    assert task.result()
    assert not (await engine.ready()).ready
    with pytest.raises(EngineDisconnected):
        await outputs(engine, a_request())
    await engine.start()
    assert (await engine.ready()).models == (MODEL,)
    assert engine.facts.incarnation == 2
    _, completed = await answer(engine, a_request(system=SYSTEM))
    assert completed.cached_tokens == 0


@pytest.mark.parametrize(
    ("fields", "status_code"),
    [
        ({"body": b"{"}, 400),
        ({"body": b"[]"}, 400),
        ({"endpoint": "/v1/nonsense"}, 404),
        ({"model": "other"}, 404),
        ({"n": 2}, 400),
        ({"max_tokens": 50_000}, 400),
    ],
)
async def test_refusals(fields: dict[str, Any], status_code: int) -> None:
    """What no engine could run is refused as by a real one, and holds nothing."""
    engine = await an_engine()
    with pytest.raises(EngineRefused) as raised:
        await outputs(engine, a_request(**fields))
    assert raised.value.status_code == status_code
    assert set(orjson.loads(raised.value.body)["error"]) == {"message", "type", "param", "code"}
    assert (await engine.load()).running == 0


async def test_other_endpoints() -> None:
    """Completions, responses and embeddings have their own forms, streamed where that applies."""
    engine = await an_engine()
    prompt = orjson.dumps({"model": MODEL, "prompt": "x", "max_tokens": 3})
    body, _ = await answer(engine, a_request(body=prompt, endpoint="/v1/completions"))
    assert (body["object"], len(body["choices"][0]["text"].split())) == ("text_completion", 3)

    asked = orjson.dumps({"model": MODEL, "input": "x", "max_output_tokens": 3})
    *chunks, completed = await outputs(engine, a_request(body=asked, endpoint="/v1/responses"))
    assert isinstance(completed, Completed)
    events = [orjson.loads(chunk.data) for chunk in chunks if isinstance(chunk, Chunk)]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"] == orjson.loads(completed.body)
    text = "".join(event["delta"] for event in events[:-1])
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text

    given = orjson.dumps({"model": MODEL, "input": "x"})
    (chunk, completed) = await outputs(engine, a_request(body=given, endpoint="/v1/embeddings"))
    assert isinstance(chunk, Chunk)
    assert isinstance(completed, Completed)
    assert not chunk.data
    assert len(orjson.loads(completed.body)["data"][0]["embedding"]) == 8


async def test_load_tells_what_the_engine_can_do() -> None:
    """Rates are those of the profile, at the speed it runs."""
    engine = await an_engine(speed=2.0)
    load = await engine.load()
    assert load.kv_tokens_max == DEMO.kv_tokens_max
    assert load.prefill_tokens_s == pytest.approx(2 * 7_300, rel=0.05)
    assert load.decode_tokens_s == pytest.approx(2 * 100)
    await engine.stop()
    assert (await engine.load()).kv_tokens_max == 0


async def test_takes_the_time_of_its_profile() -> None:
    """A cold prompt and a long answer take what the model says, divided by the speed."""
    profile = replace(DEMO, slots=1)
    engine = FakeEngine(profile, models=(MODEL,), speed=4.0)
    await engine.start()
    loop = asyncio.get_running_loop()
    started_at_s = loop.time()
    await answer(engine, a_request(system=SYSTEM, max_tokens=33))
    expected_s = (0.29 + 32 * 0.012) / 4.0
    assert expected_s * 0.9 <= loop.time() - started_at_s <= expected_s * 3
