"""`inferlane broker`: which configuration it runs with, before anything is begun."""

from collections.abc import Callable
from pathlib import Path

import pytest

from broker.service.config import Config, ConfigError
from ops.cli.main import main

VALID = '[policy]\nmodels = ["tiny"]\n[[policy.lanes]]\nname = "acme"\n'


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations that a broker was run with, and read anew; none is really run."""
    configs: list[Config] = []

    def run(config: Config, *, reread: Callable[[], Config]) -> None:
        configs.extend([config, reread()])

    monkeypatch.setattr("broker.service.main.run", run)
    return configs


def _file(folder: Path, text: str = VALID) -> str:
    path = folder / "f.toml"
    path.write_text(text)
    return str(path)


def test_flags_go_before_the_file(tmp_path: Path, ran: list[Config]) -> None:
    """Two brokers with one file need names, ports and folders of their own."""
    arguments = ["broker", "-c", _file(tmp_path), "--name", "b2", "--http-port", "0"]
    assert main([*arguments, "--state-dir", "b2-state"]) == 0
    broker = ran[0].broker
    assert (broker.name, broker.http_port, broker.state_dir) == ("b2", 0, "b2-state")
    assert ran[0].policy.models == ("tiny",)
    assert ran[1] == ran[0]


def test_file_of_the_folder(
    tmp_path: Path, ran: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flag, ./inferlane.toml is it."""
    (tmp_path / "inferlane.toml").write_text(VALID)
    monkeypatch.chdir(tmp_path)
    assert main(["broker"]) == 0
    assert ran[0].broker.name == "broker"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no configuration: give --config FILE, or put inferlane.toml here"),
        (["--config", "{file}", "--name", "a b"], "--name, --http-port or --state-dir: "),
        (["--config", "{file}", "--http-port", "70000"], "--name, --http-port or --state-dir: "),
    ],
)
def test_unusable(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    ran: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Code 2, a sentence, and no broker was run."""
    file = _file(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["broker", *(one.format(file=file) for one in arguments)]) == 2
    assert capsys.readouterr().err.startswith(f"inferlane: {told}")
    assert ran == []


def test_a_file_that_lost_its_lanes_is_a_mistake_of_the_file_also_when_read_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that is told to read it anew lives on: that is the one error it looks for."""

    def run(config: Config, *, reread: Callable[[], Config]) -> None:
        assert config.policy.lanes
        Path(file).write_text('[worker]\nworker = "w1"\n')
        with pytest.raises(ConfigError, match="a broker needs"):
            reread()

    monkeypatch.setattr("broker.service.main.run", run)
    file = _file(tmp_path)
    assert main(["broker", "-c", file]) == 0


def test_file_of_a_worker_only(
    tmp_path: Path, ran: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no lanes for a broker to serve."""
    file = _file(tmp_path, '[worker]\nworker = "w1"\n')
    assert main(["broker", "-c", file]) == 2
    assert "a broker needs [policy] with models and lanes" in capsys.readouterr().err
    assert ran == []
