"""`[gateway]` of the one TOML file."""

import hashlib
import tomllib
from pathlib import Path

import msgspec
import pytest

from broker.wire.settings import SettingsError
from producers.gateway.config import GatewayConfig, load

ONE_KEY = '[gateway.keys.alice]\nlane = "acme"\nkey = "sk-alice-1"\n'
DIGEST = hashlib.sha256(b"sk-alice-1").hexdigest()


def _file(folder: Path, text: str) -> Path:
    path = folder / "f.toml"
    path.write_text(text)
    return path


def test_file_and_arguments_are_put_together(tmp_path: Path) -> None:
    """[nats] and [producer.client] are everybody's, [gateway] is ours, arguments go first."""
    path = _file(
        tmp_path,
        '[nats]\nurl = "nats://a:1"\n[producer.client]\ncancel_s = 3\n'
        f"[gateway]\nport = 7\nstreams_max = 5\n{ONE_KEY}",
    )
    config = load(path)
    assert (config.nats.url, config.client.cancel_s) == ("nats://a:1", 3.0)
    assert (config.port, config.streams_max) == (7, 5)
    assert (config.keys["alice"].lane, config.keys["alice"].band) == ("acme", 1)
    config = load(path, host="::1", port=0, nats="nats://b:2", creds=tmp_path / "c")
    assert (config.host, config.port, config.nats.url) == ("::1", 0, "nats://b:2")
    assert config.nats.creds_file == str(tmp_path / "c")


def test_without_a_key_it_says_what_to_write(tmp_path: Path) -> None:
    """Nobody could ask, so it doesn't start; flags alone can't name keys."""
    for path in (None, _file(tmp_path, "[gateway]\nport = 7\n")):
        with pytest.raises(SettingsError, match=r"gateway\.keys: no key is named.*keys\.alice"):
            load(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[gateway.keys.a]\nlane = "x"\n', "f.toml:1: gateway.keys.a: give either"),
        (f'{ONE_KEY}key_sha256 = "{DIGEST}"\n', "give either key or key_sha256"),
        ('[gateway.keys.a]\nlane = "x"\nkey = "short"\n', ":3: gateway.keys.a.key: a key has"),
        ('[gateway.keys.a]\nlane = "x"\nkey = "schlüssel"\n', "printable ASCII"),
        ('[gateway.keys.a]\nlane = "x"\nkey_sha256 = "abc"\n', "64 hexadecimal"),
        (ONE_KEY + '[gateway.keys.b]\nlane = "x"\nkey = "sk-alice-1"\n', "alice has the same key"),
        ('[gateway.keys.a]\nlane = "x.y"\nkey = "sk-alice-1"\n', "of 1 to 64 of the characters"),
        ("[gateway.keys]\na = 1\n", ":2: gateway.keys.a: it must be a table"),
        ("[gateway]\nkeys = 1\n", "no key is named"),
        ('[gateway.keys."a b"]\nlane = "x"\n', "a key's name is"),
        ('[gateway.keys.a]\nlane = "x"\nband = 4\nkey = "sk-alice-1"\n', "band"),
        (f"[gateway]\nports = 1\n{ONE_KEY}", 'Did you mean "port"?'),
        (f"[gateway]\nstreams_max = 0\n{ONE_KEY}", "at least 1"),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, text: str, told: str) -> None:
    """Unknown keys, values out of bounds, keys that can't be told apart."""
    with pytest.raises(SettingsError) as caught:
        load(_file(tmp_path, text))
    assert told in str(caught.value)


def test_a_key_is_never_told(tmp_path: Path) -> None:
    """Not even in the message that complains of it."""
    text = '[gateway.keys.a]\nlane = "x"\nkey = "geheim"\n'
    with pytest.raises(SettingsError) as caught:
        load(_file(tmp_path, text))
    assert "geheim" not in str(caught.value)


def test_the_example_shows_every_key_with_its_default() -> None:
    """What an operator may set stands in ops/inferlane.toml, and stands there right."""
    example = Path("ops/inferlane.toml").read_text()
    text = example[example.index("# [gateway]") :]
    lines = [line.removeprefix("# ") for line in text.splitlines() if " = " in line[:40]]
    shown = tomllib.loads("\n".join(line for line in lines if not line.startswith("#")))
    defaults = msgspec.to_builtins(GatewayConfig())
    for name in ("nats", "client", "keys"):
        del defaults[name]
    defaults |= defaults.pop("batches")  # A table of its own, [gateway.batches].
    assert {name: shown.get(name) for name in defaults} == defaults
    assert shown.keys() - defaults.keys() == {"lane", "key", "key_sha256", "band"}
