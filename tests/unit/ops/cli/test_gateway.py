"""`inferlane gateway`: which configuration it runs with, before anything is begun."""

from pathlib import Path

import pytest

from ops.cli.main import main
from producers.errors import Unreachable
from producers.gateway.config import GatewayConfig

VALID = '[gateway.keys.a]\nlane = "acme"\nkey = "sk-alice-1"\n'


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[GatewayConfig]:
    """Configurations that a gateway was run with; none is really run."""
    configs: list[GatewayConfig] = []
    monkeypatch.setattr("producers.gateway.main.run", configs.append)
    return configs


def test_flags_go_before_the_file(tmp_path: Path, ran: list[GatewayConfig]) -> None:
    """Two gateways with one file need ports of their own."""
    file = tmp_path / "f.toml"
    file.write_text(VALID)
    arguments = ["gateway", "-c", str(file), "--port", "0", "--host", "::1", "--nats", "nats://x:1"]
    assert main(arguments) == 0
    assert (ran[0].port, ran[0].host, ran[0].nats.url) == (0, "::1", "nats://x:1")


def test_file_of_the_folder(
    tmp_path: Path, ran: list[GatewayConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a flag, ./inferlane.toml is it."""
    (tmp_path / "inferlane.toml").write_text(VALID)
    monkeypatch.chdir(tmp_path)
    assert main(["gateway"]) == 0
    assert ran[0].keys["a"].lane == "acme"


@pytest.mark.parametrize(
    ("text", "arguments", "told"),
    [
        (None, [], "no configuration: give --config FILE, or put inferlane.toml here"),
        (None, ["--config", "none.toml"], "none.toml can't be read: no such file"),
        ("[gateway]\nport = 1\n", [], "inferlane.toml:1: gateway.keys: no key is named"),
        (VALID, ["--port", "70000"], "inferlane.toml:1: gateway.port: 70000 is not allowed"),
    ],
)
def test_unusable(
    text: str | None,
    arguments: list[str],
    told: str,
    tmp_path: Path,
    ran: list[GatewayConfig],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Code 2, a sentence, and no gateway was run."""
    if text is not None:
        (tmp_path / "inferlane.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["gateway", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"inferlane: {told}")
    assert ran == []


def test_nobody_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 3 when the message server can't be reached."""

    def fail(_: GatewayConfig) -> None:
        message = "no NATS server can be used"
        raise Unreachable(message)

    monkeypatch.setattr("producers.gateway.main.run", fail)
    file = tmp_path / "f.toml"
    file.write_text(VALID)
    assert main(["gateway", "-c", str(file)]) == 3
    assert capsys.readouterr().err == "inferlane: no NATS server can be used\n"
