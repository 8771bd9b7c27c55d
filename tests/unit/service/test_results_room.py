"""What a lane's results take: asked for, told to the mind, bounded by their stream, alarmed."""

import asyncio

import pytest

from broker.core.events import ResultsStand
from broker.core.policy import LanePolicy, QuotaRow
from broker.core.rows import RESULT_BYTES_TYPICAL
from broker.service import results_room as module
from broker.service.config_records import LaneRetention
from broker.service.results_room import ALARM_RATIO, FILL_RATIO_MAX, policy_of
from broker.wire.messages import Kind, Reason
from broker.wire.subjects import JobAddress
from tests.builders import LANE, MODEL, a_job
from tests.leaders import OTHER_LANE, Desk, Worker, a_config, a_desk
from tests.turns import until

STREAM_BYTES_MAX = 2_000_000
FILL_BYTES_MAX = int(FILL_RATIO_MAX * STREAM_BYTES_MAX)
ROW = f"lane={LANE}"


def _results(desk: Desk) -> list[ResultsStand]:
    return [one for one in desk.seen.events if isinstance(one, ResultsStand)]


def _turned(desk: Desk) -> bool:
    desk.turn()
    return True


async def fill(desk: Desk, stored_bytes: int, *, lane: str = LANE) -> None:
    """Let a lane's results take about so much, and let the mind hear of it."""
    for number in range(stored_bytes // 100_000):
        await desk.bus.append(f"results.{lane}.fill-{number}", bytes(100_000))
    await desk.leader.results_room.look(lane)
    desk.turn()


def test_every_lane_has_a_row_bound_by_its_stream() -> None:
    """Named or not; a row that allows more than its stream holds is lowered, others are left."""
    lanes = (LanePolicy(name=LANE), LanePolicy(name=OTHER_LANE), LanePolicy(name="third"))
    own = QuotaRow(lane=LANE, result_bytes_max=10_000)
    seats = QuotaRow(lane=OTHER_LANE, inflight_jobs_max=7)
    third = QuotaRow(lane="third", result_bytes_max=10 * STREAM_BYTES_MAX)
    config = a_config(lanes=lanes, policy={"quotas": (own, seats, third)})
    config = a_streams_config(config)
    rows = {row.lane: row for row in policy_of(config).quotas}
    assert rows[LANE] == own
    assert (rows[OTHER_LANE].inflight_jobs_max, rows[OTHER_LANE].result_bytes_max) == (
        7,
        FILL_BYTES_MAX,
    )
    assert rows["third"].result_bytes_max == FILL_BYTES_MAX
    assert len(rows) == len(lanes)


def test_a_lane_that_keeps_less_has_less_room() -> None:
    """Its own retention bounds its row, not that of all."""
    config = a_config()
    kept = (LaneRetention(lane=OTHER_LANE, results_bytes_max=10 * STREAM_BYTES_MAX),)
    rows = {row.lane: row for row in policy_of(module.replace(config, retention=kept)).quotas}
    assert rows[OTHER_LANE].result_bytes_max == 10 * FILL_BYTES_MAX
    assert rows[LANE].result_bytes_max == int(FILL_RATIO_MAX * config.streams.results_bytes_max)


def a_streams_config(config: module.Config) -> module.Config:
    """The same with small streams of results."""
    streams = module.replace(config.streams, results_bytes_max=STREAM_BYTES_MAX)
    return module.replace(config, streams=streams)


async def test_results_are_asked_for_in_every_lane() -> None:
    """Bytes of all and of one; what an empty stream's would take is assumed."""
    async with a_desk() as desk:
        room = desk.leader.results_room
        assert room.lanes == (LANE, OTHER_LANE)
        await room.look(LANE)
        for number in range(2):
            await desk.bus.append(f"results.{LANE}.j{number}", bytes(1000))
        await room.look(LANE)
        desk.turn()
        told = _results(desk)
        assert (told[0].stored_bytes, told[0].mean_bytes) == (0, RESULT_BYTES_TYPICAL)
        assert told[1].stored_bytes >= 2000
        assert told[1].mean_bytes == told[1].stored_bytes / 2
        (view,) = [one for one in desk.leader.scheduler.views.rows() if one.name == ROW]
        assert view.result_bytes == told[1].stored_bytes
        assert view.result_bytes_max == int(told[1].bytes_max)


async def test_results_that_cannot_be_asked_for_are_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server did not answer: what was known stands, and the duty goes on."""
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    async with a_desk() as desk:
        desk.link.disconnect()
        duty = asyncio.create_task(desk.leader.results_room.run())
        await asyncio.sleep(0.02)
        assert not duty.done()
        desk.link.reconnect()
        await until(lambda: _turned(desk) and _results(desk) != [])
        duty.cancel()


async def test_more_lanes_than_are_asked_for_at_once_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """LANES_AT_ONCE_MAX a second, round and round; one that is gone is passed over."""
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "LANES_AT_ONCE_MAX", 2)
    lanes = tuple(LanePolicy(name=f"l{number}") for number in range(5))
    async with a_desk(lanes=lanes) as desk:
        room = desk.leader.results_room
        duty = asyncio.create_task(room.run())
        await until(lambda: _turned(desk) and len(_results(desk)) >= 10)
        assert [one.lane for one in _results(desk)[:10]] == [
            f"l{number % 5}" for number in range(10)
        ]
        room.lanes = room.lanes[1:]
        before = len(_results(desk))
        await until(lambda: _turned(desk) and len(_results(desk)) >= before + 10)
        assert "l0" not in {one.lane for one in _results(desk)[before + 5 :]}
        duty.cancel()


async def test_a_full_stream_stops_its_lane_alone_and_is_alarmed_until_it_has_room() -> None:
    """No row is configured: the stream's own bound counts, as the server tells it."""
    async with a_desk(
        "closer", "outbox", worker=True, streams={"results_bytes_max": STREAM_BYTES_MAX}
    ) as desk:
        await Worker(desk.bus).listen()
        desk.allow()
        room = desk.leader.results_room
        await fill(desk, 1_500_000)
        await fill(desk, 0, lane=OTHER_LANE)
        assert room.used_ratios[LANE] < ALARM_RATIO
        assert room.scarce == ()
        for number in range(15, 19):
            await desk.bus.append(f"results.{LANE}.fill-{number}", bytes(100_000))
        await fill(desk, 0)
        assert room.scarce == (LANE,)
        desk.take(await desk.deliver(a_job(id="late")))
        await until(lambda: _turned(desk) and bool(desk.seen.ended))
        ((record, won),) = desk.seen.ended
        assert (record.kind, record.reason, won) == (Kind.REJECTED, Reason.RESULTS_FULL, True)
        desk.take(await desk.deliver(a_job(id="line", band=3)), JobAddress(LANE, 3, MODEL))
        job = a_job(id="other", lane=OTHER_LANE)
        desk.take(await desk.deliver(job), JobAddress(OTHER_LANE, 2, MODEL))
        other = desk.shelf.get(f"{OTHER_LANE}.other")
        assert other is not None
        assert other.sent is not None
        assert desk.held("line").sent is None
        for sequence in range(1, 10):
            await desk.bus.delete_message(f"RESULTS_{LANE}", sequence)
        await fill(desk, 0)
        assert room.scarce == ()
        assert desk.held("line").sent is not None
