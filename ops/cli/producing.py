"""What `submit` and `batch` share: settings, lanes, durations."""

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
    from producers.durations import parse_duration_s

    if (total := parse_duration_s(text)) > 0:
        return total
    message = f"{what} {text!r} is no duration of up to 10 years; write 90s, 30m, 24h or 1d12h"
    raise Misused(message)
