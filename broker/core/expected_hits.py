"""How much of a prompt an engine is expected to find cached: told and compared, worth no score.

What earns a job its worker is less than that. A prefix under the floor (`prefix_tokens_min`) is
found all the same, and of a prompt of which no whole block is held the engine still finds what all
prompts begin with, such as the head of a chat template: how much, is learned from each worker's
answers. No worker is better for either, so neither may move a job.
"""

from collections.abc import Sequence

from broker.core.events import JobSpec
from broker.core.prefix_search import Level, depth_of
from broker.core.scoring import tokens_per_block
from broker.core.seat import Seat

HEAD_SHARE = 0.1
"""Weight of the newest prompt in what is found of those that share no block: as in trust."""


def expected_hit_tokens(job: JobSpec, seat: Seat, levels: Sequence[Level]) -> int:
    """Return the prompt tokens that a job without a credited hit should find cached at a worker.

    Less than its prompt: an engine computes the last token always. 0 for an empty prompt.
    """
    blocks: int | None = None
    if seat.slot_cache is not None:
        blocks = seat.slot_cache.reusable_blocks(job.blocks)
    if blocks is None:
        blocks = depth_of(seat.bit, levels)
    tokens = blocks * tokens_per_block(job) * seat.trust if blocks else seat.worker.head_tokens
    return max(0, min(round(tokens), job.prompt_tokens - 1))


def learned_head_tokens(head_tokens: float, job: JobSpec, *, cached_tokens: int) -> float:
    """Return what a worker finds of prompts that share no block, with one more answer.

    As it was, if that many are a block: so much was shared.
    """
    if cached_tokens >= tokens_per_block(job):
        return head_tokens
    return head_tokens + HEAD_SHARE * (cached_tokens - head_tokens)
