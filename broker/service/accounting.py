"""Counts each terminal record once into its lane's accounts, across crashes of anybody.

The leader walks each lane's RESULTS from where the last walk ended, off the hot path. A day's sums
stand in one value of KV USAGE together with the last sequence counted in them, and are written by
compare-and-set: the same records read again, after a crash or by a leader that does not know that
it is deposed, add nothing. The mark that says where to go on is written after the days, so it may
be behind them and never ahead.

Records must not leave RESULTS uncounted. They age out after days, and who deletes them looks at the
mark first (`bus.usage`); rejections that run out in seconds count nowhere. What is missing all the
same is an alarm: watchdog `accounts`, `inferlane_usage_records_gone_total`.

Here alone each record passes by once, before anybody may take it away: so the records of batch
lines that are needed for longer than RESULTS keeps them are copied on the way (`line_copies`).
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import structlog
from msgspec.structs import replace

from broker.bus.base import Bus, BusError, NotFound, StoredMessage, WrongSequence
from broker.bus.usage import usage_mark
from broker.service.line_copies import LineCopies, is_of_line
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.messages import Kind
from broker.wire.usage import CountedRecord, UsageDay, UsageMark, day_of, summed

PASS_S = 1.0
"""Between two looks at the lanes: accounts are seconds old, and a walk finds many records at once.
"""

BUSY_SHARE = 0.6
"""Of a core, used by this process since the last pass: above, jobs go first and counting waits (a
record takes about 25 µs of the 350 µs that a job takes, most of it to read it), ..."""

BUSY_S_MAX = 5.0
"""... but no longer than this at a time: a batch lets go of its records only once they are counted,
and holds 20,000 of them, what one broker ends in seven seconds."""

BEHIND_S_MAX = 120.0
"""A lane that can't be counted for so long is an alarm: a takeover or an election takes seconds."""

LANES_AT_ONCE_MAX = 32
"""Lanes looked at in one pass: a thousand take half a minute."""

MARK_S = 3600.0
"""An idle lane's mark is written anew this often: how old it is says for how long nobody counted.
"""

RECORDS_AT_ONCE_MAX = 500
"""Records between two writes of a day's sums: adding them up takes half a millisecond."""

LINE_BYTES_MAX = 4_000_000
"""Of records of batch lines, held to be copied before they are counted; one more at the most."""

YIELD_RECORDS = 16
"""Records decoded without giving way: about a tenth of a millisecond of work."""

WRITES_MAX = 3
"""Tries to write a day's sums in one go; then the lane's next turn is soon enough."""

SHORT_LIVED_MAX = 100_000
"""Rejections that run out, remembered until the walk has passed them; of more, a gap says nothing.
"""

REWOUND_PASSES = 10
"""A stream that ends before the mark for so many looks in a row has lost its end (a power cut on
one server); a single look may be at a server that is behind."""

_log = structlog.get_logger(__name__)


class Hears(Protocol):
    """Hears of what was counted, and of what can't be any more."""

    def usage_counted(self, lane: str, records: int) -> None:
        """So many records are in the accounts now."""
        ...

    def usage_gone(self, lane: str, records: int) -> None:
        """So many records left their stream uncounted."""
        ...


class _Found(NamedTuple):
    """A record that was read."""

    sequence: int
    at_s: float
    record: CountedRecord


@dataclass(slots=True)
class _Lane:
    """What is known of one lane."""

    mark: UsageMark
    mark_revision: int
    rewound_passes: int = 0
    days: dict[str, tuple[UsageDay, int]] = field(default_factory=dict[str, tuple[UsageDay, int]])
    """The newest day only: (as stored, revision)."""


class Accounting:
    """The duty of counting, of one leadership."""

    def __init__(
        self,
        bus: Bus,
        *,
        results_age_s_max: Mapping[str, float],
        hears: Hears,
        now: Callable[[], float],
        cpu_s: Callable[[], float] = time.process_time,
    ) -> None:
        """`results_age_s_max` names the lanes, and how long each keeps its records.

        `cpu_s` tells the processor time that this process has used.
        """
        self._bus = bus
        self._ages_s = results_age_s_max
        self._hears = hears
        self._now = now
        self._cpu_s = cpu_s
        self._copies = LineCopies(bus, now=now)
        self._looked = (now(), cpu_s())
        self._put_off_since_s: float | None = None
        self._lanes: dict[str, _Lane] = {}
        self._short_lived: dict[str, set[int]] = {lane: set() for lane in results_age_s_max}
        self._failing_since_s: dict[str, float] = {}
        self._untold = ""
        """What was lost since somebody looked."""
        self._caught_up: set[str] = set()
        """Lanes of which this leader has read all; before, its predecessor's rejections, which it
        does not know, leave gaps."""

    def short_lived(self, lane: str, sequence: int) -> None:
        """Note a rejection that will run out: its place in the stream may be empty soon."""
        known = self._short_lived.get(lane)
        if known is not None and len(known) < SHORT_LIVED_MAX:
            known.add(sequence)

    def reconfigured(self, results_age_s_max: Mapping[str, float]) -> None:
        """Count new lanes, too, and those that are gone as before: their jobs still end."""
        self._ages_s = {**self._ages_s, **results_age_s_max}
        for lane in results_age_s_max:
            self._short_lived.setdefault(lane, set())

    async def run(self) -> None:
        """Count, some lanes each PASS_S in turn, until cancelled."""
        turn: deque[str] = deque()
        while True:
            await asyncio.sleep(PASS_S)
            if self.is_put_off():
                continue
            for _ in range(min(LANES_AT_ONCE_MAX, len(self._ages_s))):
                if not turn:
                    turn.extend(self._ages_s)  # Lanes come.
                await self.count_in_turn(turn.popleft())

    def is_put_off(self) -> bool:
        """Say whether this pass is left out because the broker is busy with jobs."""
        at_s, cpu_s = self._looked
        self._looked = now_s, now_cpu_s = self._now(), self._cpu_s()
        busy = now_cpu_s - cpu_s > BUSY_SHARE * (now_s - at_s)
        since_s = self._put_off_since_s
        if not busy or (since_s is not None and now_s - since_s >= BUSY_S_MAX):
            self._put_off_since_s = None
            return False
        self._put_off_since_s = now_s if since_s is None else since_s
        return True

    async def count_in_turn(self, lane: str) -> None:
        """Count one lane; what fails is tried again in its next turn, from what is stored."""
        try:
            await self.count(lane)
        except (BusError, MalformedMessage) as error:
            self._lanes.pop(lane, None)
            self._failing_since_s.setdefault(lane, self._now())
            _log.warning("accounting.failed", lane=lane, error=str(error))
        else:
            self._failing_since_s.pop(lane, None)

    def trouble(self) -> str:
        """Say what is wrong with the accounts now, or was lost since the last look; or nothing."""
        untold, self._untold = self._untold, ""
        behind = [
            lane
            for lane, since_s in self._failing_since_s.items()
            if self._now() - since_s > BEHIND_S_MAX
        ]
        if behind and not untold:
            return f"results of {', '.join(behind)} can't be counted"
        return untold

    async def count(self, lane: str) -> None:
        """Count what a lane's stream holds beyond the mark. Raises BusError, MalformedMessage."""
        stream = subjects.results_stream(lane)
        known = self._lanes.get(lane)
        if known is None:
            known = self._lanes[lane] = await self._load(lane)
        last = (await self._bus.stream_state(stream)).last_sequence
        if last < known.mark.sequence:
            await self._rewound(known, last)
            return
        known.rewound_passes = 0
        if last > known.mark.sequence:
            await self._walk(known, stream)
        self._caught_up.add(lane)
        if self._now() - known.mark.at_s > MARK_S:
            await self._move(known, replace(known.mark, at_s=self._now()))

    async def _walk(self, known: _Lane, stream: str) -> None:
        """Read what stands beyond the mark: copy of it what must be, count it, move the mark."""
        found: list[_Found] = []
        lines: list[StoredMessage] = []
        line_bytes = 0
        async for stored in self._bus.messages(stream, first_sequence=known.mark.sequence + 1):
            found.append(_Found(stored.sequence, stored.at_s, _record(stored.data)))
            if found[-1].record.counts and is_of_line(stored):
                lines.append(stored)
                line_bytes += len(stored.data)
            if len(found) >= RECORDS_AT_ONCE_MAX or line_bytes > LINE_BYTES_MAX:
                await self._copy(known.mark.lane, lines)
                await self._add(known, found)
                found, lines, line_bytes = [], [], 0
            if stored.sequence % YIELD_RECORDS == 0:
                await asyncio.sleep(0)
        if found:
            await self._copy(known.mark.lane, lines)
            await self._add(known, found)

    async def _copy(self, lane: str, lines: Sequence[StoredMessage]) -> None:
        """Copy records of batch lines, before anybody may take them away. Raises BusError."""
        left = await self._copies.copy(lane, lines, age_s=self._ages_s[lane])
        if left:
            self._untold = (
                f"{left:,} results of batch lines of {lane} could not be copied: they are lost if"
                " no gateway runs their batches before they age out; are the lane's files full?"
            )

    async def _load(self, lane: str) -> _Lane:
        mark = await usage_mark(self._bus, lane)
        return _Lane(mark, await self._revision(subjects.usage_mark_key(lane)))

    async def _add(self, known: _Lane, found: Sequence[_Found]) -> None:
        """Put records into their days, then move the mark behind them."""
        lane, before = known.mark.lane, known.mark
        by_day: dict[str, list[_Found]] = {}
        for one in found:
            if one.record.counts:
                by_day.setdefault(day_of(one.at_s), []).append(one)
        for day, records in by_day.items():
            await self._add_to_day(known, day, records)
        last = found[-1]
        await self._move(known, replace(before, sequence=last.sequence, at_s=self._now()))
        self._look_for_gaps(before, found)
        self._hears.usage_counted(lane, sum(len(records) for records in by_day.values()))

    async def _add_to_day(self, known: _Lane, day: str, records: Sequence[_Found]) -> None:
        """Add what the day's value does not hold yet, also where another leader gets ahead.

        Raises WrongSequence when it does so again and again, or a replica that is behind is read.
        """
        lane, generation = known.mark.lane, known.mark.generation
        for tried in range(WRITES_MAX):
            value, revision = await self._day(known, day)
            if value.generation > generation:
                message = f"lane {lane} is counted by another leader, from a later beginning"
                raise WrongSequence(message)
            counted = value.counted_sequence if value.generation == generation else 0
            new = [one.record for one in records if one.sequence > counted]
            if not new:
                return
            value = replace(
                value,
                generation=generation,
                counted_sequence=records[-1].sequence,
                rows=summed(value.rows, new),
            )
            try:
                revision = await self._write(subjects.usage_day_key(lane, day), value, revision)
            except WrongSequence:
                known.days.clear()
                if tried == WRITES_MAX - 1:
                    raise
                continue
            known.days = {day: (value, revision)}
            return

    async def _day(self, known: _Lane, day: str) -> tuple[UsageDay, int]:
        """Give a day's value and its revision; an empty one at revision 0 when there is none."""
        cached = known.days.get(day)
        if cached is not None:
            return cached
        key = subjects.usage_day_key(known.mark.lane, day)
        try:
            entry = await self._bus.kv_get(subjects.USAGE_BUCKET, key)
        except NotFound:
            return UsageDay(lane=known.mark.lane, day=day), 0
        return decode(entry.value, UsageDay), entry.revision

    async def _move(self, known: _Lane, mark: UsageMark) -> None:
        """Write the mark. Raises WrongSequence when another leader counts this lane, too."""
        key = subjects.usage_mark_key(mark.lane)
        known.mark_revision = await self._write(key, mark, known.mark_revision)
        known.mark = mark

    async def _write(self, key: str, value: UsageDay | UsageMark, revision: int) -> int:
        if revision:
            return await self._bus.kv_update(
                subjects.USAGE_BUCKET, key, encode(value), revision=revision
            )
        return await self._bus.kv_create(subjects.USAGE_BUCKET, key, encode(value))

    async def _revision(self, key: str) -> int:
        try:
            return (await self._bus.kv_get(subjects.USAGE_BUCKET, key)).revision
        except NotFound:
            return 0

    # ---- what is missing ----

    def _look_for_gaps(self, before: UsageMark, found: Sequence[_Found]) -> None:
        """Alarm about records that were in the stream and can't be read any more."""
        lane, last = before.lane, found[-1].sequence
        short_lived = self._short_lived[lane]
        missing = last - before.sequence - len(found)
        if missing and before.sequence and not self._is_explained(before):
            seen = {one.sequence for one in found}
            ran_out = sum(before.sequence < one <= last and one not in seen for one in short_lived)
            missing -= ran_out
            if missing > 0 and len(short_lived) < SHORT_LIVED_MAX:
                _log.error(
                    "accounting.records_gone",
                    lane=lane,
                    records=missing,
                    after_sequence=before.sequence,
                    up_to_sequence=last,
                )
                self._untold = f"{missing:,} results of {lane} left uncounted"
                self._hears.usage_gone(lane, missing)
        self._short_lived[lane] = {one for one in short_lived if one > last}

    def _is_explained(self, before: UsageMark) -> bool:
        """Say whether gaps may be rejections of the leader before, which ran out meanwhile.

        Not where nobody counted for so long that other records ran out, too.
        """
        idle_s = self._now() - before.at_s
        return before.lane not in self._caught_up and idle_s < self._ages_s[before.lane]

    async def _rewound(self, known: _Lane, last: int) -> None:
        """Go on from a stream's new end, once it is certain that it lost its old one."""
        known.rewound_passes += 1
        if known.rewound_passes < REWOUND_PASSES:
            return
        mark = known.mark
        _log.error(
            "accounting.stream_rewound",
            lane=mark.lane,
            counted_sequence=mark.sequence,
            last_sequence=last,
        )
        self._untold = f"the results of {mark.lane} lost their newest, which were counted"
        generation = mark.generation + 1
        known.rewound_passes = 0
        await self._move(known, replace(mark, sequence=last, generation=generation))


def _record(data: bytes) -> CountedRecord:
    """Read what counts of a stored record; one that can't be read is a failed job to all."""
    try:
        return decode(data, CountedRecord)
    except MalformedMessage:
        return CountedRecord(kind=Kind.FAILED)
