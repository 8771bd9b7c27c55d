"""Compares ours with the best peer, measure by measure.

Each measure has a best peer of its own, at its best knobs: nobody has to run it to be beaten by it.
That choice is made on the same seeds, which favours the peer a little, never us.
"""

from collections.abc import Mapping, Sequence

from broker.sim.load import ITL_LOAD_RATIO_MAX, Load
from broker.sim.measures import ITL_MEAN, MEASURES, Measure
from broker.sim.paired import SEEDS_MIN, Difference, difference
from broker.sim.report import Against, Best, Entry

OURS = "ours"
"""The family of ours."""

NEGLIGIBLE_RATIO = 0.001
"""An interval that lies within this share of the peer's value is no difference, however sure: half
a millisecond of network at the end of an hour shows in throughput under every seed."""

FEW_SEEDS = f"a claim needs {SEEDS_MIN} seeds"
NEGLIGIBLE = f"under {NEGLIGIBLE_RATIO * 100:g} % of the peer's value"
LOADED = f"ITL is compared below {ITL_LOAD_RATIO_MAX * 100:g} % load"


def best_peers(entries: Sequence[Entry]) -> dict[str, Best]:
    """Return the best peer for each measure; of equals the first. Empty without peers."""
    peers = [one for one in entries if one.family != OURS]
    return {measure.name: _best(peers, measure) for measure in MEASURES} if peers else {}


def against_best_peers(
    entries: Sequence[Entry], best: Mapping[str, Best], load: Load
) -> dict[str, dict[str, Against]]:
    """Compare each of ours with the best peers; empty without peers."""
    by_label = {one.policy: one for one in entries}
    if not best:
        return {}
    return {
        ours.policy: {
            measure.name: _against(ours, by_label[best[measure.name].policy], measure, load)
            for measure in MEASURES
        }
        for ours in entries
        if ours.family == OURS
    }


def _best(peers: Sequence[Entry], measure: Measure) -> Best:
    pick = max if measure.higher_is_better else min
    one = pick(peers, key=measure.of)
    return Best(policy=one.policy, value=measure.of(one))


def _against(ours: Entry, peer: Entry, measure: Measure, load: Load) -> Against:
    apart = difference(_values(ours, measure), _values(peer, measure))
    verdict = apart.verdict(higher_is_better=measure.higher_is_better)
    reason = FEW_SEEDS if verdict == "no claim" else ""
    theirs = measure.of(peer)
    if _is_negligible(apart, theirs) and verdict != "no difference":
        verdict, reason = "no difference", NEGLIGIBLE
    if measure is ITL_MEAN and not load.itl_comparable:
        verdict, reason = "no claim", LOADED
    return Against(
        policy=peer.policy,
        value=measure.of(ours),
        best=theirs,
        ratio=measure.of(ours) / theirs if theirs else None,
        difference=apart.mean,
        interval=apart.interval,
        verdict=verdict,
        reason=reason,
    )


def _is_negligible(apart: Difference, theirs: float) -> bool:
    bound = NEGLIGIBLE_RATIO * abs(theirs)
    return apart.interval is not None and all(abs(end) <= bound for end in apart.interval)


def _values(one: Entry, measure: Measure) -> list[float]:
    return [measure.of(figures) for figures in one.seeds]
