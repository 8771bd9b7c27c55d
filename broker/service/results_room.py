"""How much room the lanes' results have: asked of the server, told to the mind, alarmed when gone.

A lane whose results stream is full ends no job, and its jobs would keep the slots of all workers
while their records wait. So what a stream can hold counts as a quota row of its lane, whether or
not the configuration names one: online jobs are refused at the door, batch waits, other lanes go
on, and all begins again once results were taken out or have run out.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from broker.bus.base import Bus, BusError
from broker.core.events import Event, ResultsStand
from broker.core.policy import Policy, QuotaRow
from broker.core.rows import RESULT_BYTES_TYPICAL
from broker.service.config import Config
from broker.service.queues import bounds_by_lane
from broker.wire import subjects

LOOK_S = 1.0
"""How often some lanes' results are asked for."""

LANES_AT_ONCE_MAX = 64
"""Lanes asked for each second: of a thousand each has its turn four times a minute."""

FILL_RATIO_MAX = 0.95
"""Share of a stream that results of jobs may take: the rest is for the records of refused jobs,
which are small and run out in seconds, and for what was estimated too low."""

ALARM_RATIO = 0.9
"""Of what results may take, from here on it is an alarm: at a result of 1.5 kB, a stream of 4 GiB
has room for a quarter of a million more."""


def policy_of(config: Config) -> Policy:
    """Return the policy, with a row for each lane's results that is bound by its stream."""
    rows = {row.name: row for row in config.policy.quotas}
    for lane, bounds in bounds_by_lane(config).items():
        streams_max = int(FILL_RATIO_MAX * bounds.results_bytes_max)
        row = QuotaRow(lane=lane)
        row = rows.get(row.name, row)
        if row.result_bytes_max is None or row.result_bytes_max > streams_max:
            rows[row.name] = replace(row, result_bytes_max=streams_max)
    return replace(config.policy, quotas=tuple(rows.values()))


class ResultsRoom:
    """The duty of looking."""

    def __init__(
        self,
        bus: Bus,
        lanes: tuple[str, ...],
        *,
        tell: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        """Look at these lanes; `tell` hears what stands."""
        self._bus = bus
        self.lanes = lanes
        self._tell = tell
        self._now = now
        self.used_ratios: dict[str, float] = {}
        """By lane, the share in use of what its results may take; 0 where nothing bounds them."""

    @property
    def scarce(self) -> tuple[str, ...]:
        """Lanes whose results have, or soon will have, no more room."""
        return tuple(lane for lane, ratio in self.used_ratios.items() if ratio >= ALARM_RATIO)

    async def run(self) -> None:
        """Look at some lanes each second, in turn, until cancelled."""
        turn: deque[str] = deque()
        while True:
            await asyncio.sleep(LOOK_S)
            for _ in range(min(LANES_AT_ONCE_MAX, len(self.lanes))):
                if not turn:
                    turn.extend(self.lanes)  # Lanes come and go.
                lane = turn.popleft()
                if lane in self.lanes:
                    with suppress(BusError):
                        await self.look(lane)

    async def look(self, lane: str) -> None:
        """Look at one lane. Raises BusError."""
        state = await self._bus.stream_state(subjects.results_stream(lane))
        mean_bytes = state.bytes / state.messages if state.messages else RESULT_BYTES_TYPICAL
        bytes_max = FILL_RATIO_MAX * state.bytes_max if state.bytes_max else math.inf
        self.used_ratios[lane] = state.bytes / bytes_max
        self._tell(ResultsStand(self._now(), lane, state.bytes, mean_bytes, bytes_max))
