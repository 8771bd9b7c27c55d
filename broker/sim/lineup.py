"""Chooses who takes part in a comparison."""

from broker.sim.contestants import Contestant, contestant, contestants

ALL = "all"
DEFAULTS = "defaults"

OURS_AS_SHIPPED = ("first_token", "weighted")
"""Ours without anything taken away: what the aims are stated for."""

ROUND_ROBIN = "round-robin"


def chosen(names: str) -> list[Contestant]:
    """Return the contestants that `all`, `defaults` or labels separated by commas mean, each once.

    `defaults`: ours as it ships, and each peer as it comes.

    Raises SimError when a label is unknown.
    """
    if names == ALL:
        return contestants()
    if names == DEFAULTS:
        return _defaults()
    found = [contestant(name.strip()) for name in names.split(",") if name.strip()]
    return list({one.label: one for one in found}.values())


def _defaults() -> list[Contestant]:
    ours = [contestant(label) for label in OURS_AS_SHIPPED]
    firsts: dict[str, Contestant] = {}
    for one in contestants():
        if not one.is_ours:
            firsts.setdefault(one.family, one)
    return [*ours, *firsts.values()]
