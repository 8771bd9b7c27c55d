"""One client for each lane that is asked for, opened when first needed.

A client lives in a task of its own from its opening to its end, since its own task group must be
left where it was entered; requests of a lane share it.
"""

import asyncio

import structlog

from broker.bus.base import Bus
from broker.wire.ids import new_job_id
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import ClientClosed, ProducerError

OFFER_AGE_S = 1.0
"""What a lane offers is read anew at most this often: a caller could ask for no model at all, again
and again."""

_log = structlog.get_logger(__name__)


class LaneClients:
    """The clients of one gateway. Its lanes are those of its keys, so they are few and known."""

    def __init__(self, bus: Bus, config: ClientConfig, tasks: asyncio.TaskGroup) -> None:
        self._bus = bus
        self._config = config
        self._tasks = tasks
        self._id = new_job_id()
        """Where answers for this process go; the same in all lanes, another after a restart."""
        self._open: dict[str, asyncio.Future[Client]] = {}
        self._offer_at_s: dict[str, float] = {}
        self._stop = asyncio.Event()

    async def of(self, lane: str) -> Client:
        """Return the lane's client. Raises Unreachable, ClientClosed."""
        if self._stop.is_set():
            message = "the gateway is stopping"
            raise ClientClosed(message)
        opened = self._open.get(lane)
        if opened is None:
            opened = self._open[lane] = asyncio.get_running_loop().create_future()
            # Whoever waits may be gone when it fails.
            opened.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._tasks.create_task(self._keep(lane, opened))
        # Shielded: a caller that leaves must not end the opening for the others.
        return await asyncio.shield(opened)

    async def refresh_offer(self, lane: str) -> None:
        """Read anew what a lane offers, unless that was done a moment ago.

        Raises as `of`.
        """
        client = await self.of(lane)
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._offer_at_s.get(lane, -OFFER_AGE_S) + OFFER_AGE_S:
            self._offer_at_s[lane] = now_s
            await client.refresh_offer()

    def stop(self) -> None:
        """End all clients: whoever waits on a job is told, and jobs go on."""
        self._stop.set()

    async def _keep(self, lane: str, opened: asyncio.Future[Client]) -> None:
        try:
            async with Client(
                self._bus, lane=lane, client_id=self._id, config=self._config
            ) as client:
                opened.set_result(client)
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001 - the edge of one lane: the others go on
            if opened.done() or not isinstance(error, ProducerError):
                _log.exception("gateway.client_failed", lane=lane)
            if not opened.done():
                given_up = ClientClosed(f"the lane can't be reached: {error}")
                opened.set_exception(error if isinstance(error, ProducerError) else given_up)
        finally:
            self._open.pop(lane, None)
            if not opened.done():
                opened.cancel()
