"""How policies pick the least of the workers: by place, or by chance among equals."""

import random
from collections.abc import Sequence


def first_least(costs: Sequence[float]) -> int:
    """Return the place of the least cost, the first of equals; `costs` is never empty."""
    return costs.index(min(costs))


def any_least(costs: Sequence[float], rng: random.Random) -> int:
    """Return the place of the least cost, equals by chance; `costs` is never empty."""
    least = min(costs)
    places = [place for place, cost in enumerate(costs) if cost == least]
    return places[0] if len(places) == 1 else rng.choice(places)
