"""Reading a lane's accounts: days, and how far its records are counted.

Whoever deletes a record asks `counted_sequence` first: a record that leaves RESULTS before it was
counted is missing from the accounts for good.
"""

import math
import time
from collections.abc import AsyncIterator, Collection

from broker.bus.base import BucketSpec, Bus, NoStream, NotFound
from broker.bus.key_value import bucket_stream
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


class Counted:
    """Tells which of a lane's records its accounts have, for whoever removes records."""

    def __init__(self, bus: Bus, lane: str, *, every_s: float) -> None:
        """Ask the server no more often than `every_s`."""
        self._bus = bus
        self._lane = lane
        self._every_s = every_s
        self._asked_at_s = -math.inf
        self._sequence: float = 0

    async def last_sequence(self) -> int:
        """Tell the sequence of the newest record: those that stand now are at or below it.

        Raises BusError.
        """
        return (await self._bus.stream_state(subjects.results_stream(self._lane))).last_sequence

    async def has(self, sequence: int) -> bool:
        """Say whether all records at or below a sequence are counted. Raises BusError.

        Always, where nobody keeps accounts: there is no bucket for them.
        """
        now_s = time.monotonic()
        if self._sequence < sequence and now_s - self._asked_at_s >= self._every_s:
            self._asked_at_s = now_s
            self._sequence = await self._ask()
        return sequence <= self._sequence

    async def _ask(self) -> float:
        try:
            return await counted_sequence(self._bus, self._lane)
        except NoStream:
            # No bucket, or its election is under way.
            bucket = bucket_stream(BucketSpec(subjects.USAGE_BUCKET)).name
            try:
                await self._bus.stream_state(bucket)
            except NotFound:
                return math.inf
            return 0


async def uncounted_records(bus: Bus, lane: str) -> int:
    """Count records that stand and are in no account yet. Raises BusError."""
    return await bus.count_from(
        subjects.results_stream(lane),
        subject=subjects.result(lane, "*"),
        sequence=await counted_sequence(bus, lane) + 1,
    )
