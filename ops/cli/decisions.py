"""`inferlane decisions`: what the broker's decision log is good for afterwards."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter, validators

from ops.cli.errors import CommandError, Misused

if TYPE_CHECKING:
    from ops.cli.decision_accuracy import Accuracy
    from ops.cli.decision_trace import Written

HIT_HEADS = (
    "CACHE KNOWN BY",
    "JOBS>",
    "PROMPT TOKENS>",
    "PREDICTED>",
    "CACHED>",
    "RATIO>",
    "OFF BY>",
)

app = cyclopts.App(
    name="decisions",
    help="Look at a decision log: a trace of its traffic, and how right its predictions were.",
)

SALT_BYTES = 16


@app.command
def trace(
    *logs: Path,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    anonymous: Annotated[bool, Parameter(negative="")] = False,
    model: str = "",
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
        model: Jobs of this model alone: the simulator takes one at a time.
    """
    import secrets

    from ops.cli.decision_files import lines_in_order
    from ops.cli.decision_trace import write_trace
    from ops.cli.result_files import require_writable, whole_file

    if not logs:
        message = "name the log's files, such as inferlane-state/decisions*.jsonl"
        raise Misused(message)
    require_writable(output, inputs=logs)
    salt = secrets.token_bytes(SALT_BYTES)
    with nullcontext(sys.stdout.buffer) if output is None else whole_file(output) as sink:
        written = write_trace(
            lines_in_order(logs), sink, salt=salt, anonymous=anonymous, model=model
        )
    _tell(written, output)
    _tell_models(written, model)


@app.command
def accuracy(
    *logs: Path,
    skip: Annotated[int, Parameter(validator=validators.Number(gte=0))] = 0,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Tell how far a decision log's predictions were from what came.

    Of each word on the cache (the agent's guess from what it was given, or the engine's own
    events): prompt tokens predicted to be cached against those that the engine found cached, in
    sum, and by how much single predictions were off, as a share of the cached tokens. And how far
    first tokens were from their prediction, from the dispatch on. Only jobs that ran once, to their
    end.

        inferlane decisions accuracy inferlane-state/decisions*.jsonl --skip 1000

    Args:
        logs: Files of the log, in any order, plain, .gz or .zst; all brokers' that led meanwhile.
        skip: Jobs left out at the begin, while caches fill and rates are learned.
        json: Print JSON.
    """
    from ops.cli.decision_accuracy import accuracy_of
    from ops.cli.decision_files import lines_in_order

    if not logs:
        message = "name the log's files, such as inferlane-state/decisions*.jsonl"
        raise Misused(message)
    show_accuracy(accuracy_of(lines_in_order(logs), skip_jobs=skip), as_json=json)


def show_accuracy(found: "Accuracy", *, as_json: bool) -> None:
    """Print what was found. Raises CommandError when no job can be compared."""
    import msgspec

    from ops.cli.decision_accuracy import SOURCES
    from ops.cli.decision_tally import left_out, nothing_usable
    from ops.cli.output import console, json_line, note, say, table

    if as_json:
        json_line(msgspec.to_builtins(found))
        return
    if not found.tally.jobs:
        raise CommandError(nothing_usable(found.tally))
    if not found.hits:
        message = f"no job to compare: none of {found.tally.jobs:,} ran once to its end"
        raise CommandError(message)
    rows = [
        (
            SOURCES.get(one.source, one.source),
            f"{one.jobs:,}",
            f"{one.prompt_tokens:,}",
            f"{one.predicted_tokens:,}",
            f"{one.cached_tokens:,}",
            "-" if one.ratio is None else f"{one.ratio:.2f}",
            "-" if one.error_ratio is None else f"{one.error_ratio:.0%}",
        )
        for one in found.hits
    ]
    console().print(table("", HIT_HEADS, rows))
    if found.first_token_error_ratio is not None and found.first_token_bias_ratio is not None:
        way = "short" if found.first_token_bias_ratio < 0 else "long"
        say(
            f"First tokens of {found.first_tokens:,} jobs: half of the predictions were off by"
            f" {found.first_token_error_ratio:.0%} or less; the one in the middle was"
            f" {abs(found.first_token_bias_ratio):.0%} too {way}."
        )
    missing = left_out(found.tally)
    if missing:
        note(f"left out: {', '.join(missing)}")


def _tell_models(written: "Written", model: str) -> None:
    from ops.cli.output import note

    if len(written.models) > 1 and not model:
        models = ", ".join(sorted(written.models))
        note(f"of several models ({models}): for the simulator take one, with --model")


def _tell(written: "Written", output: Path | None) -> None:
    from ops.cli.decision_tally import left_out
    from ops.cli.output import note

    jobs = f"{written.rows:,} job{'' if written.rows == 1 else 's'}"
    note(f"{jobs} in the trace{'' if output is None else f' {output}'}")
    missing = left_out(written.tally, (written.without_output, "ended without tokens"))
    if missing:
        note(f"left out: {', '.join(missing)}")
    if written.without_prefix:
        note(
            f"logged without a prefix: {written.without_prefix:,}; they share none in the trace. "
            "With decision_log_prefixes = true (the default) the broker logs them"
        )
