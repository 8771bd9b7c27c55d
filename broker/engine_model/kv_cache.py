"""The memory of a modelled engine: what running requests hold, and what is kept for reuse.

Paged attention with a prefix cache, after vLLM: a prompt block is shared by all who hold it; one
that nobody holds stays until room is needed, and the one released longest ago goes first. A request
releases its blocks last to first, so a block always goes before the blocks it builds on. Sizes are
tokens, not pages: the last page of a request is the only difference.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class KvCache:
    """Tokens of KV memory: private to a request, in a held block, or in an idle block."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.used_tokens = 0
        """Held by running requests; a shared block counts once."""
        self.idle_tokens = 0
        """Kept for reuse, held by nobody."""
        self.evicted_blocks = 0
        self.journal: dict[int, bool] | None = None
        """Blocks stored (True) or gone (False) since it was last emptied, in order: the KV events
        that an engine sends. None: not kept."""
        self._tokens: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def block_count(self) -> int:
        """Number of blocks that can be matched."""
        return len(self._tokens)

    @property
    def reclaimable_tokens(self) -> int:
        """Room that can be had: free, or kept for reuse only."""
        return self.capacity_tokens - self.used_tokens

    def blocks(self) -> Iterable[int]:
        """Return all blocks that can be matched, a parent before its children."""
        return self._tokens.keys()

    def match(self, blocks: Sequence[int], *, tokens_max: int) -> tuple[int, int]:
        """Return how many leading blocks are there, of at most `tokens_max`, and their tokens."""
        tokens = 0
        for index, block in enumerate(blocks):
            size = self._tokens.get(block)
            if size is None or tokens + size > tokens_max:
                return index, tokens
            tokens += size
        return len(blocks), tokens

    def match_idle(self, blocks: Sequence[int]) -> int:
        """Return the tokens of those `blocks`, all present, that nobody holds yet."""
        return sum(self._tokens[block] for block in blocks if block in self._idle)

    def hold(self, block: int) -> None:
        """Take part in a block that is there."""
        holders = self._holders.get(block, 0)
        if not holders:
            del self._idle[block]
            self.idle_tokens -= self._tokens[block]
            self.used_tokens += self._tokens[block]
        self._holders[block] = holders + 1

    def store(self, block: int, tokens: int) -> None:
        """Turn `tokens` private ones into a block, held once by the caller.

        If another request was faster, its block is held instead and the private copy is freed.
        """
        if block in self._tokens:
            self.hold(block)
            self.free(tokens)
            return
        self._tokens[block] = tokens
        self._holders[block] = 1
        self._note(block, stored=True)

    def _note(self, block: int, *, stored: bool) -> None:
        if self.journal is not None:
            self.journal.pop(block, None)
            self.journal[block] = stored

    def release(self, block: int) -> None:
        """Let go of a held block; it stays for reuse when it was held by nobody else."""
        holders = self._holders[block] - 1
        if holders:
            self._holders[block] = holders
            return
        del self._holders[block]
        self._idle[block] = None
        self.used_tokens -= self._tokens[block]
        self.idle_tokens += self._tokens[block]

    def allocate(self, tokens: int) -> bool:
        """Take private tokens, evicting idle blocks as needed; False and nothing done if full."""
        if tokens > self.reclaimable_tokens:
            return False
        self.used_tokens += tokens
        while self.used_tokens + self.idle_tokens > self.capacity_tokens:
            block, _ = self._idle.popitem(last=False)
            self.idle_tokens -= self._tokens.pop(block)
            self.evicted_blocks += 1
            self._note(block, stored=False)
        return True

    def free(self, tokens: int) -> None:
        """Give private tokens back."""
        self.used_tokens -= tokens

    def clear_idle(self) -> None:
        """Drop everything that is kept for reuse only."""
        for block in self._idle:
            del self._tokens[block]
            self._note(block, stored=False)
        self._idle.clear()
        self.idle_tokens = 0
