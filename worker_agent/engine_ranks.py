"""Which prefix blocks any data-parallel rank of an engine holds. Pure: times are passed in.

Each rank keeps a cache of its own, and publishes at an endpoint of its own. A prompt's blocks are
useful where one rank has all of them, so each rank has its tree (`engine_blocks`), and a block of
ours is held while one rank's tree credits it.

The engine itself chooses the rank for a request, by load. So of n ranks, with a prefix in one, a
job finds it each n-th time at first; as jobs of that prefix keep coming here, further ranks get it.
How much less was found than told is for the broker's trust in the worker to learn.
"""

from collections.abc import Sequence

from worker_agent.engine.kv_event_wire import KvEvent
from worker_agent.engine_blocks import EngineBlocks, TokenizedPrompt

RANKS_MAX = 64
"""Of one engine: vLLM's largest published settings have 32."""


class EngineRanks:
    """The ranks of one engine."""

    def __init__(self, ranks: int = 1) -> None:
        assert 1 <= ranks <= RANKS_MAX
        self._ranks = tuple(EngineBlocks() for _ in range(ranks))
        self._holders: dict[int, int] = {}
        """By block that was told as held, the ranks that hold it, as bits."""

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._ranks)

    def depth(self, chain: Sequence[int]) -> int:
        """Return how many of our blocks from the front of `chain` the best rank holds."""
        return max(rank.depth(chain) for rank in self._ranks)

    def holds(self, block: int) -> bool:
        """Tell whether any rank holds a block of ours."""
        return any(rank.depth((block,)) for rank in self._ranks)

    def knows(self, chain: Sequence[int]) -> bool:
        """Tell whether the places of all its blocks are known, in every rank."""
        return all(rank.knows(chain) for rank in self._ranks)

    def use(self, chain: Sequence[int], *, at_s: float) -> None:
        """Note that a prompt was used, by whichever rank."""
        for rank in self._ranks:
            rank.use(chain, at_s=at_s)

    def learn(self, prompt: TokenizedPrompt, *, at_s: float) -> None:
        """Take a prompt's tokens."""
        for rank in self._ranks:
            rank.learn(prompt, at_s=at_s)

    def expire(self, before_s: float) -> None:
        """Forget the places of what was not used since `before_s`."""
        for rank in self._ranks:
            rank.expire(before_s)

    def apply(self, event: KvEvent, *, rank: int = 0) -> None:
        """Take one event of a rank; they come in its order."""
        self._ranks[rank].apply(event)

    def lost(self, rank: int) -> None:
        """Know nothing of a rank any more."""
        self._ranks[rank].clear()

    def clear(self) -> None:
        """Know nothing: another engine, with perhaps another tokenizer."""
        for rank in self._ranks:
            rank.clear()

    def take(self) -> tuple[list[int], list[int]]:
        """Return our blocks held and gone since the last call, parents first and last."""
        if len(self._ranks) == 1:
            return self._ranks[0].take()
        before: dict[int, bool] = {}
        leaving: list[int] = []
        for index, rank in enumerate(self._ranks):
            stored, gone = rank.take()
            for block in stored:
                before.setdefault(block, block in self._holders)
                self._holders[block] = self._holders.get(block, 0) | 1 << index
            for block in gone:
                before.setdefault(block, block in self._holders)
                left = self._holders.get(block, 0) & ~(1 << index)
                if left:
                    self._holders[block] = left
                else:
                    self._holders.pop(block, None)
            leaving += gone
        came = [block for block, held in before.items() if not held and block in self._holders]
        went = dict.fromkeys(block for block in leaving if block not in self._holders)
        return came, list(went)
