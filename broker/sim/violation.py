"""What a checker finds."""

from broker.sim.errors import SimError


class Violation(SimError):
    """Something happened that must never happen; the message says what."""


def require(truth: object, what: str) -> None:
    """Raise Violation unless it is so."""
    if not truth:
        raise Violation(what)
