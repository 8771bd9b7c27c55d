"""`inferlane decisions`: what the broker's decision log is good for afterwards."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from ops.cli.decision_trace import Written

app = cyclopts.App(name="decisions", help="Make a trace of real traffic from a decision log.")

SALT_BYTES = 16


@app.command
def trace(
    *logs: Path,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    anonymous: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Make a trace of a decision log: the same traffic, for the simulator, without its text.

    A line for each job that ran, in the order of arrival: when it came, tokens in and out, lane,
    band, model, and which prompts begin alike (ids of 2,048-byte blocks, numbered anew). Sessions
    are hashed with a salt that nobody knows. The shape is that of Mooncake's public traces.

        inferlane decisions trace inferlane-state/decisions*.jsonl --output monday.jsonl

    Jobs that were tried several times are one line. Left out, and counted at the end: jobs without
    an end or a dispatch in the log, jobs that ended without tokens, and lines that can't be read.

    Args:
        logs: Files of the log, in any order, plain, .gz or .zst; all brokers' that led meanwhile.
        output: Where the trace goes (JSON lines); default: standard output.
        anonymous: Name lanes lane1, lane2, ... in the order of appearance. Models keep theirs.
    """
    import secrets

    from ops.cli.decision_files import lines_in_order
    from ops.cli.decision_trace import write_trace

    if not logs:
        message = "name the log's files, such as inferlane-state/decisions*.jsonl"
        raise Misused(message)
    if output is not None and output.resolve() in {log.resolve() for log in logs}:
        message = f"{output} is one of the logs; give the trace another name"
        raise Misused(message)
    salt = secrets.token_bytes(SALT_BYTES)
    with _sink(output) as sink:
        written = write_trace(lines_in_order(logs), sink, salt=salt, anonymous=anonymous)
    _tell(written, output)


@contextmanager
def _sink(output: Path | None) -> Generator[IO[bytes]]:
    """Open the trace's file; it stands under its name once it is whole."""
    if output is None:
        yield sys.stdout.buffer
        return
    part = output.with_name(f"{output.name}.part")
    try:
        file = part.open("wb")
    except OSError as error:
        message = f"{part} can't be written: {(error.strerror or str(error)).lower()}"
        raise Misused(message) from error
    try:
        with file:
            yield file
        part.replace(output)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            message = f"{output} can't be written: {(error.strerror or str(error)).lower()}"
            raise CommandError(message) from error
        raise


def _tell(written: "Written", output: Path | None) -> None:
    from ops.cli.decision_trace import left_out
    from ops.cli.output import note

    jobs = f"{written.rows:,} job{'' if written.rows == 1 else 's'}"
    note(f"{jobs} in the trace{'' if output is None else f' {output}'}")
    missing = left_out(written)
    if missing:
        note(f"left out: {', '.join(missing)}")
    if written.without_prefix:
        note(
            f"logged without a prefix: {written.without_prefix:,}; they share none in the trace. "
            "With decision_log_prefixes = true (the default) the broker logs them"
        )
