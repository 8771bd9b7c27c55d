"""What is due at the end of this turn of the loop: each once, however often it was asked for.

Many messages are read in one turn, and more of them the busier the machine is. What they bring to
one connection goes out in one write then.
"""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

WORKS_AT_ONCE = 32
"""Done without a look at what else has come: a token takes some 30 us of a gateway, all told."""

Work = Callable[[], None]


class Turn:
    """Collects work."""

    def __init__(self) -> None:
        self._due: deque[Work] = deque()

    def at_end(self, work: Work) -> None:
        """Do this once all that is ready now has run. Whoever asks twice is called twice."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(work)

    def _run(self) -> None:
        due = self._due
        for _ in range(min(WORKS_AT_ONCE, len(due))):
            work = due[0]
            try:
                work()
            except Exception:  # noqa: BLE001 - the edge of one piece of work: the others are done
                _log.exception("gateway.work_failed")
            # Only now, so that what is asked for meanwhile starts no second run.
            due.popleft()
        if due:
            asyncio.get_running_loop().call_soon(self._run)
