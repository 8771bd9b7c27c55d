"""What clients are told unasked, and what operators see: every queue, in slices."""

import asyncio
import json
from collections import Counter
from typing import Any

import msgspec
import pytest

from broker.core.events import QueueDepth
from broker.core.policy import LanePolicy, QuotaRow
from broker.core.views import QueueView, Views
from broker.service import announcements as module
from broker.service import snapshot
from broker.service.announcements import DEPTH_POLLS_MAX
from broker.service.queues import queue_consumers
from broker.service.snapshot import SLICE_S
from broker.service.views import lane_views
from broker.wire.codec import decode
from broker.wire.messages import LaneState
from tests.builders import LANE, MODEL, a_job
from tests.leaders import ADDRESS, OTHER_LANE, WORKER, Desk, a_desk, a_listing
from tests.turns import until


def depths(desk: Desk) -> list[tuple[str, int, int]]:
    """Depths the mind was told."""
    desk.turn()
    events = [event for event in desk.seen.events if isinstance(event, QueueDepth)]
    return [(event.lane, event.band, event.pending_jobs) for event in events]


async def test_each_lane_hears_of_all_its_queues() -> None:
    """Waiting here and in the stream, running, and its bound."""
    rows = (QuotaRow(lane=LANE, band=2, queued_jobs_max=7),)
    async with a_desk("outbox", policy={"quotas": rows}) as desk:
        heard: list[LaneState] = []
        await desk.bus.subscribe("q.*", lambda one: heard.append(decode(one.data, LaneState)))
        desk.beat(inflight=(a_listing("runs"),))
        await desk.hold(a_job())
        desk.leader.intake.depth(ADDRESS, 3)
        desk.turn()
        await desk.leader.announcements.publish_states_once()
        await until(lambda: len(heard) == 2)
        assert [(state.lane, state.epoch, len(state.queues)) for state in heard] == [
            (LANE, 1, 4),
            (OTHER_LANE, 1, 4),
        ]
        queue = heard[0].queues[2]
        assert (queue.band, queue.queued_jobs, queue.queued_jobs_max, queue.inflight_jobs) == (
            2,
            4,
            7,
            1,
        )


async def test_queues_are_told_in_json_beside_the_other_form() -> None:
    """On a subject of its own, so that no reader of msgpack trips over it."""
    async with a_desk("outbox") as desk:
        told: list[LaneState] = []
        heard: list[Any] = []
        state = f"q.{LANE}"
        await desk.bus.subscribe(state, lambda one: told.append(decode(one.data, LaneState)))
        await desk.bus.subscribe(f"{state}.json", lambda one: heard.append(json.loads(one.data)))
        await desk.leader.announcements.publish_states_once()
        await until(lambda: bool(told and heard))
        assert heard == [json.loads(msgspec.json.encode(told[0]))]


async def test_the_depth_of_a_queue_that_delivers_nothing_is_asked_for() -> None:
    """Its window is full: no delivery tells what came behind it, or what was purged."""
    async with a_desk() as desk:
        spec = queue_consumers(desk.config)[ADDRESS]
        await desk.publish(a_job())
        await desk.leader.announcements.poll_depth(ADDRESS, spec)
        await desk.bus.delete_message(f"JOBS_{LANE}", 1)
        await desk.leader.announcements.poll_depth(ADDRESS, spec)
        assert depths(desk) == [(LANE, 2, 1), (LANE, 2, 0)]


async def test_a_depth_that_cannot_be_had_is_asked_for_in_its_next_turn() -> None:
    """The server did not answer: what was known stands."""
    async with a_desk() as desk:
        desk.link.disconnect()
        spec = queue_consumers(desk.config)[ADDRESS]
        await desk.leader.announcements.poll_depth(ADDRESS, spec)
        assert depths(desk) == []


async def test_queues_beyond_one_seconds_polls_have_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DEPTH_POLLS_MAX a second, round and round."""
    monkeypatch.setattr(module, "QUEUE_STATE_S", 0.001)
    monkeypatch.setattr(module, "DEPTH_POLLS_MAX", 3)
    async with a_desk() as desk:
        queues = queue_consumers(desk.config)
        polling = asyncio.create_task(desk.leader.announcements.poll_depths(queues))
        await asyncio.wait_for(until(lambda: len(depths(desk)) >= len(queues)), 5)
        polling.cancel()
        told = depths(desk)[: len(queues)]
        assert sorted({(lane, band) for lane, band, _ in told}) == sorted(
            {(at.lane, at.band) for at in queues}
        )
        assert DEPTH_POLLS_MAX > 3


async def test_the_duties_of_telling_go_on_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each second, and each five."""
    monkeypatch.setattr(module, "QUEUE_STATE_S", 0.001)
    monkeypatch.setattr(module, "LEARNED_S", 0.001)
    async with a_desk() as desk:
        desk.learned.measured(MODEL, prompt_blocks=10, prompt_tokens=600)
        announcements = desk.leader.announcements
        duties = [
            asyncio.create_task(announcements.publish_states()),
            asyncio.create_task(announcements.publish_learned()),
        ]
        await asyncio.wait_for(until(lambda: len(desk.leader.outbox._mail) >= 4), 5)
        await asyncio.wait_for(until(lambda: desk.learned.news() is None), 5)
        for duty in duties:
            duty.cancel()


async def test_telling_of_many_queues_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """480 queues, each a tenth of a slice to read: others have their turn after a dozen or so."""
    lanes = tuple(LanePolicy(name=f"lane{number}") for number in range(120))
    async with a_desk(lanes=lanes) as desk:
        read: list[int] = []
        turns = 0
        look = Views.queue

        def counted_look(*args: Any, **kwargs: Any) -> QueueView:
            read.append(turns)
            return look(*args, **kwargs)

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        monkeypatch.setattr(Views, "queue", counted_look)
        # Work done is the clock, so that a busy machine is not a slow telling.
        monkeypatch.setattr(snapshot.time, "perf_counter", lambda: len(read) * SLICE_S / 10)
        counting = asyncio.create_task(count_turns())
        await desk.leader.announcements.publish_states_once()
        counting.cancel()
        assert len(read) == 480
        # Whole lanes of four, and the counter joins a turn late.
        assert max(Counter(read).values()) <= 2 * 12


async def test_lanes_and_workers_are_shown_with_their_rows() -> None:
    """A row of all lanes under each, a lane's own under itself."""
    lanes = (LanePolicy(name=LANE, bands=(1, 2), paused=True), LanePolicy(name=OTHER_LANE))
    rows = (QuotaRow(inflight_jobs_max=5), QuotaRow(lane=OTHER_LANE, inflight_tokens_max=9))
    async with a_desk(worker=True, lanes=lanes, policy={"quotas": rows}) as desk:
        one, other = lane_views(desk.leader.scheduler, desk.config.policy)
        assert (one.paused, [queue.band for queue in one.queues]) == (True, [1, 2])
        assert [row.row for row in one.rows] == ["all", f"lane={one.lane}"]
        assert [row.row for row in other.rows] == ["all", f"lane={OTHER_LANE}"]
        assert other.rows[0].inflight_jobs_max == 5
        (worker,) = desk.snapshots.workers()
        assert (worker.worker, worker.phase) == (WORKER, "live")
        assert (worker.breaker, worker.breaker_openings) == ("closed", 0)


async def test_a_standby_shows_itself_and_little_else() -> None:
    """It leads nobody."""
    async with a_desk(worker=True) as desk:
        desk.snapshots.leads(None)
        desk.clock.advance(5)
        status = desk.snapshots.status()
        assert (status.leader, status.epoch, status.since_s) == (False, 0, 5.0)
        assert list(desk.snapshots.lanes()) == list(desk.snapshots.workers()) == []
