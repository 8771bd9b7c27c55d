"""The gateway's settings: `[gateway]` of the one TOML file, or flags."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

from msgspec import Meta, Struct, structs

from broker.disk.named_file import read_named
from broker.wire import settings
from broker.wire.fields import Band, Token
from broker.wire.ids import is_token
from broker.wire.messages import BODY_BYTES_MAX
from broker.wire.settings import Settings
from broker.wire.toml_lines import KeyPath
from producers.batches.config import BatchesConfig
from producers.config import ClientConfig, NatsLink

MIB = 1024 * 1024

KEY_CHARS_MIN = 8
"""Shortest bearer key: a shorter one is guessed."""

DIGEST_CHARS = 64
"""A SHA-256 digest in hexadecimal."""

Positive = Annotated[float, Meta(gt=0, le=1e6)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1_000_000)]

NO_KEYS = (
    "no key is named, so nobody could ask for anything; add a table for each caller, such as"
    ' [gateway.keys.alice] with key = "sk-…" and lane = "acme"'
)


class KeyConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One bearer key, and whose jobs it makes."""

    lane: Token
    """Lane of its jobs."""
    key: Annotated[str, Meta(max_length=256)] = ""
    """The key as the caller sends it; ..."""
    key_sha256: Annotated[str, Meta(max_length=DIGEST_CHARS)] = ""
    """... or its SHA-256 in hexadecimal, so that the file holds no secret."""
    band: Band = 1
    """Priority of requests that name none: somebody waits for them."""


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One gateway: where it listens, who may ask, and how much at once. Durations in seconds."""

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    """Without TLS: beyond loopback, put a proxy before it."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 9471
    """0: any free port."""
    keys: dict[Token, KeyConfig] = {}
    """Who may ask, by name; the name stands in metrics and logs, the key nowhere."""
    nats: NatsLink = NatsLink()
    client: ClientConfig = ClientConfig()
    batches: BatchesConfig = BatchesConfig()
    """Batches that this process runs, and files."""

    connections_max: AtLeastOne = 4096
    """Connections at once; a further one is told 503 and closed."""
    streams_max: AtLeastOne = 2048
    """Streamed answers at once; a further one is told 503."""
    header_bytes_max: Annotated[int, Meta(ge=1024, le=65536)] = 8192
    """Longest request line, and longest header."""
    headers_max: Annotated[int, Meta(ge=16, le=1024)] = 64
    """Headers of a request; the OpenAI client sends some twenty."""
    body_bytes_max: Annotated[int, Meta(ge=1024, le=BODY_BYTES_MAX)] = BODY_BYTES_MAX
    """Largest request body (files have a bound of their own)."""
    bodies_bytes_max: Annotated[int, Meta(ge=MIB)] = 512 * MIB
    """Bodies of all requests under way; while they take so much, a further one is told 503."""
    stream_bytes_max: Annotated[int, Meta(ge=4096)] = 256 * 1024
    """Of a streamed answer, what is kept for a slow reader. A slower one gets the rest at the end,
    in one piece."""

    keepalive_s: Positive = 75.0
    """Longest silence between two requests of a connection, and until a request's headers are
    whole: more than the 60 s of common proxies, so that they close first."""
    body_s_max: Positive = 60.0
    """Longest wait for a whole request body."""
    write_s_max: Positive = 60.0
    """A reader who takes nothing of his answer for so long is gone."""
    answer_s_max: Positive = 4500.0
    """Longest wait for an answer: more than a band's longest wait and a run together."""
    stream_silence_s: Positive = 15.0
    """A stream without a token for so long sends a comment, so that no proxy takes it for dead."""
    drain_s_max: Positive = 30.0
    """What answers under way get after SIGTERM; then they are cut off, their jobs cancelled."""


def load(
    path: Path | None,
    *,
    host: str | None = None,
    port: int | None = None,
    nats: str | None = None,
    creds: Path | None = None,
) -> GatewayConfig:
    """Read `[gateway]` of a TOML file, `[nats]` and `[producer.client]` beside it.

    Arguments go before the file. Raises SettingsError, also when no key is named; OSError.
    """
    source = "flags" if path is None else str(path)
    data = b"" if path is None else read_named(path, bytes_max=settings.SETTINGS_BYTES_MAX)
    document = settings.parse(data, source=source)
    table: dict[str, Any] = dict(document.data.get("gateway", {}))
    table["nats"] = dict(document.data.get("nats", {}))
    table["client"] = dict(document.data.get("producer", {}).get("client", {}))
    given = {"host": host, "port": port}
    table |= {name: value for name, value in given.items() if value is not None}
    if nats:
        table["nats"]["url"] = nats
    if creds:
        table["nats"]["creds_file"] = str(creds)
    keys = _read_keys(replace(document, data={"gateway": dict(table)}), table.pop("keys", {}))
    config = replace(document, data={"gateway": table}).read(GatewayConfig, ("gateway",))
    config = structs.replace(config, keys=keys)
    problems = tuple(document.problem(key, message) for key, message in _wrong(config))
    if problems:
        raise document.error(*problems)
    return config


def _read_keys(document: Settings, keys: object) -> dict[str, KeyConfig]:
    """Read each key's table by itself, so that a mistake is told by its name and line."""
    found: dict[str, KeyConfig] = {}
    for name, table in cast("dict[str, object]", keys).items() if isinstance(keys, dict) else ():
        path = ("gateway", "keys", name)
        if not is_token(name):
            message = "a key's name is 1 to 64 of the characters A-Z a-z 0-9 _ -"
            raise document.error(document.problem(path, message))
        if not isinstance(table, dict):
            raise document.error(document.problem(path, "it must be a table with lane and key"))
        found[name] = document.read(KeyConfig, path)
    return found


def _wrong(config: GatewayConfig) -> list[tuple[KeyPath, str]]:
    """Find what is wrong with the keys, each being allowed by itself."""
    if not config.keys:
        return [(("gateway", "keys"), NO_KEYS)]
    found: list[tuple[KeyPath, str]] = []
    seen: dict[str, str] = {}
    for name, entry in config.keys.items():
        path = ("gateway", "keys", name)
        if bool(entry.key) == bool(entry.key_sha256):
            found.append((path, "give either key or key_sha256"))
        elif entry.key and len(entry.key) < KEY_CHARS_MIN:
            found.append(((*path, "key"), f"a key has at least {KEY_CHARS_MIN} characters"))
        elif entry.key and not (entry.key.isascii() and entry.key.isprintable()):
            found.append(((*path, "key"), "a key has printable ASCII characters only"))
        elif entry.key_sha256 and not _is_digest(entry.key_sha256):
            message = f"a SHA-256 has {DIGEST_CHARS} hexadecimal characters"
            found.append(((*path, "key_sha256"), message))
        said = entry.key or entry.key_sha256.lower()
        if other := seen.get(said):
            found.append((path, f"{other} has the same key; whose is it?"))
        seen.setdefault(said, name)
    return found


def _is_digest(text: str) -> bool:
    return len(text) == DIGEST_CHARS and all(char in "0123456789abcdefABCDEF" for char in text)
