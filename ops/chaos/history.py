"""Histories: what each process of a chaos run saw and did, one JSON line for each event.

A line is written by one call to the kernel before the process goes on, so that `kill -9` loses
none. All processes run on one machine and read one clock; times are Unix seconds.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from broker.wire.messages import Attempt

SUFFIX = ".history.jsonl"


class Event(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all: when it was. `job` is a job key, `<lane>.<job>`."""

    at_s: float


class Submitted(Event, frozen=True, kw_only=True, tag="submitted"):
    """A producer is about to store a job."""

    job: str
    by: str


class Accepted(Event, frozen=True, kw_only=True, tag="accepted"):
    """The stream said that it has the job: from now on it must end."""

    job: str
    by: str


class Held(Event, frozen=True, kw_only=True, tag="held"):
    """A broker pulled a job: it waits there until a worker takes it."""

    job: str
    by: str


class Ordered(Event, frozen=True, kw_only=True, tag="ordered"):
    """A broker sends a job to a worker."""

    job: str
    by: str
    worker: str
    attempt: Attempt


class Taken(Event, frozen=True, kw_only=True, tag="taken"):
    """A worker accepted an order."""

    job: str
    worker: str
    life: int
    """Process id: a worker that restarts lives again."""
    attempt: Attempt
    epoch: int
    """Of the broker that ordered; ..."""
    number: int
    """... its orders to this worker count up; ..."""
    epoch_known: int
    """... and the highest epoch that the worker had heard of."""


class RunBegan(Event, frozen=True, kw_only=True, tag="run_began"):
    """An engine began to work on a job."""

    job: str
    worker: str
    life: int
    run: int


class RunEnded(Event, frozen=True, kw_only=True, tag="run_ended"):
    """It ended there: completed, failed by the engine, or aborted by the agent."""

    job: str
    worker: str
    life: int
    run: int
    how: str


class Recorded(Event, frozen=True, kw_only=True, tag="recorded"):
    """A terminal record was offered to RESULTS; `won`: it is the one that stands."""

    job: str
    by: str
    kind: str
    won: bool


class Acked(Event, frozen=True, kw_only=True, tag="acked"):
    """The server confirmed that the job's message is gone."""

    job: str
    by: str


class Told(Event, frozen=True, kw_only=True, tag="told"):
    """A producer has the job's record."""

    job: str
    by: str
    kind: str


class Mixed(Event, frozen=True, kw_only=True, tag="mixed"):
    """A producer was given tokens of an attempt after those of a later one."""

    job: str
    by: str


class Died(Event, frozen=True, kw_only=True, tag="died"):
    """A process ends itself, as it was told to, in the midst of a step."""

    by: str
    step: str
    place: str


HistoryEvent = (
    Submitted
    | Accepted
    | Held
    | Ordered
    | Taken
    | RunBegan
    | RunEnded
    | Recorded
    | Acked
    | Told
    | Mixed
    | Died
)

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[HistoryEvent] = msgspec.json.Decoder(HistoryEvent)


class Pen:
    """Writes one process's history."""

    def __init__(self, folder: Path, name: str) -> None:
        """Go on with the history of this name. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}{SUFFIX}"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, event: HistoryEvent) -> None:
        """Write an event; it survives this process."""
        os.write(self._file, _encoder.encode(event) + b"\n")


def read(folder: Path) -> list[HistoryEvent]:
    """Read all histories of a folder, in the order of time."""
    events = [event for path in sorted(folder.glob(f"*{SUFFIX}")) for event in read_one(path)]
    return ordered(events)


def read_one(path: Path) -> Iterator[HistoryEvent]:
    """Read one history; none when there is none yet."""
    if path.exists():
        with path.open("rb") as lines:
            for line in lines:
                yield _decoder.decode(line)


def ordered(events: Iterable[HistoryEvent]) -> list[HistoryEvent]:
    """Sort events by time; those of one instant keep their order."""
    return sorted(events, key=lambda event: event.at_s)
