"""The measures that policies are ranked by: their names, units, and which way is better."""

from typing import Protocol

from msgspec import Struct

from broker.sim.figures import Spread


class Measured(Protocol):
    """Figures of one run, or means over seeds."""

    @property
    def ttft_s(self) -> Spread:
        """Time to the first token."""
        ...


class Measure(Struct, frozen=True, kw_only=True):
    """One of them."""

    name: str
    """As in a report: `ttft_s.p50`."""
    says: str
    unit: str = ""
    """`s`, `%` (of a ratio in 0..1), `tokens/s`, or none."""
    higher_is_better: bool = False

    def of(self, figures: Measured) -> float:
        """Return its value."""
        value: object = figures
        for part in self.name.split("."):
            value = getattr(value, part)
        assert isinstance(value, int | float), f"{self.name} is a number"
        return float(value)

    def text(self, value: float) -> str:
        """Write a value as people read it: times in ms, ratios in %."""
        match self.unit:
            case "s":
                return f"{value * 1000:,.{_decimals(value * 1000)}f} ms"
            case "%":
                return f"{value * 100:.1f} %"
            case "tokens/s":
                return f"{value:,.{_decimals(value)}f} tokens/s"
            case _:
                return f"{value:.3f}"

    def interval(self, low: float, high: float) -> str:
        """Write an interval, its unit once."""
        unit = self.text(low).partition(" ")[2]
        ends = [self.text(end).partition(" ")[0] for end in (low, high)]
        return f"{' … '.join(ends)} {unit}".rstrip()


def _decimals(value: float) -> int:
    """Three figures that count."""
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2  # noqa: PLR2004  # Digits.


def _time(name: str, says: str) -> Measure:
    return Measure(name=name, says=says, unit="s")


def _share(name: str, says: str, *, higher_is_better: bool = False) -> Measure:
    return Measure(name=name, says=says, unit="%", higher_is_better=higher_is_better)


TTFT_MEAN = _time("ttft_s.mean", "TTFT mean")
ITL_MEAN = _time("itl_s.mean", "ITL mean")
E2E_MEAN = _time("e2e_s.mean", "end to end mean")
CACHED = _share("cached_token_ratio", "cached-token share", higher_is_better=True)

MEASURES = (
    TTFT_MEAN,
    _time("ttft_s.p50", "TTFT p50"),
    _time("ttft_s.p90", "TTFT p90"),
    _time("ttft_s.p99", "TTFT p99"),
    ITL_MEAN,
    E2E_MEAN,
    _time("e2e_s.p50", "end to end p50"),
    _time("e2e_s.p99", "end to end p99"),
    CACHED,
    Measure(name="throughput_tokens_s", says="throughput", unit="tokens/s", higher_is_better=True),
    _share("utilisation_std", "spread of utilisation"),
    _share("prefix_switch_ratio", "prefix switches"),
    _share("hot_switch_ratio", "switches of hot prefixes"),
    _share("duplicate_kv_ratio", "duplicate KV"),
    _share("hit_dip", "hit dip after a change"),
    Measure(name="jain_index", says="fairness over lanes (Jain)", higher_is_better=True),
)
"""Queue wait is not among them: peers bind on arrival, so theirs is 0 while their requests wait in
the engine, unseen. TTFT counts both kinds of wait."""
