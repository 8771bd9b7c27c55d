"""Reading a lane's accounts: days, and how far its records are counted.

Whoever deletes a record asks `counted_sequence` first: a record that leaves RESULTS before it was
counted is missing from the accounts for good.
"""

from collections.abc import AsyncIterator, Collection

from broker.bus.base import Bus, NotFound
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.usage import UsageDay, UsageMark


async def usage_days(
    bus: Bus, *, lanes: Collection[str] = (), since: str = "", until: str = ""
) -> AsyncIterator[UsageDay]:
    """Read stored days, of these lanes (none named: all), by lane and day.

    `since` and `until` are days (`2026-11-30`), both included; empty: no bound. Raises BusError,
    MalformedMessage.
    """
    for key in await bus.kv_keys(subjects.USAGE_BUCKET):
        found = subjects.parse_usage_day_key(key)
        if found is None:
            continue
        lane, day = found
        if (lanes and lane not in lanes) or day < since or (until and day > until):
            continue
        try:
            entry = await bus.kv_get(subjects.USAGE_BUCKET, key)
        except NotFound:
            continue  # It ran out just now.
        yield decode(entry.value, UsageDay)


async def usage_mark(bus: Bus, lane: str) -> UsageMark:
    """Read how far a lane is counted; sequence 0 when nothing was. Raises BusError."""
    try:
        entry = await bus.kv_get(subjects.USAGE_BUCKET, subjects.usage_mark_key(lane))
    except NotFound:
        return UsageMark(lane=lane)
    return decode(entry.value, UsageMark)


async def counted_sequence(bus: Bus, lane: str) -> int:
    """Tell up to which sequence of RESULTS all records are counted. Raises BusError."""
    return (await usage_mark(bus, lane)).sequence


async def uncounted_records(bus: Bus, lane: str) -> int:
    """Count records that stand and are in no account yet. Raises BusError."""
    return await bus.count_from(
        subjects.results_stream(lane),
        subject=subjects.result(lane, "*"),
        sequence=await counted_sequence(bus, lane) + 1,
    )
