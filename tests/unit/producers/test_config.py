"""The producers' tables of the one TOML file."""

from pathlib import Path

import pytest

from broker.wire.settings import SettingsError
from producers.config import ClientConfig, ProducerConfig, load


def test_nothing_given_is_all_defaults() -> None:
    """No file is needed."""
    assert load(None) == ProducerConfig()


def test_file_and_arguments_are_put_together(tmp_path: Path) -> None:
    """[nats] is everybody's, [producer] ours, arguments go first; the broker's are let be."""
    path = tmp_path / "inferlane.toml"
    path.write_text(
        '[nats]\nurl = "nats://a:1"\nuser = "me"\nreplicas = 3\n[broker]\nname = "b"\n'
        '[producer]\nlane = "acme"\n[producer.client]\nwatchdog_s = 3\n'
    )
    found = load(path)
    assert (found.nats.url, found.nats.user, found.lane) == ("nats://a:1", "me", "acme")
    assert found.client == ClientConfig(watchdog_s=3.0)
    found = load(path, nats="nats://b:2", lane="other", creds=tmp_path / "c")
    assert (found.nats.url, found.lane) == ("nats://b:2", "other")
    assert found.nats.creds_file == str(tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[producer]\nlan = 1\n", "lan"),
        ("[producer.client]\nwatchdog_s = 0\n", "watchdog_s"),
        ("[producer.client]\n\nwatch = 1\n", "3"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, text: str, told: str) -> None:
    """Unknown keys and values out of bounds."""
    path = tmp_path / "inferlane.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=told):
        load(path)
