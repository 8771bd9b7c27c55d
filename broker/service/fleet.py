"""Who is out there: standbys hear heartbeats too, so that a takeover knows the fleet."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from broker.bus.base import Bus, Message
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, decode_note
from broker.wire.messages import Heartbeat, WorkerNote

WORKERS_MAX = 10_000
"""Workers remembered; a further one takes the place of the one silent for longest."""

EPOCH_BELIEVED_MAX = 2**52
"""Half of what the wire can say, so that there is always a later one. Epochs are revisions of a
key, which is written about once a second."""

SILENCE_S_MAX = 1.0
"""As much of a time in which nobody spoke counts as anybody's silence: one heartbeat. More is the
message server's silence, or our own link's, and nobody is the less alive for it."""


class Listener(Protocol):
    """Whoever leads."""

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        """A worker's word of each second."""
        ...

    def note(self, note: WorkerNote) -> None:
        """A worker's word of this moment."""
        ...


@dataclass(frozen=True, slots=True)
class Heard:
    """The last word of a worker."""

    heard_s: float
    """On the fleet's clock."""
    heartbeat: Heartbeat


class Fleet:
    """Last word of each worker, and a tap for whoever leads."""

    def __init__(self, *, now: Callable[[], float], malformed: Callable[[str], None]) -> None:
        """Know nobody yet."""
        self._now = now
        self._malformed = malformed
        self._heard: dict[str, Heard] = {}
        self._spoken_s = 0.0
        """The fleet's clock, as of the last word of anybody: stands still while nobody speaks."""
        self._spoken_at_s = now()
        self.listening_since_s = now()
        self.listener: Listener | None = None
        self._later: tuple[int, asyncio.Event] | None = None
        """Set where a worker tells of a later epoch than this."""

    async def listen(self, bus: Bus) -> None:
        """Subscribe once, for the life of the process."""
        await bus.subscribe(subjects.HEARTBEATS, self._on_heartbeat)
        await bus.subscribe(subjects.WORKER_NOTES, self._on_note)
        self.listening_since_s = self._now()

    def live(self, *, within_s: float) -> list[Heartbeat]:
        """Return the last word of each worker that was not silent for longer than `within_s`.

        Silent is who says nothing while others do: after an outage of the message server all that
        lived before it count as alive.
        """
        oldest_s = self._clock_s() - within_s
        return [heard.heartbeat for heard in self._heard.values() if heard.heard_s >= oldest_s]

    @property
    def newest_epoch(self) -> int:
        """The highest epoch that any worker has seen, whoever led then."""
        return max((_believed_epoch(heard.heartbeat) for heard in self._heard.values()), default=0)

    async def until_later(self, epoch: int) -> None:
        """Wait until a worker knows of a later epoch."""
        self._later = (epoch, asyncio.Event())
        if self.newest_epoch <= epoch:
            await self._later[1].wait()

    def notice(self, worker: str) -> str:
        """Return what a worker last said that keeps it from ending jobs; empty: nothing."""
        heard = self._heard.get(worker)
        return "" if heard is None else heard.heartbeat.notice

    def _clock_s(self) -> float:
        return self._spoken_s + min(self._now() - self._spoken_at_s, SILENCE_S_MAX)

    def _on_heartbeat(self, message: Message) -> None:
        try:
            heartbeat = decode(message.data, Heartbeat)
        except MalformedMessage:
            self._malformed("heartbeat")
            return
        self._heard.pop(heartbeat.worker, None)
        if len(self._heard) >= WORKERS_MAX:
            del self._heard[next(iter(self._heard))]
        self._spoken_s, self._spoken_at_s = self._clock_s(), self._now()
        self._heard[heartbeat.worker] = Heard(self._spoken_s, heartbeat)
        if self._later is not None and _believed_epoch(heartbeat) > self._later[0]:
            self._later[1].set()
        if self.listener is not None:
            self.listener.heartbeat(heartbeat)

    def _on_note(self, message: Message) -> None:
        if self.listener is None:
            return
        try:
            note = decode_note(message.data)
        except MalformedMessage:
            self._malformed("note")
            return
        self.listener.note(note)


def _believed_epoch(heartbeat: Heartbeat) -> int:
    """Tell the epoch that a worker knows; 0 where it is nonsense."""
    return heartbeat.epoch if heartbeat.epoch <= EPOCH_BELIEVED_MAX else 0
