"""A job's stages at the broker, and every move between them: the table that `Held.enter` obeys.

`ops/docs/states.md` is drawn from it (`python -m ops.states_page`).
"""

from dataclasses import dataclass
from enum import Enum, auto


class Stage(Enum):
    """Where a held job stands."""

    WAITING = auto()
    """Pulled, and renewed by the broker until a worker has it."""
    SENT = auto()
    """Offered to a worker, not accepted yet."""
    RUNNING = auto()
    """Accepted: the agent renews and acknowledges the message now."""
    CLOSING = auto()
    """Its end is being recorded here."""


@dataclass(frozen=True, slots=True)
class Move:
    """One way from stage to stage."""

    source: Stage | None
    """None: its message is in its stream, and the broker holds nothing of it."""
    target: Stage | None
    """None: the broker holds nothing of it any more."""
    cause: str
    """What makes it move, in words."""


MOVES = (
    Move(None, Stage.WAITING, "pulled"),
    Move(None, Stage.RUNNING, "found in a worker's list by a new leader"),
    Move(Stage.WAITING, Stage.SENT, "dispatched"),
    Move(Stage.WAITING, Stage.RUNNING, "found in a worker's list"),
    Move(Stage.WAITING, Stage.CLOSING, "refused, expired, cancelled, given up"),
    Move(Stage.SENT, Stage.RUNNING, "accepted by its worker"),
    Move(Stage.SENT, Stage.WAITING, "not taken by its worker, or never sent"),
    Move(Stage.SENT, Stage.CLOSING, "too large for an order, given up, its stream broken off"),
    Move(Stage.RUNNING, Stage.WAITING, "its attempt came to nothing, or its worker was lost"),
    Move(Stage.RUNNING, Stage.CLOSING, "cancelled, given up, its stream broken off"),
    Move(Stage.WAITING, None, "its record was found, or it is left to come again"),
    Move(Stage.SENT, None, "its record stands before the worker's answer came"),
    Move(Stage.RUNNING, None, "its record stands, its agent acknowledges"),
    Move(Stage.CLOSING, None, "its record stands, the message is acknowledged"),
)
"""All moves. To stay is none."""

_POSSIBLE = frozenset((move.source, move.target) for move in MOVES)


def is_possible(source: Stage | None, target: Stage | None) -> bool:
    """Say whether a job may move so, or stays."""
    return source is target or (source, target) in _POSSIBLE
