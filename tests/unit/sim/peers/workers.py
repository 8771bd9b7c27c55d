"""Builders: a worker as a policy sees it, and requests with prefixes."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from broker.sim.request import Request

BLOCK_TOKENS = 16


@dataclass(kw_only=True)
class FakeWorker:
    """A worker whose figures a case sets; it holds the blocks in `cached`."""

    id: int = 0
    requests: int = 0
    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    active_tokens: int = 0
    active_block_tokens: int = 0
    kv_ratio: float = 0.0
    cached: set[int] = field(default_factory=set)

    def hit_tokens(self, request: Request) -> int:
        """Return the tokens of the leading blocks that are cached."""
        held = 0
        for block in request.blocks:
            if block not in self.cached:
                break
            held += 1
        return held * request.block_tokens


def a_request(
    blocks: Sequence[int] = (), *, index: int = 0, prompt_tokens: int | None = None
) -> Request:
    """Build a request of whole blocks of 16 tokens, unless told its length."""
    return Request(
        index=index,
        at_s=0.0,
        prompt_tokens=prompt_tokens or max(1, len(blocks) * BLOCK_TOKENS),
        output_tokens=1,
        output_tokens_max=1,
        blocks=tuple(blocks),
        block_tokens=BLOCK_TOKENS,
    )


def workers_with(*requests: int) -> list[FakeWorker]:
    """Build one worker for each count of requests given."""
    return [FakeWorker(id=place, requests=count) for place, count in enumerate(requests)]
