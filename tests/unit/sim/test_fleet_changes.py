"""What happens to the fleet, from the command line to a run."""

import pytest

from broker.sim.errors import SimError
from broker.sim.fleet_changes import CHANGES_MAX, parse, written
from broker.sim.world import Change


def test_changes_come_in_the_order_of_time() -> None:
    """And each is written as it is read."""
    found = parse(["restart:2@120", "join@60", "drain:3@60.5", "lose:0@0"], workers=3)
    assert [written(one) for one in found] == [
        "lose:0@0",
        "join@60",
        "drain:3@60.5",
        "restart:2@120",
    ]
    assert [one.change for one in found] == [Change.LOSE, Change.JOIN, Change.DRAIN, Change.RESTART]
    assert parse([], workers=1) == ()


@pytest.mark.parametrize(
    "text",
    [
        *("join", "join@", "join@x", "join@-1", "join@inf", "join@nan", "join:1@5", "restart@5"),
        *("restart:@5", "restart:x@5", "restart:-1@5", "grow@5", "", "@5"),
    ],
)
def test_what_cant_be_read_is_told_with_how_it_is_written(text: str) -> None:
    """Kind, worker, seconds: nothing is guessed."""
    with pytest.raises(SimError, match="restart:2@120") as raised:
        parse([text], workers=4)
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["restart:2@5"], "restart:2@5: there is no worker 2 then"),
        (["restart:2@5", "join@6"], "there is no worker 2 then"),
        (["lose:0@5", "restart:0@6"], "there is no worker 0 then"),
        (["lose:0@5", "drain:1@6"], "drain:1@6: no worker is left to serve"),
        (["lose:0@5", "lose:1@6", "join@6"], "lose:1@6: no worker is left to serve"),
    ],
)
def test_what_cant_happen_is_told(given: list[str], told: str) -> None:
    """A worker that is not there, or a fleet that is none: requests would wait for ever."""
    with pytest.raises(SimError, match=told):
        parse(given, workers=2)


def test_a_worker_that_restarts_serves_again() -> None:
    """A drain ends with it; who joined may be the only one left."""
    assert len(parse(["drain:0@1", "restart:0@2", "drain:1@3"], workers=2)) == 3
    assert len(parse(["join@1", "lose:0@2"], workers=1)) == 2


def test_changes_are_bounded() -> None:
    """As many as the bound, and not one more."""
    assert len(parse(["join@1"] * CHANGES_MAX, workers=1)) == CHANGES_MAX
    with pytest.raises(SimError, match=f"{CHANGES_MAX + 1} changes"):
        parse(["join@1"] * (CHANGES_MAX + 1), workers=1)
