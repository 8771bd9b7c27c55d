"""`inferlane usage`: jobs and tokens by lane, API key, model and day, as tables or for export.

Read from the accounts that the leading broker keeps; no broker is needed to read them.
"""

import asyncio
import csv
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster, connected
from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from broker.bus.base import Bus
    from broker.wire.usage import UsageDay, UsageRow

app = cyclopts.App(name="usage")

Name = Literal["day", "lane", "key", "model"]
Names = tuple[str, ...]
"""Values of some of the names, in the order asked for."""

ALL_NAMES: tuple[Name, ...] = ("day", "lane", "key", "model")

KINDS = ("completed", "failed", "cancelled", "expired", "dead_lettered", "rejected")
TOKENS = ("prompt_tokens", "cached_tokens", "output_tokens")

DAY_CHARS = len("2026-11-30")


@app.default
def usage(
    *,
    lane: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    key: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    model: Annotated[tuple[str, ...], Parameter(negative="", show_default=False)] = (),
    since: str = "",
    until: str = "",
    by: Annotated[tuple[Name, ...], Parameter(negative="", show_default=False)] = ALL_NAMES,
    format: Literal["table", "json", "csv"] = "table",  # noqa: A002 - it is the flag's name.
    cluster: Cluster = HERE,
) -> None:
    """Show what lanes used: jobs by how they ended, and tokens as the engines counted them.

    A job counts on the day (UTC) on which its result was stored. The sums equal those of the
    results themselves, each counted once, whatever crashed, and stay when results are deleted.
    Refusals that may be tried again count nowhere. PROMPT includes CACHED: prompt tokens that were
    not computed again.

        inferlane usage --since 7d --by lane --by model

    Args:
        lane: Only this lane; may be given again.
        key: Only this API key, by its name; may be given again.
        model: Only this model; may be given again.
        since: First day: 2026-11-30, or so long ago: 7d.
        until: Last day: 2026-11-30, or so long ago: 1d.
        by: What to tell apart; may be given again. Default: all four.
        format: json: a line for each row. csv: with a head line.
        cluster: Where the cluster is.
    """
    wanted = (_day(since, flag="--since"), _day(until, flag="--until"))
    rows, uncounted = asyncio.run(_fetch(cluster, lane, wanted))
    chosen = [
        (day, row)
        for day, row in rows
        if (not key or row.api_key_name in key) and (not model or row.model in model)
    ]
    show(grouped(chosen, by), by, form=format)
    if uncounted:
        from ops.cli.output import note

        note(f"{uncounted:,} results are not counted yet; a leading broker does so within seconds")


def _day(text: str, *, flag: str) -> str:
    """Name a day: as it is, or as so long ago; empty stays empty. Raises Misused."""
    from datetime import date

    from broker.wire.usage import day_of
    from ops.cli.producing import seconds

    if not text:
        return ""
    try:
        if len(text) == DAY_CHARS:
            return date.fromisoformat(text).isoformat()
    except ValueError as error:
        message = f"{flag} {text!r} is no day; write 2026-11-30, or 7d for seven days ago"
        raise Misused(message) from error
    return day_of(time.time() - seconds(text, what=flag))


async def _fetch(
    cluster: Cluster, lanes: Sequence[str], days: tuple[str, str]
) -> tuple[list[tuple["UsageDay", "UsageRow"]], int]:
    """Read the accounts, and how many records are in none yet."""
    from broker.bus.base import NoStream, NotFound
    from broker.bus.usage import usage_days
    from broker.wire.settings import nearest
    from ops.cli.letters import known_lanes

    since, until = days
    async with connected(cluster) as bus:
        known = await known_lanes(bus)
        try:
            read = [day async for day in usage_days(bus, lanes=lanes, since=since, until=until)]
        except (NotFound, NoStream) as error:
            message = "this cluster keeps no accounts: its brokers are of an older version"
            raise CommandError(message) from error
        kept = {*known, *(day.lane for day in read)}
        for lane in lanes:
            if lane not in kept:
                hint = nearest(lane, sorted(kept))
                message = f"no such lane: {lane}.{hint} Known: {', '.join(sorted(kept))}"
                raise CommandError(message)
        uncounted = sum([await _uncounted(bus, lane) for lane in lanes or known])
    return [(day, row) for day in read for row in day.rows], uncounted


async def _uncounted(bus: "Bus", lane: str) -> int:
    """Count what is in no account yet; 0 where the lane's results are gone."""
    from broker.bus.base import NoStream, NotFound
    from broker.bus.usage import uncounted_records

    try:
        return await uncounted_records(bus, lane)
    except (NotFound, NoStream):
        return 0


def grouped(
    rows: Iterable[tuple["UsageDay", "UsageRow"]], by: Sequence[Name]
) -> list[tuple[Names, dict[str, int]]]:
    """Add up rows that are alike in the names asked for; sorted by these."""
    sums: dict[Names, dict[str, int]] = {}
    for day, row in rows:
        named: dict[Name, str] = {
            "day": day.day,
            "lane": day.lane,
            "key": row.api_key_name,
            "model": row.model,
        }
        found = sums.setdefault(
            tuple(named[name] for name in by), dict.fromkeys((*KINDS, *TOKENS), 0)
        )
        for name in found:
            found[name] += getattr(row, name)
    return sorted(sums.items())


def show(rows: Sequence[tuple[Names, dict[str, int]]], by: Sequence[Name], *, form: str) -> None:
    """Print rows: a table with a total, JSON lines, or CSV."""
    from ops.cli.output import console, json_line, say, table

    whole = [
        (names, {"jobs": sum(found[kind] for kind in KINDS), **found}) for names, found in rows
    ]
    match form:
        case "json":
            for names, found in whole:
                json_line({**dict(zip(by, names, strict=True)), **found})
        case "csv":
            out = csv.writer(sys.stdout, lineterminator="\n")
            out.writerow((*by, "jobs", *KINDS, *TOKENS))
            out.writerows((*names, *found.values()) for names, found in whole)
        case _ if not whole:
            say("No usage.")
        case _:
            heads = (*(name.upper() for name in by), *_HEADS)
            body = [(*(name or "-" for name in names), *_cells(found)) for names, found in whole]
            total = {name: sum(found[name] for _, found in whole) for name in whole[0][1]}
            if len(whole) > 1:
                body.append(("total", *("" for _ in by[1:]), *_cells(total)))
            console().print(table("", heads, body))


_HEADS = ("JOBS>", "COMPLETED>", "FAILED>", "OTHER ENDS>", "PROMPT>", "CACHED>", "OUTPUT>")


def _cells(found: dict[str, int]) -> tuple[str, ...]:
    other = sum(found[kind] for kind in KINDS[2:])
    numbers = (found["jobs"], found["completed"], found["failed"], other)
    return tuple(f"{number:,}" for number in (*numbers, *(found[name] for name in TOKENS)))
