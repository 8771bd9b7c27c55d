"""`inferlane worker`: flags and file become the settings that a worker runs with."""

from pathlib import Path

import pytest

from ops.cli.main import main as inferlane
from worker_agent import main
from worker_agent.config import WorkerConfig


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[WorkerConfig]:
    """Settings of the workers that were run; none really is."""
    seen: list[WorkerConfig] = []

    def run(config: WorkerConfig, *, replace: bool) -> int:
        assert not replace
        seen.append(config)
        return main.EXIT_SUPERSEDED

    monkeypatch.setattr(main, "run", run)
    monkeypatch.delenv("INFERLANE_CONFIG", raising=False)
    return seen


def test_flags_are_enough_and_the_exit_code_is_the_workers(runs: list[WorkerConfig]) -> None:
    """`inferlane worker` ends as the agent does."""
    flags = ["--name", "gpu1", "--base-url", "http://127.0.0.1:1", "--model", "a", "--model", "b=c"]
    assert inferlane(["worker", *flags, "--slots", "3", "--nats", "nats://h:1"]) == 4
    (config,) = runs
    assert (config.worker, config.slots, config.base_url) == ("gpu1", 3, "http://127.0.0.1:1")
    assert (config.models, config.nats.url) == ({"a": "a", "b": "c"}, "nats://h:1")


def test_a_live_agents_place_is_taken_only_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a flag alone: in a file, a copy would end the original."""
    told: list[bool] = []

    def run(config: WorkerConfig, *, replace: bool) -> int:
        del config
        told.append(replace)
        return main.EXIT_OK

    monkeypatch.setattr(main, "run", run)
    assert inferlane(["worker", "--name", "gpu1", "--replace"]) == 0
    assert inferlane(["worker", "--name", "gpu1"]) == 0
    assert told == [True, False]


def test_flags_go_before_the_file(
    runs: list[WorkerConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may also come from the environment."""
    file = tmp_path / "w.toml"
    file.write_text('[worker]\nworker = "gpu1"\nslots = 7\n')
    assert inferlane(["worker", "--config", str(file), "--name", "gpu2"]) == 4
    monkeypatch.setenv("INFERLANE_CONFIG", str(file))
    assert inferlane(["worker"]) == 4
    assert [(one.worker, one.slots) for one in runs] == [("gpu2", 7), ("gpu1", 7)]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "give the worker a name, --name NAME"),
        (["--name", "a.b"], 'worker.worker: "a.b" is not allowed'),
        (["--name", "a", "--engine", "magic"], "magic"),
    ],
)
def test_wrong_flags_are_told_in_a_sentence(
    flags: list[str], told: str, runs: list[WorkerConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing was begun."""
    assert inferlane(["worker", *flags]) == 2
    assert told in capsys.readouterr().err
    assert runs == []
