"""Deleting results: what may go goes, and what keeps a job from running again stays."""

from typing import Any

import pytest

from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.accounting import Accounting
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import DeadLetter
from producers import erasing
from producers.erasing import Erased, Eraser
from tests.accounts import a_terminal_record, accounts, set_up, store, total
from tests.builders import LANE, MODEL, a_job


class Lane:
    """A lane with its accountant, and an eraser of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = MemoryBus(clock=self.clock)
        self.accounting = Accounting(
            self.bus, results_age_s_max={LANE: 1e6}, hears=self, now=self.clock.now_s
        )
        self.eraser = Eraser(self.bus, LANE)

    def usage_counted(self, lane: str, records: int) -> None:
        """Nothing to do."""

    def usage_gone(self, lane: str, records: int) -> None:
        message = f"{records} records of {lane} left uncounted"
        raise AssertionError(message)

    async def ended(self, job: str, *, counted: bool = True) -> None:
        """A job that ended."""
        await store(self.bus, a_terminal_record(job))
        if counted:
            await self.accounting.count(LANE)

    async def given_up(self, job: str) -> None:
        """A job with a dead letter."""
        record = a_terminal_record(job)
        subject = subjects.jobs(LANE, 2, MODEL)
        letter = DeadLetter(job=encode(a_job(id=job)), subject=subject, record=record)
        await self.bus.append(subjects.dead_letter(LANE, job), encode(letter))

    async def left(self) -> list[str]:
        """Subjects of what is stored."""
        return [
            *await self.bus.subject_counts(subjects.results_stream(LANE)),
            *await self.bus.subject_counts(subjects.dead_letters_stream(LANE)),
        ]


async def a_world() -> Lane:
    """With lane `acme` set up."""
    lane = Lane()
    await set_up(lane.bus)
    return lane


async def test_a_jobs_result_and_letter_are_deleted_and_no_other() -> None:
    """The accounts keep the numbers."""
    lane = await a_world()
    for job in ("a", "b"):
        await lane.ended(job)
        await lane.given_up(job)
    assert await lane.eraser.erase_job("a") == Erased(results=1, dead_letters=1)
    assert await lane.left() == [f"results.{LANE}.b", f"dlq.{LANE}.b"]
    assert await lane.eraser.erase_job("a") == Erased()
    await lane.ended("c")
    assert total(await accounts(lane.bus)) == 3


async def test_a_lines_copy_is_deleted_with_its_result() -> None:
    """Also where the result itself ran out before."""
    lane = await a_world()
    line = "batch_1-7"
    for ends in (True, False):
        if ends:
            await lane.ended(line)
        await lane.bus.append(subjects.line_copy(LANE, "batch_1", 7), b"record")
        assert await lane.eraser.erase_job(line) == Erased(results=1)
        assert not await lane.bus.subject_counts(subjects.files_stream(LANE))


async def test_a_result_stays_until_it_is_counted() -> None:
    """Or the accounts would lack it for good."""
    lane = await a_world()
    await lane.ended("a", counted=False)
    assert await lane.eraser.erase_job("a") == Erased(uncounted=1)
    await lane.accounting.count(LANE)
    assert await lane.eraser.erase_job("a") == Erased(results=1)


@pytest.mark.parametrize("band", [2, 3])
async def test_a_result_stays_while_its_jobs_message_does(band: int) -> None:
    """Without it the job would run again."""
    lane = await a_world()
    subject = subjects.jobs(LANE, band, MODEL)
    stored = await lane.bus.append(subject, encode(a_job(id="a", band=band)))
    await lane.ended("a")
    await lane.ended("b")
    assert await lane.eraser.erase_before(lane.clock.now_s() + 1) == Erased(results=1, unsettled=1)
    await lane.bus.delete_message(stored.stream, stored.sequence)
    assert await lane.eraser.erase_job("a") == Erased(results=1)


async def test_what_is_older_goes_and_what_is_not_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the time of storing, in bounded walks, results and letters apart if asked."""
    monkeypatch.setattr(erasing, "RECORDS_AT_ONCE_MAX", 2)
    lane = await a_world()
    for job in "abcde":
        await lane.ended(job)
        await lane.given_up(job)
        lane.clock.advance(10.0)
    before_s = lane.clock.now_s() - 15.0
    told: list[int] = []
    erased = await lane.eraser.erase_before(
        before_s, dead_letters=False, progress=lambda one: told.append(one.results)
    )
    assert (erased, told) == (Erased(results=4), [2, 4, 4])
    assert await lane.eraser.erase_before(before_s, results=False) == Erased(dead_letters=4)
    assert await lane.left() == [f"results.{LANE}.e", f"dlq.{LANE}.e"]


async def test_what_is_deleted_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting alone leaves the text in the server's files."""
    lane = await a_world()
    asked: list[Any] = []
    delete = lane.bus.delete_message

    async def watched(stream: str, sequence: int, *, erase: bool = False) -> bool:
        asked.append((stream, erase))
        return await delete(stream, sequence)

    monkeypatch.setattr(lane.bus, "delete_message", watched)
    await lane.ended("a")
    await lane.given_up("a")
    await lane.eraser.erase_job("a")
    assert asked == [(f"RESULTS_{LANE}", True), (f"DLQ_{LANE}", True)]
