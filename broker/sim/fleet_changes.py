"""What happens to the fleet in a run, as people write it: `join@60`, `restart:2@120`."""

import math
from collections.abc import Sequence

from broker.sim.errors import SimError
from broker.sim.world import Change, FleetChange

CHANGES_MAX = 1000
"""More is no scenario that anybody wrote: the fuzzer draws faults by itself."""

HOW = "KIND@SECONDS or KIND:WORKER@SECONDS, such as join@60, restart:2@120, lose:0@90, drain:1@30"


def parse(given: Sequence[str], *, workers: int) -> tuple[FleetChange, ...]:
    """Return the changes in the order of time; at one instant, in the order given.

    Workers are numbered from 0; those that join follow, as they come.

    Raises SimError where one can't be read, names no worker there is, or leaves nobody to serve.
    """
    if len(given) > CHANGES_MAX:
        message = f"{len(given)} changes of the fleet are more than {CHANGES_MAX}"
        raise SimError(message)
    changes = sorted((_one(text) for text in given), key=lambda change: change.at_s)
    _require_possible(changes, workers=workers)
    return tuple(changes)


def written(change: FleetChange) -> str:
    """Write a change as `parse` reads it."""
    whom = "" if change.change is Change.JOIN else f":{change.host}"
    return f"{change.change}{whom}@{change.at_s:g}"


def _one(text: str) -> FleetChange:
    what, _, when = text.partition("@")
    kind, colon, whom = what.partition(":")
    try:
        change, at_s = Change(kind), float(when)
        host = int(whom) if colon else -1
    except ValueError as error:
        message = f"a change of the fleet is given as {HOW}; not {text!r}"
        raise SimError(message) from error
    if not (math.isfinite(at_s) and at_s >= 0) or (host >= 0) == (change is Change.JOIN):
        message = f"a change of the fleet is given as {HOW}; not {text!r}"
        raise SimError(message)
    return FleetChange(at_s=at_s, change=change, host=host)


def _require_possible(changes: Sequence[FleetChange], *, workers: int) -> None:
    """See that each worker is there when something happens to it, and one always serves."""
    there, serving, joined = set(range(workers)), set(range(workers)), workers
    for one in changes:
        if one.change is Change.JOIN:
            there.add(joined)
            serving.add(joined)
            joined += 1
            continue
        if one.host not in there:
            message = f"{written(one)}: there is no worker {one.host} then"
            raise SimError(message)
        match one.change:
            case Change.RESTART:
                serving.add(one.host)
            case Change.DRAIN:
                serving.discard(one.host)
            case Change.LOSE:
                there.discard(one.host)
                serving.discard(one.host)
        if not serving:
            message = f"{written(one)}: no worker is left to serve"
            raise SimError(message)
