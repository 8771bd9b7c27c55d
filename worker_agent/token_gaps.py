"""Which gaps between tokens are decode steps alone, by what this agent gave its engine. Pure.

From the start of an attempt until its first token the engine may prefill it, in the steps that
decode the others (chunked prefill), and all answers wait. A gap counts when no attempt was in that
state at any instant of it. A stretch of gaps counts by its two ends, so it doesn't matter how many
tokens come in one read.
"""

from collections.abc import Hashable

from broker.engine_model.decode_meter import DecodeMeter


class TokenGaps:
    """Of all attempts on one engine; times are of one monotonic clock."""

    def __init__(self) -> None:
        self.meter = DecodeMeter()
        self._last: dict[Hashable, tuple[int, float] | None] = {}
        """Tokens of each answer, and since when; None before the first."""
        self._prefilling = 0
        self._quiet_since_s = 0.0

    def began(self, name: Hashable) -> None:
        """Note that an attempt's prompt is given to the engine."""
        self._last[name] = None
        self._prefilling += 1

    def came(self, name: Hashable, *, tokens: int, at_s: float) -> None:
        """Note that an attempt's answer has so many tokens now."""
        last = self._last[name]
        self._last[name] = tokens, at_s
        if last is None:
            self._prefilled(at_s)
        elif not self._prefilling and last[1] >= self._quiet_since_s:
            self.meter.add(tokens=tokens - last[0], seconds=at_s - last[1])

    def ended(self, name: Hashable, *, at_s: float) -> None:
        """Note that an attempt has left the engine, with an answer or without."""
        if self._last.pop(name) is None:
            self._prefilled(at_s)

    def _prefilled(self, at_s: float) -> None:
        self._prefilling -= 1
        self._quiet_since_s = at_s
