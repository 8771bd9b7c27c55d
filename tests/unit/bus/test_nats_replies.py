"""The window: bounded, fair, and exact under cancellation."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.bus.nats_replies import Window


async def test_order_of_arrival() -> None:
    """Who waits first enters first, even if a smaller one behind would fit."""
    window = Window(outstanding_max=10, bytes_max=100)
    await window.enter(60)
    entered: list[int] = []

    async def enter(size: int) -> None:
        await window.enter(size)
        entered.append(size)

    async with asyncio.TaskGroup() as group:
        group.create_task(enter(50))
        await asyncio.sleep(0)
        group.create_task(enter(10))
        await asyncio.sleep(0)
        assert entered == []
        window.leave(60)
    assert entered == [50, 10]


async def test_cancel_while_waiting_lets_the_next_in() -> None:
    """A large one that gives up makes way for the small one behind it."""
    window = Window(outstanding_max=10, bytes_max=100)
    await window.enter(60)
    large = asyncio.ensure_future(window.enter(90))
    small = asyncio.ensure_future(window.enter(10))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait([large, small], timeout=5)
    assert (large.cancelled(), small.done(), window.outstanding) == (True, True, 2)


async def test_cancel_just_after_admission_gives_the_room_back() -> None:
    """Admitted and cancelled in the same turn: the room is not lost."""
    window = Window(outstanding_max=1, bytes_max=100)
    await window.enter(1)
    waiting = asyncio.ensure_future(window.enter(1))
    await asyncio.sleep(0)
    window.leave(1)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert window.outstanding == 0
    assert window.enter_now(1)


async def test_cancelled_one_is_passed_over() -> None:
    """Cancelled, then room: the next is admitted, and the count stays right."""
    window = Window(outstanding_max=1, bytes_max=100)
    await window.enter(1)
    first = asyncio.ensure_future(window.enter(1))
    second = asyncio.ensure_future(window.enter(1))
    await asyncio.sleep(0)
    first.cancel()
    window.leave(1)
    await asyncio.wait([first, second], timeout=5)
    assert (second.done(), window.outstanding) == (True, 1)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(1, 60)), max_size=40
    )
)
def test_any_sequence_keeps_its_bounds(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, the bounds hold, and when all have left nothing is left."""
    asyncio.run(_play(steps))


async def _play(steps: list[tuple[str, int]]) -> None:
    window = Window(outstanding_max=3, bytes_max=100)
    tasks: list[tuple[asyncio.Task[None], int]] = []
    inside: list[int] = []
    for what, size in steps:
        if what == "enter":
            tasks.append((asyncio.ensure_future(window.enter(size)), size))
        elif what == "leave" and inside:
            window.leave(inside.pop())
        elif what == "cancel" and tasks:
            tasks[size % len(tasks)][0].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside += [own for task, own in tasks if task.done() and not task.cancelled()]
        tasks = [one for one in tasks if not one[0].done()]
        assert window.outstanding == len(inside) <= 3
        assert len(inside) == 1 or sum(inside) <= 100
    while inside or tasks:
        for size in inside:
            window.leave(size)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        inside = [own for task, own in tasks if task.done()]
        tasks = [one for one in tasks if not one[0].done()]
    assert window.outstanding == 0
