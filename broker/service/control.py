"""What operators and owners may ask the leading broker: `ctl.cluster.*` and `ctl.lane.<lane>.*`."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import structlog

from broker.bus.base import Bus, BusError, Message, NotFound, Subscription
from broker.core.events import CancelRequested, DrainRequested
from broker.service.endings import Endings
from broker.service.held import Shelf
from broker.service.loop import Loop
from broker.service.reconcile import Reconciler
from broker.service.snapshot import (
    DifferenceView,
    LanesView,
    ReconcileView,
    SnapshotSource,
    WorkersView,
)
from broker.service.snapshot import encode as encode_view
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.ids import MalformedName, is_token, job_key
from broker.wire.messages import CancelRequest, ControlReply, DrainRequest, Job, WhyRequest

REQUESTS_MAX = 256
"""Control requests worked on at once; a further one is told to try again."""

_Answer = Callable[[bytes, str], Awaitable[ControlReply]]

_log = structlog.get_logger(__name__)


class Control:
    """Answers control requests while this broker leads."""

    def __init__(
        self,
        bus: Bus,
        loop: Loop,
        shelf: Shelf,
        endings: Endings,
        reconciler: Reconciler,
        snapshots: SnapshotSource,
        *,
        now: Callable[[], float],
    ) -> None:
        """Answer for one leadership."""
        self._bus = bus
        self._loop = loop
        self._shelf = shelf
        self._endings = endings
        self._reconciler = reconciler
        self._snapshots = snapshots
        self._now = now
        self._requests: asyncio.Queue[Message] = asyncio.Queue(REQUESTS_MAX)
        self._cluster: dict[str, _Answer] = {
            "workers": self._workers,
            "lanes": self._lanes,
            "status": self._status,
            "drain": self._drain,
            "reconcile": self._reconcile,
        }
        self._lane: dict[str, _Answer] = {"cancel": self._cancel, "why": self._why}

    async def run(self) -> None:
        """Answer until cancelled."""
        taken: list[Subscription] = []
        try:
            taken.append(await self._bus.subscribe(subjects.CLUSTER_CONTROL, self._take))
            taken.append(await self._bus.subscribe(subjects.LANE_CONTROL, self._take))
            while True:
                await self._answer(await self._requests.get())
        finally:
            for subscription in taken:
                await subscription.unsubscribe()

    async def _take(self, message: Message) -> None:
        try:
            self._requests.put_nowait(message)
        except asyncio.QueueFull:
            busy = ControlReply(ok=False, message="Too many control requests; try again.")
            await self._bus.publish(message.reply, encode(busy))

    async def _answer(self, message: Message) -> None:
        parts = message.subject.split(".")
        lane = parts[2] if parts[1] == "lane" else ""
        answers = self._lane if lane else self._cluster
        answer = answers.get(parts[-1])
        try:
            reply = (
                await answer(message.data, lane)
                if answer is not None
                else ControlReply(ok=False, message=f"Unknown request {message.subject}.")
            )
        except MalformedMessage as error:
            reply = ControlReply(ok=False, message=f"The request can't be read: {error}"[:4096])
        except BusError as error:
            reply = ControlReply(ok=False, message=f"The message server failed: {error}"[:4096])
        if message.reply:
            try:
                await self._bus.publish(message.reply, encode(reply))
            except BusError as error:
                _log.info("control.reply_unsent", subject=message.subject, error=str(error))

    async def _workers(self, _data: bytes, _lane: str) -> ControlReply:
        return _view(WorkersView(workers=tuple(self._snapshots.workers())))

    async def _lanes(self, _data: bytes, _lane: str) -> ControlReply:
        return _view(LanesView(lanes=tuple(self._snapshots.lanes())))

    async def _status(self, _data: bytes, _lane: str) -> ControlReply:
        return _view(self._snapshots.status())

    async def _drain(self, data: bytes, _lane: str) -> ControlReply:
        request = decode(data, DrainRequest)
        known = {worker.worker for worker in self._snapshots.workers()}
        if request.worker not in known:
            return ControlReply(
                ok=False, message=f"No worker {request.worker}; see `inferlane workers`."
            )
        self._loop.tell(DrainRequested(self._now(), request.worker, request.draining))
        return ControlReply(ok=True, message="asked")

    async def _reconcile(self, _data: bytes, _lane: str) -> ControlReply:
        report = await self._reconciler.reconcile()
        found = tuple(
            DifferenceView(kind=one.kind, key=one.key, worker=one.worker, detail=one.detail)
            for one in report.differences
        )
        return _view(
            ReconcileView(checked_jobs=report.checked_jobs, differences=found, repaired=len(found))
        )

    async def _cancel(self, data: bytes, lane: str) -> ControlReply:
        request = decode(data, CancelRequest)
        key = job_key(lane, request.job)
        if key in self._shelf or self._loop.scheduler.is_known(key):
            self._loop.tell(CancelRequested(self._now(), key))
            return ControlReply(ok=True, message="cancelling")
        if not request.stream or not request.stream_sequence:
            return ControlReply(ok=False, message=f"No job {request.job} is held or running.")
        return await self._cancel_unpulled(request, lane)

    async def _cancel_unpulled(self, request: CancelRequest, lane: str) -> ControlReply:
        """Cancel a job that still waits in its stream, found by its sequence."""
        gone = ControlReply(ok=False, message=f"No job {request.job} is queued; see its result.")
        if request.stream not in (f"JOBS_{lane}", f"BATCH_{lane}"):
            return ControlReply(ok=False, message=f"{request.stream} is no stream of lane {lane}.")
        try:
            stored = await self._bus.message_at(request.stream, request.stream_sequence)
            job = decode(stored.data, Job)
            address = subjects.parse_jobs(stored.subject)
        except (NotFound, MalformedMessage, MalformedName):
            return gone
        if job.id != request.job:
            return gone
        self._endings.end_unpulled(job.id, address, job.client, sequence=request.stream_sequence)
        return ControlReply(ok=True, message="cancelling")

    async def _why(self, data: bytes, lane: str) -> ControlReply:
        request = decode(data, WhyRequest)
        if not is_token(lane):
            return ControlReply(ok=False, message=f"{lane!r} is no lane.")
        why = self._loop.scheduler.views.why(job_key(lane, request.job))
        if why is None:
            return ControlReply(ok=False, message=f"No job {request.job} is held or running.")
        return ControlReply(ok=True, data=msgspec.json.encode(why))


def _view(view: msgspec.Struct) -> ControlReply:
    return ControlReply(ok=True, data=encode_view(view))
