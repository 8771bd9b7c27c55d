"""Watches the event loop from a thread: tells what holds it, and ends a process that stays stuck.

A loop that is held answers nothing, not even /healthz, and its leader's key runs out, so a standby
takes over. What is left is a process that does nothing and never ends. Here its place in the code
is logged once it has stood still for `STALL_S`, and after `stuck_s_max` the process is ended, so
that its supervisor starts it anew. Time is counted in looks of the thread itself: a process that
was stopped and woken as a whole has missed nothing.
"""

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable

import structlog

STALL_S = 5.0
"""A loop that has not turned for this long is held: a hundred of its ticks. Also /healthz's."""

LOOK_S = 0.5
"""How often the thread looks."""

FRAMES_TOLD_MAX = 12
"""Innermost frames of the stack that are logged."""

EXIT_STUCK = 5
"""Exit code of a process that was ended because its loop stayed stuck."""

_log = structlog.get_logger(__name__)


class LoopWatch:
    """The thread, and the beats that it waits for."""

    def __init__(
        self,
        *,
        stuck_s_max: float,
        stall_s: float = STALL_S,
        look_s: float = LOOK_S,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """Watch the running loop; 0 as `stuck_s_max` never ends the process."""
        self._stuck_s_max = stuck_s_max
        self._stall_s = stall_s
        self._look_s = look_s
        self._end = end
        self._watched = threading.get_ident()
        self._beats = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self.stalls = 0
        """Times it stood still for `stall_s`."""

    async def run(self) -> None:
        """Start the thread and beat for it until cancelled."""
        self._thread.start()
        try:
            while True:
                self._beats += 1
                await asyncio.sleep(self._look_s / 2)
        finally:
            self._closing.set()

    def looked_at(self) -> Callable[[], str]:
        """Return a look that tells each stall once, when it is over."""
        seen = 0

        def look() -> str:
            nonlocal seen
            before, seen = seen, self.stalls
            return f"the loop stood still for {self._stall_s:g} s or more" * (seen > before)

        return look

    def _watch(self) -> None:
        beats, silent_s, is_told = 0, 0.0, False
        while not self._closing.wait(self._look_s):
            if beats != self._beats:
                beats, silent_s, is_told = self._beats, 0.0, False
                continue
            silent_s += self._look_s
            if silent_s >= self._stall_s and not is_told:
                is_told = True
                self.stalls += 1
                _log.error("loop.stalled", silent_s=silent_s, held_by=self._held_by())
            if self._stuck_s_max and silent_s >= self._stuck_s_max:
                _log.critical("loop.stuck", silent_s=silent_s, held_by=self._held_by())
                self._end(EXIT_STUCK)
                return

    def _held_by(self) -> str:
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - the only way
        return "".join(traceback.format_stack(frame)[-FRAMES_TOLD_MAX:])
