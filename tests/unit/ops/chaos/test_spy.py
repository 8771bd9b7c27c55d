"""The spied bus: what it writes down of a job, and where it lets its process die or stand."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from broker.bus import topology
from broker.bus.base import Bus, Delivery, Message, WrongSequence
from broker.bus.memory import MemoryBus
from broker.wire import codec, subjects
from broker.wire.messages import (
    Answer,
    Attempt,
    Dispatch,
    Job,
    Kind,
    Probe,
    TerminalRecord,
    WorkReply,
)
from ops.chaos import spy as spying
from ops.chaos.history import (
    Accepted,
    Acked,
    Held,
    HistoryEvent,
    Ordered,
    Recorded,
    Submitted,
    Taken,
    read,
)
from ops.chaos.plants import ONE_IN, Plant, is_hit, planted
from ops.chaos.spy import Place, Spy, a_spy, orders_file, standing_file
from tests.builders import LANE, MODEL

WORKER = "worker-1"
KEY = f"{LANE}.a"
QUEUE = subjects.jobs(LANE, 1, MODEL)


def a_job(job_id: str = "a") -> Job:
    """A job."""
    return Job(id=job_id, lane=LANE, band=1, model=MODEL, client="client-1", body=b"{}")


def a_record(job_id: str = "a") -> TerminalRecord:
    """Its record."""
    return TerminalRecord(job=job_id, lane=LANE, kind=Kind.COMPLETED, ended_at_s=1.0)


def an_order(ack_subject: str = "ack") -> Dispatch:
    """An order to run it."""
    return Dispatch(
        epoch=3,
        number=7,
        attempt=Attempt(3, 1),
        lane=LANE,
        stream=subjects.jobs_stream(LANE, 1),
        stream_sequence=1,
        ack_subject=ack_subject,
        job=codec.encode(a_job()),
        run_s_max=10.0,
        stall_s=10.0,
    )


@dataclass
class Stand:
    """A spied bus, and what it wrote."""

    folder: Path
    spy: Spy
    bus: Bus
    real: MemoryBus

    @property
    def history(self) -> list[HistoryEvent]:
        return read(self.folder)

    async def store_record(self, job_id: str = "a", *, bus: Bus | None = None) -> None:
        """Offer a record by compare-and-set."""
        await (bus or self.bus).append(
            subjects.result(LANE, job_id),
            codec.encode(a_record(job_id)),
            expected_last_subject_sequence=0,
        )


@asynccontextmanager
async def a_stand(folder: Path, *, name: str = WORKER) -> AsyncGenerator[Stand]:
    """Put a spy on a bus in memory."""
    real = MemoryBus()
    await topology.apply(real, topology.of([topology.LanePlan(LANE, (MODEL,))]))
    spy = a_spy(folder=folder, name=name)
    yield Stand(folder, spy, spy.on(real), real)
    await real.close()


async def test_a_submission_is_written_before_and_after(tmp_path: Path) -> None:
    """Accepted is what the stream's word says, not the wish."""
    async with a_stand(tmp_path) as stand:
        await stand.bus.append(QUEUE, codec.encode(a_job()))
    first, second = stand.history
    assert isinstance(first, Submitted)
    assert isinstance(second, Accepted)
    assert first.job == second.job == KEY


async def test_a_record_is_written_with_whether_it_won(tmp_path: Path) -> None:
    """The second one is known to have lost."""
    async with a_stand(tmp_path) as stand:
        await stand.store_record()
        with pytest.raises(WrongSequence):
            await stand.store_record()
    records = [event for event in stand.history if isinstance(event, Recorded)]
    assert [record.won for record in records] == [True, False]


async def test_an_order_is_written_by_both_its_sides(tmp_path: Path) -> None:
    """By the broker when it leaves, by the worker when it is accepted; its job's ack, too."""
    async with a_stand(tmp_path) as stand:

        async def accept(message: Message) -> None:
            reply = WorkReply(answer=Answer.ACCEPTED, epoch=3, incarnation=1)
            await stand.bus.publish(message.reply, codec.encode(reply))

        await stand.bus.subscribe(subjects.work(WORKER), accept)
        data = codec.encode(an_order())
        await stand.bus.request(subjects.work(WORKER), data, timeout_s=1.0)
    ordered, taken = stand.history
    assert isinstance(ordered, Ordered)
    assert isinstance(taken, Taken)
    assert (taken.job, taken.worker, taken.epoch, taken.number) == (KEY, WORKER, 3, 7)
    assert stand.spy.acks == {"ack": KEY}


@pytest.mark.parametrize("answer", sorted(set(Answer) - {Answer.ACCEPTED}))
async def test_an_order_that_was_refused_is_not_taken(tmp_path: Path, answer: Answer) -> None:
    """Only an accepted one may run."""
    async with a_stand(tmp_path) as stand:

        async def refuse(message: Message) -> None:
            reply = WorkReply(answer=answer, epoch=3, incarnation=1)
            await stand.bus.publish(message.reply, codec.encode(reply))

        await stand.bus.subscribe(subjects.work(WORKER), refuse)
        for order in (an_order(), Probe(epoch=3, number=8)):
            await stand.bus.request(subjects.work(WORKER), codec.encode(order), timeout_s=1.0)
    assert [type(event) for event in stand.history] == [Ordered]


async def test_an_ack_is_written_once_the_server_confirmed_it(tmp_path: Path) -> None:
    """Of a job that was pulled here."""
    async with a_stand(tmp_path) as stand:
        await stand.real.append(QUEUE, codec.encode(a_job()))
        pulled = asyncio.get_running_loop().create_future()
        stream, consumer = subjects.jobs_stream(LANE, 1), subjects.job_consumer(1, MODEL)
        pull = await stand.bus.pull(stream, consumer, pulled.set_result, window=1)
        (delivery,) = await pulled
        await stand.bus.ack(delivery.ack_subject)
        await pull.stop()
    held, acked = stand.history
    assert isinstance(held, Held)
    assert isinstance(acked, Acked)
    assert held.job == acked.job == KEY


async def test_garbage_passes_unwritten(tmp_path: Path) -> None:
    """What is no message is the product's business."""
    async with a_stand(tmp_path) as stand:
        heard = asyncio.Event()
        await stand.bus.subscribe(subjects.work(WORKER), lambda _: heard.set())
        await stand.real.publish(subjects.work(WORKER), b"\xff", reply="_INBOX.x")
        await heard.wait()
    assert stand.history == []


async def test_a_process_stands_at_its_place_until_the_order_is_taken_back(tmp_path: Path) -> None:
    """The whole loop stands; what was about to happen happens then."""
    async with a_stand(tmp_path) as stand:
        place = Place("append", "before", "results.", "record", dies=False)
        orders = orders_file(tmp_path, WORKER)
        orders.write_text(place.order())

        def release() -> bool:
            standing = standing_file(orders)
            while not standing.exists():
                pass
            there = not any(isinstance(event, Recorded) for event in read(tmp_path))
            standing.unlink()
            return there

        watching = asyncio.get_running_loop().run_in_executor(None, release)
        await stand.store_record()
        assert await watching
    assert isinstance(stand.history[0], Recorded)


async def test_a_process_that_nobody_releases_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever told it to stand may be gone."""
    monkeypatch.setattr(spying, "STANDS_S_MAX", 0.01)
    async with a_stand(tmp_path) as stand:
        place = Place("append", "after", "results.", "record", dies=False)
        orders_file(tmp_path, WORKER).write_text(place.order())
        await stand.store_record()
        assert not standing_file(orders_file(tmp_path, WORKER)).exists()


@pytest.mark.parametrize("text", ["", "die", "die run", "die run append", "\0"])
async def test_an_order_that_can_t_be_read_is_left_alone(tmp_path: Path, text: str) -> None:
    """Nobody dies of it."""
    async with a_stand(tmp_path) as stand:
        orders_file(tmp_path, WORKER).write_text(text)
        await stand.store_record()
    assert len(stand.history) == 1


# ---- plants, which work on the same bus ----


def hit_job() -> str:
    """Name a job that plants hit."""
    return next(name for name in map(str, range(100 * ONE_IN)) if is_hit(name))


async def test_without_a_plant_the_bus_is_the_bus(tmp_path: Path) -> None:
    """Nothing stands between."""
    async with a_stand(tmp_path) as stand:
        assert planted(stand.bus, None) is stand.bus


async def test_planted_to_lose_a_record_is_not_stored(tmp_path: Path) -> None:
    """And its writer believes that it is; other records are."""
    async with a_stand(tmp_path) as stand:
        bus = planted(stand.bus, Plant.LOSE)
        await stand.store_record(hit_job(), bus=bus)
        await stand.store_record(f"{hit_job()}-other", bus=bus)
        stored = await stand.real.subject_counts(subjects.results_stream(LANE))
    assert not is_hit(f"{hit_job()}-other")
    assert list(stored) == [subjects.result(LANE, f"{hit_job()}-other")]


async def test_planted_to_double_two_records_win(tmp_path: Path) -> None:
    """The second stands."""
    async with a_stand(tmp_path) as stand:
        await stand.store_record(hit_job(), bus=planted(stand.bus, Plant.DOUBLE))
    assert [event.won for event in stand.history if isinstance(event, Recorded)] == [True, True]


async def test_planted_to_be_stuck_a_job_is_not_handed_over(tmp_path: Path) -> None:
    """The one that is hit; the next is."""
    async with a_stand(tmp_path) as stand:
        bus = planted(stand.bus, Plant.STUCK)
        for name in (hit_job(), "a"):
            await stand.real.append(QUEUE, codec.encode(a_job(name)))
        got: list[str] = []
        seen = asyncio.Event()

        def take(deliveries: list[Delivery]) -> None:
            got.extend(codec.decode(one.data, Job).id for one in deliveries)
            if got:
                seen.set()

        stream, consumer = subjects.jobs_stream(LANE, 1), subjects.job_consumer(1, MODEL)
        pull = await bus.pull(stream, consumer, take, window=10)
        await seen.wait()
        await pull.stop()
    assert not is_hit("a")
    assert got == ["a"]
