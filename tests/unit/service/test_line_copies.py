"""Records of batch lines are copied where they may be needed for longer than RESULTS keeps them."""

from typing import Any

import pytest

from broker.bus.base import (
    BusError,
    LinkDown,
    NotFound,
    PayloadTooLarge,
    StoredMessage,
    StreamFull,
)
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.bus.usage import counted_sequence
from broker.service import accounting, line_copies
from broker.service.accounting import Accounting
from broker.service.line_copies import PATIENCE_S, LineCopies
from broker.wire import subjects
from broker.wire.batches import is_needed_longer
from broker.wire.codec import JSON_HEADERS, encode
from broker.wire.ids import line_job_id
from broker.wire.messages import Kind
from tests.accounts import a_terminal_record, accounts, set_up, store, total
from tests.builders import LANE
from tests.crashing import Failing, faulty
from tests.stored_batches import a_batch

DAY_S = 86_400.0
AGE_S = 3 * DAY_S
BATCH = "batch_1"
FILES = subjects.files_stream(LANE)
ANY_COPY = subjects.line_copy(LANE, "*", "*")


class Office:
    """A lane with a batch of 30 days, and who counts its records."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = MemoryBus(clock=self.clock)
        self.counted = 0

    async def set_up(self, **fields: Any) -> None:
        """Make the streams, and the batch."""
        await set_up(self.bus)
        batch = a_batch(
            id=BATCH, **{"created_at_s": self.clock.now_s(), "window_s": 30 * DAY_S, **fields}
        )
        key = subjects.batch_key(LANE, batch.id)
        await self.bus.kv_put(subjects.BATCHES_BUCKET, key, encode(batch))

    def accountant(self, bus: Any = None) -> Accounting:
        """One leader's duty."""
        return Accounting(
            bus or self.bus,
            results_age_s_max={LANE: AGE_S},
            hears=self,
            now=self.clock.now_s,
            cpu_s=lambda: 0.0,
        )

    def usage_counted(self, lane: str, records: int) -> None:
        assert lane == LANE
        self.counted += records

    def usage_gone(self, lane: str, records: int) -> None:
        raise AssertionError(lane, records)

    async def end(self, job: str, **fields: Any) -> None:
        """A job ends."""
        await store(self.bus, a_terminal_record(job, **fields))

    async def copies(self) -> list[str]:
        """Subjects of the copies that stand."""
        return list(await self.bus.subject_counts(FILES, subject=ANY_COPY))


async def an_office(**fields: Any) -> Office:
    """With everything set up."""
    office = Office()
    await office.set_up(**fields)
    return office


@pytest.mark.parametrize(
    ("age_s", "left_s", "needed"),
    [
        (3 * DAY_S, 30 * DAY_S, True),
        (3 * DAY_S, 2 * DAY_S + 1, True),
        (3 * DAY_S, 2 * DAY_S, False),
        (3600.0, 2401.0, True),
        (3600.0, 2400.0, False),
        (31 * DAY_S, 30 * DAY_S, False),
        (0.0, 30 * DAY_S, False),
    ],
)
def test_needed_beyond_the_window_and_a_third_of_the_age(
    age_s: float, left_s: float, needed: bool
) -> None:
    """A day at most; and what never ages out needs no copy."""
    assert is_needed_longer(stored_at_s=9.0, age_s=age_s, deadline_at_s=9.0 + left_s) is needed


async def test_a_line_is_copied_word_for_word_and_counted() -> None:
    """With its headers; what is no line of a known batch is counted alone."""
    office = await an_office()
    line, answer = line_job_id(BATCH, 7), encode(a_terminal_record(line_job_id(BATCH, 7)))
    await office.bus.append(subjects.result(LANE, line), answer, headers=JSON_HEADERS)
    for other in ("job", "batch_1", "batch_1-x", "batch_other-7", "abatch_1-7"):
        await office.end(other)
    await office.accountant().count(LANE)
    assert await office.copies() == [subjects.line_copy(LANE, BATCH, 7)]
    copy = await office.bus.last_message(FILES, subjects.line_copy(LANE, BATCH, 7))
    assert (copy.data, copy.headers) == (answer, JSON_HEADERS)
    assert total(await accounts(office.bus)) == office.counted == 6


async def test_a_copy_outlives_its_record() -> None:
    """The record ages out after its three days, the copy stands at the window's end."""
    office = await an_office()
    await office.end(line_job_id(BATCH, 1))
    await office.accountant().count(LANE)
    office.clock.advance(30 * DAY_S)
    results = subjects.results_stream(LANE)
    assert (await office.bus.stream_state(results)).messages == 0
    assert await office.copies() == [subjects.line_copy(LANE, BATCH, 1)]
    office.clock.advance(31 * DAY_S)
    assert not await office.copies()


async def test_nothing_is_copied_near_the_end_of_a_window() -> None:
    """RESULTS keeps it for long enough by itself."""
    office = await an_office(window_s=2 * DAY_S)
    await office.end(line_job_id(BATCH, 1))
    await office.accountant().count(LANE)
    assert not await office.copies()
    assert office.counted == 1


async def test_what_runs_out_is_not_copied() -> None:
    """A rejection's job comes again."""
    office = await an_office()
    refused = a_terminal_record(line_job_id(BATCH, 1), kind=Kind.REJECTED, retry_after_s=1.0)
    await store(office.bus, refused, ttl_s=1.0)
    await office.accountant().count(LANE)
    assert not await office.copies()


async def test_no_record_is_counted_before_it_is_copied() -> None:
    """Or a runner might take the record away, and the copy come after it."""
    office = await an_office()
    await office.end(line_job_id(BATCH, 1))
    failing = Failing("append", times=1, error=LinkDown("cut"))
    accountant = office.accountant(faulty(office.bus, failing))
    with pytest.raises(LinkDown):
        await accountant.count(LANE)
    assert await counted_sequence(office.bus, LANE) == 0
    await accountant.count(LANE)
    assert (await counted_sequence(office.bus, LANE), len(await office.copies())) == (1, 1)


async def test_a_leader_that_died_in_between_copies_once() -> None:
    """Its successor reads the same records again."""
    office = await an_office()
    for number in range(1, 6):
        await office.end(line_job_id(BATCH, number))
    failing = Failing("kv_create", times=1, error=LinkDown("cut"))
    with pytest.raises(LinkDown):
        await office.accountant(faulty(office.bus, failing)).count(LANE)
    assert len(await office.copies()) == 5
    await office.accountant().count(LANE)
    assert (await office.bus.stream_state(FILES)).messages == 5
    assert total(await accounts(office.bus)) == 5


@pytest.mark.parametrize("error", [StreamFull("full"), PayloadTooLarge("large")])
async def test_what_finds_no_room_is_counted_and_said(error: BusError) -> None:
    """Bills don't wait for somebody to delete files."""
    office = await an_office()
    await office.end(line_job_id(BATCH, 1))
    failing = Failing("append", times=1, error=error)
    accountant = office.accountant(faulty(office.bus, failing))
    await accountant.count(LANE)
    assert office.counted == 1
    assert "could not be copied" in accountant.trouble()
    assert not accountant.trouble()


async def test_accounts_wait_for_copies_with_patience() -> None:
    """And no longer: what is wrong for minutes is wrong for good."""
    office = await an_office()
    await office.end(line_job_id(BATCH, 1))
    failing = Failing("append", times=3, error=LinkDown("cut"))
    accountant = office.accountant(faulty(office.bus, failing))
    with pytest.raises(LinkDown):
        await accountant.count(LANE)
    office.clock.advance(PATIENCE_S - 1)
    with pytest.raises(LinkDown):
        await accountant.count(LANE)
    office.clock.advance(1)
    await accountant.count(LANE)
    assert office.counted == 1
    assert "could not be copied" in accountant.trouble()


async def test_many_large_lines_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be copied is bounded."""
    monkeypatch.setattr(accounting, "LINE_BYTES_MAX", 2500)
    seen: list[int] = []
    copy = LineCopies.copy

    async def noted(self: LineCopies, lane: str, lines: list[StoredMessage], **given: Any) -> int:
        seen.append(sum(len(one.data) for one in lines))
        return await copy(self, lane, lines, **given)

    monkeypatch.setattr(LineCopies, "copy", noted)
    office = await an_office()
    for number in range(1, 8):
        await office.end(line_job_id(BATCH, number), body=b"x" * 1000)
    await office.accountant().count(LANE)
    assert len(await office.copies()) == 7
    assert len(seen) == 3
    assert max(seen) < 2500 + 1500


async def test_deadlines_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is read again."""
    monkeypatch.setattr(line_copies, "DEADLINES_MAX", 2)
    office = await an_office()
    copies = LineCopies(office.bus, now=office.clock.now_s)
    for number in (1, 2, 3):
        batch = a_batch(id=f"batch_{number}", created_at_s=office.clock.now_s(), window_s=9e6)
        await office.bus.kv_put("BATCHES", subjects.batch_key(LANE, batch.id), encode(batch))
        line = line_job_id(batch.id, 1)
        stored = StoredMessage(subjects.result(LANE, line), number, b"", office.clock.now_s())
        assert await copies.copy(LANE, [stored], age_s=AGE_S) == 0
    assert len(copies._deadlines_at_s) == 2
    assert len(await office.copies()) == copies.copied == 3
    with pytest.raises(NotFound):
        await office.bus.last_message(FILES, subjects.line_copy(LANE, "batch_1", 2))
