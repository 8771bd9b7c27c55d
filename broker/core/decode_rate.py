"""How long a decode step takes at a worker, learned from its reports and those of its kin.

Every running request reads its KV cache at each step, so a step takes longer the more is held:
a + b · KV tokens (paged attention is bound by memory bandwidth: Kwon et al., SOSP 2023; the peers'
measured curves are nearly straight). Both are learned by least squares over the latest reports,
older ones weighing less. Where the KV never varied nothing is known of b: it is 0 then.

Workers that are alike (`Kinds`) share a line. One of them alone sees too little of it: a tenth
between two guesses would send a job away from its prefix. What sets a worker apart is a ratio, and
counts only where it is plain.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

MEMORY_REPORTS = 64.0
"""Reports that weigh: a minute's worth at the default heartbeat."""

VARIATION_MIN = 0.05
"""Least spread of the KV tokens, as a share of their mean, from which a slope is believed."""

STEP_S_MAX = 10.0
"""Longest step believed: a model that pages from disk takes seconds; a rate that is garbage must
not shun a worker for hours."""

KIN_REPORTS = 512.0
"""The same, of all workers of a kind together."""

APART_RATIO_MIN = 1.25
"""A worker is as quick as its kin until it is slower or quicker by more: a throttled GPU is slower
by a third and more, and guesses from a minute's reports differ by a tenth."""

APART_REPORTS_MIN = 8.0
"""Reports of its own before a worker is set apart."""

KINDS_MAX = 256
"""Kinds of workers known at once; beyond, each stands for itself."""

GAP_SECONDS_MIN = 0.1
"""Less decoding than this, older reports counting half each, says nothing of the gap."""


@dataclass(slots=True)
class DecodeRate:
    """One worker's line."""

    weight: float = 0.0
    kv_mean: float = 0.0
    step_mean_s: float = 0.0
    kv_variance: float = 0.0
    covariance: float = 0.0
    memory: float = MEMORY_REPORTS

    def learn(self, *, kv_tokens: float, step_s: float) -> None:
        """Take a report: so many KV tokens given to the worker, and so long a step."""
        step_s = min(step_s, STEP_S_MAX)
        self.weight = min(self.weight + 1.0, self.memory)
        share = 1.0 / self.weight
        kv_off, step_off_s = kv_tokens - self.kv_mean, step_s - self.step_mean_s
        self.kv_mean += share * kv_off
        self.step_mean_s += share * step_off_s
        # Welford's update, with a weight that stops growing: older reports fade.
        self.kv_variance += share * (kv_off * (kv_tokens - self.kv_mean) - self.kv_variance)
        self.covariance += share * (step_off_s * (kv_tokens - self.kv_mean) - self.covariance)

    @property
    def slope_s(self) -> float:
        """Seconds that one more KV token adds to each step."""
        if self.kv_variance <= (VARIATION_MIN * self.kv_mean) ** 2:
            return 0.0
        return max(0.0, self.covariance / self.kv_variance)

    def step_s(self, kv_tokens: float) -> float:
        """Return the seconds of a step at so many KV tokens; 0 before any report."""
        return self.step_and_slope_s(kv_tokens)[0]

    def step_and_slope_s(self, kv_tokens: float) -> tuple[float, float]:
        """Return the seconds of a step at so many KV tokens, and those of one token more."""
        slope_s, mean_s = self.slope_s, self.step_mean_s
        # Never under half the mean: a line drawn far beyond what was seen says little.
        return max(0.5 * mean_s, mean_s + slope_s * (kv_tokens - self.kv_mean)), slope_s

    def scaled(self, ratio: float) -> "DecodeRate":
        """Return the line of one that takes so many times as long."""
        return replace(
            self, step_mean_s=ratio * self.step_mean_s, covariance=ratio * self.covariance
        )


class Kinds:
    """The lines of workers that are alike in all that they say of themselves."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, DecodeRate] = {}

    def learn(self, kind: Hashable, *, kv_tokens: float, step_s: float) -> None:
        """Take a report of one of them."""
        line = self._lines.get(kind)
        if line is None:
            if len(self._lines) >= KINDS_MAX:
                return
            line = self._lines[kind] = DecodeRate(memory=KIN_REPORTS)
        line.learn(kv_tokens=kv_tokens, step_s=step_s)

    def line(self, kind: Hashable, own: DecodeRate) -> DecodeRate:
        """Return a worker's line: its kin's, scaled where its own reports set it apart."""
        kin = self._lines.get(kind)
        if kin is None:
            return own
        if own.weight < APART_REPORTS_MIN:
            return kin.scaled(1.0)
        ratio = own.step_mean_s / kin.step_s(own.kv_mean)
        is_apart = not 1 / APART_RATIO_MIN <= ratio <= APART_RATIO_MIN
        return kin.scaled(ratio if is_apart else 1.0)


@dataclass(slots=True)
class KvOverTime:
    """KV tokens given to a worker while answers grew there, each answer's seconds weighing alike.

    A report tells how fast answers grew since the last one, so it belongs to what was there then:
    jobs come and go several times between two reports.
    """

    since_at_s: float = 0.0
    answer_s: float = 0.0
    kv_token_s: float = 0.0

    def passes(self, *, kv_tokens: float, answers: int, at_s: float) -> None:
        """Take what was there until now; called before any of it changes."""
        answer_s = answers * (at_s - self.since_at_s)
        self.since_at_s = at_s
        self.answer_s += answer_s
        self.kv_token_s += answer_s * kv_tokens

    def read(self) -> float | None:
        """Return the mean since the last reading; None when no answer grew."""
        if self.answer_s <= 0:
            return None
        mean = self.kv_token_s / self.answer_s
        self.answer_s = self.kv_token_s = 0.0
        return mean


@dataclass(slots=True)
class TokenGap:
    """Seconds between two tokens of an answer at a worker, as its lists of jobs tell.

    Whatever the engine does meanwhile counts, other jobs' prefill above all.
    """

    tokens: float = 0.0
    seconds: float = 0.0

    def note(self, *, tokens: int, seconds: float) -> None:
        """Take by how much one answer grew, and in which time."""
        self.tokens += tokens
        self.seconds += seconds

    def turn(self) -> None:
        """Let what was seen before a report count half."""
        self.tokens *= 0.5
        self.seconds *= 0.5

    @property
    def gap_s(self) -> float:
        """Return the mean gap of late; 0 when hardly anything was seen."""
        return self.seconds / self.tokens if self.seconds >= GAP_SECONDS_MIN else 0.0
