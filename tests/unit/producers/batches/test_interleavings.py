"""Whatever happens to a batch, in whatever order, its lines stand once.

Runners die at any call to the server (before it or after it), are stopped, or lose their link and
come back as ghosts; meanwhile somebody cancels, or the window ends. The real runner plays, on the
in-process bus.
"""

import asyncio
from dataclasses import dataclass
from typing import Literal

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from producers.batches.records import Batch
from tests.batches import a_line, lines
from tests.crashing import Step, When, faulty
from tests.stored_batches import SMALL, Place, a_place

GOOD = 30

HASTY = msgspec.structs.replace(
    SMALL, lines_inflight_max=6, lookahead_lines=8, lease_s=0.15, scan_s=0.03, grace_s=0.15
)

End = Literal["killed", "stopped", "cut off"]


@dataclass(frozen=True)
class Life:
    """A runner that ends at its n-th call to the server."""

    calls: int
    when: When
    end: End


LIVES = st.builds(
    Life,
    calls=st.integers(1, 150),
    when=st.sampled_from(["before", "after"]),
    end=st.sampled_from(["killed", "killed", "stopped", "cut off"]),
)


class Story:
    """One batch, and what happens to it."""

    def __init__(self, place: Place, batch: Batch, *, cancel_at_call: int) -> None:
        self._place = place
        self._batch = batch
        self._cancel_at_call = cancel_at_call
        self._calls = 0
        self._over = asyncio.Event()
        self._cancels: list[asyncio.Task[Batch]] = []

    async def live(self, life: Life) -> None:
        """Let a runner live until its end, or the batch's."""
        calls = 0
        due = asyncio.Event()

        def fault(step: Step) -> None:
            nonlocal calls
            calls += step.when == "before"
            self._note_call()
            if (calls, step.when) == (life.calls, life.when) and not due.is_set():
                due.set()
                if life.end != "stopped":
                    member.link.disconnect()

        member = self._place.start_runner(HASTY, wrap=lambda bus: faulty(bus, fault))
        waits = [asyncio.create_task(due.wait()), asyncio.create_task(self._place.ended(self._id))]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        if life.end != "cut off":
            await member.stop()

    async def end(self) -> Batch:
        """Let the cut-off ones come back, and one more runner finish."""
        for member in self._place.members:
            if not member.task.done():
                member.link.reconnect()
        self._place.start_runner(HASTY)
        ended = await self._place.ended(self._id)
        await asyncio.gather(*self._cancels)
        return ended

    @property
    def _id(self) -> str:
        return self._batch.id

    def _note_call(self) -> None:
        self._calls += 1
        if self._calls == self._cancel_at_call:
            cancel = self._place.shelf.cancel(self._id)
            self._cancels.append(asyncio.create_task(cancel))


async def play(lives: list[Life], *, cancel_at_call: int, window: str) -> None:
    """Play a story, and hold the invariant against its end."""
    async with a_place() as place:
        place.responder.run_s = 0.002
        given_lines = [*lines(GOOD), b"{", a_line("id-0")]
        batch = await place.create(given_lines, completion_window=window)
        story = Story(place, batch, cancel_at_call=cancel_at_call)
        for life in lives:
            await story.live(life)
        ended = await story.end()
        assert ended.status in ("completed", "expired", "cancelled")
        await place.check(ended, (f"id-{number}" for number in range(GOOD)))
        assert ended.counts.total == GOOD + 2
        if not cancel_at_call and window == "24h":
            assert (ended.status, ended.counts.completed) == ("completed", GOOD)
        if ended.status == "completed":
            assert ended.counts.failed == 2


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lives=st.lists(LIVES, max_size=4),
    cancel_at_call=st.one_of(st.just(0), st.integers(1, 400)),
    window=st.sampled_from(["24h", "24h", "0.3s"]),
)
def test_each_line_stands_once_whatever_happens(
    lives: list[Life], cancel_at_call: int, window: str
) -> None:
    """Random interleavings of cancel, expiry, crash and finish keep the invariant."""
    asyncio.run(play(lives, cancel_at_call=cancel_at_call, window=window))
