"""`inferlane doctor`: looks at everything a cluster stands on, and says what to do."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, URL, Cluster, connected
from ops.cli.errors import ExitCode, Unreachable

if TYPE_CHECKING:
    from broker.bus.nats_wire import Credentials
    from broker.service.config import Config
    from ops.cli.doctor_findings import Finding
    from ops.cli.durability import Durability

app = cyclopts.App(name="doctor")

LINE_BYTES = 2_000
"""A batch line where none is stored yet that could be measured: some 400 tokens of prompt."""


@app.default
def doctor(
    *,
    config: Annotated[Path | None, Parameter(alias="-c", env_var="INFERLANE_CONFIG")] = None,
    nats_config: Path | None = None,
    monitor: str | None = None,
    line_bytes: int = LINE_BYTES,
    listen_s: float = 2.5,
    json: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = HERE,
) -> int:
    """Look at NATS, streams, broker, workers, clocks, disks and ports, and say what to do.

    Nothing is changed. Each line is ok, warn or FAIL; exit code 1 if any is FAIL, 3 if NATS can't
    be reached. With --config, sizes are compared with the file; without it, only what no cluster
    may have different.

    What a power cut may lose depends on the server's sync_interval, which it does not tell its
    clients. Give one of: --monitor, --nats-config, or nats.sync_interval in --config.

    Args:
        config: The cluster's inferlane.toml.
        nats_config: The nats-server configuration file.
        monitor: The server's monitoring address, such as http://127.0.0.1:8222.
        line_bytes: Size of a batch line, for the disk a million lines need.
        listen_s: How long to listen for heartbeats.
        json: Print JSON.
        cluster: Where the cluster is.
    """
    findings = asyncio.run(
        examine(
            cluster,
            config=config,
            nats_config=nats_config,
            monitor=monitor,
            line_bytes=line_bytes,
            listen_s=listen_s,
        )
    )
    tell(findings, as_json=json)
    return exit_code(findings)


async def examine(
    cluster: Cluster,
    *,
    config: Path | None,
    nats_config: Path | None,
    monitor: str | None,
    line_bytes: int,
    listen_s: float,
) -> list["Finding"]:
    """Gather all facts and judge them. Raises ConfigError, CommandError."""
    from ops.cli.doctor_facts import gather
    from ops.cli.doctor_findings import Finding, Level
    from ops.cli.doctor_judge import judge

    chosen, durability = await _given(config, nats_config, monitor)
    try:
        async with connected(_where(cluster, chosen), _credentials(chosen)) as bus:
            facts = await gather(bus, config=chosen, durability=durability, listen_s=listen_s)
            return list(judge(facts, line_bytes=line_bytes))
    except Unreachable as error:
        return [Finding(Level.FAIL, "nats", str(error), unreachable=True)]


async def _given(
    config: Path | None, nats_config: Path | None, monitor: str | None
) -> tuple["Config | None", "Durability"]:
    from broker.service.config import load
    from ops.cli.durability import UNKNOWN, from_config, from_monitor, from_nats_config

    chosen = load(config) if config is not None else None
    if monitor is not None:
        return chosen, await from_monitor(monitor)
    if nats_config is not None:
        return chosen, from_nats_config(nats_config)
    if chosen is not None and chosen.nats.sync_interval:
        return chosen, from_config(chosen.nats.sync_interval)
    return chosen, UNKNOWN


def _where(cluster: Cluster, config: "Config | None") -> Cluster:
    """Take the file's address, unless another is given."""
    if config is None or cluster.url != URL:
        return cluster
    return replace(cluster, url=config.nats.url)


def _credentials(config: "Config | None") -> "Credentials | None":
    from broker.bus.nats_wire import Credentials

    if config is None:
        return None
    creds_file = Path(config.nats.creds_file) if config.nats.creds_file else None
    return Credentials(user=config.nats.user, password=config.nats.password, creds_file=creds_file)


def tell(findings: Sequence["Finding"], *, as_json: bool) -> None:
    """Print the findings, one a line and what to do under it."""
    from ops.cli.doctor_findings import Level
    from ops.cli.output import json_line, printable, say

    if as_json:
        json_line(
            [
                {"level": one.level, "about": one.about, "found": one.found, "to_do": one.to_do}
                for one in findings
            ]
        )
        return
    for one in findings:
        say(f"{one.level:<4}  {one.about:<11} {printable(one.found)}")
        if one.to_do:
            say(f"{'':<18}→ {printable(one.to_do)}")
    counts = {level: sum(one.level is level for one in findings) for level in Level}
    say(f"\n{counts[Level.OK]} ok, {counts[Level.WARN]} warn, {counts[Level.FAIL]} FAIL")


def exit_code(findings: Sequence["Finding"]) -> ExitCode:
    """Choose the exit code."""
    from ops.cli.doctor_findings import Level

    if any(one.unreachable for one in findings):
        return ExitCode.UNREACHABLE
    failed = any(one.level is Level.FAIL for one in findings)
    return ExitCode.FAILED if failed else ExitCode.OK
