"""A request of a workload: when it comes, how large it is, and which prefix blocks it has."""

from collections.abc import Sequence

from msgspec import Struct

SPAN_S_MAX = 366 * 86_400.0
"""From the first arrival to the last, and between two turns: hours of real time, where nothing
else happens meanwhile. What is longer is a slip of the unit, and would be simulated for ever."""


class Request(Struct, frozen=True, kw_only=True):
    """One request. Unlike a broker, a simulation knows how long the answer will be."""

    index: int
    """Its place in the workload, from 0."""
    at_s: float
    """When it is sent; with `after`, how long after that request's end."""
    prompt_tokens: int
    """At least 1."""
    output_tokens: int
    """At least 1."""
    output_tokens_max: int
    """What its sender allows, and all that a router may know of its length."""
    blocks: Sequence[int] = ()
    """Chained ids of the prompt's whole prefix blocks: an equal id is an equal whole prefix."""
    block_tokens: int
    """Prompt tokens that each block stands for."""
    lane: str = "main"
    band: int = 1
    session: str = ""
    after: int | None = None
    """The request of the same session that must have ended before."""


class Workload(Struct, frozen=True, kw_only=True):
    """Requests in the order of their indices, which is that of `at_s` where none has `after`."""

    name: str
    """Short, for tables and file names."""
    requests: Sequence[Request]
    source: str
    """Where it comes from, for the report."""
