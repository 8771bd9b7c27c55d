"""What comes again after a takeover: whose record stands already is acknowledged, not run.

The last leader's deliveries come first, and among them are jobs that ended while nobody led: their
records stand, and their agents' acks went unheard since the consumers were reset. Given to a worker
again, such a job would only be found recorded there, after its caller was told of another start. So
the record is looked for here. What comes later waits behind in its queue, to keep the order.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import structlog

from broker.bus.base import Bus, BusError, Delivery, NotFound
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode
from broker.wire.ids import is_token
from broker.wire.messages import Job, Kind, TerminalRecord
from broker.wire.subjects import JobAddress

LOOKS_AT_ONCE_MAX = 64
"""Records of one queue looked for at the same time: ten thousand take about a second."""

_log = structlog.get_logger(__name__)

Take = Callable[[JobAddress, Delivery], None]
Settled = Callable[[JobAddress, Delivery, Job, TerminalRecord], None]


class Redelivered:
    """Stands between the pulls and the intake."""

    def __init__(self, bus: Bus, *, take: Take, settled: Settled) -> None:
        """Hand each delivery to `take`, or with its job and record to `settled`."""
        self._bus = bus
        self._take = take
        self._settled = settled
        self._marks: dict[JobAddress, int] = {}
        self._lines: dict[JobAddress, deque[Delivery]] = {}
        """Queues that something is looked for in, with what waits for that; windows bound them."""
        self._begun: asyncio.Queue[JobAddress] = asyncio.Queue()

    def expect(self, marks: Mapping[JobAddress, int]) -> None:
        """Look for the records of all messages up to these sequences, by queue."""
        self._marks = dict(marks)

    def came(self, address: JobAddress, deliveries: Iterable[Delivery]) -> None:
        """Take what a pull brought, in order."""
        mark = self._marks.get(address, 0)
        for delivery in deliveries:
            line = self._lines.get(address)
            if line is not None:
                line.append(delivery)
            elif delivery.sequence <= mark:
                self._lines[address] = deque([delivery])
                self._begun.put_nowait(address)
            else:
                self._take(address, delivery)

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._look_through(await self._begun.get()))

    async def _look_through(self, address: JobAddress) -> None:
        line, mark = self._lines[address], self._marks[address]
        while line:
            some = [line.popleft() for _ in range(min(len(line), LOOKS_AT_ONCE_MAX))]
            async with asyncio.TaskGroup() as group:
                looks = [group.create_task(self._ended(one, mark=mark)) for one in some]
            for delivery, look in zip(some, looks, strict=True):
                ended = look.result()
                if ended is None:
                    self._take(address, delivery)
                else:
                    self._settled(address, delivery, *ended)
        del self._lines[address]

    async def _ended(self, delivery: Delivery, *, mark: int) -> tuple[Job, TerminalRecord] | None:
        """Find a job's record; None where none stands or it can't be told: agents look, too."""
        if delivery.sequence > mark:
            return None
        try:
            job = decode(delivery.data, Job)
            if not is_token(job.lane) or not is_token(job.id):
                return None
            stored = await self._bus.last_message(
                subjects.results_stream(job.lane), subjects.result(job.lane, job.id)
            )
            record = decode(stored.data, TerminalRecord)
        except (NotFound, MalformedMessage):
            return None
        except BusError as error:
            _log.info("redelivered.record_unknown", stream=delivery.stream, error=str(error))
            return None
        # Of a dead letter only the book of attempts knows whether the letter was written.
        return None if record.kind is Kind.DEAD_LETTERED else (job, record)
