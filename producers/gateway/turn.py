"""What is due at the end of this turn of the loop: each once, however often it was asked for.

Many messages are read in one turn, and more of them the busier the machine is. What they bring to
one connection goes out in one write then.
"""

import asyncio
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

Work = Callable[[], None]


class Turn:
    """Collects work."""

    def __init__(self) -> None:
        self._due: list[Work] = []

    def at_end(self, work: Work) -> None:
        """Do this once all that is ready now has run. Whoever asks twice is called twice."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(work)

    def _run(self) -> None:
        due, self._due = self._due, []
        for work in due:
            try:
                work()
            except Exception:  # noqa: BLE001 - the edge of one piece of work: the others are done
                _log.exception("gateway.work_failed")
