"""How fast answers grow while their engine does nothing but decode, as its agent sees it.

A token that comes while another prompt is prefilled comes late, and says nothing of a decode step.
So only the gaps in which nothing was prefilled are taken: what is added up here. Nothing is
smoothed: the broker fits a line through the readings, over the KV cache in use at each, and a rate
of some seconds ago would belong to another cache.
"""

DECODE_S_MIN = 0.1
"""Seconds of answers that a reading takes at least: a few gaps are mostly the clock's and the
loop's. Less is kept for the next reading."""


class DecodeMeter:
    """Of one engine. Sums of its answers: two that grow beside each other count twice."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def add(self, *, tokens: int, seconds: float) -> None:
        """Take by how many tokens answers grew, and in which time."""
        self._tokens += tokens
        self._seconds += seconds

    def read(self) -> float:
        """Return an answer's tokens a second since the last reading; 0: too little was seen."""
        if self._seconds < DECODE_S_MIN:
            return 0.0
        rate = self._tokens / self._seconds
        self._tokens, self._seconds = 0, 0.0
        return rate
