"""A continuous pull of the in-process bus."""

import asyncio
from collections import Counter
from collections.abc import Callable

from broker.bus.base import Delivery, DeliveryHandler
from broker.bus.containment import Contained
from broker.bus.memory_server import MemoryServer
from broker.bus.memory_streams import MemoryConsumer, Puller


class MemoryPull:
    """Its place at the consumer, and what has arrived and was not handed over."""

    def __init__(
        self,
        server: MemoryServer,
        stream: str,
        consumer: str,
        handler: DeliveryHandler,
        *,
        window: int,
        counts: Counter[str],
        linked: Callable[[], bool],
    ) -> None:
        self._server = server
        self._stream = stream
        self._consumer = consumer
        self._handler = handler
        self._window = window
        self._counts = counts
        self._linked = linked
        self._unreleased = 0
        self._arrived: list[Delivery] = []
        self._puller = Puller(self._arrive)
        self._at: MemoryConsumer | None = None
        self._stopped = False

    def release(self, count: int = 1) -> None:
        """Give back room."""
        assert count <= self._unreleased, "more released than delivered"
        self._unreleased -= count
        self.attach()

    def resize(self, window: int) -> None:
        """Change the window; 0 pauses."""
        self._window = window
        self.attach()

    async def stop(self) -> list[Delivery]:
        """Stop pulling; returns what arrived and was not handed over. Idempotent."""
        self._stopped = True
        self.detach()
        left, self._arrived = self._arrived, []
        return left

    def attach(self) -> None:
        """Pull from the consumer as it stands now, which may be a recreated one, or none."""
        if self._stopped or not self._linked():
            return
        stream = self._server.streams.get(self._stream)
        consumer = stream.consumers.get(self._consumer) if stream is not None else None
        if consumer is not self._at:
            self.detach()
        self._puller.room = self._window - self._unreleased
        if consumer is None:
            return
        if self._at is None:
            consumer.pullers.append(self._puller)
            self._at = consumer
        consumer.serve()

    def detach(self) -> None:
        """Leave the consumer, as when the link is lost."""
        if self._at is not None:
            self._at.pullers.remove(self._puller)
            self._at = None

    def lose(self) -> None:
        """Lose what was on its way: it comes again after its ack-wait."""
        self.detach()
        self._unreleased -= len(self._arrived)
        self._arrived.clear()

    def _arrive(self, delivery: Delivery) -> None:
        self._unreleased += 1
        self._arrived.append(delivery)
        if len(self._arrived) == 1:
            asyncio.get_running_loop().call_soon(self._hand_over)

    def _hand_over(self) -> None:
        if self._stopped or not self._arrived:
            return
        batch, self._arrived = self._arrived, []
        with Contained(self._counts, f"deliveries of {self._consumer}"):
            self._handler(batch)
