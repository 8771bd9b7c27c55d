"""A window longer than RESULTS keeps records: no line is lost or run twice, no copy stays."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace

from broker.bus.topology import Bounds
from broker.bus.usage import counted_sequence
from broker.service import accounting
from broker.service.accounting import Accounting
from broker.wire import subjects
from broker.wire.codec import encode
from producers.batches import runner
from producers.batches.copies import Copies, sweep_copies
from producers.batches.records import Batch, Status
from tests.batches import lines
from tests.builders import LANE
from tests.buses import until
from tests.stored_batches import SMALL, Place, a_batch, a_place

AGE_S = 3600.0
"""How long RESULTS keeps a record here; the batches' window is 30 days."""

FILES = subjects.files_stream(LANE)
RESULTS = subjects.results_stream(LANE)


class Listener:
    """Hears of what was counted."""

    def usage_counted(self, lane: str, records: int) -> None:
        """Nothing to do."""

    def usage_gone(self, lane: str, records: int) -> None:
        raise AssertionError(lane, records)


@asynccontextmanager
async def a_lane(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Place]:
    """A lane, and a broker's accountant that counts its records."""
    monkeypatch.setattr(accounting, "PASS_S", 0.02)
    async with a_place(bounds=Bounds(results_age_s_max=AGE_S)) as place:
        await place.bus.kv_delete(subjects.USAGE_BUCKET, subjects.usage_mark_key(LANE))
        duty = Accounting(
            place.bus,
            results_age_s_max={LANE: AGE_S},
            hears=Listener(),
            now=asyncio.get_running_loop().time,
            cpu_s=lambda: 0.0,
        )
        async with asyncio.TaskGroup() as tasks:
            counting = tasks.create_task(duty.run())
            yield place
            counting.cancel()


async def copies_of(place: Place, batch: Batch) -> int:
    """How many copies of its lines' records stand."""
    subject = subjects.line_copy(LANE, batch.id, "*")
    return len(await place.bus.subject_counts(FILES, subject=subject))


async def until_idle(place: Place) -> None:
    """Wait until all jobs have ended and left their stream."""

    async def is_idle() -> bool:
        return not (await place.bus.stream_state(subjects.jobs_stream(LANE, 3))).messages

    await until(is_idle)


async def age_out(place: Place) -> None:
    """Drop all records, as the server does with old ones; the accounts had days for them."""

    async def are_counted() -> bool:
        state = await place.bus.stream_state(RESULTS)
        return await counted_sequence(place.bus, LANE) == state.last_sequence

    await until(are_counted)
    await place.bus.purge(RESULTS, ">")


async def left_behind(place: Place) -> Batch:
    """A batch whose runner died with eight lines under way, which then ended and aged out."""
    place.responder.may_run.clear()
    member = place.start_runner()
    batch = await place.create(lines(20), completion_window="30d")
    await until(lambda: len(place.responder.seen) == SMALL.lines_inflight_max)
    await member.kill()
    place.responder.may_run.set()
    await until_idle(place)
    await age_out(place)
    return batch


async def test_lines_that_ended_and_aged_out_while_nobody_ran_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next runner finds their copies: every line once, none run twice, no copy left."""
    async with a_lane(monkeypatch) as place:
        batch = await left_behind(place)
        assert await copies_of(place, batch) == SMALL.lines_inflight_max
        place.start_runner()
        ended = await place.ended(batch.id)
        await place.check(ended, (f"id-{number}" for number in range(20)))
        assert ended.status is Status.COMPLETED
        assert set(place.responder.runs.values()) == {1}

        async def are_gone() -> bool:
            return not await copies_of(place, batch)

        await until(are_gone)


async def test_without_copies_they_would_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above can fail."""
    async with a_lane(monkeypatch) as place:
        batch = await left_behind(place)
        await Copies(place.bus, batch).remove_all()
        place.start_runner()
        await place.ended(batch.id)
        assert sorted(place.responder.runs.values()) == [1] * 12 + [2] * 8


async def test_killed_between_written_and_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that stand are not written again, whether their record, its copy or neither stands."""
    async with a_lane(monkeypatch) as place:
        held = replace(SMALL, clear_after_s=60.0)
        member = place.start_runner(held)
        place.responder.run_s = 0.05
        batch = await place.create(lines(40), completion_window="30d")
        await place.when(batch.id, lambda one: one.counts.completed >= 8)
        await member.kill()
        await until_idle(place)
        await age_out(place)
        assert await copies_of(place, batch) >= 8
        place.start_runner()
        ended = await place.ended(batch.id)
        await place.check(ended, (f"id-{number}" for number in range(40)))
        assert set(place.responder.runs.values()) == {1}

        async def are_gone() -> bool:
            return not await copies_of(place, batch)

        await until(are_gone)


async def test_copies_of_batches_that_are_gone_or_ended_are_swept() -> None:
    """Those of an open one stay, and none goes before whoever asks can know."""
    async with a_place() as place:
        batches = {
            "batch_open": a_batch(id="batch_open", status=Status.IN_PROGRESS),
            "batch_ended": a_batch(id="batch_ended", status=Status.EXPIRED),
        }
        for batch in batches.values():
            key = subjects.batch_key(LANE, batch.id)
            await place.bus.kv_put(subjects.BATCHES_BUCKET, key, encode(batch))
        for batch_id in (*batches, "batch_gone"):
            for number in (1, 2):
                await place.bus.append(subjects.line_copy(LANE, batch_id, number), b"record")
        kept = await place.put(lines(1))
        assert await sweep_copies(place.bus, place.shelf) == 0
        assert await sweep_copies(place.bus, place.shelf, swept_after_s=-1.0) == 2
        left = await place.bus.subject_counts(FILES)
        assert list(left) == [
            subjects.file_chunks(LANE, kept.id),
            subjects.line_copy(LANE, "batch_open", 1),
            subjects.line_copy(LANE, "batch_open", 2),
        ]


async def test_every_runner_sweeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So copies of a batch that nobody came back to go in the end."""
    swept = asyncio.Event()

    async def sweep(_bus: object, shelf: object) -> int:
        assert shelf.lane == LANE  # pyright: ignore[reportAttributeAccessIssue]
        swept.set()
        return 0

    monkeypatch.setattr(runner, "sweep_copies", sweep)
    async with a_place() as place:
        place.start_runner(replace(SMALL, sweep_s=0.05))
        async with asyncio.timeout(20):
            await swept.wait()
