"""A broker's side of control requests on an in-process bus, scripted: for tests of commands."""

from collections.abc import Callable, Iterable
from typing import Self

from msgspec import Struct

from broker.bus.base import Bus, Message
from broker.service.snapshot import WorkersView, WorkerView, encode
from broker.wire import subjects
from broker.wire.codec import decode
from broker.wire.codec import encode as encode_message
from broker.wire.control import ControlReply, DrainRequest


class Operator:
    """Answers control requests; `workers` gives one list after the other, then the last again."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._workers: list[tuple[WorkerView, ...]] = [()]
        self.answers: dict[str, Callable[[], ControlReply]] = {"workers": self._next_workers}
        self.drained: list[DrainRequest] = []
        self.drain_reply = ControlReply(ok=True)

    async def __aenter__(self) -> Self:
        await self._bus.subscribe(subjects.CLUSTER_CONTROL, self._answer)
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def tell_workers(self, *seen: Iterable[WorkerView]) -> None:
        """Tell these workers, one list after the other."""
        self._workers = [tuple(workers) for workers in seen]

    def tell(self, verb: str, view: Struct) -> None:
        """Answer a verb with this view."""
        self.answers[verb] = lambda: ControlReply(ok=True, data=encode(view))

    async def _answer(self, message: Message) -> None:
        verb = message.subject.rpartition(".")[2]
        if verb == "drain":
            self.drained.append(decode(message.data, DrainRequest))
            reply = self.drain_reply
        else:
            reply = self.answers[verb]()
        await self._bus.publish(message.reply, encode_message(reply))

    def _next_workers(self) -> ControlReply:
        seen = self._workers.pop(0) if len(self._workers) > 1 else self._workers[0]
        return ControlReply(ok=True, data=encode(WorkersView(workers=seen)))
