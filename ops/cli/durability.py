"""How often the NATS server flushes to disk, from whoever knows, and what that means.

By default nats-server flushes its files every two minutes (nats-server issue 7564): a killed
process loses nothing, for the system has its writes, but a power cut loses what was not flushed.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import orjson

from broker.disk.named_file import read_named
from ops.cli.errors import CommandError, Misused
from ops.cli.output import duration

DEFAULT_SYNC_S = 120.0
"""nats-server's own default."""

MONITOR_S_MAX = 3.0
MONITOR_BYTES_MAX = 1_000_000
"""Longest answer read from the monitoring address; it is some hundred bytes long."""

NATS_CONFIG_BYTES_MAX = 1_000_000
"""Of a server's configuration file; ours have 2 kB."""

_COMMENT = re.compile(r"(^|\s)(#|//).*$", re.MULTILINE)
_SYNC = re.compile(r"\bsync(?:_interval)?\s*[:=\s]\s*[\"']?([0-9A-Za-z.µ]+)")
_INCLUDE = re.compile(r"^\s*include\s", re.MULTILINE)
_STORE = re.compile(r"\bstore(?:_dir|dir)?\s*[:=\s]\s*[\"']?([^\"'\s,}]+)")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Durability:
    """What is known of the server's disk."""

    sync_s: float | None
    """Between two flushes; 0: each write is flushed before it is acknowledged; None: not known."""
    source: str = ""
    store_dir: Path | None = None
    storage_bytes_max: int | None = None
    """Of all accounts, the server's `max_file`."""

    @property
    def told(self) -> str:
        """Say how often it flushes."""
        if self.sync_s is None:
            return "not known"
        return "at each write" if self.sync_s == 0 else f"every {duration(self.sync_s)}"


UNKNOWN = Durability(None)


def sync_seconds(text: str) -> float | None:
    """Read a `sync_interval` (`always`, `1s`, `1m30s`); None when it is none."""
    if text == "always":
        return 0.0
    if not re.fullmatch(rf"(?:{_PART.pattern})+", text):
        return None
    return sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(text))


def from_config(sync_interval: str) -> Durability:
    """Take what inferlane.toml says of the server. Raises Misused."""
    sync_s = sync_seconds(sync_interval)
    if sync_s is None:
        message = f'nats.sync_interval = "{sync_interval}": write "always", or a duration as "1s"'
        raise Misused(message)
    return Durability(sync_s, "nats.sync_interval of the configuration")


def from_nats_config(path: Path) -> Durability:
    """Read the server's own configuration file. Raises CommandError, OSError.

    A file that says nothing has the default, unless it includes others.
    """
    text = _COMMENT.sub("", _text_of(path))
    store = _STORE.search(text)
    store_dir = Path(store[1]) if store else None
    found = _SYNC.search(text)
    if found is None:
        sync_s = None if _INCLUDE.search(text) else DEFAULT_SYNC_S
        return Durability(sync_s, f"{path} (which says nothing of sync_interval)", store_dir)
    sync_s = sync_seconds(found[1])
    if sync_s is None:
        message = f"{path}: sync_interval {found[1]!r} is neither `always` nor a duration"
        raise CommandError(message)
    return Durability(sync_s, str(path), store_dir)


def _text_of(path: Path) -> str:
    return read_named(path, bytes_max=NATS_CONFIG_BYTES_MAX).decode(errors="replace")


async def from_monitor(address: str) -> Durability:
    """Ask the server's monitoring address. Raises CommandError."""
    url = f"{address.rstrip('/')}/jsz?config=true"
    limit = aiohttp.ClientTimeout(total=MONITOR_S_MAX)
    try:
        async with aiohttp.ClientSession(timeout=limit) as session, session.get(url) as answer:
            answer.raise_for_status()
            told = orjson.loads(await answer.content.read(MONITOR_BYTES_MAX))
        config = told["config"]
        always = bool(config.get("sync_always", False))
        sync_s = 0.0 if always else float(config["sync_interval"]) / 1e9
        return Durability(sync_s, address, Path(config["store_dir"]), int(config["max_storage"]))
    except (TimeoutError, aiohttp.ClientError, ValueError) as error:
        message = f"no monitoring answer at {url} ({error or 'time-out'}): is `http:` set there?"
        raise CommandError(message) from error
    except (KeyError, TypeError, AttributeError) as error:
        message = f"{url} does not answer as nats-server does, or JetStream is off there"
        raise CommandError(message) from error
