"""Whose orders count, and what the echo says of them."""

from hypothesis import given
from hypothesis import strategies as st

from worker_agent.fence import Fence, Verdict


def test_orders_of_the_leader_come_in_turn() -> None:
    """Each next number is processed and echoed."""
    fence = Fence()
    assert fence.judge(epoch=3, number=1) is Verdict.NEXT
    assert fence.judge(epoch=3, number=2) is Verdict.NEXT
    assert (fence.epoch, fence.echo) == (3, 2)


def test_a_lower_epoch_is_stale_and_changes_nothing() -> None:
    """A broker that lost its leadership is refused, however high its numbers."""
    fence = Fence()
    fence.judge(epoch=5, number=4)
    assert fence.judge(epoch=4, number=99) is Verdict.STALE_EPOCH
    assert (fence.epoch, fence.echo) == (5, 4)


def test_a_new_epoch_starts_the_echo_anew() -> None:
    """The echo counts the orders of this epoch's broker only."""
    fence = Fence()
    fence.judge(epoch=5, number=40)
    assert fence.learn(6)
    assert fence.echo == 0
    assert fence.judge(epoch=6, number=1) is Verdict.NEXT


def test_learning_an_equal_or_lower_epoch_changes_nothing() -> None:
    """An inventory repeated by the same leader keeps the echo."""
    fence = Fence()
    fence.judge(epoch=5, number=7)
    assert not fence.learn(5)
    assert not fence.learn(2)
    assert (fence.epoch, fence.echo) == (5, 7)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5))))
def test_nothing_is_processed_that_the_echo_has_denied(orders: list[tuple[int, int]]) -> None:
    """Once an echo of n went out, no order up to n of that epoch, nor of an earlier one, starts."""
    fence = Fence()
    for epoch, number in orders:
        before = (fence.epoch, fence.echo)
        verdict = fence.judge(epoch=epoch, number=number)
        assert (verdict is Verdict.NEXT) == ((epoch, number) > before and epoch >= before[0])
        assert (fence.epoch, fence.echo) >= before
