"""How full the streams of a kind are, for `doctor`: pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from ops.cli.doctor_facts import Facts
from ops.cli.doctor_findings import Finding, fail, ok, warn
from ops.cli.output import size


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRule:
    """From when on the streams of a kind are too full, and what is said of it.

    In the sentences `{lane}` is the stream's lane.
    """

    kind: str
    """How their names begin."""
    about: str
    scarce_ratio: float
    full_ratio: float
    soon: str
    now: str
    to_do: str


def judge_room(facts: Facts, rule: RoomRule) -> Iterator[Finding]:
    """Judge all streams of a kind; nothing where there is none."""
    named = sorted(name for name in facts.streams if name.startswith(rule.kind))
    scarce = 0
    for name in named:
        stream, lane = facts.streams[name], name.removeprefix(rule.kind)
        bytes_max = int(stream.config.get("max_bytes", -1))
        if bytes_max <= 0 or stream.stored_bytes < rule.scarce_ratio * bytes_max:
            continue
        scarce += 1
        found = f"{name} holds {size(stream.stored_bytes)} of {size(bytes_max)}"
        to_do = rule.to_do.format(lane=lane)
        if stream.stored_bytes < rule.full_ratio * bytes_max:
            yield warn(rule.about, f"{found}: {rule.soon.format(lane=lane)}", to_do)
        else:
            yield fail(rule.about, f"{found}: {rule.now.format(lane=lane)}", to_do)
    if named and not scarce:
        yield ok(rule.about, "there is room for more in each lane")
