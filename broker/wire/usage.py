"""A lane's accounts: sums of its terminal records by API key, model and day, as they are stored.

A record counts on the day (UTC) on which its stream stored it, by the server's clock: no producer's
or worker's clock can move it into another month. Rejections that name a `retry_after_s` count
nowhere: they run out, and the same job may come again.
"""

from collections.abc import Iterable
from datetime import UTC, datetime

from msgspec import Struct

from broker.wire.fields import Count, Seconds, ShortText, Token
from broker.wire.messages import Kind, Record, Usage

ROWS_MAX = 1_000
"""Pairs of API key and model told apart in one lane's day, about 100 KB. A job's key name is its
caller's word, so it needs a bound: more are summed under OTHERS."""

OTHERS = "(others)"


class CountedRecord(Struct, frozen=True):
    """The fields of a stored terminal record that accounts are made of."""

    kind: Kind
    model: ShortText = ""
    api_key_name: ShortText = ""
    usage: Usage = Usage()
    retry_after_s: Seconds = 0.0

    @property
    def counts(self) -> bool:
        """Whether it is the job's last word."""
        return self.kind is not Kind.REJECTED or not self.retry_after_s


class UsageRow(Struct, frozen=True, array_like=True):
    """What one API key used of one model in a lane on a day: jobs by how they ended, and tokens."""

    api_key_name: ShortText
    model: ShortText
    completed: Count = 0
    failed: Count = 0
    cancelled: Count = 0
    expired: Count = 0
    dead_lettered: Count = 0
    rejected: Count = 0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Of the prompt tokens, those that were not computed again."""
    output_tokens: Count = 0

    @property
    def jobs(self) -> int:
        """Count jobs, however they ended."""
        ended = (self.completed, self.failed, self.cancelled, self.expired)
        return sum(ended) + self.dead_lettered + self.rejected


class UsageDay(Record, frozen=True, kw_only=True):
    """One lane's day. It says itself up to where its stream is counted in it.

    So adding a record and noting that it was added is one write, and a crash can't part them.
    """

    lane: Token
    day: ShortText
    """`2026-11-30`."""
    generation: Count = 0
    counted_sequence: Count = 0
    """All of the day's records at or below this sequence of RESULTS are in the rows."""
    rows: tuple[UsageRow, ...] = ()


class UsageMark(Record, frozen=True, kw_only=True):
    """How far a lane's RESULTS stream is counted: written after the days it speaks of."""

    lane: Token
    sequence: Count = 0
    at_s: Seconds = 0.0
    """When this was so, by the counting broker's clock."""
    generation: Count = 0
    """Rises when the stream turns out to have lost its end: sequences begin to mean other records.
    """


def day_of(at_s: float) -> str:
    """Name the day (UTC) of an instant: `2026-11-30`."""
    return datetime.fromtimestamp(at_s, tz=UTC).date().isoformat()


def summed(
    rows: Iterable[UsageRow], records: Iterable[CountedRecord] = (), *, rows_max: int = ROWS_MAX
) -> tuple[UsageRow, ...]:
    """Add up rows and records of the same key and model; beyond `rows_max` pairs, under OTHERS.

    Sorted by key and model; no number is lost.
    """
    sums: dict[tuple[str, str], list[int]] = {}

    def sums_of(name: tuple[str, str]) -> list[int]:
        known = sums.get(name)
        if known is None and name != _OTHERS and len(sums) - (_OTHERS in sums) >= rows_max - 1:
            return sums_of(_OTHERS)
        return sums.setdefault(name, [0] * len(_NUMBERS)) if known is None else known

    for row in rows:
        numbers = sums_of((row.api_key_name, row.model))
        for index, name in enumerate(_NUMBERS):
            numbers[index] += getattr(row, name)
    for record in records:
        numbers = sums_of((record.api_key_name, record.model))
        numbers[_KIND_AT[record.kind]] += 1
        numbers[_PROMPT_AT] += record.usage.prompt_tokens
        numbers[_CACHED_AT] += record.usage.cached_tokens
        numbers[_OUTPUT_AT] += record.usage.output_tokens
    return tuple(UsageRow(*name, *sums[name]) for name in sorted(sums))


_OTHERS = (OTHERS, OTHERS)
_NUMBERS = UsageRow.__struct_fields__[2:]
_KIND_AT = {kind: _NUMBERS.index(kind.value) for kind in Kind}
_PROMPT_AT, _CACHED_AT, _OUTPUT_AT = (
    _NUMBERS.index(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")
)
