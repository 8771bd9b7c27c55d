"""Who was heard, and who hears of it: also on a standby."""

import pytest

from broker.bus.base import Message
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service import fleet as module
from broker.service.fleet import Fleet
from broker.wire import messages as wire
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import Attempt, Heartbeat, WorkerNote
from tests.leaders import a_beat
from tests.turns import until


class Ear:
    """Whoever leads."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.notes: list[WorkerNote] = []

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self.beats.append(heartbeat)

    def note(self, note: WorkerNote) -> None:
        self.notes.append(note)


def a_fleet(clock: ManualClock) -> tuple[Fleet, list[str]]:
    """A fleet, and what it could not read."""
    bad: list[str] = []
    return Fleet(now=clock.now_s, malformed=bad.append), bad


def hear(fleet: Fleet, beat: Heartbeat) -> None:
    """A heartbeat arrives."""
    fleet._on_heartbeat(Message(subjects.heartbeat(beat.worker), encode(beat)))


NOTE = wire.FirstToken(worker="w1", incarnation=1, key="acme.j", attempt=Attempt(1, 1), ttft_s=0.1)


async def test_a_standby_remembers_and_a_leader_also_hears() -> None:
    """Heartbeats are kept whoever leads; notes only matter to who does."""
    clock = ManualClock()
    fleet, bad = a_fleet(clock)
    bus = MemoryBus(clock=clock)
    await fleet.listen(bus)
    await bus.publish(subjects.heartbeat("w1"), encode(a_beat()))
    await bus.publish(subjects.worker_note("w1"), encode(NOTE))
    await until(lambda: bool(fleet.live(within_s=1)))
    ear = fleet.listener = Ear()
    await bus.publish(subjects.heartbeat("w1"), encode(a_beat(sequence=2)))
    await bus.publish(subjects.worker_note("w1"), encode(NOTE))
    await until(lambda: bool(ear.beats and ear.notes))
    assert (len(ear.beats), ear.notes, bad) == (1, [NOTE], [])
    await bus.close()


def test_only_the_recently_heard_are_live() -> None:
    """A word is good for so long, while others speak."""
    clock = ManualClock()
    fleet, _ = a_fleet(clock)
    hear(fleet, a_beat(worker="old"))
    for _ in range(5):
        clock.advance(1)
        hear(fleet, a_beat(worker="new"))
    assert [beat.worker for beat in fleet.live(within_s=3)] == ["new"]
    assert len(fleet.live(within_s=6)) == 2


def test_who_lived_before_an_outage_lives_after_it() -> None:
    """Chaos, seed 6: NATS was away for 10 s; who led then heard of some workers at once, gave jobs
    to them, and another still had one of these.
    """
    clock = ManualClock()
    fleet, _ = a_fleet(clock)
    for worker in ("a", "b"):
        hear(fleet, a_beat(worker=worker))
    clock.advance(10)
    assert len(fleet.live(within_s=3)) == 2
    hear(fleet, a_beat(worker="b"))
    assert len(fleet.live(within_s=3)) == 2
    for _ in range(3):
        clock.advance(1)
        hear(fleet, a_beat(worker="b"))
    assert [beat.worker for beat in fleet.live(within_s=3)] == ["b"]


def test_the_one_silent_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORKERS_MAX: a flood of names forgets the dead first."""
    monkeypatch.setattr(module, "WORKERS_MAX", 2)
    fleet, _ = a_fleet(ManualClock())
    for worker in ("a", "b", "a", "c"):
        hear(fleet, a_beat(worker=worker))
    assert [beat.worker for beat in fleet.live(within_s=1)] == ["a", "c"]


def test_garbage_is_counted_and_survived() -> None:
    """Neither a heartbeat nor a note."""
    fleet, bad = a_fleet(ManualClock())
    fleet.listener = Ear()
    fleet._on_heartbeat(Message("wrk.x.hb", b"\xc1"))
    fleet._on_note(Message("wrk.x.note", b"\x80"))
    assert bad == ["heartbeat", "note"]
    assert not fleet.live(within_s=1)
