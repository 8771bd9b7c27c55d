"""Contains what a callback raises: counted, logged, and the loop that called it lives on.

The bus calls code that isn't its own (handlers, link watchers) from its reading loop, which must
never die of it: this is the bus's one broad catch.
"""

from collections import Counter
from types import TracebackType

from broker.bus.logs import Log

_log = Log(__name__)


class Contained:
    """A `with` block whose exceptions end here. Cancellation passes through."""

    __slots__ = ("_counts", "_what")

    def __init__(self, counts: Counter[str], what: str) -> None:
        self._counts = counts
        self._what = what

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        """Swallow an Exception."""
        if not isinstance(error, Exception):
            return False
        self._counts["handler_errors"] += 1
        _log.error("callback failed", what=self._what, exc_info=error)
        return True
