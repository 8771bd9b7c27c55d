"""What the leader tells clients unasked: each lane's queues, and what was learned of the models.

A queue's depth is what the broker holds of it and what waits in its stream. Deliveries tell the
latter, but a queue whose window is full delivers nothing, so the server is asked as well, some
queues each second in turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

import structlog

from broker.bus.base import Bus, BusError, ConsumerSpec
from broker.core.events import Event, QueueDepth
from broker.core.scheduler import Scheduler
from broker.service.config import Config
from broker.service.learned import Learned
from broker.service.offer import publish_offers
from broker.service.snapshot import sliced
from broker.service.views import lane_states
from broker.wire import subjects
from broker.wire.codec import encode, encode_for
from broker.wire.subjects import JobAddress

QUEUE_STATE_S = 1.0
"""How often clients hear the state of their lane's queues."""

LEARNED_S = 5.0
"""How often clients may hear a better figure of a model's bytes per token."""

DEPTH_POLLS_MAX = 32
"""Queues asked for their depth each second: a hundred queues take three."""

_log = structlog.get_logger(__name__)


class Announcements:
    """The duties of telling."""

    def __init__(
        self,
        bus: Bus,
        config: Config,
        scheduler: Scheduler,
        learned: Learned,
        *,
        epoch: int,
        mail: Callable[[str, bytes], None],
        tell: Callable[[Event], None],
        now: Callable[[], float],
    ) -> None:
        """Send by `mail`; `tell` hears what the server said of queues."""
        self._bus = bus
        self._config = config
        self._scheduler = scheduler
        self._learned = learned
        self._epoch = epoch
        self._mail = mail
        self._tell = tell
        self._now = now

    def reconfigured(self, config: Config) -> None:
        """Tell of the queues of a new configuration."""
        self._config = config

    async def publish_states(self) -> None:
        """Tell each lane's queues, at once and then each second, until cancelled."""
        while True:
            await self.publish_states_once()
            await asyncio.sleep(QUEUE_STATE_S)

    async def publish_states_once(self) -> None:
        """Tell each lane's queues as they are now."""
        states = lane_states(
            self._scheduler, self._config.policy, epoch=self._epoch, at_s=self._now()
        )
        async for state in sliced(states):
            self._mail(subjects.queue_state(state.lane), encode(state))
            as_json = encode_for(state, speaks_json=True)
            self._mail(subjects.queue_state_json(state.lane), as_json)

    async def poll_depths(self, queues: Mapping[JobAddress, ConsumerSpec]) -> None:
        """Ask how deep queues are, some each second, until cancelled."""
        turn: deque[JobAddress] = deque()
        while True:
            await asyncio.sleep(QUEUE_STATE_S)
            for _ in range(min(DEPTH_POLLS_MAX, len(queues))):
                if not turn:
                    turn.extend(queues)  # Queues come and go.
                address = turn.popleft()
                if address in queues:
                    await self.poll_depth(address, queues[address])

    async def poll_depth(self, address: JobAddress, spec: ConsumerSpec) -> None:
        """Ask how deep one queue is."""
        try:
            state = await self._bus.consumer_state(spec.stream, spec.name)
        except BusError:
            return
        lane, band, model = address.lane, address.band, address.model
        self._tell(QueueDepth(self._now(), lane, band, model, state.pending))

    async def publish_learned(self) -> None:
        """Tell clients what was learned of the models' tokens, until cancelled."""
        while True:
            await asyncio.sleep(LEARNED_S)
            await self.publish_learned_once()

    async def publish_learned_once(self) -> None:
        """Tell clients what was learned, if that is news. Told again if it failed."""
        news = self._learned.news()
        if news is None:
            return
        try:
            await publish_offers(self._bus, self._config, bytes_per_token=news)
        except BusError as error:
            _log.warning("announcements.offer_unsent", error=str(error))
        else:
            self._learned.told(news)
