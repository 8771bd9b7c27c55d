"""`inferlane submit`: put one request in, and print its answer."""

import asyncio
import signal
import sys
from codecs import BOM_UTF8
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

from broker.disk.named_file import read_named
from broker.wire.ids import new_job_id
from broker.wire.messages import BODY_BYTES_MAX
from ops.cli.connection import HERE, Cluster
from ops.cli.errors import CommandError, ExitCode, Misused, Unreachable
from ops.cli.lane_jobs import check_lane, only_lane
from ops.cli.producing import ConfigFlag, LaneFlag, lane_of, seconds, settings

if TYPE_CHECKING:
    from producers.client import Client
    from producers.config import ProducerConfig
    from producers.ticket import Ticket

app = cyclopts.App(name="submit", help="Put one request in, and print its answer.")


@app.default
def submit(  # noqa: PLR0913 - one parameter is one flag.
    prompt: Annotated[
        str,
        Parameter(help="What to ask; - reads it from standard input.", allow_leading_hyphen=True),
    ] = "",
    /,
    *,
    lane: LaneFlag = None,
    model: Annotated[str, Parameter(help="Model; default: the lane's first.")] = "",
    body: Annotated[
        Path | None, Parameter(help="A whole request body (JSON file) instead of a prompt.")
    ] = None,
    endpoint: Annotated[str, Parameter(help="Of the OpenAI API.")] = "/v1/chat/completions",
    band: Annotated[int, Parameter(help="0 critical, 1 interactive, 2 standard, 3 batch.")] = 2,
    max_tokens: Annotated[int | None, Parameter(help="Longest answer to a prompt.")] = None,
    stream: Annotated[bool, Parameter(negative="", help="Print the answer as it comes.")] = False,
    json: Annotated[bool, Parameter(negative="", help="Print the engine's whole answer.")] = False,
    job_id: Annotated[
        str, Parameter(help="Idempotency key: the same key again gives the same answer.")
    ] = "",
    session: Annotated[str, Parameter(help="Jobs of a session like the same worker.")] = "",
    deadline: Annotated[
        str | None, Parameter(help="After this time nobody wants the answer: 30s, 5m.")
    ] = None,
    wait: Annotated[str, Parameter(help="How long a full queue is waited out.")] = "60s",
    config: ConfigFlag = None,
    cluster: Cluster = HERE,
) -> int:
    """Put one request in, wait for its answer and print its text; without any all of it, as JSON.

        inferlane submit "What is a lane?" --lane acme --model tiny --stream

    Ctrl-C cancels the job. Exit codes: 0 answered, 1 the job failed or was turned away, 2 wrong
    usage, 3 the cluster can't be reached, 130 stopped.
    """
    import uvloop

    from producers import errors

    found = settings(config, cluster, lane=lane)
    if lane is not None:
        lane_of(found)
    fields: dict[str, Any] = {
        "endpoint": endpoint,
        "band": band,
        "job_id": job_id,
        "session": session,
        "deadline_s": None if deadline is None else seconds(deadline, what="--deadline"),
        "stream": stream,
        "queue_full_wait_s": seconds(wait, what="--wait"),
    }
    request = _Request(prompt, model=model, body=body, max_tokens=max_tokens)
    try:
        uvloop.run(_submit(found, request, fields, as_json=json))
    except asyncio.CancelledError:
        return ExitCode.INTERRUPTED  # By SIGTERM or SIGHUP: what became of it was told.
    except errors.BadLink as error:
        raise Misused(str(error)) from error
    except errors.Unreachable as error:
        raise Unreachable(str(error)) from error
    except errors.BadRequest as error:
        raise Misused(str(error)) from error
    except errors.ProducerError as error:
        raise CommandError(_with_engines_word(error)) from error
    return ExitCode.OK


class _Request:
    """What to ask, before the lane's offer is known."""

    def __init__(
        self, prompt: str, *, model: str, body: Path | None, max_tokens: int | None
    ) -> None:
        if bool(prompt) == bool(body):
            message = "give either a prompt or --body FILE"
            raise Misused(message)
        try:
            self.raw = None if body is None else _body(body)
            self.prompt = _piped_prompt() if prompt == "-" else prompt
        except OSError as error:
            said = (error.strerror or str(error)).lower()
            message = f"{body or 'the prompt'} can't be read: {said}"
            raise Misused(message) from error
        except UnicodeDecodeError as error:
            message = "the prompt is not UTF-8; send it with that encoding"
            raise Misused(message) from error
        self.model = model
        self.max_tokens = max_tokens

    def made(self, client: "Client") -> "bytes | dict[str, object]":
        """The request's body; for a prompt the lane's first model, unless one was named."""
        if self.raw is not None:
            return self.raw
        model = self.model or next(iter(client.offer.models if client.offer else ()), "")
        if not model:
            message = (
                f"what lane {client.lane!r} offers can't be read: has a broker run here? See "
                "`inferlane doctor`"
            )
            raise Unreachable(message)
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": self.prompt}],
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        return body


def _body(path: Path) -> bytes:
    # A pipe, too: `--body <(jq … request.json)`.
    return read_named(path, bytes_max=BODY_BYTES_MAX, pipes=True).removeprefix(BOM_UTF8)


def _piped_prompt() -> str:
    """Read the prompt from standard input, no more of it than any body may have."""
    raw = sys.stdin.buffer.read(BODY_BYTES_MAX + 1)
    if len(raw) > BODY_BYTES_MAX:
        message = f"the prompt on standard input is larger than {BODY_BYTES_MAX:,} bytes"
        raise Misused(message)
    return raw.decode()


async def _submit(
    found: "ProducerConfig", request: _Request, fields: dict[str, Any], *, as_json: bool
) -> None:
    from producers.client import Client
    from producers.connecting import connect_bus
    from producers.door import lanes_of

    async with connect_bus(found.nats, name="inferlane-submit") as bus:
        known = await lanes_of(bus)
        lane = found.lane or only_lane(known)
        check_lane(lane, known)
        async with Client(bus, lane=lane, config=found.client) as client:
            _stop_on_signals()
            await _ask(client, request, fields, as_json=as_json)


async def _ask(
    client: "Client", request: _Request, fields: dict[str, Any], *, as_json: bool
) -> None:
    if request.raw is not None:
        fields = {**fields, "model": request.model}
    from ops.cli.output import note

    known = bool(fields["job_id"])
    # Known before it is stored: an interrupt may come between that and its receipt.
    job_id = fields["job_id"] or new_job_id()
    fields = {**fields, "job_id": job_id}
    ticket: Ticket | None = None
    try:
        ticket = await client.submit(request.made(client), known=known, **fields)
        await _print(ticket, stream=bool(fields["stream"]), as_json=as_json)
    except BaseException as error:
        is_refused = ticket is None and isinstance(error, Exception)
        if not is_refused and (ticket is None or ticket.record is None):
            # Nobody waits for the answer any more: don't let it be made.
            note(f"job {client.lane}.{job_id}: {await _cancelled(client, job_id)}")
        raise


def _stop_on_signals() -> None:
    """Let SIGTERM, and a terminal that is closed, stop it as Ctrl-C does."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called by the command's task"
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, task.cancel)


async def _cancelled(client: "Client", job_id: str) -> str:
    """Cancel a job, and say what became of it."""
    from producers.errors import ProducerError

    try:
        if await client.cancel_job(job_id):
            return "cancelled"
        record = await client.find_record(job_id)
    except ProducerError as error:
        return f"not cancelled, it may run on ({error}); `inferlane job` tells"
    return "not in the cluster" if record is None else f"it had ended: {record.kind}"


async def _print(ticket: "Ticket", *, stream: bool, as_json: bool) -> None:
    from ops.cli.output import note
    from producers.answer import answer_text, beside_text

    if stream and not as_json:
        is_told = await _print_stream(ticket)
        record = await ticket.result(raise_for_kind=True)
    else:
        record = await ticket.result(raise_for_kind=True)
        text = "" if as_json else answer_text(record.body)
        is_told = bool(text)
        sys.stdout.write(f"{text}\n" if text else "")
    if not is_told:
        # Numbers, calls of tools, or nothing but why it ended: an empty line would hide them.
        sys.stdout.buffer.write(record.body.rstrip(b"\n") + b"\n")
    elif more := beside_text(record.body):
        note(f"the answer has {more}; --json prints all of it")


async def _print_stream(ticket: "Ticket") -> bool:
    """Print pieces as they come; of a whole answer only the rest, where it goes on.

    Says whether there was any text.
    """
    from producers.answer import answer_text, piece_text

    printed = ""
    async for chunk in ticket.stream():
        text = answer_text(chunk.data) if chunk.whole else piece_text(chunk.data)
        if chunk.whole and text.startswith(printed):
            text = text[len(printed) :]
        elif chunk.whole or chunk.restart:
            sys.stdout.write("\n")
            printed = ""
        sys.stdout.write(text)
        sys.stdout.flush()
        printed += text
    sys.stdout.write("\n" if printed else "")
    sys.stdout.flush()
    return bool(printed)


def _with_engines_word(error: Exception) -> str:
    """The error, and what the engine said where it is known."""
    from producers.answer import error_text
    from producers.errors import JobFailed

    said = error_text(error.record.body) if isinstance(error, JobFailed) else ""
    return f"{error}: {said}" if said and said not in str(error) else str(error)
