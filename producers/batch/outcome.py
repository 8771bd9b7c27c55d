"""How a line ended becomes one line of the output or the error file. Pure."""

from dataclasses import dataclass

import orjson

from broker.wire.messages import Kind, Reason, TerminalRecord
from producers.batch.lines import FINAL, BadLine, Code

HTTP_OK = range(200, 300)


@dataclass(frozen=True, slots=True)
class Ended:
    """A line's end, ready to be written."""

    number: int
    text: bytes
    """One JSON line, its end included."""
    ok: bool
    """Belongs to the output file; else to the error file."""
    final: bool = False
    """No second run can help: the line itself is at fault."""


def of_record(number: int, custom_id: str, record: TerminalRecord, *, job_id: str) -> Ended:
    """Write down how a line's job ended."""
    request_id = f"batch_req_{job_id}"
    status = record.status_code
    if record.kind is Kind.COMPLETED or (record.kind is Kind.FAILED and status and record.body):
        body = one_line(record.body)
        if body is not None:
            response = {
                "status_code": status or HTTP_OK.start,
                "request_id": record.request_id or job_id,
                "body": body,
            }
            text = _line(request_id, custom_id, response, None)
            done = record.kind is Kind.COMPLETED and response["status_code"] in HTTP_OK
            return Ended(number, text, ok=done)
        garbage = "the engine's answer is no JSON"
        error = {"code": Reason.ENGINE_GARBAGE.value, "message": garbage, "line": number}
        return Ended(number, _line(request_id, custom_id, None, error), ok=False)
    error = {"code": _code(record), "message": record.message or _said(record), "line": number}
    return Ended(number, _line(request_id, custom_id, None, error), ok=False)


def of_bad_line(line: BadLine, *, batch_id: str) -> Ended:
    """Write down why a line was not run."""
    error = {"code": line.code.value, "message": line.message, "line": line.number}
    text = _line(f"batch_req_{batch_id}-{line.number}", line.custom_id, None, error)
    return Ended(line.number, text, ok=False, final=line.code in FINAL)


def one_line(body: bytes) -> orjson.Fragment | None:
    """Return an engine's JSON, fit for one line and else untouched; None when it is no JSON."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return orjson.Fragment(orjson.dumps(parsed) if b"\n" in body or b"\r" in body else body)


def _code(record: TerminalRecord) -> str:
    match record.kind:
        case Kind.EXPIRED:
            return Code.BATCH_EXPIRED.value
        case Kind.CANCELLED:
            return Code.BATCH_CANCELLED.value
        case _:
            known = record.reason or record.kind
            return (Code.MODEL_NOT_FOUND if known is Reason.UNKNOWN_MODEL else known).value


def _said(record: TerminalRecord) -> str:
    return f"the job ended {record.kind}" + (f": {record.reason}" if record.reason else "")


def _line(request_id: str, custom_id: str | None, response: object, error: object) -> bytes:
    return orjson.dumps(
        {"id": request_id, "custom_id": custom_id, "response": response, "error": error},
        option=orjson.OPT_APPEND_NEWLINE,
    )
