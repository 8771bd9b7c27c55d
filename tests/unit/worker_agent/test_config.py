"""The agent's settings: a file, flags over it, and mistakes told so that a person can act."""

import tomllib
from pathlib import Path

import msgspec
import pytest

from broker.wire.settings import SettingsError
from worker_agent.config import WorkerConfig, load
from worker_agent.flags import model_names, parse_flags

FILE = """
[nats]
url = "nats://10.0.0.1:4222"
user = "worker"
sync_interval = "always"

[policy]
models = ["big"]

[worker]
worker = "gpu1"
engine = "openai"
base_url = "http://127.0.0.1:8000"
slots = 8
models = { big = "meta/big" }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file as an operator has it: broker's tables beside the agent's."""
    file = tmp_path / "inferlane.toml"
    file.write_text(FILE)
    return file


def test_a_file_gives_its_worker_table_and_the_way_to_the_server(path: Path) -> None:
    """The broker's other tables and keys are none of the agent's business."""
    config = load(path)
    assert (config.worker, config.slots, config.models) == ("gpu1", 8, {"big": "meta/big"})
    assert (config.nats.url, config.nats.user) == ("nats://10.0.0.1:4222", "worker")
    assert config.heartbeat_s == 1.0


def test_flags_go_before_the_file(path: Path) -> None:
    """One file serves many workers that differ in a flag or two."""
    flags = ["--config", str(path), "--worker", "gpu2", "--slots", "2", "--model", "a=b"]
    read = parse_flags([*flags, "--model", "c", "--nats", "nats://other:1"])
    assert read is not None
    config = read.config
    assert (config.worker, config.slots) == ("gpu2", 2)
    assert config.models == {"a": "b", "c": "c"}
    assert (config.nats.url, config.nats.user) == ("nats://other:1", "worker")
    assert config.base_url == "http://127.0.0.1:8000"


def test_flags_alone_are_enough() -> None:
    """No file is needed for a worker on this machine."""
    read = parse_flags(["--worker", "w1", "--engine", "fake", "--model", "tiny"])
    assert read is not None
    config = read.config
    assert (config.worker, config.engine) == ("w1", "fake")
    assert config.nats.url == "nats://127.0.0.1:4222"


def test_taking_a_live_agents_place_is_no_setting() -> None:
    """A flag beside the settings."""
    flags = ["--worker", "w1", "--engine", "fake"]
    asked, plain = parse_flags([*flags, "--replace"]), parse_flags(flags)
    assert asked is not None
    assert plain is not None
    assert asked.config == plain.config
    assert (asked.replace, plain.replace) == (True, False)


def test_an_unknown_key_is_refused_with_its_line(path: Path) -> None:
    """A typing error in the file is an error, not a silence."""
    path.write_text(FILE.replace("slots = 8", "slot = 8"))
    with pytest.raises(SettingsError) as caught:
        load(path)
    assert f'{path}:14: worker.slot: no such key. Did you mean "slots"?' in str(caught.value)


def test_a_value_out_of_range_is_refused_with_what_is_allowed(path: Path) -> None:
    """The message says line, key, and the bound."""
    path.write_text(FILE.replace("slots = 8", "slots = 0"))
    with pytest.raises(SettingsError, match=r":14: worker\.slots: 0 is not allowed"):
        load(path)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--engine", "fake"], "worker is missing"),
        (["--worker", "a.b"], 'worker.worker: "a.b" is not allowed'),
        (["--worker", "w", "--config", "/nowhere.toml"], "/nowhere.toml"),
    ],
)
def test_wrong_flags_are_told_and_give_no_configuration(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence on standard error."""
    assert parse_flags(flags) is None
    assert told in capsys.readouterr().err


def test_model_names_are_pairs_or_single() -> None:
    """`served=own`, or one name for both."""
    assert model_names(["a", "b=c", "d=e=f"]) == {"a": "a", "b": "c", "d": "e=f"}


def test_the_example_shows_every_key_with_its_default() -> None:
    """What an operator may set stands in ops/inferlane.toml, and stands there right."""
    example = Path("ops/inferlane.toml").read_text()
    start = example.index("# [worker]")
    lines = example[start : example.index("# [producer]")].splitlines()
    text = "\n".join(
        line.removeprefix("# ") for line in lines if " = " in line and "# #" not in line
    )
    shown = tomllib.loads(text)
    defaults = msgspec.to_builtins(WorkerConfig(worker="gpu-1"))
    del defaults["nats"]
    assert shown == defaults


def test_an_engine_of_sequences_has_as_many_as_slots(path: Path) -> None:
    """llama.cpp keeps one prompt a slot; others cache blocks unless told."""
    assert load(path).cached_sequences == 0
    assert load(path, overrides={"engine": "llama"}).cached_sequences == 8
    assert load(path, overrides={"cache_sequences": 3}).cached_sequences == 3
