"""When generated requests come, what they ask for, and how popular each choice is."""

import random
from collections.abc import Iterator
from heapq import nsmallest
from itertools import accumulate


def poisson(rng: random.Random, *, requests_per_s: float, start_s: float = 0.0) -> Iterator[float]:
    """Yield the endless arrivals of many independent senders at a steady rate."""
    at_s = start_s
    while True:
        at_s += rng.expovariate(requests_per_s)
        yield at_s


def around(rng: random.Random, tokens_mean: int) -> int:
    """Return a length, uniform within half of the mean around it, at least 1."""
    return max(1, round(tokens_mean * rng.uniform(0.5, 1.5)))


class Popularity:
    """Draws one of `choices` numbers from 0; the k-th is asked for in proportion to k^−zipf."""

    def __init__(self, choices: int, *, zipf: float) -> None:
        """0 is uniform; web pages and prompts are usually near 1 (Breslau et al., INFOCOM '99)."""
        self._numbers = range(choices)
        self._weights = [max((number + 1) ** -zipf, 1e-300) for number in self._numbers]
        self._cumulated = list(accumulate(self._weights))

    def one(self, rng: random.Random) -> int:
        """Return one number."""
        return rng.choices(self._numbers, cum_weights=self._cumulated)[0]

    def several(self, rng: random.Random, wanted: int) -> list[int]:
        """Return different numbers, as if drawn one after the other; at most all there are.

        The first of independent exponential clocks to ring (Efraimidis and Spirakis, 2006).
        """
        clocks = ((rng.expovariate(self._weights[n]), n) for n in self._numbers)
        return [number for _, number in nsmallest(wanted, clocks)]
