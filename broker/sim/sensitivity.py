"""No winner by one constant: the same comparison with one constant of the engine changed at a time.

Halved and doubled are: the rate of prefill (what its curve adds over its constant), the slope of
decode (what its curve adds as the KV cache fills), and the KV cache of each worker. Decode time is
a curve over the share of the cache in use, so a larger cache is also a faster decode of equal work.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace as replaced

from msgspec.structs import replace

from broker.engine_model.profile import Curve
from broker.sim.figures import Figures
from broker.sim.measures import TTFT_MEAN
from broker.sim.paired import difference
from broker.sim.report import Sensitivity, Variant
from broker.sim.runs import Setting

UNCHANGED = "unchanged"

Seeds = Mapping[str, Sequence[Figures]]
"""By policy, the figures of each seed."""


def variants(setting: Setting) -> dict[str, Setting]:
    """Return the settings to compare in, of equal workers; the first is the one given."""
    made = {UNCHANGED: setting}
    profile = setting.profile
    factors = {"halved": 0.5, "doubled": 2.0}
    for word, factor in factors.items():
        faster = replaced(profile, prefill_s=_steeper(profile.prefill_s, 1 / factor))
        made[f"prefill rate {word}"] = replace(setting, profile=faster)
    for word, factor in factors.items():
        steeper = replaced(profile, decode_s=_steeper(profile.decode_s, factor))
        made[f"decode slope {word}"] = replace(setting, profile=steeper)
    for word, factor in factors.items():
        blocks = max(1, round(setting.blocks_per_worker * factor))
        made[f"KV size {word}"] = replace(setting, blocks_per_worker=blocks)
    return made


def sensitivity(outcomes: Mapping[str, Seeds | str], *, ours: Sequence[str]) -> Sensitivity:
    """Sum up what each variant came to, or why it could not be run; the first has no change.

    `ours` are the labels of ours, the one that is compared with the best peer first.
    """
    base = next(iter(outcomes.values()))
    assert not isinstance(base, str), "the unchanged setting has run"
    made = tuple(
        Variant(name=name, problem=seeds)
        if isinstance(seeds, str)
        else _variant(name, seeds, base=base, ours=ours)
        for name, seeds in outcomes.items()
    )
    holds = not any(one.reversed_pairs for one in made)
    return Sensitivity(measure=TTFT_MEAN.name, holds=holds, variants=made)


def _steeper(curve: Curve, factor: float) -> Curve:
    return Curve(curve.constant_s, curve.slope_s * factor, curve.bend_s * factor)


def _variant(name: str, seeds: Seeds, *, base: Seeds, ours: Sequence[str]) -> Variant:
    values = {label: _mean(figures) for label, figures in seeds.items()}
    peers = [value for label, value in values.items() if label not in ours]
    return Variant(
        name=name,
        order=tuple(sorted(values, key=values.__getitem__)),
        values=values,
        ours_to_best_peer=values[ours[0]] / min(peers) if ours and peers else None,
        reversed_pairs=tuple(
            (one, other)
            for one in seeds
            for other in seeds
            if _is_ahead(base, one, other) and _is_ahead(seeds, other, one)
        ),
    )


def _mean(figures: Sequence[Figures]) -> float:
    return sum(TTFT_MEAN.of(one) for one in figures) / len(figures)


def _is_ahead(seeds: Seeds, one: str, other: str) -> bool:
    """Tell whether one may be claimed to be faster than the other."""
    apart = difference(
        [TTFT_MEAN.of(figures) for figures in seeds[one]],
        [TTFT_MEAN.of(figures) for figures in seeds[other]],
    )
    return apart.verdict(higher_is_better=False) == "better"
