"""Generated workloads by name: `shared_prompts?prompts=8&zipf=1`."""

import inspect
import random
from collections.abc import Callable, Mapping

from broker.sim.errors import TraceError
from broker.sim.request import Workload
from broker.sim.workload import generated

PREFIX = "generated:"
"""How such a name begins where paths are meant too."""

GENERATED: dict[str, Callable[..., Workload]] = {
    make.__name__: make
    for make in (
        generated.shared_prompts,
        generated.few_shot,
        generated.rag,
        generated.hot_group,
        generated.alternating,
        generated.bursts,
        generated.retry_storm,
        generated.short_long_lanes,
        generated.scale_out,
        generated.many,
    )
}
"""Every generated workload; the parameters of each are its function's."""

NUMBER_MAX = 1_000_000_000
"""No parameter means anything beyond: it is a slip of the hand."""

COUNT_MAX = 10_000_000
"""Requests, prompts, tokens: what is made of so many is held in memory, some GB."""

MAY_BE_ZERO = frozenset({"zipf", "hot_share", "storm_at_s", "start_h"})

SHARES = frozenset({"hot_share"})


def generate(text: str, rng: random.Random) -> Workload:
    """Return the workload of a name with parameters; its source tells both.

    Raises:
        TraceError: no such name, parameter or value.
    """
    name, values = split(text)
    if name not in GENERATED:
        raise TraceError(PREFIX + text, f"no such workload; known: {', '.join(GENERATED)}")
    make = GENERATED[name]
    workload = make(rng, **parameters(make, values, where=PREFIX + text))
    shown = ", ".join(f"{key}={value}" for key, value in values.items())
    return Workload(name=name, requests=workload.requests, source=f"generated: {name}({shown})")


def split(text: str) -> tuple[str, dict[str, str]]:
    """Split `name?key=value&…` into the name and the values by key."""
    name, _, query = text.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    return name, {key: value for key, _, value in pairs}


def parameters(
    make: Callable[..., Workload], values: Mapping[str, str], *, where: str
) -> dict[str, int | float]:
    """Return the values as the numbers that the function's parameters take.

    Raises:
        TraceError: an unknown key, or no such number; `where` is what the user wrote.
    """
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(make).parameters.items()
        if isinstance(parameter.default, int | float)
    }
    found: dict[str, int | float] = {}
    for key, value in values.items():
        if key not in defaults:
            raise TraceError(where, f"no parameter {key!r}; known: {', '.join(defaults)}")
        found[key] = _number(key, value, type(defaults[key]), where)
    return found


def _number(key: str, value: str, kind: type[int | float], where: str) -> int | float:
    try:
        number = kind(value)
    except ValueError as error:
        raise TraceError(where, f"{key}={value}: not of type {kind.__name__}") from error
    most = 1 if key in SHARES else COUNT_MAX if kind is int else NUMBER_MAX
    if not 0 <= number <= most or (number == 0 and key not in MAY_BE_ZERO):
        raise TraceError(where, f"{key}={value}: must be over 0, and at most {most:,}")
    return number
