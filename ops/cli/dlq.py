"""`inferlane dlq`: jobs that were given up. List them, read them, run them again.

Dead letters stand in a stream of each lane, with the job as it was published and the history of its
failures. No broker is needed to look at them.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.connection import HERE, Cluster, connected
from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from broker.bus.base import Bus
    from ops.cli.letters import Letter

app = cyclopts.App(name="dlq", help="Jobs given up after too many failures: list, read, replay.")

LISTED_MAX = 50
"""Letters listed of each lane without --all, the newest."""

HEADS = ("JOB", "GIVEN UP", "BAND", "MODEL", "REASON", "FAILURES>", "SIZE>")


@app.command(name="list")
def list_letters(
    lane: str | None = None,
    /,
    *,
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002  # It is the flag's name.
    json: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = HERE,
) -> None:
    """List dead letters, oldest first: of each lane the newest 50, or all of them.

    Args:
        lane: Only this lane.
        all: Not only the newest.
        json: Print one line of JSON for each.
        cluster: Where the cluster is.
    """
    asyncio.run(_list(lane, everything=all, as_json=json, cluster=cluster))


@app.command
def show(
    job: str,
    /,
    *,
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002  # It is the flag's name.
    json: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = HERE,
) -> None:
    """Show one dead letter: why it was given up, each attempt, and the request.

    Args:
        job: LANE.JOB, as `inferlane dlq list` shows it.
        all: The whole request, however long.
        json: Print JSON; the request is whole.
        cluster: Where the cluster is.
    """
    asyncio.run(_show(job, everything=all, as_json=json, cluster=cluster))


@app.command
def replay(
    *jobs: str,
    lane: str | None = None,
    all: Annotated[bool, Parameter(negative="")] = False,  # noqa: A002  # It is the flag's name.
    keep: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    cluster: Cluster = HERE,
) -> None:
    """Run given-up jobs again, each as a new job with a new id.

    The old id keeps its record ("dead_lettered"), which callers may have seen. The new job stands
    in the same queue with the same request, and its result is found under the new id, which is
    printed. A deadline that has passed is left out. The letter is removed once the new job is
    stored; interrupted and run again, no job is replayed twice. A batch does not learn of it: for
    its lines use `inferlane batch retry`.

    Args:
        jobs: LANE.JOB, as `inferlane dlq list` shows it; one or more.
        lane: With --all: the lane.
        all: Every letter of --lane.
        keep: Leave the letters where they are.
        json: Print one line of JSON for each.
        cluster: Where the cluster is.
    """
    if all == bool(jobs) or all != (lane is not None):
        message = "name the jobs to replay, or give --lane LANE --all for every one of a lane"
        raise Misused(message)
    asyncio.run(_replay(jobs, lane=lane, keep=keep, as_json=json, cluster=cluster))


async def _list(lane: str | None, *, everything: bool, as_json: bool, cluster: Cluster) -> None:
    from ops.cli.letters import newest

    count_max = None if everything else LISTED_MAX
    async with connected(cluster) as bus:
        lanes = await _lanes(bus, lane)
        if as_json:
            for one in lanes:
                async for letter in newest(bus, one, count_max=count_max):
                    _print_json(letter)
            return
        rows = [
            _row(letter) for one in lanes async for letter in newest(bus, one, count_max=count_max)
        ]
        total = sum([await _count(bus, one) for one in lanes])
    _print_rows(rows, total=total)


def _print_rows(rows: list[tuple[str, ...]], *, total: int) -> None:
    from ops.cli.output import console, note, say, table

    if not rows:
        say("No dead letters.")
        return
    console().print(table("", HEADS, rows))
    if len(rows) < total:
        note(f"{total - len(rows):,} older ones: --all")


async def _show(job: str, *, everything: bool, as_json: bool, cluster: Cluster) -> None:
    from ops.cli.letter_text import as_builtins, as_text
    from ops.cli.letters import find
    from ops.cli.output import json_line, say

    async with connected(cluster) as bus:
        letter = await find(bus, job)
    if as_json:
        json_line(as_builtins(letter))
    else:
        say(as_text(letter, whole=everything))


async def _replay(
    jobs: Iterable[str], *, lane: str | None, keep: bool, as_json: bool, cluster: Cluster
) -> None:
    from ops.cli.letters import find, newest, replay

    done = 0
    async with connected(cluster) as bus:

        async def chosen() -> "AsyncIterator[Letter]":
            if lane is not None:
                (known,) = await _lanes(bus, lane)
                async for letter in newest(bus, known, count_max=None):
                    yield letter
            for job in jobs:
                yield await find(bus, job)

        async for letter in chosen():
            try:
                replayed = await replay(bus, letter, keep=keep)
            except CommandError as error:
                message = f"{error} ({done} replayed before it)" if done else str(error)
                raise type(error)(message) from error
            done += 1
            _print_replayed(letter, replayed, as_json=as_json)
    _print_count(done, as_json=as_json)


def _print_replayed(letter: "Letter", new_key: str, *, as_json: bool) -> None:
    from ops.cli.output import json_line, say

    if as_json:
        json_line({"from": letter.key, "to": new_key, "subject": letter.subject})
    else:
        say(f"{letter.key} runs again as {new_key}")


def _print_count(done: int, *, as_json: bool) -> None:
    from ops.cli.output import note

    if done == 0:
        note("no dead letters: nothing to replay")
    elif not as_json:
        note(f"{done} replayed; results are under the new ids")


def _print_json(letter: "Letter") -> None:
    from ops.cli.letter_text import as_summary
    from ops.cli.output import json_line

    json_line(as_summary(letter))


def _row(letter: "Letter") -> tuple[str, ...]:
    from ops.cli.letter_text import moment
    from ops.cli.output import size

    record = letter.record
    return (
        letter.key,
        moment(letter.at_s),
        str(record.band),
        record.model,
        record.reason.value if record.reason else "?",
        str(len(record.failures)),
        size(letter.job_bytes),
    )


async def _count(bus: "Bus", lane: str) -> int:
    from broker.wire import subjects

    return (await bus.stream_state(subjects.dead_letters_stream(lane))).messages


async def _lanes(bus: "Bus", lane: str | None) -> list[str]:
    """Find the lanes there are, or make sure of the one that is asked for."""
    from broker.wire.settings import nearest
    from ops.cli.letters import known_lanes

    known = await known_lanes(bus)
    if lane is None:
        return known
    if lane not in known:
        message = f"no such lane: {lane}.{nearest(lane, known)} Known: {', '.join(known) or 'none'}"
        raise CommandError(message)
    return [lane]
