"""A request inside the modelled engine: where it stands and what memory it holds."""

from enum import IntEnum

from broker.engine_model.events import SequenceRequest


class Stage(IntEnum):
    """How far it is; GONE when finished or cancelled."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    GONE = 3


class SequenceState:
    """A request inside the engine."""

    __slots__ = (
        "block_tokens",
        "blocks",
        "cached_tokens",
        "finish_tick",
        "generated",
        "held",
        "hit_blocks",
        "hit_tokens",
        "order",
        "prefilled",
        "private_tokens",
        "request",
        "since_tick",
        "stage",
        "target",
    )

    def __init__(self, request: SequenceRequest, order: int, block_tokens: int) -> None:
        self.request = request
        self.order = order
        self.blocks = request.blocks[: request.prompt_tokens]
        share = request.prompt_tokens // len(self.blocks) if self.blocks else 1
        self.block_tokens = min(request.block_tokens or block_tokens, share)
        self.stage = Stage.WAITING
        self.cached_tokens = -1  # Not admitted yet.
        self.generated = 0
        self.reset()

    def reset(self) -> None:
        """Hold nothing: as submitted, or preempted."""
        self.target = self.request.prompt_tokens + self.generated
        self.prefilled = 0
        self.hit_blocks = 0
        self.hit_tokens = 0
        self.held = 0
        self.private_tokens = 0
        self.since_tick = 0
        self.finish_tick = -1
