"""Fair turns within one queue of batch: between the batches, each of them one client's jobs.

As between lanes (`lanes`, from Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): a counter for each client rises by the tokens dispatched for it, those within a slack of the
least are equal, so that locality may choose between them, and one that comes anew is lifted to the
least in line. So a small batch is not stuck behind a large one of its lane: with N in line each
gets an N-th, in tokens, until it ends. A job costs a step of binary searches, however many there
are.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from broker.core.lanes import DEBT_TOKENS_MAX, Ranking

if TYPE_CHECKING:
    from broker.core.queues import Line, LineEntry

FLOWS_KEPT_MAX = 1024
"""Clients whose counters are remembered; beyond, those go that have nothing in line."""

FLOWS_FAIR_MAX = 8
"""Clients between which one look chooses: an eighth of the candidates each is enough to find work
that a cache serves."""

FLOWS_OTHERS_MAX = 64
"""Clients that are looked at when none of those may go: as many as there are candidates."""


@dataclass(slots=True, eq=False)
class Flow:
    """What waits of one client, and what it was given."""

    client: str
    line: "Line" = field(default_factory=list["LineEntry"])
    counter: float = 0.0
    jobs_behind: int = 0
    """Jobs that its producer has not published yet, as the newest job says."""
    newest_sequence: int = -1


class Flows:
    """The clients of one queue."""

    def __init__(self) -> None:
        self._flows: dict[str, Flow] = {}
        self._in_line = Ranking()
        self._left: Flow | None = None
        """Which last left the line: who comes to an empty one is lifted to its counter."""
        self._floor = 0.0
        """No client counts as less."""

    def __len__(self) -> int:
        """Count the clients in line."""
        return len(self._in_line)

    def __iter__(self) -> Iterator[Flow]:
        """Give those in line, least served first."""
        return (self._flows[client] for _, client in self._in_line)

    def enter(self, entry: "LineEntry") -> None:
        """Put a job in line."""
        job = entry[3].job
        flow = self._flows.get(job.client)
        if flow is None:
            flow = self._flows[job.client] = Flow(job.client)
            self._forget()
        if not flow.line:
            least = self._in_line.least
            left = self._left.counter if self._left is not None else 0.0
            flow.counter = max(flow.counter, self._floor, left if least is None else least)
            self._in_line.put(flow.client, flow.counter)
        if job.stream_sequence > flow.newest_sequence:
            flow.newest_sequence, flow.jobs_behind = job.stream_sequence, job.jobs_behind
        insort(flow.line, entry)

    def leave(self, place: tuple[float, int, str], client: str) -> None:
        """Take a job out of line, which must be there."""
        flow = self._flows[client]
        del flow.line[bisect_left(flow.line, place, key=_place)]
        if not flow.line:
            self._left = flow
            self._in_line.drop(flow.client)

    def charge(self, client: str, tokens: float, *, slack_tokens: float) -> None:
        """Charge a client for a job that goes; what cannot go meanwhile banks little of it."""
        self.correct(client, tokens)
        flow = self._flows.get(client)
        if flow is not None:
            self._floor = max(self._floor, flow.counter - slack_tokens - DEBT_TOKENS_MAX)

    def correct(self, client: str, tokens: float) -> None:
        """Charge what a job cost more, or refund what it cost less (negative)."""
        flow = self._flows.get(client)
        if flow is None:
            return  # Forgotten, or known from a worker's list alone.
        flow.counter = max(self._floor, flow.counter) + tokens
        if flow.line:
            self._in_line.put(client, flow.counter)

    def fair(self, *, slack_tokens: float) -> "list[Line]":
        """List the lines of those whose turn it is: the least served, and who is about equal."""
        least = self._in_line.least
        if least is None:
            return []
        limit = max(least, self._floor) + slack_tokens
        return [flow.line for flow in islice(self, FLOWS_FAIR_MAX) if flow.counter <= limit]

    def others(self, *, slack_tokens: float) -> "list[Line]":
        """List lines of the next, for when none of the fair ones' jobs may go."""
        begin = len(self.fair(slack_tokens=slack_tokens))
        return [flow.line for flow in islice(self, begin, begin + FLOWS_OTHERS_MAX)]

    def ahead_of(self, place: tuple[float, int, str], client: str, *, jobs_in_line: int) -> int:
        """Tell about how many go before a job: its client's, and as many of each other client."""
        flow = self._flows.get(client)
        if flow is None:
            return 0
        own = bisect_left(flow.line, place, key=_place)
        return own + min(own * (len(self) - 1), jobs_in_line - len(flow.line))

    def _forget(self) -> None:
        """Forget a client that has nothing in line, where there are too many."""
        if len(self._flows) <= FLOWS_KEPT_MAX:
            return
        for client, flow in self._flows.items():
            if not flow.line and flow is not self._left:
                del self._flows[client]
                return


def _place(entry: "LineEntry") -> tuple[float, int, str]:
    return entry[:3]
