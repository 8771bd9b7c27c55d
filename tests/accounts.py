"""Accounts for tests: a lane's RESULTS with records, who counts them, and the sums by hand."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from broker.bus import topology
from broker.bus.base import Bus
from broker.bus.topology import LanePlan
from broker.bus.usage import usage_days
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import Kind, TerminalRecord, Usage
from broker.wire.usage import UsageRow, day_of
from tests.builders import LANE, MODEL

Sums = dict[tuple[str, str, str], Counter[str]]
"""(day, key, model) to numbers, those that are not 0."""

NUMBERS = UsageRow.__struct_fields__[2:]


def a_terminal_record(job: str, **fields: Any) -> TerminalRecord:
    """A completed job of lane `acme`: 10 tokens in, 4 of them cached, 3 out."""
    defaults: dict[str, Any] = {
        "job": job,
        "lane": LANE,
        "kind": Kind.COMPLETED,
        "ended_at_s": 1000.0,
        "model": MODEL,
        "body": b"{}",
        "usage": Usage(10, 4, 3),
    }
    return TerminalRecord(**{**defaults, **fields})


async def set_up(bus: Bus, *lanes: str) -> None:
    """Make the streams and buckets of lanes, `acme` by default."""
    plans = [LanePlan(lane, (MODEL,)) for lane in lanes or (LANE,)]
    await topology.apply(bus, topology.of(plans))


async def store(bus: Bus, record: TerminalRecord, *, ttl_s: float = 0.0) -> int:
    """Write a record as brokers and agents do; returns its sequence."""
    appended = await bus.append(
        subjects.result(record.lane, record.job),
        encode(record),
        expected_last_subject_sequence=0,
        ttl_s=ttl_s,
    )
    return appended.sequence


async def accounts(bus: Bus, lane: str = LANE) -> Sums:
    """What the accounts say."""
    return {
        (day.day, row.api_key_name, row.model): Counter(
            {name: number for name in NUMBERS if (number := getattr(row, name))}
        )
        async for day in usage_days(bus, lanes=[lane])
        for row in day.rows
    }


async def sums_of_records(bus: Bus, lane: str = LANE) -> Sums:
    """Add up by hand what stands in a lane's RESULTS."""
    sums: Sums = {}
    async for stored in bus.messages(subjects.results_stream(lane)):
        record = decode(stored.data, TerminalRecord)
        name = (day_of(stored.at_s), record.api_key_name, record.model)
        sums.setdefault(name, Counter()).update(numbers_of(record))
    return {name: +numbers for name, numbers in sums.items()}


def numbers_of(record: TerminalRecord) -> dict[str, int]:
    """What one record adds."""
    return {
        record.kind.value: 1,
        "prompt_tokens": record.usage.prompt_tokens,
        "cached_tokens": record.usage.cached_tokens,
        "output_tokens": record.usage.output_tokens,
    }


def total(sums: Sums, names: Iterable[str] = (*(kind.value for kind in Kind),)) -> int:
    """Add up some numbers over all rows; by default jobs."""
    return sum(numbers[name] for numbers in sums.values() for name in names)
