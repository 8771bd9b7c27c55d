"""Why each job went where it went: a JSON line per dispatch and per end, joined by key and attempt.

The loop only puts records on a bounded queue; a thread encodes, writes and rotates. A slow or full
disk costs lines, which are counted, and never a job: the log is for people, nothing reads it back.
"""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import structlog

from broker.core.decisions import Candidate, Dispatch
from broker.service.log_files import LogFiles
from broker.wire.messages import Attempt, Finished, Kind, Reason

QUEUE_LINES_MAX = 20_000
"""Records waiting for the writer: two seconds at 5,000 jobs/s, some 20 MB."""

CANDIDATES_MAX = 8
"""Scored workers told in a line, best first; the number of all stands beside them."""

FLUSH_S = 0.2
"""How long a line may wait before it is written: `tail -f` feels live, and writes stay few."""

CLOSE_S_MAX = 5.0
"""How long `close` waits for the last lines; a disk that hangs must not keep the broker."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A job was given to a worker."""

    at_s: float
    decision: Dispatch
    band: int
    model: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An attempt ended, or a job that had none."""

    at_s: float
    key: str
    worker: str = ""
    finished: Finished | None = None
    """What the worker said of the attempt; None when the broker ended the job itself."""
    kind: Kind | None = None
    """Of the job's record; None when the job is tried again, or its record was found."""
    reason: Reason | None = None
    e2e_s: float | None = None
    """Since the job was queued."""


Entry = Dispatched | Ended


class DecisionLog:
    """Takes entries from the loop; its thread writes them."""

    def __init__(
        self,
        folder: Path,
        *,
        file_bytes_max: int,
        files_max: int,
        queue_lines_max: int = QUEUE_LINES_MAX,
    ) -> None:
        """Write to `folder`, made if absent. With `file_bytes_max` 0 nothing is logged."""
        self._files = LogFiles(folder, "decisions", bytes_max=file_bytes_max, files_max=files_max)
        self._queue: deque[Entry] = deque()
        self._queue_lines_max = queue_lines_max if file_bytes_max else 0
        self._dropped = 0
        self._lost = 0
        self._written = 0
        self._errors = 0
        self._trouble = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="decision-log", daemon=True)
        if file_bytes_max:
            self._thread.start()

    @property
    def path(self) -> Path:
        """Where the newest lines are."""
        return self._files.path

    @property
    def lines_written(self) -> int:
        """Lines on disk."""
        return self._written

    @property
    def lines_dropped(self) -> int:
        """Lines lost: the queue was full, or the disk."""
        return self._dropped + self._lost

    @property
    def write_errors(self) -> int:
        """Writes that failed."""
        return self._errors

    @property
    def trouble(self) -> str:
        """What keeps lines from the disk now; empty when all is well."""
        return self._trouble

    def put(self, entry: Entry) -> None:
        """Log an entry. Never waits: with a full queue the entry is dropped and counted."""
        if len(self._queue) < self._queue_lines_max:
            self._queue.append(entry)
        elif self._queue_lines_max:
            self._dropped += 1

    def close(self, *, timeout_s: float = CLOSE_S_MAX) -> None:
        """Write what is queued and stop, within `timeout_s`. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_S):
            self._drain()
        self._drain()
        self._files.close()

    def _drain(self) -> None:
        entries = [self._queue.popleft() for _ in range(len(self._queue))]
        if not entries:
            return
        try:
            self._files.append(b"".join(line(entry) for entry in entries))
        except OSError as error:
            self._lost += len(entries)
            self._tell(f"{self._files.path}: {error.strerror or error}")
            # Last: who sees the error counted sees what it cost, too.
            self._errors += 1
        else:
            self._tell("")
            self._written += len(entries)

    def _tell(self, trouble: str) -> None:
        """Say once that lines are being lost, and once that they are not any more."""
        if trouble and not self._trouble:
            _log.error("decision_log.failing", error=trouble, lost_lines=self._lost)
        elif self._trouble and not trouble:
            _log.warning("decision_log.recovered", lost_lines=self._lost)
        self._trouble = trouble


def line(entry: Entry) -> bytes:
    """Write one entry as a JSON line."""
    match entry:
        case Dispatched():
            record = _dispatch(entry)
        case Ended():
            record = _end(entry)
    return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)


def _dispatch(entry: Dispatched) -> Mapping[str, Any]:
    decision, why = entry.decision, entry.decision.explanation
    best_first = sorted(why.candidates, key=_score)[:CANDIDATES_MAX]
    return {
        "event": "dispatch",
        "at_s": round(entry.at_s, 6),
        "key": decision.key,
        "attempt": _numbers(decision.attempt),
        "worker": decision.worker,
        "band": entry.band,
        "model": entry.model,
        "policy": why.policy,
        "previous_worker": why.previous_worker,
        "queue_s": round(why.queue_s, 6),
        "held_by": why.held_by,
        "predicted_hit_tokens": why.predicted_hit_tokens,
        "predicted_ttft_s": round(why.predicted_ttft_s, 6),
        "failed_attempts": len(decision.failures),
        "candidates": len(why.candidates),
        "scores": [
            {
                "worker": one.worker,
                "score": one.score,
                "hit_tokens": one.hit_tokens,
                "backlog_tokens": one.backlog_tokens,
            }
            for one in best_first
        ],
    }


def _score(candidate: Candidate) -> float:
    return candidate.score


def _end(entry: Ended) -> Mapping[str, Any]:
    record: dict[str, Any] = {
        "event": "end",
        "at_s": round(entry.at_s, 6),
        "key": entry.key,
        "kind": entry.kind,
        "reason": entry.reason,
    }
    if entry.e2e_s is not None:
        record["e2e_s"] = round(entry.e2e_s, 6)
    finished = entry.finished
    if finished is not None:
        record |= {
            "attempt": _numbers(finished.attempt),
            "worker": entry.worker,
            "outcome": finished.outcome,
            "predicted_hit_tokens": finished.predicted_hit_tokens,
            "cached_tokens": finished.usage.cached_tokens,
            "prompt_tokens": finished.usage.prompt_tokens,
            "output_tokens": finished.usage.output_tokens,
            "ttft_s": round(finished.ttft_s, 6),
            "run_s": round(finished.run_s, 6),
            "detail": finished.detail,
        }
    return record


def _numbers(attempt: Attempt) -> tuple[int, int]:
    return attempt.epoch, attempt.number
