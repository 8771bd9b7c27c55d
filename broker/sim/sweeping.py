"""What a sweep over knobs came to, as it is written to JSON."""

from collections.abc import Sequence

from msgspec import Struct

from broker.sim.knobs import Knobs
from broker.sim.report import Entry, SettingFacts, TraceFacts, setting_facts, trace_facts
from broker.sim.request import Workload
from broker.sim.runs import Setting


class SweptPoint(Struct, frozen=True, kw_only=True):
    """Ours under one combination of values."""

    knobs: dict[str, str]
    """Empty: as shipped."""
    figures: Entry


class Swept(Struct, frozen=True, kw_only=True):
    """All of it; the first point is as shipped."""

    points: tuple[SweptPoint, ...]
    setting: SettingFacts
    trace: TraceFacts


def swept_report(
    tried: Sequence[Knobs],
    entries: Sequence[Entry],
    *,
    setting: Setting,
    seeds: int,
    workload: Workload,
) -> Swept:
    """Put combinations and their figures together."""
    points = (
        SweptPoint(knobs=one.values, figures=figures)
        for one, figures in zip(tried, entries, strict=True)
    )
    return Swept(
        points=tuple(points),
        setting=setting_facts(setting, seeds=range(1, seeds + 1)),
        trace=trace_facts(workload),
    )
