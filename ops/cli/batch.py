"""`inferlane batch`: run a JSONL file of requests, look it over, rerun what failed."""

import asyncio
import signal
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number

from ops.cli import batch_stored
from ops.cli.batch_stored import EndpointFlag, KeyFlag
from ops.cli.connection import HERE, Cluster
from ops.cli.errors import CommandError, ExitCode, Misused, Unreachable
from ops.cli.producing import ConfigFlag, LaneFlag, lane_of, seconds, settings

if TYPE_CHECKING:
    from producers.batch.plan import Plan
    from producers.batch.runner import Report
    from producers.client import Client
    from producers.config import ProducerConfig

app = cyclopts.App(
    name="batch",
    help=(
        "Run a JSONL file of OpenAI batch requests (run, retry, check), or hand it in for the "
        "cluster to run (submit, list, status, watch, cancel, results)."
    ),
)
app.command(batch_stored.submit)
app.command(batch_stored.list_batches, name="list")
app.command(batch_stored.status)
app.command(batch_stored.watch)
app.command(batch_stored.cancel)
app.command(batch_stored.results)

InputArgument = Annotated[
    str,
    Parameter(
        help="JSONL file of requests, plain, .gz or .zst; - reads standard input.",
        allow_leading_hyphen=True,
    ),
]
ErrorsFlag = Annotated[
    Path | None,
    Parameter(name="--errors", help="Where failed lines go; default: OUT.errors.jsonl."),
]
ConcurrencyFlag = Annotated[
    int,
    Parameter(
        name="--concurrency",
        help="Jobs in the cluster at once, at most.",
        validator=Number(gte=1),
    ),
]
QuietFlag = Annotated[
    bool, Parameter(name=("--quiet", "-q"), negative="", help="Show no progress.")
]


@app.command
def run(  # noqa: PLR0913 - one parameter is one flag.
    input_file: InputArgument,
    /,
    *,
    output: Annotated[
        Path | None,
        Parameter(help="Where results go, as they come (JSONL); needed, but for --detach."),
    ] = None,
    lane: LaneFlag = None,
    errors: ErrorsFlag = None,
    window: Annotated[
        str | None, Parameter(help="Time for the whole batch: 90m, 24h (default), 7d.")
    ] = None,
    concurrency: ConcurrencyFlag = 1000,
    detach: Annotated[
        bool, Parameter(negative="", help="Hand it in and leave, as `batch submit` does.")
    ] = False,
    endpoint: EndpointFlag = "",
    key: KeyFlag = "",
    quiet: QuietFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Run every line of a batch file, and write one result line for each.

    A line is {"custom_id": "...", "method": "POST", "url": "/v1/chat/completions", "body": {...}},
    as for the OpenAI Batch API. Results go to --output, failures to --errors; each custom_id stands
    in exactly one of them, in any order. A bad line is one error line with its number, and the
    others run.

        inferlane batch run in.jsonl --lane acme --output out.jsonl

    Stop it at any time (Ctrl-C, kill, power): the same command goes on where it was, and no
    finished line is run twice. What it remembers stands in OUT.state; to begin anew, name another
    --output.

    With --detach it is `inferlane batch submit`: the file is handed in, its batch's id printed, and
    the cluster's gateways run it; `inferlane batch results ID` fetches what came of it.

    When the window is over, unfinished lines go to --errors with the code batch_expired.

    Exit codes: 0 all lines completed, 1 some failed, 2 input, output or usage can't be used,
    3 the cluster can't be reached (run it again later), 130 stopped.
    """
    from producers.batch.plan import Plan, default_errors

    batch_stored.require_endpoint(endpoint)
    found = settings(config, cluster, lane=lane)
    if detach:
        window = window or batch_stored.WINDOW
        return _detach(input_file, found, output, errors, endpoint=endpoint, window=window, key=key)
    if output is None:
        message = "name an --output for the results, or --detach and fetch them later"
        raise Misused(message)
    output = _resolved(output)
    plan = Plan(
        input=input_file,
        output=output,
        errors=_resolved(errors or default_errors(output)),
        lane=lane_of(found),
        window_s=None if window is None else seconds(window, what="--window"),
        endpoint=endpoint,
        concurrency=concurrency,
        api_key_name=batch_stored.api_key_name(key),
    )
    return _run(plan, found, quiet=quiet)


def _resolved(path: Path) -> Path:
    """The file that is meant; what leads to none (`/dev/stdout`) keeps the name it is told by.

    Raises Misused where none is named.
    """
    found = path.resolve()
    if not path.name:
        message = f"{path} names no file; name one"
        raise Misused(message)
    try:
        return path if path.exists() and not found.exists() else found
    except OSError:
        return found  # Whoever opens it says why it can't be.


@app.command
def retry(  # noqa: PLR0913 - one parameter is one flag.
    output: Annotated[Path, Parameter(help="Output file of the batch.")],
    errors: Annotated[Path | None, Parameter(help="Its error file; default as for `run`.")] = None,
    /,
    *,
    input_file: Annotated[
        str | None,
        Parameter(
            name="--input",
            help="Its input, if it has moved; - for standard input.",
            allow_leading_hyphen=True,
        ),
    ] = None,
    window: Annotated[
        str | None, Parameter(help="Time for this round; default: as before.")
    ] = None,
    concurrency: ConcurrencyFlag = 1000,
    key: KeyFlag = "",
    quiet: QuietFlag = False,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Run those lines of a batch again that failed, expired or were turned away.

    Their error lines are taken out, and each ends anew in OUT or in ERR: afterwards every custom_id
    still stands in exactly one of them. Lines that are bad themselves (no JSON, a double custom_id,
    a wrong request) stay where they are: no second run helps.

        inferlane batch retry out.jsonl

    Can be stopped and gone on with like `run`: `batch run` with the old arguments finishes the
    round. Exit codes as of `run`.
    """
    from producers.batch.errors import BatchError
    from producers.batch.plan import Plan
    from producers.batch.state import read_identity

    found = settings(config, cluster, lane=None)
    output = _resolved(output)
    try:
        identity = read_identity(output)
    except BatchError as error:
        raise Misused(str(error)) from error
    if identity.input in ("", "-") and input_file is None:
        how = "came from a pipe" if identity.input else "has a name that is no UTF-8"
        message = (
            f"the input of {output} {how}; give it again: --input FILE, or --input - and a pipe"
        )
        raise Misused(message)
    plan = Plan(
        input=input_file or identity.input,
        output=output,
        errors=_resolved(errors or identity.errors_of(output)),
        lane=identity.lane,
        window_s=None if window is None else seconds(window, what="--window"),
        concurrency=concurrency,
        api_key_name=batch_stored.api_key_name(key),
    )
    return _run(plan, found, quiet=quiet, again=True)


@app.command
def check(
    input_file: InputArgument,
    /,
    *,
    tokens_per_second: Annotated[
        float | None, Parameter(help="What the cluster gets through, prompt and output together.")
    ] = None,
    endpoint: Annotated[str, Parameter(help="The batch's endpoint; default as for `run`.")] = "",
    lane: LaneFlag = None,
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Look a batch file over, and estimate its tokens and hours. Nothing is run.

    With --lane the cluster is asked too: models that the lane doesn't have are found, and the hours
    are estimated from what its workers get through now.

        inferlane batch check in.jsonl --tokens-per-second 20000

    Tokens are estimated from bytes (four a token, as for English), the output at the most that the
    lines allow, and reuse of shared beginnings is left out of the hours: they are an upper bound.

    Exit codes: 0 all lines are good, 1 some are bad, 2 the file can't be used, 3 --lane was given
    and the cluster can't be reached.
    """
    import uvloop

    from ops.cli.batch_estimate import Rates, ask_cluster, told
    from ops.cli.output import say
    from producers.batch.check import check_batch
    from producers.batch.errors import BatchError

    if tokens_per_second is not None and tokens_per_second <= 0:
        message = "--tokens-per-second must be above 0"
        raise Misused(message)
    batch_stored.require_endpoint(endpoint)
    found = settings(config, cluster, lane=lane)
    offered = None if lane is None else uvloop.run(ask_cluster(found, lane_of(found)))
    offer = offered.offer if offered else None
    try:
        findings = check_batch(input_file, endpoint=endpoint, offer=offer)
    except BatchError as error:
        raise Misused(str(error)) from error
    for line in told(findings, tokens_per_second, offered.rates if offered else Rates()):
        say(line)
    return ExitCode.FAILED if findings.faults else ExitCode.OK


def _detach(
    input_file: str,
    found: "ProducerConfig",
    output: Path | None,
    errors: Path | None,
    *,
    endpoint: str,
    window: str,
    key: str,
) -> int:
    """Hand a batch in, and say how its results get where they are wanted."""
    from ops.cli.output import note, say
    from producers.batch.plan import state_of

    if output is not None and state_of(_resolved(output)).exists():
        message = (
            f"{output} holds results of a run that was begun here; go on with it without --detach, "
            "or name another --output"
        )
        raise Misused(message)
    batch = batch_stored.hand_in(input_file, found, endpoint=endpoint, window=window, key=key)
    say(batch.id)
    where = f"--output {output or 'OUT'}" + (f" --errors {errors}" if errors else "")
    note(f"its results: inferlane batch results {batch.id} --lane {batch.lane} {where}")
    return ExitCode.OK


def _run(plan: "Plan", found: "ProducerConfig", *, quiet: bool, again: bool = False) -> int:
    """Run a plan, told by progress and a last sentence; return the exit code."""
    import uvloop

    from producers import errors
    from producers.batch.errors import BatchError

    try:
        report = uvloop.run(_run_async(plan, found, quiet=quiet, again=again))
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        message = f"{error}. Run the same command again then: it goes on from here"
        raise Unreachable(message) from error
    except (BatchError, errors.UnknownLane) as error:
        raise Misused(str(error)) from error
    except errors.ProducerError as error:
        raise CommandError(str(error)) from error
    return _tell(plan, report)


async def _run_async(
    plan: "Plan", found: "ProducerConfig", *, quiet: bool, again: bool
) -> "Report":
    from producers.batch.progress import show
    from producers.batch.runner import Tally, run_batch
    from producers.errors import ProducerError

    stop = asyncio.Event()
    tally = Tally()
    _stop_on_signals(stop)

    def connect(client_id: str) -> "AbstractAsyncContextManager[Client]":
        return _client(found, lane=plan.lane, client_id=client_id)

    failure: ProducerError | None = None
    report: Report | None = None
    async with asyncio.TaskGroup() as tasks:
        showing = tasks.create_task(show(tally, quiet=quiet))
        try:
            report = await run_batch(plan, connect, stop=stop, tally=tally, retry=again)
        except ProducerError as error:
            failure = error  # Raised outside, so that it is no group.
        showing.cancel()
    if failure is not None:
        raise failure
    assert report is not None, "either it failed or it ended"
    return report


def _client(
    found: "ProducerConfig", *, lane: str, client_id: str
) -> "AbstractAsyncContextManager[Client]":
    """A client with a batch's patience: an outage of minutes is waited out, no error."""
    import msgspec

    from producers.batch.plan import OUTAGE_S
    from producers.client import Client

    patient = msgspec.structs.replace(found.client, submit_s=OUTAGE_S, no_stream_s=OUTAGE_S)
    return Client.connect(lane=lane, client_id=client_id, config=patient, link=found.nats)


def _stop_on_signals(stop: asyncio.Event) -> None:
    """The first Ctrl-C or SIGTERM stops in good order; a second one ends the process as it is."""
    from ops.cli.output import note

    loop = asyncio.get_running_loop()

    def asked() -> None:
        note("stopping; once more ends it at once")
        stop.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)


def _tell(plan: "Plan", report: "Report") -> int:
    """Say how the run ended; return the exit code."""
    from ops.cli.output import note, say

    counts = report.counts
    failed = counts.failed + counts.bad
    if report.collected_again:
        note(
            "results had been taken away since the last run; what the cluster still holds was "
            "collected again"
        )
    told = f"{counts.total:,} lines: {counts.completed:,} completed, {failed:,} failed"
    told += f" ({report.expired:,} because the window was over)" if report.expired else ""
    told += f", {counts.open:,} not finished" if counts.open else ""
    told += f"; results: {plan.output}" if counts.completed else ""
    told += f"; errors: {plan.errors}" if failed else ""
    say(told)
    if report.interrupted:
        note(
            "stopped; lines under way run on in the cluster. The same command again collects them "
            "and does the rest"
        )
        return ExitCode.INTERRUPTED
    if counts.failed:
        note(f"`inferlane batch retry {plan.output}` runs what failed again")
    return ExitCode.FAILED if failed else ExitCode.OK
