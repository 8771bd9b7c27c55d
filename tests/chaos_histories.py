"""Builders of hand-made histories: one job's life, fault by fault."""

from typing import Any

from broker.wire.messages import Attempt, Kind
from ops.chaos.checker import Strike
from ops.chaos.history import (
    Accepted,
    Acked,
    HistoryEvent,
    Ordered,
    Recorded,
    RunBegan,
    RunEnded,
    Submitted,
    Taken,
    Told,
    ordered,
)
from ops.chaos.plan import Kind as Fault

JOB = "online.a"
PRODUCER = "chats-1"
BROKER = "broker-1"
WORKER = "worker-1"
LIFE = 100


def an_order(
    at_s: float = 3.0,
    *,
    job: str = JOB,
    worker: str = WORKER,
    life: int = LIFE,
    epoch: int = 1,
    number: int = 1,
    epoch_known: int = 0,
) -> Taken:
    """An order that a worker accepted."""
    attempt = Attempt(epoch, number)
    return Taken(
        at_s=at_s,
        job=job,
        worker=worker,
        life=life,
        attempt=attempt,
        epoch=epoch,
        number=number,
        epoch_known=epoch_known or epoch,
    )


def a_run(
    from_s: float = 4.0,
    to_s: float | None = 5.0,
    *,
    job: str = JOB,
    worker: str = WORKER,
    life: int = LIFE,
    run: int = 0,
    how: str = "completed",
) -> list[HistoryEvent]:
    """A run in an engine; one without an end died with its process."""
    events: list[HistoryEvent] = [RunBegan(at_s=from_s, job=job, worker=worker, life=life, run=run)]
    if to_s is not None:
        events.append(RunEnded(at_s=to_s, job=job, worker=worker, life=life, run=run, how=how))
    return events


def a_record(
    at_s: float = 6.0, *, job: str = JOB, by: str = WORKER, won: bool = True, **fields: Any
) -> Recorded:
    """A record that was offered."""
    return Recorded(at_s=at_s, job=job, by=by, won=won, kind=fields.get("kind", Kind.COMPLETED))


def a_life(job: str = JOB, *, without: tuple[type, ...] = ()) -> list[HistoryEvent]:
    """A job's whole life: a second for each step, from submission at 1 to its end at 8."""
    events: list[HistoryEvent] = [
        Submitted(at_s=1.0, job=job, by=PRODUCER),
        Accepted(at_s=2.0, job=job, by=PRODUCER),
        Ordered(at_s=3.0, job=job, by=BROKER, worker=WORKER, attempt=Attempt(1, 1)),
        an_order(4.0, job=job),
        *a_run(4.5, 5.0, job=job),
        a_record(6.0, job=job),
        Acked(at_s=7.0, job=job, by=WORKER),
        Told(at_s=8.0, job=job, by=PRODUCER, kind=Kind.COMPLETED),
    ]
    return ordered(event for event in events if not isinstance(event, without))


def a_strike(
    kind: Fault = Fault.KILL_WORKER,
    at_s: float = 4.7,
    *,
    member: str = WORKER,
    for_s: float = 1.0,
    step: str = "",
    number: int = 0,
    back_at_s: float = 0.0,
    in_midst: bool = False,
) -> Strike:
    """A fault as it happened."""
    return Strike(number, kind, member, at_s, at_s + for_s, step, back_at_s, in_midst)
