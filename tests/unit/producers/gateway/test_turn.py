"""The end of a turn: all that is due, in order, in slices, whatever one of them does."""

import asyncio
from collections.abc import Callable

from producers.gateway.turn import WORKS_AT_ONCE, Turn
from tests.turns import until


async def test_what_is_due_comes_after_all_that_is_ready() -> None:
    """In the order in which it was asked for."""
    turn = Turn()
    done: list[str] = []
    loop = asyncio.get_running_loop()
    turn.at_end(lambda: done.append("first"))
    turn.at_end(lambda: done.append("second"))
    assert done == []
    loop.call_soon(done.append, "ready later")
    await until(lambda: len(done) == 3)
    assert done == ["first", "second", "ready later"]


async def test_much_that_is_due_lets_others_in_between() -> None:
    """WORKS_AT_ONCE: what has become ready meanwhile doesn't wait for all of it."""
    turn = Turn()
    done: list[int] = []
    seen: list[int] = []
    for number in range(2 * WORKS_AT_ONCE + 1):
        turn.at_end(_noting(done, number))
    asyncio.get_running_loop().call_soon(lambda: seen.append(len(done)))
    await until(lambda: len(done) == 2 * WORKS_AT_ONCE + 1)
    assert done == sorted(done)
    assert seen == [WORKS_AT_ONCE]


def _noting(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)


async def test_work_that_fails_keeps_nothing_else_from_being_done() -> None:
    """Nor what is asked for later."""
    turn = Turn()
    done: list[str] = []

    def fail() -> None:
        message = "spoiled"
        raise ValueError(message)

    turn.at_end(fail)
    turn.at_end(lambda: done.append("same turn"))
    await until(lambda: bool(done))
    turn.at_end(lambda: done.append("later"))
    await until(lambda: len(done) == 2)


async def test_work_may_ask_for_more() -> None:
    """It is done once."""
    turn = Turn()
    done: list[str] = []
    turn.at_end(lambda: turn.at_end(lambda: done.append("more")))
    await until(lambda: bool(done))
    await asyncio.sleep(0)
    assert done == ["more"]
