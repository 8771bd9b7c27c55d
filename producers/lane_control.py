"""Requests of a lane's owner to the leading broker: asked again while a new leader takes over.

The cancellation of a whole lane is many such requests, each of a bounded step; what is left of it
travels with them, so that it goes on under another leader.
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from broker.bus.base import Bus, LinkDown, NoResponders, Timeout
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.control import (
    ControlReply,
    LaneCancelRequest,
    LaneCancelStep,
)
from producers.config import ClientConfig
from producers.errors import Unreachable

ASK_AGAIN_S = 0.2
"""Pause before a question is put again that nobody answered: a takeover takes seconds."""

STEP_S_MAX = 15.0
"""Longest wait for one step: the broker gives it 5 s, and others may be before it."""

CancelProgress = Callable[[LaneCancelStep], None]
"""Hears of each step of a lane's cancellation."""


class LaneControl:
    """Asks for one lane."""

    def __init__(self, bus: Bus, lane: str, config: ClientConfig) -> None:
        """Ask on this bus, as patiently as `config` says."""
        self._bus = bus
        self._lane = lane
        self._config = config

    async def ask(
        self, verb: str, request: msgspec.Struct, *, what: str, timeout_s: float = 0.0
    ) -> ControlReply:
        """Put a question until it is answered, for `cancel_s` at most. Raises Unreachable.

        `what` names it in the error. One answer may take `timeout_s`; 0: `lookup_s`. A leader that
        died with the question answers never, so a long wait for it leaves `cancel_s` to ask anew.
        """
        subject = subjects.lane_control(self._lane, verb)
        data = encode(request)
        one_s = timeout_s or self._config.lookup_s
        try:
            async with asyncio.timeout(self._config.cancel_s + timeout_s):
                while True:
                    with suppress(NoResponders, Timeout, LinkDown):
                        reply = await self._bus.request(subject, data, timeout_s=one_s)
                        return decode(reply.data, ControlReply)
                    await asyncio.sleep(ASK_AGAIN_S)
        except TimeoutError as error:
            message = f"no broker took {what}; is one running? Try again"
            raise Unreachable(message) from error
        except MalformedMessage as error:
            message = f"the broker's answer to {what} can't be read ({error}): another version?"
            raise Unreachable(message) from error

    async def count(self, *, bands: Collection[int] = (), model: str = "") -> LaneCancelStep:
        """Count jobs of the lane that wait or run: all, or of some bands or a model.

        Raises Unreachable.
        """
        return await self._step(LaneCancelRequest(bands=tuple(bands), model=model))

    async def cancel(
        self,
        *,
        bands: Collection[int] = (),
        model: str = "",
        progress: CancelProgress = lambda _: None,
    ) -> LaneCancelStep:
        """Cancel jobs of the lane that are there now; return how many were.

        Jobs that come meanwhile stay. Those that run are told to stop, and end within moments.
        Raises Unreachable, which says how many were before it; they stay so.
        """
        asked = LaneCancelRequest(bands=tuple(bands), model=model)
        found = await self._step(asked)
        left, jobs, running = found.spans, 0, 0
        while left:
            try:
                step = await self._step(msgspec.structs.replace(asked, spans=left))
            except Unreachable as error:
                message = f"{jobs} jobs were cancelled before this: {error}; it goes on from there"
                raise Unreachable(message) from error
            # What a leader had counted but not ended when it died, the next one counts again.
            jobs, running = min(found.jobs, jobs + step.jobs), running + step.running
            if not step.jobs and step.spans == left:
                message = (
                    f"{jobs} jobs of lane {self._lane!r} were cancelled, and the next can't be: "
                    "are its results full? See `inferlane doctor`"
                )
                raise Unreachable(message)
            left = step.spans
            progress(LaneCancelStep(jobs=jobs, running=running, spans=left))
        return LaneCancelStep(jobs=jobs, running=running)

    async def _step(self, request: LaneCancelRequest) -> LaneCancelStep:
        what = f"the cancellation of lane {self._lane!r}"
        reply = await self.ask("cancel_lane", request, what=what, timeout_s=STEP_S_MAX)
        if not reply.ok:
            message = f"{what} was refused: {reply.message}"
            raise Unreachable(message)
        try:
            return msgspec.json.decode(reply.data, type=LaneCancelStep)
        except msgspec.MsgspecError as error:
            message = f"the broker's answer to {what} can't be read ({error}): another version?"
            raise Unreachable(message) from error
