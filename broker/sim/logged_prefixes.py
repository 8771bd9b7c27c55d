"""What prompts of a log share, as blocks for the engine model.

A log has one hash for eight of the wire's blocks, some 512 tokens, and an engine serves what lies
between two of them as well. How much it did is logged, too: where a job was served more than its
whole logged blocks, all that share the last of these are taken to share as much of what follows.
For that each logged block becomes eight, where it matters.
"""

from collections.abc import Iterable, Sequence

from broker.sim.decision_trace import BLOCKS_PER_LOGGED, BlockTokens, PrefixIds
from broker.sim.decisions import LoggedJob

BETWEEN_MIN = 0.05
"""Share of the cached tokens that lies between logged blocks, from which on it matters."""

LOGGED_BLOCKS_MAX = 2_000_000
"""More are never split: the simulation would hold eight times as many."""


class LoggedPrefixes:
    """Gives each job of one model its blocks."""

    def __init__(self, jobs: Sequence[LoggedJob]) -> None:
        """Look at all jobs, in the order in which they came."""
        tokens = BlockTokens()
        for job in jobs:
            if job.counted_prompt_tokens:
                tokens.add(job)
        self._logged_tokens = tokens.of(jobs[0].model) if jobs else 1
        self._ids = PrefixIds()
        self._shared: dict[int, int] = {}
        """By logged block: how many parts of what follows all share that have it."""
        self.is_split = self._matters(jobs)
        if self.is_split:
            self._look(jobs)

    @property
    def block_tokens(self) -> int:
        """Prompt tokens of each block."""
        parts = BLOCKS_PER_LOGGED if self.is_split else 1
        return max(1, self._logged_tokens // parts)

    def of(self, job: LoggedJob) -> list[int]:
        """Return a job's blocks, all of them whole."""
        logged = self._logged(job)
        if not self.is_split:
            return logged
        rest = max(1, job.input_tokens) - len(logged) * self._logged_tokens
        return self._parts(logged, last=min(BLOCKS_PER_LOGGED - 1, rest // self.block_tokens))

    def _parts(self, logged: Sequence[int], *, last: int) -> list[int]:
        """Split blocks; of what follows the last one, `last` parts are in the prompt."""
        parts: list[int] = []
        common: list[int] = []
        for block in logged:
            own = [_part(block, number) for number in range(len(common), BLOCKS_PER_LOGGED)]
            parts += common + own
            common = [_after(block, number) for number in range(self._shared.get(block, 0))]
        return parts + common[:last]

    def _logged(self, job: LoggedJob) -> list[int]:
        return self._ids.of(job.blocks[: max(1, job.input_tokens) // self._logged_tokens])

    def _matters(self, jobs: Iterable[LoggedJob]) -> bool:
        blocks = cached = between = 0
        for job in jobs:
            blocks += len(job.packed_blocks) // 8
            cached += job.cached_tokens
            between += job.cached_tokens % self._logged_tokens
        return between > BETWEEN_MIN * cached and blocks <= LOGGED_BLOCKS_MAX

    def _look(self, jobs: Iterable[LoggedJob]) -> None:
        seen: set[int] = set()
        for job in jobs:
            logged = self._logged(job)
            whole, rest = divmod(job.cached_tokens, self._logged_tokens)
            if 0 < whole <= len(logged):
                is_new = whole == len(logged) or logged[whole] not in seen
                last = logged[whole - 1]
                if is_new:
                    parts = rest // self.block_tokens
                    self._shared[last] = max(self._shared.get(last, 0), parts)
            seen.update(logged)


def _part(block: int, number: int) -> int:
    """Name a part of a logged block."""
    return (2 * block) * BLOCKS_PER_LOGGED + number


def _after(block: int, number: int) -> int:
    """Name a part of what follows a logged block, whatever follows it."""
    return (2 * block + 1) * BLOCKS_PER_LOGGED + number
