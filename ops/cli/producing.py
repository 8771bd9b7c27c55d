"""What `submit` and `batch` share: settings, lanes, durations."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from ops.cli.connection import URL, Cluster
from ops.cli.errors import Misused

if TYPE_CHECKING:
    from producers.config import ProducerConfig

ConfigFlag = Annotated[
    Path | None,
    Parameter(name=("--config", "-c"), help="TOML file with [nats] and [producer] tables."),
]
LaneFlag = Annotated[str | None, Parameter(name="--lane", help="Lane that the jobs belong to.")]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def settings(config: Path | None, cluster: Cluster, *, lane: str | None) -> "ProducerConfig":
    """Read the settings; flags go before the file. Raises SettingsError, Misused."""
    from producers.config import load

    named = cluster.url if cluster.url != URL else None
    try:
        return load(config, nats=named, creds=cluster.creds, lane=lane)
    except OSError as error:
        message = f"{config} can't be read: {(error.strerror or str(error)).lower()}"
        raise Misused(message) from error


def lane_of(found: "ProducerConfig") -> str:
    """Name the lane. Raises Misused when none is named or the name can't be one."""
    from broker.wire.ids import MalformedName, require_token

    if not found.lane:
        message = 'name a lane: --lane NAME, or lane = "NAME" under [producer] of the --config file'
        raise Misused(message)
    try:
        return require_token(found.lane, what="lane")
    except MalformedName as error:
        raise Misused(str(error)) from error


def seconds(text: str, *, what: str) -> float:
    """Read a duration: `90`, `30s`, `24h`, `1d12h`. Raises Misused when it is none, or 0."""
    if _DURATION.fullmatch(text):
        total = sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(text))
        if total > 0:
            return total
    message = f"{what} {text!r} is no duration; write 90s, 30m, 24h or 1d12h"
    raise Misused(message)
