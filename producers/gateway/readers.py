"""Who reads a job that was named by its caller: two gateways may have readers of one job.

A gateway cancels what it submitted when its last reader leaves. Before that it asks the others; one
that has readers of the job answers, and from then on the job is its to cancel. What another gateway
submitted and has not handed over is not cancelled by leaving: it may be kept there, to be fetched
later.

Only jobs whose callers named them are asked about: nobody else can know another's id.
"""

import asyncio
from collections.abc import Callable

import structlog

from broker.bus.base import Bus, BusError, Message, Subscription
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.control import Leaving

ASK_S = 0.25
"""How long the others are waited for: they answer in a millisecond, and a job whose last reader
left is to be cancelled within a second."""

HEARD_MAX = 1000
"""Questions remembered, of the last ASK_S: who begins to read meanwhile answers them as well."""

_Key = tuple[str, str]
"""Lane and job id."""

_log = structlog.get_logger(__name__)


class Readers:
    """Asks the other gateways, and answers them."""

    def __init__(self, bus: Bus, name: str, *, takes_over: Callable[[_Key], bool]) -> None:
        """`name` is this gateway's own; `takes_over` says whether a job is read here, for good."""
        self._bus = bus
        self._name = name
        self._takes_over = takes_over
        self._heard: dict[_Key, tuple[Message, float]] = {}
        self._subscribing = asyncio.Lock()
        self._subscription: Subscription | None = None

    async def listen(self) -> None:
        """Begin to answer; again is nothing. Trouble is logged, and tried again the next time."""
        async with self._subscribing:
            if self._subscription is not None:
                return
            subject = subjects.gateways_leaving("*")
            try:
                self._subscription = await self._bus.subscribe(subject, self._on_question)
            except BusError as error:
                _log.warning("gateway.readers_unheard", error=str(error))

    async def begins(self, key: _Key) -> None:
        """Answer a question about a job of just now: somebody has begun to read it here."""
        found = self._heard.pop(key, None)
        if found is None:
            return
        message, until_s = found
        if asyncio.get_running_loop().time() < until_s:
            await self._answer(message, key)

    async def elsewhere(self, key: _Key) -> bool:
        """Ask whether the job is read at another gateway, whose it is then."""
        lane, job = key
        question = encode(Leaving(job=job, gateway=self._name))
        try:
            await self._bus.request(subjects.gateways_leaving(lane), question, timeout_s=ASK_S)
        except BusError:
            return False  # Nobody answered.
        return True

    async def _on_question(self, message: Message) -> None:
        try:
            asked = decode(message.data, Leaving)
        except MalformedMessage as error:
            _log.info("gateway.question_unread", error=str(error))
            return
        if asked.gateway == self._name or not subjects.may_be_answered(message.reply):
            return
        key = message.subject.split(".")[1], asked.job
        await self._answer(message, key)
        now_s = asyncio.get_running_loop().time()
        self._heard = {one: (m, s) for one, (m, s) in self._heard.items() if s > now_s}
        if len(self._heard) < HEARD_MAX:
            self._heard[key] = message, now_s + ASK_S

    async def _answer(self, message: Message, key: _Key) -> None:
        if not self._takes_over(key):
            return
        try:
            await self._bus.publish(message.reply, b"")
        except BusError as error:
            _log.info("gateway.answer_unsent", error=str(error))
