"""The engine that the settings name, or one sentence on why it can't be."""

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
