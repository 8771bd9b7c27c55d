"""Batches and files as the OpenAI API shows them. Pure."""

from broker.wire.files import FileInfo
from producers.batches.forecast import told
from producers.batches.records import Batch


def batch_object(batch: Batch) -> dict[str, object]:
    """A batch as its users see it. What we know of its time stands in its metadata."""
    counts = batch.counts
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": _errors(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status.value,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": int(batch.created_at_s),
        "in_progress_at": _instant(batch.in_progress_at_s),
        "expires_at": int(batch.deadline_at_s),
        "finalizing_at": _instant(batch.finalizing_at_s),
        "completed_at": _instant(batch.completed_at_s),
        "failed_at": _instant(batch.failed_at_s),
        "expired_at": _instant(batch.expired_at_s),
        "cancelling_at": _instant(batch.cancelling_at_s),
        "cancelled_at": _instant(batch.cancelled_at_s),
        "request_counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
        },
        "usage": _usage(batch),
        "metadata": {**batch.metadata, **told(batch.forecast)},
    }


def file_object(info: FileInfo) -> dict[str, object]:
    """A file as its users see it; `uploaded` while it grows, then `processed`."""
    shown: dict[str, object] = {
        "id": info.id,
        "object": "file",
        "bytes": info.bytes,
        "created_at": int(info.created_at_s),
        "filename": info.filename,
        "purpose": info.purpose,
        "status": "uploaded" if info.growing else "processed",
    }
    if info.expires_at_s:
        shown["expires_at"] = int(info.expires_at_s)
    return shown


def page(data: list[dict[str, object]], *, has_more: bool) -> dict[str, object]:
    """A page of a list."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": has_more,
    }


def _instant(at_s: float) -> int | None:
    return int(at_s) if at_s else None


def _errors(batch: Batch) -> dict[str, object] | None:
    if not batch.errors:
        return None
    data = [
        {
            "code": fault.code,
            "message": fault.message,
            "param": fault.param or None,
            "line": fault.line or None,
        }
        for fault in batch.errors
    ]
    return {"object": "list", "data": data}


def _usage(batch: Batch) -> dict[str, object]:
    usage = batch.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
