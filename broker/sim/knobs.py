"""Ours under other values of its knobs: every combination of those that are asked for."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite

import msgspec
from msgspec import Struct

from broker.core.policy import BreakerPolicy, OrderPolicy, Policy, RoutingPolicy
from broker.sim.errors import SimError
from broker.wire.settings import nearest

SECTIONS = {"routing": RoutingPolicy, "order": OrderPolicy, "breaker": BreakerPolicy}
"""What can be swept: `[policy.routing]`, `[policy.order]`, `[policy.breaker]`."""

COMBINATIONS_MAX = 500
"""More is an oversight: three knobs of eight values each are 512."""


class Knobs(Struct, frozen=True, kw_only=True):
    """One combination."""

    values: dict[str, str]
    """By name: `routing.bias`. Empty: as shipped."""
    policy: Policy

    @property
    def label(self) -> str:
        """What to call it."""
        return " ".join(f"{name}={value}" for name, value in self.values.items()) or "as shipped"


def parse(given: Sequence[str]) -> dict[str, list[str]]:
    """Read `routing.bias=0,1,2`; raises SimError, saying which knobs there are."""
    found: dict[str, list[str]] = {}
    for one in given:
        name, equals, text = one.partition("=")
        values = [value.strip() for value in text.split(",") if value.strip()]
        if not equals or not values:
            message = f"a knob is given as NAME=VALUE,VALUE,… (routing.bias=0,1,2), not {one!r}"
            raise SimError(message)
        if name not in known():
            close = nearest(name, known())
            message = f"no such knob: {name}.{close} Known: {', '.join(known())}"
            raise SimError(message)
        if name in found:
            message = f"{name} is named twice: give all its values at once, {name}=VALUE,VALUE,…"
            raise SimError(message)
        found[name] = list(dict.fromkeys(values))
    return found


def known() -> list[str]:
    """Name all knobs."""
    return [
        f"{section}.{field.name}"
        for section, kind in SECTIONS.items()
        for field in msgspec.structs.fields(kind)
    ]


def combinations(base: Policy, knobs: Mapping[str, Sequence[str]]) -> list[Knobs]:
    """Return the base as it is, and every combination of the values.

    Raises SimError when a value does not suit its knob, or there are too many.
    """
    rows = list(product(*knobs.values()))
    if len(rows) > COMBINATIONS_MAX:
        message = f"{len(rows)} combinations are more than {COMBINATIONS_MAX}: sweep fewer at once"
        raise SimError(message)
    made = [dict(zip(knobs, row, strict=True)) for row in rows]
    return [
        Knobs(values={}, policy=base),
        *(Knobs(values=values, policy=_changed(base, values)) for values in made),
    ]


def _changed(base: Policy, values: Mapping[str, str]) -> Policy:
    tree = msgspec.to_builtins(base)
    for name, value in values.items():
        section, _, field = name.partition(".")
        tree[section][field] = value
    said = " ".join(f"{name}={value}" for name, value in values.items())
    try:
        policy = msgspec.convert(tree, Policy, strict=False)
    except msgspec.ValidationError as error:
        message = f"{said}: {error}"
        raise SimError(message) from error
    if not all(_is_finite(getattr(policy, section)) for section in SECTIONS):
        message = f"{said}: it must be a finite number"
        raise SimError(message)
    return policy


def _is_finite(section: RoutingPolicy | OrderPolicy | BreakerPolicy) -> bool:
    values = msgspec.structs.astuple(section)
    return all(isfinite(value) for value in values if isinstance(value, float))
