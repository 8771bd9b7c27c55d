"""The page of a job's life is what its generator prints, and the code obeys what it shows."""

import re
from pathlib import Path

import pytest

from broker.core.state import Phase
from broker.service.held import Held
from broker.service.stages import MOVES, Stage, is_possible
from broker.wire.messages import Kind
from ops.states_page import PAGE, drawn, renewed
from tests.leaders import a_desk

_SET = re.compile(r"\.stage = Stage\.")


def test_the_page_is_what_its_generator_prints() -> None:
    """If this fails: `python -m ops.states_page`."""
    page = PAGE.read_text()
    assert renewed(page) == page
    assert drawn() in page


def test_the_page_names_each_kind_of_record_and_each_phase_of_a_worker() -> None:
    """Whoever reads a record finds its kind there."""
    page = PAGE.read_text()
    assert [kind for kind in Kind if f"| `{kind.value}` |" not in page] == []
    assert [phase for phase in Phase if f"`{phase.name}`" not in page] == []


def test_every_move_is_told_once_and_every_stage_is_entered_and_left() -> None:
    """No stage is a trap."""
    pairs = [(move.source, move.target) for move in MOVES]
    assert len(set(pairs)) == len(pairs)
    for stage in Stage:
        assert any(target is stage for _, target in pairs)
        assert (stage, None) in pairs
        assert is_possible(stage, stage)
    assert not is_possible(Stage.CLOSING, Stage.WAITING)
    assert not is_possible(None, Stage.SENT)


def test_stages_change_by_the_table_alone() -> None:
    """No module of the broker's service sets one past `Held.enter`."""
    modules = Path("broker/service").glob("*.py")
    setters = [path.name for path in modules if _SET.search(path.read_text())]
    assert setters == []


async def test_a_move_that_the_table_does_not_have_is_a_fault() -> None:
    """A job whose end is being recorded can't wait again."""
    async with a_desk() as desk:
        held = Held("a.b", "a", 2, "m", "b", "c", "JOBS_a", "s", 1, "ack", 0.0)
        held.enter(Stage.CLOSING)
        with pytest.raises(AssertionError, match=r"can't go from Stage\.CLOSING to"):
            held.enter(Stage.WAITING)
        held.enter(Stage.CLOSING)
        sent = Held("a.c", "a", 2, "m", "c", "c", "JOBS_a", "s", 1, "ack", 0.0, stage=Stage.SENT)
        with pytest.raises(AssertionError, match="begins as"):
            desk.shelf.put(sent, None)
