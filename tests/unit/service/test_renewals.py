"""Held jobs do not come again while they wait: renewed in time, each in its turn."""

import asyncio
import time

from broker.bus.base import LinkDown
from broker.service.held import Held, Shelf
from broker.service.renewals import LOOKS_PER_PERIOD, RENEWALS_PER_TURN_MAX
from tests.builders import a_job
from tests.crashing import Failing
from tests.leaders import a_delivery, a_desk
from tests.turns import until


async def test_a_held_job_is_not_delivered_again_however_long_it_waits() -> None:
    """Ten ack-waits pass; the message is still delivered, once."""
    async with a_desk() as desk:
        held = await desk.hold(a_job())
        for _ in range(10):
            desk.clock.advance(desk.config.broker.renew_s + 1)
            assert await desk.leader.renewals.renew_due() == 1
        assert await desk.leader.renewals.renew_due() == 0
        state = await desk.bus.consumer_state(held.stream, "b2-tiny")
        assert (state.ack_pending, state.pending) == (1, 0)


async def test_a_running_job_is_its_agents_to_renew() -> None:
    """Until it waits here again: then it is first."""
    async with a_desk() as desk:
        desk.take(a_delivery(a_job(id="a")))
        desk.take(a_delivery(a_job(id="b"), sequence=2))
        desk.shelf.runs(desk.held("b"))
        desk.clock.advance(desk.config.broker.renew_s)
        assert await desk.leader.renewals.renew_due() == 1
        desk.shelf.waits(desk.held("b"))
        assert desk.shelf.renewal_due(before_s=0.0) is desk.held("b")
        assert await desk.leader.renewals.renew_due() == 1


async def test_a_lost_link_ends_a_turn_and_loses_nothing() -> None:
    """What is due stays due."""
    async with a_desk(fault=Failing("renew", LinkDown(""))) as desk:
        desk.take(a_delivery(a_job()))
        desk.clock.advance(desk.config.broker.renew_s)
        assert await desk.leader.renewals.renew_due() == 0
        assert await desk.leader.renewals.renew_due() == 1


async def test_many_renewals_give_way_to_others() -> None:
    """RENEWALS_PER_TURN_MAX are sent, then the loop has its turn."""
    async with a_desk() as desk:
        for number in range(RENEWALS_PER_TURN_MAX + 1):
            desk.take(a_delivery(a_job(id=f"j{number}"), sequence=number + 1))
        desk.clock.advance(desk.config.broker.renew_s)
        renewing = asyncio.create_task(desk.leader.renewals.renew_due())
        await asyncio.sleep(0)
        assert not renewing.done()
        assert await renewing == RENEWALS_PER_TURN_MAX + 1


async def test_the_duty_looks_by_itself() -> None:
    """Several times a period."""
    async with a_desk("renewals", renew_s=0.1) as desk:
        held = await desk.hold(a_job())
        desk.clock.advance(1)
        await asyncio.wait_for(until(lambda: held.renewed_at_s == desk.clock.now_s()), 5)
        assert LOOKS_PER_PERIOD > 1


def test_looking_for_what_is_due_costs_nothing_however_much_is_held() -> None:
    """50,000 jobs held and none due: microseconds, not a walk over the shelf."""
    shelf = Shelf(bytes_max=0, reserve_ratios=(0.0,) * 4)
    _hold_many(shelf, 50_000)
    started_s = time.perf_counter()
    for _ in range(100):
        assert shelf.renewal_due(before_s=0.0) is None
    assert time.perf_counter() - started_s < 0.1


def _hold_many(shelf: Shelf, count: int) -> None:

    for number in range(count):
        key = f"acme.j{number}"
        held = Held(
            key, "acme", 2, "tiny", f"j{number}", "c", "JOBS_acme", "s", number, "$JS.ACK", 0.0
        )
        held.renewed_at_s = 5.0
        shelf.put(held, None)
