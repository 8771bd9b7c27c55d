"""Prompts built of parts, with the chained block ids that equal beginnings share."""

from collections.abc import Iterator
from itertools import count, islice

BLOCK_TOKENS = 64
"""Tokens per block of generated prompts: about the wire's 256 bytes, at 4 bytes a token."""


class Prefix:
    """A prompt's beginning. Two prompts share the blocks of the prefixes they have in common."""

    def __init__(
        self, *, tokens: int = 0, blocks: tuple[int, ...] = (), fresh: Iterator[int] | None = None
    ) -> None:
        self.tokens = tokens
        self.blocks = blocks
        """Ids of the whole blocks."""
        self._fresh = count() if fresh is None else fresh
        self._followers: dict[int, Prefix] = {}

    def then(self, part: int, tokens: int) -> "Prefix":
        """Return this prefix with a part after it that others may share: by its number, once."""
        follower = self._followers.get(part)
        if follower is None:
            follower = self._followers[part] = self.alone(tokens)
        return follower

    def alone(self, tokens: int) -> "Prefix":
        """Return this prefix with something after it that nobody shares."""
        total = self.tokens + tokens
        whole = total // BLOCK_TOKENS - len(self.blocks)
        blocks = (*self.blocks, *islice(self._fresh, whole))
        return Prefix(tokens=total, blocks=blocks, fresh=self._fresh)
