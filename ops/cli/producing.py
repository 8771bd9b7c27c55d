"""What `submit` and `batch` share: settings, exit codes, durations, errors in a sentence."""

import re
import sys
from enum import IntEnum
from pathlib import Path
from typing import Annotated, NoReturn

from cyclopts import Parameter

from producers.config import ProducerConfig


class Exit(IntEnum):
    """Exit codes that scripts can trust."""

    OK = 0
    FAILED = 1
    """Some lines (or the job) failed."""
    UNUSABLE = 2
    """Wrong usage, or an input or output that can't be used. Nothing new was run."""
    UNREACHABLE = 3
    """The cluster can't be reached."""
    INTERRUPTED = 130


ConfigFlag = Annotated[
    Path | None,
    Parameter(name=("--config", "-c"), help="TOML file with [nats] and [producer] tables."),
]
NatsFlag = Annotated[
    str | None, Parameter(name="--nats", help="Message server, nats://[user:password@]host:port.")
]
LaneFlag = Annotated[str | None, Parameter(name="--lane", help="Lane that the jobs belong to.")]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def fail(message: object, code: Exit) -> NoReturn:
    """Say what is wrong in one sentence on standard error, and leave."""
    sys.stderr.write(f"inferlane: {message}\n")
    raise SystemExit(int(code))


def settings(config: Path | None, *, nats: str | None, lane: str | None) -> ProducerConfig:
    """Read the settings, or leave with a sentence that says what is wrong in them."""
    from broker.wire.settings import SettingsError
    from producers.config import load

    try:
        return load(config, nats=nats, lane=lane)
    except (SettingsError, OSError) as error:
        fail(error, Exit.UNUSABLE)


def lane_of(found: ProducerConfig) -> str:
    """Name the lane, or leave when none is named or the name can't be one."""
    from broker.wire.ids import MalformedName, require_token

    if not found.lane:
        fail('name a lane: --lane NAME, or lane = "NAME" under [producer]', Exit.UNUSABLE)
    try:
        return require_token(found.lane, what="lane")
    except MalformedName as error:
        fail(error, Exit.UNUSABLE)


def seconds(text: str, *, what: str) -> float:
    """Read a duration: `90`, `30s`, `24h`, `1d12h`; leave when it is none, or not above 0."""
    if _DURATION.fullmatch(text):
        total = sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(text))
        if total > 0:
            return total
    fail(f"{what} {text!r} is no duration; write 90s, 30m, 24h or 1d12h", Exit.UNUSABLE)
