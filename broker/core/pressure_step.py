"""How far batch must give way in a model's pool."""

from enum import IntEnum


class Step(IntEnum):
    """Each step includes those before it."""

    NONE = 0
    BORROW = 1
    """Bands 0-1 borrow batch's seats before batch uses them."""
    HOLD_BATCH = 2
    """Batch gets its guaranteed share only."""
    REFUSE_BATCH = 3
    """Batch that is submitted now is refused."""
