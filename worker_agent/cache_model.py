"""What the agent believes of its engine's prefix cache. Pure: times are passed in.

Fed by our own dispatches: a chain is credited once its prefill is done, never when it was merely
given. The engine's count of cached tokens corrects it: far fewer than predicted means that the
cache is smaller, or shared with others, and what is as old as the miss is given up. Bytes per token
are learned from the engine's usage.

Where the engine tells what it stores and evicts (`engine_blocks`), that is what is believed, and
the guess goes on beside it, for the time when the engine falls silent. While its word is not whole
(we came late, or missed some), the guess is believed, less what the engine says is gone.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from broker.wire.messages import CacheSummary, Usage
from broker.wire.prefix import BLOCK_BYTES
from broker.wire.prompt import BYTES_PER_TOKEN
from worker_agent.cache_stores import BlockCache, Chain, Reuse, SequenceCache, Store
from worker_agent.cache_summary import SummaryFeed
from worker_agent.engine.kv_event_wire import AllBlocksCleared, KvEvent
from worker_agent.engine_blocks import TokenizedPrompt
from worker_agent.engine_ranks import EngineRanks

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
    ranks: int = 1
    """Of the engine, each with a cache of its own."""


class CacheSource(StrEnum):
    """Whose word on the cache is believed."""

    MODEL = "model"
    """Ours: a guess from what was dispatched."""
    EVENTS = "events"
    """The engine's."""


@dataclass(frozen=True, slots=True)
class _Begun:
    chain: Chain
    reuse: Reuse
    """As the guess has it."""
    source: CacheSource
    blocks: int
    """That should be cached, as that source has it."""


@dataclass(slots=True)
class Predictions:
    """How much was predicted and found, in prompt tokens, of requests whose engine told."""

    requests: int = 0
    predicted_tokens: int = 0
    cached_tokens: int = 0
    error_tokens: int = 0
    """Sum of the differences, whichever their sign."""


class CacheModel:
    """One engine's cache."""

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self._tokens_max = limits.tokens_max or CACHE_TOKENS_DEFAULT
        is_sequences = limits.sequences > 0
        self._store: Store = SequenceCache(slots=limits.sequences) if is_sequences else BlockCache()
        self._engine = EngineRanks(limits.ranks)
        self.source = CacheSource.MODEL
        self.predictions = {source: Predictions() for source in CacheSource}
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
        self._engine.use(chain, at_s=at_s)
        believes_engine = self.source is CacheSource.EVENTS
        blocks = self._engine.depth(chain) if believes_engine else reuse.blocks
        self._begun[name] = _Begun(chain, reuse, self.source, blocks)
        self._settle()
        return round(blocks * self.tokens_per_block)

    def prefilled(self, name: Hashable, *, at_s: float) -> None:
        """Note its first token: its whole prompt is in the cache."""
        begun = self._begun.get(name)
        if begun is None:
            return
        self._store.fill(name, at_s=at_s)
        chain = begun.chain
        if self.source is CacheSource.EVENTS:
            chain = chain[: self._engine.depth(chain)]
        if self.is_reported(begun.chain):
            self._feed.stored(chain, at_s=at_s)
        self._settle()

    def is_reported(self, chain: Sequence[int]) -> bool:
        """Tell whether a prompt is long enough to be worth a report."""
        return len(chain) * self.tokens_per_block >= self._limits.prefix_tokens_min

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
        self._engine.expire(at_s - self._limits.ttl_s)
        self._settle()
        self._settle_engine(at_s, evicted=False)

    def clear(self) -> None:
        """Start anew: the engine restarted, or some of what it said is lost."""
        self._engine.clear()
        self._engine.take()
        self._empty()

    def _empty(self) -> None:
        self._store.clear()
        self._store.take_gone()
        self._begun.clear()
        self._feed.cleared()

    # ---- the engine's own word ------------------------------------------------------------------

    def heard(self, events: Iterable[KvEvent], *, at_s: float, rank: int = 0) -> None:
        """Take what a rank of the engine did to its cache, in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared) and self._engine.count == 1:
                self._empty()
            self._engine.apply(event, rank=rank)
        self._settle_engine(at_s, evicted=True)

    def lost(self, rank: int, *, at_s: float) -> None:
        """Know nothing of a rank any more; of an only one, begin anew."""
        if self._engine.count == 1:
            self.clear()
            return
        self._engine.lost(rank)
        self._settle_engine(at_s, evicted=True)

    def learn(self, prompt: TokenizedPrompt, *, at_s: float) -> None:
        """Take a prompt's tokens: they say which engine blocks it needs."""
        self._engine.learn(prompt, at_s=at_s)
        self._settle_engine(at_s, evicted=False)

    def knows_tokens(self, chain: Sequence[int]) -> bool:
        """Tell whether a prompt's tokens are known."""
        return self._engine.knows(chain)

    def is_held(self, chain: Sequence[int]) -> bool:
        """Tell whether the engine says that it holds the whole prompt."""
        return self._engine.depth(chain) == len(chain)

    def believe(self, source: CacheSource) -> None:
        """Choose whose word counts from now on. Credit that only the other gave is taken back."""
        if source is self.source:
            return
        self.source = source
        self._feed.kept(self._is_believed)

    def _is_believed(self, block: int) -> bool:
        if self.source is CacheSource.EVENTS:
            return self._engine.holds(block)
        return self._store.depth((block,)) == 1

    def _settle_engine(self, at_s: float, *, evicted: bool) -> None:
        """Pass on what the engine's word changed. Not `evicted`: we forget, the engine does not."""
        stored, gone = self._engine.take()
        believes_engine = self.source is CacheSource.EVENTS
        if evicted:
            self._store.lost(gone)
        if evicted or believes_engine:
            self._feed.dropped(gone)
        if believes_engine:
            self._feed.stored(stored, at_s=at_s)
        self._settle()

    # ---- reports --------------------------------------------------------------------------------

    def ask_full(self) -> None:
        """Make the next report a full one."""
        self._feed.ask_full()

    def report(self) -> CacheSummary | None:
        """Take the next report; None when nothing changed."""
        return self._feed.take()

    def _settle(self) -> None:
        self._store.bound(int(self._tokens_max / self.tokens_per_block))
        gone = self._store.take_gone()
        if self.source is CacheSource.MODEL:
            self._feed.dropped(gone)

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
        if self._is_far_below(begun.reuse.blocks, cached_tokens):
            self._store.missed(begun.chain, used_at_s=begun.reuse.used_at_s)
        if self._is_far_below(begun.blocks, cached_tokens):
            self._miss_streak += cached_tokens == 0
        predicted_tokens = round(begun.blocks * self.tokens_per_block)
        seen = self.predictions[begun.source]
        seen.requests += 1
        seen.predicted_tokens += predicted_tokens
        seen.cached_tokens += cached_tokens
        seen.error_tokens += abs(predicted_tokens - cached_tokens)
        if cached_tokens > 0:
            self._miss_streak = 0
        self._feed.mute(muted=self._miss_streak >= MISS_STREAK_MAX)

    def _is_far_below(self, blocks: int, cached_tokens: int) -> bool:
        predicted_tokens = blocks * self.tokens_per_block
        return blocks >= MISS_BLOCKS_MIN and cached_tokens < FAR_BELOW_RATIO * predicted_tokens
