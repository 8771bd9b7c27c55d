"""Builds lines of a decision log as the broker itself writes them."""

from array import array
from collections.abc import Sequence
from typing import Any

from broker.core.decisions import Candidate, Dispatch, Explanation, HeldBy
from broker.core.events import JobSpec
from broker.service.decision_log import Dispatched, Ended, line
from broker.wire.messages import Attempt, Finished, Kind, Outcome, Reason, Usage

START_S = 1_000_000.0

USAGE = Usage(prompt_tokens=700, cached_tokens=600, output_tokens=16)


def a_dispatch_line(
    name: str = "j1",
    *,
    lane: str = "acme",
    enqueued_s: float = 0.0,
    waited_s: float = 1.0,
    worker: str = "w0",
    number: int = 1,
    blocks: Sequence[int] = (),
    prefixes: bool = True,
    listed: bool = False,
    **job: Any,
) -> bytes:
    """Write that a job was dispatched; `listed`: known from a worker's list only.

    `blocks` are the wire's.
    """
    key = f"{lane}.{name}"
    enqueued_at_s = START_S + enqueued_s
    defaults: dict[str, Any] = {"band": 1, "model": "tiny", "blocks": array("Q", blocks)}
    spec = JobSpec(key, lane, **{**defaults, **job}, enqueued_at_s=enqueued_at_s)
    decision = Dispatch(
        key=key,
        worker=worker,
        attempt=Attempt(7, number),
        number=number,
        stream_sequence=5,
        predicted_hit_tokens=640,
        enqueued_at_s=enqueued_at_s,
        failures=(),
        run_s_max=60.0,
        stall_s=10.0,
        explanation=Explanation(
            policy="first_token",
            candidates=(Candidate(worker, 1.0, 640, 0),),
            previous_worker="",
            predicted_hit_tokens=640,
            predicted_ttft_s=0.5,
            queue_s=waited_s,
            held_by=HeldBy.ORDER,
        ),
    )
    at_s = enqueued_at_s + waited_s
    told = Dispatched(at_s, decision, spec.band, spec.model, None if listed else spec)
    return line(told, prefixes=prefixes)


def an_end_line(
    name: str = "j1",
    *,
    lane: str = "acme",
    at_s: float = 5.0,
    usage: Usage = USAGE,
    worker: str = "w0",
    **finished: Any,
) -> bytes:
    """Write that a worker's attempt settled its job: a run of 3 s, first token after 0.5 s."""
    key = f"{lane}.{name}"
    defaults: dict[str, Any] = {
        "key": key,
        "attempt": Attempt(7, 1),
        "outcome": Outcome.SETTLED,
        "kind": Kind.COMPLETED,
        "usage": usage,
        "ttft_s": 0.5,
        "run_s": 3.0,
    }
    told = Finished(**{**defaults, **finished})
    kind = told.kind if told.outcome is Outcome.SETTLED else None
    return line(Ended(START_S + at_s, key, worker, told, kind, told.reason))


def a_closing_line(name: str = "j1", *, kind: Kind | None = Kind.EXPIRED) -> bytes:
    """Write that the broker itself ended a job; without a kind: that its record was found."""
    return line(Ended(START_S + 5.0, f"acme.{name}", kind=kind))


def a_refusal_line(
    name: str = "j1",
    *,
    lane: str = "acme",
    at_s: float = 5.0,
    enqueued_s: float = 0.0,
    kind: Kind = Kind.REJECTED,
    reason: Reason = Reason.QUEUE_FULL,
    row: str = "all",
    blocks: Sequence[int] = (),
    **job: Any,
) -> bytes:
    """Write that the broker ended a job that it never dispatched, and what it had asked for."""
    key = f"{lane}.{name}"
    defaults: dict[str, Any] = {"band": 1, "model": "tiny", "blocks": array("Q", blocks)}
    spec = JobSpec(key, lane, **{**defaults, **job}, enqueued_at_s=START_S + enqueued_s)
    return line(Ended(START_S + at_s, key, kind=kind, reason=reason, row=row, job=spec))
