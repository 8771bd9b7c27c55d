"""What the agent believes of its engine's prefix cache. Pure: times are passed in.

Fed by our own dispatches: a chain is credited once its prefill is done, never when it was merely
given. The engine's count of cached tokens corrects it: far fewer than predicted means that the
cache is smaller, or shared with others, and what is as old as the miss is given up. Bytes per token
are learned from the engine's usage.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from broker.wire.messages import CacheSummary, Usage
from broker.wire.prefix import BLOCK_BYTES
from broker.wire.prompt import BYTES_PER_TOKEN
from worker_agent.cache_stores import BlockCache, Chain, Reuse, SequenceCache, Store
from worker_agent.cache_summary import SummaryFeed

CACHE_TOKENS_DEFAULT = 65_536
"""Assumed capacity where nobody tells: about what a 24 GB accelerator holds beside an 8B model in 8
bits."""

FAR_BELOW_RATIO = 0.5
"""Fewer cached tokens than this share of the prediction is a miss; more is the inaccuracy of block
edges."""

MISS_BLOCKS_MIN = 4
"""Predictions of fewer blocks prove nothing: a chat template alone moves the edge of the first."""

MISS_STREAK_MAX = 3
"""So many complete misses in a row, and the engine is taken to reuse nothing (its prefix cache is
off)."""

LEARNING_SHARE = 0.1
"""Weight of the newest request in the average of bytes per token."""

BYTES_PER_TOKEN_MIN, BYTES_PER_TOKEN_MAX = 0.5, 32.0
"""No tokenizer is outside; an engine that counts nonsense may not distort the capacity."""

LEARNING_BLOCKS_MIN = 4
"""Shorter prompts say more about the chat template than about the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Bounds of the model and of what it reports."""

    tokens_max: int = 0
    """Capacity of the engine's cache; 0 = not known."""
    sequences: int = 0
    """Slots of an engine that caches whole sequences; 0 = it caches blocks."""
    ttl_s: float = 600.0
    refresh_s: float = 60.0
    prefix_tokens_min: int = 1000
    summary_bytes_max: int = 65_536


@dataclass(frozen=True, slots=True)
class _Begun:
    chain: Chain
    reuse: Reuse


class CacheModel:
    """One engine's cache."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._tokens_max = limits.tokens_max or CACHE_TOKENS_DEFAULT
        is_sequences = limits.sequences > 0
        self._store: Store = SequenceCache(slots=limits.sequences) if is_sequences else BlockCache()
        self._feed = SummaryFeed(bytes_max=limits.summary_bytes_max, refresh_s=limits.refresh_s)
        self._begun: dict[Hashable, _Begun] = {}
        self._bytes_per_token = BYTES_PER_TOKEN
        self._learned = False
        self._miss_streak = 0

    @property
    def tokens_per_block(self) -> float:
        """How many tokens a block stands for, as learned so far."""
        return BLOCK_BYTES / self._bytes_per_token

    def resize(self, tokens_max: int) -> None:
        """Take the capacity that the engine tells; 0 = it doesn't."""
        self._tokens_max = self._limits.tokens_max or tokens_max or CACHE_TOKENS_DEFAULT

    def begin(self, name: Hashable, chain: Sequence[int], *, at_s: float) -> int:
        """Note a request given to the engine; returns its prompt tokens that should be cached."""
        reuse = self._store.begin(name, chain, at_s=at_s)
        self._begun[name] = _Begun(chain, reuse)
        self._settle()
        return round(reuse.blocks * self.tokens_per_block)

    def prefilled(self, name: Hashable, *, at_s: float) -> None:
        """Note its first token: its whole prompt is in the cache."""
        begun = self._begun.get(name)
        if begun is None:
            return
        self._store.fill(name, at_s=at_s)
        if len(begun.chain) * self.tokens_per_block >= self._limits.prefix_tokens_min:
            self._feed.stored(begun.chain, at_s=at_s)
        self._settle()

    def end(
        self,
        name: Hashable,
        *,
        at_s: float,
        usage: Usage | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Note that it ended, with what the engine counted where it told."""
        begun = self._begun.pop(name, None)
        if begun is None:
            return
        output_tokens = usage.output_tokens if usage else 0
        tail_blocks = -(-output_tokens // max(1, round(self.tokens_per_block)))
        self._store.end(name, tail_blocks=tail_blocks, at_s=at_s)
        if usage is not None:
            self._learn(len(begun.chain), usage.prompt_tokens)
        if cached_tokens is not None:
            self._correct(begun, cached_tokens)
        self._settle()

    def expire(self, *, at_s: float) -> None:
        """Forget what was not used for the time to live."""
        self._store.expire(at_s - self._limits.ttl_s)
        self._settle()

    def clear(self) -> None:
        """Start anew: the engine restarted."""
        self._store.clear()
        self._store.take_gone()
        self._begun.clear()
        self._feed.cleared()

    def ask_full(self) -> None:
        """Make the next report a full one."""
        self._feed.ask_full()

    def report(self) -> CacheSummary | None:
        """Take the next report; None when nothing changed."""
        return self._feed.take()

    def _settle(self) -> None:
        self._store.bound(int(self._tokens_max / self.tokens_per_block))
        self._feed.dropped(self._store.take_gone())

    def _learn(self, blocks: int, prompt_tokens: int) -> None:
        if blocks < LEARNING_BLOCKS_MIN or prompt_tokens <= 0:
            return
        # The last, partial block has no hash: half of one, on average.
        seen = (blocks + 0.5) * BLOCK_BYTES / prompt_tokens
        seen = min(max(seen, BYTES_PER_TOKEN_MIN), BYTES_PER_TOKEN_MAX)
        share = LEARNING_SHARE if self._learned else 1.0
        self._bytes_per_token += share * (seen - self._bytes_per_token)
        self._learned = True

    def _correct(self, begun: _Begun, cached_tokens: int) -> None:
        blocks = begun.reuse.blocks
        predicted = blocks * self.tokens_per_block
        if blocks >= MISS_BLOCKS_MIN and cached_tokens < FAR_BELOW_RATIO * predicted:
            self._store.missed(begun.chain, used_at_s=begun.reuse.used_at_s)
            self._miss_streak += cached_tokens == 0
        if cached_tokens > 0:
            self._miss_streak = 0
        self._feed.mute(muted=self._miss_streak >= MISS_STREAK_MAX)
