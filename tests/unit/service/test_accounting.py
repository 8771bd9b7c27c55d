"""Each terminal record is counted once, whoever dies; what can't be counted is an alarm."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.bus.base import Bus, LinkDown, Timeout, WrongSequence
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.bus.usage import counted_sequence, uncounted_records, usage_days, usage_mark
from broker.service import accounting
from broker.service.accounting import (
    BEHIND_S_MAX,
    BUSY_S_MAX,
    BUSY_SHARE,
    REWOUND_PASSES,
    WRITES_MAX,
    Accounting,
)
from broker.wire import subjects
from broker.wire.messages import Kind, Usage
from broker.wire.usage import OTHERS, CountedRecord, UsageRow, day_of, summed
from tests.accounts import a_terminal_record, accounts, set_up, store, sums_of_records, total
from tests.builders import LANE, MODEL
from tests.crashing import Failing, Gate, faulty

AGE_S = 3 * 86_400.0


class Office:
    """A lane, a clock, and accountants of it."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.bus = MemoryBus(clock=self.clock)
        self.counted: Counter[str] = Counter()
        self.gone: Counter[str] = Counter()
        self.cpu_s = 0.0

    def accountant(self, bus: Bus | None = None, *lanes: str) -> Accounting:
        """One leader's duty."""
        return Accounting(
            bus or self.bus,
            results_age_s_max=dict.fromkeys(lanes or (LANE,), AGE_S),
            hears=self,
            now=self.clock.now_s,
            cpu_s=lambda: self.cpu_s,
        )

    def usage_counted(self, lane: str, records: int) -> None:
        self.counted[lane] += records

    def usage_gone(self, lane: str, records: int) -> None:
        self.gone[lane] += records


async def an_office() -> Office:
    """With lane `acme` set up."""
    office = Office()
    await set_up(office.bus)
    return office


async def test_records_are_summed_by_key_model_and_day() -> None:
    """Jobs by kind, tokens as the engine counted them; a day is the server's, in UTC."""
    office = await an_office()
    await store(office.bus, a_terminal_record("a", api_key_name="alice"))
    await store(office.bus, a_terminal_record("b", api_key_name="alice", usage=Usage(1, 0, 1)))
    await store(office.bus, a_terminal_record("c", api_key_name="bob", kind=Kind.FAILED))
    first_day = day_of(office.clock.now_s())
    accountant = office.accountant()
    await accountant.count(LANE)
    office.clock.advance(86_400.0)
    await store(office.bus, a_terminal_record("d", model="other", kind=Kind.CANCELLED))
    await accountant.count(LANE)
    tokens = {"prompt_tokens": 10, "cached_tokens": 4, "output_tokens": 3}
    alice = {"completed": 2, "prompt_tokens": 11, "cached_tokens": 4, "output_tokens": 4}
    assert await accounts(office.bus) == {
        (first_day, "alice", MODEL): alice,
        (first_day, "bob", MODEL): {"failed": 1, **tokens},
        (day_of(office.clock.now_s()), "", "other"): {"cancelled": 1, **tokens},
    }
    assert await accounts(office.bus) == await sums_of_records(office.bus)
    assert office.counted == {LANE: 4}
    assert not office.gone


async def test_counting_twice_adds_nothing() -> None:
    """Nor does a new leader that begins where the mark stands."""
    office = await an_office()
    for number in range(5):
        await store(office.bus, a_terminal_record(f"job-{number}"))
    for accountant in (office.accountant(), office.accountant()):
        await accountant.count(LANE)
        await accountant.count(LANE)
    assert total(await accounts(office.bus)) == 5
    assert await counted_sequence(office.bus, LANE) == 5
    assert await uncounted_records(office.bus, LANE) == 0


CRASHES = {
    "before the day": ("kv_create", "before", LinkDown("cut")),
    "the day is stored, its answer lost": ("kv_create", "after", Timeout("lost")),
    "before the mark": ("kv_update", "before", LinkDown("cut")),
}


@pytest.mark.parametrize("crash", CRASHES.values(), ids=CRASHES)
@pytest.mark.parametrize("number", range(1, 5))
async def test_a_crash_between_any_two_steps_counts_no_record_twice(
    crash: tuple[Any, Any, Exception], number: int
) -> None:
    """The day's sums and the last sequence counted stand in one value."""
    office = await an_office()
    operation, when, error = crash
    left = number

    def fault(step: Any) -> None:
        nonlocal left
        if (step.operation, step.when) == (operation, when):
            left -= 1
            if not left:
                raise error

    dying = office.accountant(faulty(office.bus, fault))
    for day in range(3):
        await store(office.bus, a_terminal_record(f"early-{day}"))
        await dying.count_in_turn(LANE)
        office.clock.advance(50_000.0)
        await store(office.bus, a_terminal_record(f"late-{day}"))
        await dying.count_in_turn(LANE)
    await office.accountant().count(LANE)
    assert await accounts(office.bus) == await sums_of_records(office.bus)
    assert total(await accounts(office.bus)) == 6


async def test_a_leader_that_is_deposed_without_knowing_adds_nothing() -> None:
    """Both read the same records; the second write finds them counted."""
    office = await an_office()
    await store(office.bus, a_terminal_record("a"))
    gate = Gate("kv_create", prefix=subjects.USAGE_BUCKET)
    old = office.accountant(faulty(office.bus, gate))
    counting = asyncio.create_task(old.count_in_turn(LANE))
    await gate.reached.wait()
    await store(office.bus, a_terminal_record("b"))
    await office.accountant().count(LANE)
    gate.open.set()
    await counting
    await store(office.bus, a_terminal_record("c"))
    await old.count_in_turn(LANE)
    await office.accountant().count(LANE)
    assert total(await accounts(office.bus)) == 3


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), failures=st.floats(0.0, 0.4))
def test_sums_equal_the_records_under_any_faults(seed: int, failures: float) -> None:
    """Two leaders in turn and at once, calls that fail before or after they reached the server."""
    asyncio.run(_sums_equal(random.Random(seed), failures))


async def _sums_equal(chance: random.Random, failures: float) -> None:
    office = await an_office()

    def fault(_: Any) -> None:
        if chance.random() < failures:
            raise LinkDown("cut") if chance.random() < 0.5 else Timeout("lost")

    accountants = [office.accountant(faulty(office.bus, fault)) for _ in range(2)]
    kinds = list(Kind)
    for number in range(60):
        record = a_terminal_record(
            f"job-{number}",
            kind=chance.choice(kinds),
            api_key_name=chance.choice(["", "alice", "bob"]),
            usage=Usage(chance.randrange(100), chance.randrange(10), chance.randrange(50)),
        )
        await store(office.bus, record)
        if number % 20 == 10:
            office.clock.advance(80_000.0)
        if chance.random() < 0.3:
            accountants[chance.randrange(2)] = office.accountant(faulty(office.bus, fault))
        if chance.random() < 0.3:
            await asyncio.gather(*(one.count_in_turn(LANE) for one in accountants))
        else:
            await chance.choice(accountants).count_in_turn(LANE)
    await office.accountant().count(LANE)
    assert await accounts(office.bus) == await sums_of_records(office.bus)
    assert total(await accounts(office.bus)) == 60
    assert not office.gone


async def test_a_rejection_that_runs_out_counts_nowhere() -> None:
    """Whether it was seen or not; the leader that wrote it knows why its place is empty."""
    office = await an_office()
    accountant = office.accountant()
    await store(office.bus, a_terminal_record("a"))
    await accountant.count(LANE)
    refused = a_terminal_record("b", kind=Kind.REJECTED, retry_after_s=1.0, usage=Usage())
    accountant.short_lived(LANE, await store(office.bus, refused, ttl_s=1.0))
    office.clock.advance(2.0)
    await store(office.bus, a_terminal_record("c"))
    await store(office.bus, refused, ttl_s=1.0)
    await accountant.count(LANE)
    assert total(await accounts(office.bus)) == 2
    assert not office.gone
    assert not accountant._short_lived[LANE]


async def test_a_rejection_for_good_is_counted() -> None:
    """Nobody will try that job again."""
    office = await an_office()
    await store(office.bus, a_terminal_record("a", kind=Kind.REJECTED, usage=Usage()))
    await office.accountant().count(LANE)
    assert total(await accounts(office.bus), ["rejected"]) == 1


async def test_a_record_that_was_deleted_uncounted_is_an_alarm() -> None:
    """With its number; the others are counted."""
    office = await an_office()
    accountant = office.accountant()
    await store(office.bus, a_terminal_record("a"))
    await accountant.count(LANE)
    _, gone, _ = [await store(office.bus, a_terminal_record(name)) for name in "bcd"]
    await office.bus.delete_message(subjects.results_stream(LANE), gone)
    await accountant.count(LANE)
    assert office.gone == {LANE: 1}
    assert total(await accounts(office.bus)) == 3
    assert (accountant.trouble(), accountant.trouble()) == (
        f"1 results of {LANE} left uncounted",
        "",
    )


async def test_a_lane_that_can_not_be_counted_for_long_is_an_alarm() -> None:
    """BEHIND_S_MAX: until then it may be a takeover."""
    office = await an_office()
    failing = Failing("kv_get", LinkDown("cut"), times=3)
    accountant = office.accountant(faulty(office.bus, failing))
    for _ in range(3):
        await accountant.count_in_turn(LANE)
        office.clock.advance(BEHIND_S_MAX / 2)
    assert accountant.trouble() == f"results of {LANE} can't be counted"
    await accountant.count_in_turn(LANE)
    assert accountant.trouble() == ""


async def test_gaps_from_before_a_leader_alarm_only_if_nobody_counted_for_days() -> None:
    """Its predecessor's rejections leave gaps; records do so once they are older than they keep."""
    for idle_s, gone in ((60.0, 0), (AGE_S + 1, 1)):
        office = await an_office()
        await store(office.bus, a_terminal_record("a"))
        await office.accountant().count(LANE)
        sequence = await store(office.bus, a_terminal_record("b"))
        await office.bus.delete_message(subjects.results_stream(LANE), sequence)
        office.clock.advance(idle_s)
        await store(office.bus, a_terminal_record("c"))
        await office.accountant().count(LANE)
        assert office.gone[LANE] == gone


async def test_an_idle_lanes_mark_says_that_somebody_counts() -> None:
    """Written anew each hour, so that its age means what it says."""
    office = await an_office()
    accountant = office.accountant()
    await store(office.bus, a_terminal_record("a"))
    await accountant.count(LANE)
    office.clock.advance(AGE_S + 1)
    await accountant.count(LANE)
    mark = await usage_mark(office.bus, LANE)
    assert (mark.sequence, mark.at_s) == (1, office.clock.now_s())


async def test_a_stream_that_lost_its_end_is_counted_from_its_new_end() -> None:
    """Only when it is seen again and again: one look may be at a server that is behind."""
    office = await an_office()
    accountant = office.accountant()
    for name in "abc":
        await store(office.bus, a_terminal_record(name))
    await accountant.count(LANE)
    stream = office.bus.server.stream(subjects.results_stream(LANE))
    stream.remove(3)
    stream.last_sequence = 2
    for _ in range(REWOUND_PASSES - 1):
        await accountant.count(LANE)
    assert await counted_sequence(office.bus, LANE) == 3
    await accountant.count(LANE)
    assert await counted_sequence(office.bus, LANE) == 2
    await store(office.bus, a_terminal_record("d"))
    await accountant.count(LANE)
    # Four were stored and each was counted, the lost one, too.
    assert total(await accounts(office.bus)) == 4
    stale = office.accountant()
    await stale.count(LANE)
    stale._lanes[LANE].mark = (await usage_mark(office.bus, LANE)).__class__(
        lane=LANE, sequence=2, generation=0
    )
    with pytest.raises(WrongSequence):
        await stale.count(LANE)
    assert total(await accounts(office.bus)) == 4


async def test_a_record_that_can_not_be_read_is_a_failed_job() -> None:
    """As all who read it say."""
    office = await an_office()
    await office.bus.append(subjects.result(LANE, "x"), b"\xc1")
    await office.accountant().count(LANE)
    assert list((await accounts(office.bus)).values()) == [{"failed": 1}]


async def test_a_lane_that_fails_does_not_keep_the_others_from_being_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each in its turn, again and again."""
    monkeypatch.setattr(accounting, "PASS_S", 0.001)
    office = Office()
    await set_up(office.bus, LANE, "beta")
    await store(office.bus, a_terminal_record("a"))
    await store(office.bus, a_terminal_record("b", lane="beta"))
    failing = Failing("kv_get", LinkDown("cut"), times=3)
    accountant = office.accountant(faulty(office.bus, failing), LANE, "beta")
    running = asyncio.create_task(accountant.run())
    async with asyncio.timeout(10):
        while office.counted != {LANE: 1, "beta": 1}:
            await asyncio.sleep(0)
    running.cancel()
    assert failing.raised == 3
    assert total(await accounts(office.bus, "beta")) == 1


async def test_a_busy_broker_counts_later_but_not_much_later() -> None:
    """BUSY_SHARE of a core since the last look puts a pass off, for BUSY_S_MAX at a time."""
    office = await an_office()
    accountant = office.accountant()
    put_off: list[bool] = []
    for _ in range(int(BUSY_S_MAX) + 3):
        office.clock.advance(1.0)
        office.cpu_s += BUSY_SHARE + 0.1
        put_off.append(accountant.is_put_off())
    assert put_off == [*[True] * int(BUSY_S_MAX), False, True, True]
    office.clock.advance(1.0)
    office.cpu_s += BUSY_SHARE - 0.1
    assert not accountant.is_put_off()


async def test_many_records_are_counted_in_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """RECORDS_AT_ONCE_MAX between two writes, the loop's other work in between."""
    monkeypatch.setattr(accounting, "RECORDS_AT_ONCE_MAX", 10)
    office = await an_office()
    for number in range(45):
        await store(office.bus, a_terminal_record(f"job-{number}"))
    writes: list[str] = []
    watched = faulty(
        office.bus,
        lambda step: writes.append(step.when) if step.operation == "kv_update" else None,
    )
    await office.accountant(watched).count(LANE)
    assert writes.count("before") == 4 + 4
    assert total(await accounts(office.bus)) == 45


def test_names_beyond_the_bound_are_summed_together() -> None:
    """A caller's word can't make a day's value grow without end, and no number is lost."""
    records = [CountedRecord(Kind.COMPLETED, MODEL, f"key-{n}", Usage(1, 0, 2)) for n in range(9)]
    rows = summed((), records[:4], rows_max=4)
    rows = summed(rows, records[4:], rows_max=4)
    assert [row.api_key_name for row in rows] == [OTHERS, "key-0", "key-1", "key-2"]
    assert sum(row.jobs for row in rows) == 9
    assert rows[0] == UsageRow(OTHERS, OTHERS, completed=6, prompt_tokens=6, output_tokens=12)


async def test_days_are_read_by_lane_and_bounds() -> None:
    """Both bounds included."""
    office = Office()
    await set_up(office.bus, LANE, "beta")
    accountant = office.accountant(None, LANE, "beta")
    days: list[str] = []
    for number in range(3):
        days.append(day_of(office.clock.now_s()))
        for lane in (LANE, "beta"):
            await store(office.bus, a_terminal_record(f"job-{number}", lane=lane))
            await accountant.count(lane)
        office.clock.advance(86_400.0)

    async def read(**bounds: Any) -> list[tuple[str, str]]:
        return [(one.lane, one.day) async for one in usage_days(office.bus, **bounds)]

    assert await read(lanes=["beta"], since=days[1]) == [("beta", days[1]), ("beta", days[2])]
    assert await read(until=days[0]) == [(LANE, days[0]), ("beta", days[0])]
    assert len(await read()) == 6


async def test_a_write_that_is_overtaken_again_and_again_is_left_for_the_next_turn() -> None:
    """WRITES_MAX tries: it may be a replica that is behind that is read."""
    office = await an_office()
    await store(office.bus, a_terminal_record("a"))
    failing = Failing("kv_create", WrongSequence("behind"), times=WRITES_MAX)
    accountant = office.accountant(faulty(office.bus, failing))
    with pytest.raises(WrongSequence):
        await accountant.count(LANE)
    assert failing.raised == WRITES_MAX
    await accountant.count_in_turn(LANE)
    assert total(await accounts(office.bus)) == 1
