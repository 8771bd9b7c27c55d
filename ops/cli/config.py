"""`inferlane config`: is a configuration file right, and what does it come to?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

if TYPE_CHECKING:
    from broker.service.config import Config

app = cyclopts.App(name="config", help="Check a configuration file; show what it comes to.")

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


@app.command
def check(file: Path, /) -> None:
    """Check a configuration file: unknown keys, wrong values, and what must agree.

    Mistakes are told by file, line and key (exit code 2). What is allowed but worth a second look
    is noted.

    Args:
        file: The TOML file.
    """
    from ops.cli.output import say

    config = read(file)
    for text in notes(config, file):
        say(f"note: {text}")
    say(f"{file}: ok: {summary(config)}")


@app.command
def show(file: Path, /, *, json: Annotated[bool, Parameter(negative="")] = False) -> None:
    """Show every value as it counts, defaults included; passwords are hidden.

    Args:
        file: The TOML file.
        json: Print JSON instead of TOML.
    """
    import msgspec

    from ops.cli.output import json_line, say
    from ops.cli.toml_text import masked, toml_text

    config = read(file)
    if json:
        json_line(masked(msgspec.to_builtins(config)))
    else:
        say(toml_text(config).rstrip())


def read(file: Path) -> "Config":
    """Read a file and judge all of it, the other programs' tables included. Raises ConfigError."""
    import worker_agent.config
    from broker.disk.named_file import read_named
    from broker.service.config import load
    from broker.wire import settings
    from ops.cli.config_pairs import check_pairs
    from producers import config as producing
    from producers.gateway import config as answering

    config = load(file)
    document = settings.parse(
        read_named(file, bytes_max=settings.SETTINGS_BYTES_MAX), source=str(file)
    )
    check_pairs(
        document,
        config,
        worker=None if config.worker is None else worker_agent.config.load(file),
        producer=None if config.producer is None else producing.load(file),
        gateway=None if config.gateway is None else answering.load(file),
    )
    return config


def summary(config: "Config") -> str:
    """Say what a configuration is of."""
    policy = config.policy
    counts = (
        (len(policy.lanes), "lane"),
        (len(policy.models), "model"),
        (len(policy.quotas), "quota row"),
    )
    parts = [f"{count} {what}{'' if count == 1 else 's'}" for count, what in counts]
    if config.worker is not None:
        parts.append("a worker")
    if config.producer is not None:
        parts.append("a producer")
    if config.gateway is not None:
        parts.append("a gateway")
    return ", ".join(parts)


def notes(config: "Config", file: Path) -> Iterator[str]:
    """Say what is allowed and may still not be meant."""
    if config.policy.lanes and all(lane.paused for lane in config.policy.lanes):
        yield "every lane is paused: no job is taken"
    if config.policy.lanes and not config.policy.quotas:
        yield "no [[policy.quotas]]: nothing but the workers' own room bounds what runs and waits"
    if config.broker.http_host not in LOOPBACK:
        yield (
            f"the status page listens on {config.broker.http_host}; it has no password, so keep"
            " others from it"
        )
    servers = len(config.nats.url.split(","))
    if servers > 1 and config.nats.replicas == 1:
        yield f"{servers} servers and replicas = 1: what a lost server held is lost; set 3"
    if config.nats.password and file.stat().st_mode & 0o077:
        yield f"it holds a password, and others may read it: chmod 600 {file}"
