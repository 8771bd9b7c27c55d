"""A run of engine steps whose make-up does not change: the model's unit of time.

While the same requests decode and nothing is prefilled, each step takes a little longer than the
one before (the KV cache fills by one token a request). That sum has a closed form, so hundreds of
steps cost no more than one. Every instant is computed from the phase's start, never from the step
before: it does not depend on how often the model was looked at.
"""

from broker.engine_model.profile import Profile


class Phase:
    """`steps_max` equal steps from `start_s`; `done` of them are over."""

    __slots__ = (
        "_prefill_s",
        "_profile",
        "_share",
        "_share_stride",
        "done",
        "start_s",
        "steps_max",
    )

    def __init__(
        self,
        profile: Profile,
        *,
        start_s: float,
        used_tokens: int,
        decoding: int,
        prefill_tokens: int,
        yields_tokens: bool,
        steps_max: int,
    ) -> None:
        """Plan a phase. One that prefills, or yields no tokens, is a single step."""
        self._profile = profile if yields_tokens else None
        self._prefill_s = profile.prefill_s.at(prefill_tokens) if prefill_tokens else 0.0
        self._share = used_tokens / profile.kv_tokens_max
        self._share_stride = decoding / profile.kv_tokens_max
        self.start_s = start_s
        self.steps_max = steps_max
        self.done = 0

    def end_s(self, steps: int) -> float:
        """Return the instant at which `steps` steps are over."""
        if self._profile is None:
            return self.start_s + self._prefill_s
        decode_s = self._profile.decode_s.over(self._share, self._share_stride, steps)
        return self.start_s + self._prefill_s + decode_s

    def steps_by(self, at_s: float) -> int:
        """Return how many steps are over at `at_s`, at least `done`."""
        if self.end_s(self.steps_max) <= at_s:
            return self.steps_max
        low, high = self.done, self.steps_max
        while high - low > 1:
            middle = (low + high) // 2
            if self.end_s(middle) <= at_s:
                low = middle
            else:
                high = middle
        return low

    def cut(self, at_s: float) -> None:
        """End with the step that is under way at `at_s`: the next one is made up anew."""
        over = self.done > 0 and self.end_s(self.done) >= at_s
        self.steps_max = self.done if over else min(self.steps_max, self.done + 1)
