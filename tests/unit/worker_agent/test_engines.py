"""The engine that the settings name, or one sentence on why it can't be."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from worker_agent.config import WorkerConfig
from worker_agent.engine.fake import FakeEngine
from worker_agent.engine.llama import LlamaEngine
from worker_agent.engine.openai_http import OpenAiHttpEngine
from worker_agent.engines import ConfigMistake, make_engine

GGUF = Path(__file__).parents[3] / "ops" / "tiny_model" / "tiny.gguf"


def a_config(**fields: Any) -> WorkerConfig:
    """Settings of a worker."""
    return WorkerConfig(worker="w", **fields)


def test_an_engine_over_http_has_the_configured_slots() -> None:
    """Until the server tells a smaller number."""
    engine = make_engine(a_config(engine="openai", base_url="http://127.0.0.1:1", slots=7))
    assert isinstance(engine, OpenAiHttpEngine)
    assert engine.facts.slots == 7


def test_a_fake_engine_has_its_profiles_memory() -> None:
    """And never more slots than the profile."""
    engine = make_engine(a_config(engine="fake", models={"a": "a"}, slots=100, profile="demo"))
    assert isinstance(engine, FakeEngine)
    assert (engine.facts.slots, engine.facts.kv_tokens_max) == (6, 6 * 2304)


async def test_a_llama_engine_serves_the_configured_name() -> None:
    """Without one, the file's; it is not started here."""
    for models, name in (({"a": "own"}, "own"), ({}, "tiny")):
        engine = make_engine(a_config(engine="llama", gguf=str(GGUF), models=models))
        assert isinstance(engine, LlamaEngine)
        assert engine._options.model == name
        await engine.stop()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"engine": "openai", "base_url": "ftp://nowhere"}, "ftp://nowhere"),
        ({"engine": "llama", "kv_events": "ipc:///e"}, "one of kind llama has none"),
        ({"engine": "openai", "kv_events_replay": "ipc:///e"}, "set that, too"),
        ({"engine": "openai", "kv_events": "tcp://*:5557"}, "the address to connect to"),
        ({"engine": "openai", "kv_events": "ipc://relative"}, "give ipc:///path or tcp://"),
        ({"engine": "openai", "kv_events": f"ipc:///{'x' * 107}"}, "give ipc:///path"),
        (
            {"engine": "openai", "kv_events": "ipc:///e", "kv_events_replay": "5558"},
            "kv_events_replay = '5558'",
        ),
        (
            {"engine": "openai", "kv_events": "ipc:///e", "kv_events_ranks": 2},
            "each of 2 ranks publishes at a port of its own, so give tcp://host:port",
        ),
        (
            {
                "engine": "openai",
                "kv_events": "tcp://h:5557",
                "kv_events_replay": "tcp://h:65535",
                "kv_events_ranks": 2,
            },
            "kv_events_replay = 'tcp://h:65535': the ports of 2 ranks end above 65535",
        ),
        (
            {"engine": "openai", "kv_events": "ipc:///e", "cache_sequences": 4},
            "keeps no `cache_sequences`",
        ),
        ({"engine": "fake"}, "a fake engine serves what `models` names: give at least one"),
        ({"engine": "fake", "profile": "h100", "models": {"a": "a"}}, "no profile 'h100'"),
        ({"engine": "llama", "gguf": "/nowhere.gguf"}, "there is no model file '/nowhere.gguf'"),
    ],
)
def test_settings_that_can_not_work_are_told_in_a_sentence(
    fields: dict[str, Any], told: str
) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigMistake) as caught:
        make_engine(a_config(**fields))
    assert told in str(caught.value)


def test_kv_events_without_pyzmq_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told before the engine is asked anything."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigMistake, match=r"inferlane\[kv-events\]"):
        make_engine(a_config(engine="openai", kv_events="ipc:///tmp/kv"))


def test_kv_events_are_heard_at_a_socket_or_a_host() -> None:
    """Nothing is connected yet."""
    for endpoint in ("ipc:///tmp/kv", "tcp://10.0.0.7:5557"):
        make_engine(a_config(engine="openai", kv_events=endpoint, kv_events_replay=endpoint))
