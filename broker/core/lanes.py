"""Fair shares between lanes: virtual token counters, one per lane and band of a model pool.

Theory: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024). Each lane's counter
rises by the weighted tokens dispatched for it ÷ its weight; the lane with the least counter goes
first. Tokens, not jobs: a lane of long jobs and one of short jobs get the same work. A lane that
wakes is lifted to the least counter of those in line, so that idleness is not banked. A corrected
cost corrects the counter.

Two lanes in line in the same band stay within U + Q + P + K·E of each other. U: largest cost. Q:
slack within which locality may choose. P: by how much more a lane was passed over that was least
served and could not go; at most `DEBT_TOKENS_MAX`. K·E: most jobs in flight × largest correction of
one, that of a failed attempt included. For let i be ahead of j, and s the last dispatch of i with j
in line: then i was at most Q + P ahead, and its cost brought it U further. Since s only corrections
of jobs that were in flight at s can have moved i up or j down: what j was given later is charged
before it is refunded, and a lift moves it up.

Nothing of that looks back beyond s. So the same holds of what was seen since any instant, if D, how
far some lane was then ahead of the least in line, takes the place of U + Q + P where there was no
such dispatch since: **max(D, U + Q + P) + K·E**, K counting who was in flight at that instant, too.
D counts lanes that sleep: they may wake as they are, and are lifted if they are behind. Hence one
huge job, or its failure, need not loosen the bound for ever: two periods are kept, each begun
afresh after `PERIOD_JOBS` dispatches with D as it is then, and the older one tells the bound.

Each band has counters of its own, since bands are served by priority, not by counters: what a lane
gets where another has nothing in line says nothing of whose turn it is elsewhere. With one counter
over several bands a lane that had a higher one to itself owed all of that in a lower one, and who
came to the higher one was lifted to lanes that had no part in it, and took it over.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from broker.wire.ids import BANDS

DEBT_TOKENS_MAX = 65_536.0
"""Most that a lane falls behind, beyond the slack, whose jobs can't go where others do: it goes
first when they can, and so gets its share in the end; but what never fits must not bank for
ever."""


PERIOD_JOBS = 1000
"""Dispatches of a model after which a period begins; the bound is of the last one to two periods.
Some minutes of a busy cluster: longer than most jobs run, so that it does not jump."""


class Ranking:
    """Lanes in the order of their counters; equal counters by name."""

    def __init__(self) -> None:
        self._sorted: list[tuple[float, str]] = []
        self._counters: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[tuple[float, str]]:
        return iter(self._sorted)

    def __contains__(self, lane: str) -> bool:
        return lane in self._counters

    def put(self, lane: str, counter: float) -> None:
        """Give a lane its place, or move it."""
        self.drop(lane)
        self._counters[lane] = counter
        insort(self._sorted, (counter, lane))

    def drop(self, lane: str) -> None:
        """Take a lane out, if it is in."""
        counter = self._counters.pop(lane, None)
        if counter is not None:
            del self._sorted[bisect_left(self._sorted, (counter, lane))]

    @property
    def first(self) -> str:
        """The lane with the least counter; there must be one."""
        return self._sorted[0][1]

    @property
    def least(self) -> float | None:
        """The least counter."""
        return self._sorted[0][0] if self._sorted else None

    @property
    def greatest(self) -> float | None:
        """The greatest counter."""
        return self._sorted[-1][0] if self._sorted else None


class _Books:
    """One band's counters."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.in_line: dict[str, int] = {}
        """Jobs, by lane."""
        self.awake = Ranking()
        self.left = ""
        """The lane that last left the line: a lane that wakes alone is lifted to its counter, as
        that is by then (charged for its last job, or refunded)."""
        self.floor = 0.0
        """No lane counts as less. The ranking keeps the order of those beneath it."""

    def counter(self, lane: str) -> float:
        return max(self.floor, self.counters.get(lane, 0.0))

    @property
    def least(self) -> float | None:
        least = self.awake.least
        return None if least is None else max(self.floor, least)

    @property
    def gap(self) -> float:
        greatest = self.awake.greatest
        return 0.0 if greatest is None else max(0.0, greatest - (self.least or 0.0))

    @property
    def apart(self) -> float:
        """How far a lane, awake or not, is ahead of the least in line, or of who left it last."""
        least = self.least
        level = self.counter(self.left) if least is None else least
        return max(0.0, max(self.counters.values(), default=0.0) - level)


@dataclass(slots=True)
class Period:
    """What the bound is made of, seen since an instant."""

    apart: float = 0.0
    """D: how far a lane was ahead then."""
    inflight_jobs_max: int = 0
    """K: most jobs in flight at once."""
    cost_max: float = 0.0
    """U: largest cost ÷ weight charged."""
    error_max: float = 0.0
    """E: largest correction ÷ weight."""
    passed_max: float = 0.0
    """P: most that a lane in line was behind one that went, beyond the slack."""

    def bound(self, *, slack_tokens: float) -> float:
        """Tell what two lanes may be apart at most: max(D, U + Q + P) + K·E."""
        turns = self.cost_max + slack_tokens + min(self.passed_max, DEBT_TOKENS_MAX)
        return max(self.apart, turns) + self.inflight_jobs_max * self.error_max


class LaneCounters:
    """The counters of one model pool."""

    def __init__(self, *, period_jobs: int = PERIOD_JOBS) -> None:
        self._books = tuple(_Books() for _ in BANDS)
        self.period_jobs = period_jobs
        self.period, self._newer = Period(), Period()
        self._period_jobs_left = period_jobs
        self._inflight_jobs = 0

    def counter(self, lane: str, *, band: int) -> float:
        """Tell a lane's counter."""
        return self._books[band].counter(lane)

    def place(self, lane: str, *, band: int) -> float:
        """Tell by what a lane in line is ranked: its counter, without the floor."""
        return self._books[band].counters[lane]

    def floor(self, *, band: int) -> float:
        """Tell what every lane of a band counts as at least."""
        return self._books[band].floor

    def is_awake(self, lane: str, *, band: int) -> bool:
        """Say whether a lane has jobs in line."""
        return lane in self._books[band].awake

    @property
    def gap(self) -> float:
        """Greatest difference between two lanes in line in the same band; 0 with fewer than two."""
        return max(books.gap for books in self._books)

    def bound(self, *, slack_tokens: float) -> float:
        """Tell what `gap` may be at most, by the last one to two periods."""
        return self.period.bound(slack_tokens=slack_tokens)

    def inflight(self, jobs: int) -> None:
        """Note how many jobs are in flight, one more than before."""
        self._inflight_jobs = jobs
        for period in (self.period, self._newer):
            period.inflight_jobs_max = max(period.inflight_jobs_max, jobs)

    def lined_up(self, lane: str, *, band: int) -> None:
        """Note one more job in line; a lane that wakes is lifted."""
        books = self._books[band]
        jobs = books.in_line.get(lane, 0)
        books.in_line[lane] = jobs + 1
        if jobs:
            return
        least = books.least
        level = books.counter(books.left) if least is None else least
        counter = books.counters[lane] = max(books.counter(lane), level)
        books.awake.put(lane, counter)

    def left(self, lane: str, *, band: int) -> None:
        """Note one job less in line."""
        books = self._books[band]
        books.in_line[lane] -= 1
        if not books.in_line[lane]:
            del books.in_line[lane]
            books.left = lane
            books.awake.drop(lane)

    def goes_first(self, lane: str, *, band: int, slack_tokens: float) -> None:
        """Note that a lane's job goes whosever turn it is: nobody in line banks much of that."""
        books = self._books[band]
        books.floor = max(books.floor, books.counter(lane) - slack_tokens - DEBT_TOKENS_MAX)

    def dispatched(self, lane: str, cost: float, *, band: int, slack_tokens: float) -> None:
        """Charge a lane for a job that goes: its cost ÷ weight."""
        books = self._books[band]
        counter, least = books.counter(lane), books.least
        passed = 0.0 if least is None else counter - slack_tokens - least
        for period in (self.period, self._newer):
            period.passed_max = max(period.passed_max, passed)
            period.cost_max = max(period.cost_max, cost)
        self._put(books, lane, counter + cost)
        self._period_jobs_left -= 1
        if self._period_jobs_left <= 0:
            self._begin_period()

    def correct(self, lane: str, amount: float, *, band: int) -> None:
        """Charge what a job costs more, or refund what it costs less (negative): work ÷ weight."""
        books = self._books[band]
        self._put(books, lane, books.counter(lane) + amount)

    def erred(self, amount: float) -> None:
        """Note by how much one job's charge was wrong in all: work ÷ weight, of either sign."""
        for period in (self.period, self._newer):
            period.error_max = max(period.error_max, abs(amount))

    def lift(self, lane: str, counter: float, *, band: int) -> None:
        """Raise a lane's counter."""
        books = self._books[band]
        if counter > books.counter(lane):
            self._put(books, lane, counter)

    def _begin_period(self) -> None:
        apart = max(books.apart for books in self._books)
        self.period, self._newer = self._newer, Period(apart, self._inflight_jobs)
        self._period_jobs_left = self.period_jobs

    @staticmethod
    def _put(books: _Books, lane: str, counter: float) -> None:
        books.counters[lane] = counter
        if lane in books.awake:
            books.awake.put(lane, counter)
