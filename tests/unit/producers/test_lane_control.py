"""A lane's cancellation as its owner counts it, step by step."""

from collections.abc import Sequence

import msgspec
import pytest

from broker.bus.memory import MemoryBus
from broker.wire.control import ControlReply, LaneCancelStep, StreamSpan
from producers.config import ClientConfig
from producers.errors import Unreachable
from producers.lane_control import LaneControl
from tests.builders import LANE

SPAN = StreamSpan(stream="BATCH_online", next_sequence=1, last_sequence=5_000)
REST = msgspec.structs.replace(SPAN, next_sequence=2_001)


class Scripted(LaneControl):
    """Asks a broker that answers by a script."""

    def __init__(self, steps: Sequence[LaneCancelStep]) -> None:
        """Give these answers, in turn."""
        super().__init__(MemoryBus(), LANE, ClientConfig())
        self._steps = iter(steps)

    async def ask(
        self, verb: str, request: msgspec.Struct, *, what: str, timeout_s: float = 0.0
    ) -> ControlReply:
        """Answer."""
        del verb, request, what, timeout_s
        return ControlReply(ok=True, data=msgspec.json.encode(next(self._steps)))


async def test_steps_add_up_and_are_told() -> None:
    """Each with what is left of it."""
    steps = [
        LaneCancelStep(jobs=5_000, spans=(SPAN,)),
        LaneCancelStep(jobs=2_000, running=3, spans=(REST,)),
        LaneCancelStep(jobs=2_999),
    ]
    heard: list[LaneCancelStep] = []
    done = await Scripted(steps).cancel(progress=heard.append)
    assert (done.jobs, done.running) == (4_999, 3)
    assert [step.jobs for step in heard] == [2_000, 4_999]


async def test_what_two_leaders_count_is_told_once() -> None:
    """The first died with jobs counted and not ended: never more than were there."""
    steps = [
        LaneCancelStep(jobs=5_000, spans=(SPAN,)),
        LaneCancelStep(jobs=2_000, spans=(REST,)),
        LaneCancelStep(jobs=3_295),
    ]
    assert (await Scripted(steps).cancel()).jobs == 5_000


async def test_a_step_that_does_nothing_ends_it() -> None:
    """Instead of asking for ever: what stands in the way is told."""
    stuck = LaneCancelStep(jobs=0, spans=(SPAN,))
    steps = [LaneCancelStep(jobs=5_000, spans=(SPAN,)), stuck]
    with pytest.raises(
        Unreachable, match=r"0 jobs of lane .* were cancelled, and the next can't be"
    ):
        await Scripted(steps).cancel()
