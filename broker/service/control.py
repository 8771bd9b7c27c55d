"""What operators and owners may ask the leading broker: `ctl.cluster.*` and `ctl.lane.<lane>.*`."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
import structlog

from broker.bus.base import Bus, BusError, Message, NoStream, NotFound, Subscription
from broker.core.events import CancelRequested, DrainRequested
from broker.service.endings import Endings
from broker.service.held import Shelf
from broker.service.job_states import JobStates
from broker.service.lane_cancel import LaneCancel
from broker.service.loop import Loop
from broker.service.reconcile import Reconciler
from broker.service.snapshot import (
    DifferenceView,
    LanesView,
    ReconcileView,
    SnapshotSource,
    WorkersView,
    sliced,
)
from broker.service.snapshot import encode as encode_view
from broker.service.stages import Stage
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode_for, speaks_json
from broker.wire.control import (
    CancelRequest,
    ControlReply,
    DrainRequest,
    EstimateRequest,
    JobRequest,
    LaneCancelRequest,
    ResultRequest,
    WhyRequest,
)
from broker.wire.ids import is_token, job_key
from broker.wire.messages import TerminalRecord

REQUESTS_MAX = 256
"""Control requests of operators, and of owners, that wait; a further one is told to try again."""

AT_ONCE_MAX = 8
"""Requests of each sort worked on at once. A reconcile takes seconds: no cancel waits behind it."""

RESULT_BYTES_MAX = 1_000_000
"""A larger record is not repeated in an answer: its reader takes it from RESULTS."""

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
        self._states = JobStates(bus, shelf, loop.scheduler)
        self._lane_cancel = LaneCancel(bus, shelf, loop.scheduler, endings, tell=loop.tell, now=now)
        self._of_operators: asyncio.Queue[Message] = asyncio.Queue(REQUESTS_MAX)
        self._of_owners: asyncio.Queue[Message] = asyncio.Queue(REQUESTS_MAX)
        self._cluster: dict[str, _Answer] = {
            "workers": self._workers,
            "lanes": self._lanes,
            "status": self._status,
            "drain": self._drain,
            "reconcile": self._reconcile,
        }
        self._lane: dict[str, _Answer] = {
            "cancel": self._cancel,
            "cancel_lane": self._cancel_lane,
            "job": self._job,
            "why": self._why,
            "result": self._result,
            "estimate": self._estimate,
        }

    async def run(self) -> None:
        """Answer until cancelled."""
        taken: list[Subscription] = []
        try:
            async with asyncio.TaskGroup() as group:
                for subject, requests, answers in (
                    (subjects.CLUSTER_CONTROL, self._of_operators, self._cluster),
                    (subjects.LANE_CONTROL, self._of_owners, self._lane),
                ):
                    take = partial(self._take, requests)
                    taken.append(await self._bus.subscribe(subject, take))
                    for _ in range(AT_ONCE_MAX):
                        group.create_task(self._answer_all(requests, answers))
        finally:
            for subscription in taken:
                await subscription.unsubscribe()

    async def _take(self, requests: asyncio.Queue[Message], message: Message) -> None:
        try:
            requests.put_nowait(message)
        except asyncio.QueueFull:
            busy = ControlReply(ok=False, message="Too many control requests; try again.")
            await self._reply(message, busy)

    async def _answer_all(
        self, requests: asyncio.Queue[Message], answers: Mapping[str, _Answer]
    ) -> None:
        while True:
            message = await requests.get()
            await self._reply(message, await self._answer(message, answers))

    async def _answer(self, message: Message, answers: Mapping[str, _Answer]) -> ControlReply:
        parts = message.subject.split(".")
        lane = parts[2] if parts[1] == "lane" else ""
        answer = answers.get(parts[-1])
        if answer is None:
            return ControlReply(ok=False, message=f"Unknown request {message.subject}."[:4096])
        try:
            return await answer(message.data, lane)
        except MalformedMessage as error:
            return ControlReply(ok=False, message=f"The request can't be read: {error}"[:4096])
        except BusError as error:
            return ControlReply(ok=False, message=f"The message server failed: {error}"[:4096])
        except Exception:  # noqa: BLE001 - the edge of one request: the others go on
            _log.exception("control.surprise", subject=message.subject)
            return ControlReply(ok=False, message="The broker failed at this; see its log.")

    async def _reply(self, message: Message, reply: ControlReply) -> None:
        if not subjects.may_be_answered(message.reply):
            if message.reply:
                _log.warning("control.reply_refused", reply=message.reply[:80])
            return
        try:
            told = encode_for(reply, speaks_json=speaks_json(message.data, message.headers))
            await self._bus.publish(message.reply, told)
        except BusError as error:
            _log.info("control.reply_unsent", subject=message.subject, error=str(error))

    async def _workers(self, _data: bytes, _lane: str) -> ControlReply:
        workers = [worker async for worker in sliced(self._snapshots.workers())]
        return _view(WorkersView(workers=tuple(workers), gone=self._snapshots.gone()))

    async def _lanes(self, _data: bytes, _lane: str) -> ControlReply:
        return _view(
            LanesView(lanes=tuple([lane async for lane in sliced(self._snapshots.lanes())]))
        )

    async def _status(self, _data: bytes, _lane: str) -> ControlReply:
        return _view(self._snapshots.status())

    async def _drain(self, data: bytes, _lane: str) -> ControlReply:
        request = decode(data, DrainRequest)
        known = [worker.worker async for worker in sliced(self._snapshots.workers())]
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
        held = self._shelf.get(key)
        if held is not None and held.stage is Stage.CLOSING:
            return ControlReply(ok=False, message=f"Job {request.job} is ending; see its result.")
        if self._is_known(key):
            if held is not None and _is_anothers(held.client, request):
                return _anothers(request)
            return self._cancel_known(key)
        if not request.stream or not request.stream_sequence:
            return ControlReply(ok=False, message=f"No job {request.job} is held or running.")
        return await self._cancel_unpulled(request, lane)

    def _is_known(self, key: str) -> bool:
        return key in self._shelf or self._loop.scheduler.is_known(key)

    def _cancel_known(self, key: str) -> ControlReply:
        self._loop.tell(CancelRequested(self._now(), key))
        return ControlReply(ok=True, message="cancelling")

    async def _cancel_unpulled(self, request: CancelRequest, lane: str) -> ControlReply:
        """Cancel a job that still waits in its stream, found by its sequence."""
        if request.stream not in (f"JOBS_{lane}", f"BATCH_{lane}"):
            return ControlReply(ok=False, message=f"{request.stream} is no stream of lane {lane}.")
        found = await self._states.unpulled(
            request.job, lane, stream=request.stream, sequence=request.stream_sequence
        )
        if found is None:
            return ControlReply(
                ok=False, message=f"No job {request.job} is queued; see its result."
            )
        job, address, stored = found
        if _is_anothers(job.client, request):
            return _anothers(request)
        key = job_key(lane, request.job)
        if self._is_known(key):
            return self._cancel_known(key)  # It was pulled meanwhile.
        self._endings.end_unpulled(
            job,
            address,
            sequence=request.stream_sequence,
            speaks_json=speaks_json(stored.data, stored.headers),
        )
        return ControlReply(ok=True, message="cancelling")

    async def _cancel_lane(self, data: bytes, lane: str) -> ControlReply:
        if not is_token(lane):
            return ControlReply(ok=False, message=f"{lane!r} is no lane.")
        return _view(await self._lane_cancel.step(lane, decode(data, LaneCancelRequest)))

    async def _job(self, data: bytes, lane: str) -> ControlReply:
        if not is_token(lane):
            return ControlReply(ok=False, message=f"{lane!r} is no lane.")
        return _view(await self._states.of(decode(data, JobRequest), lane))

    async def _why(self, data: bytes, lane: str) -> ControlReply:
        request = decode(data, WhyRequest)
        if not is_token(lane):
            return ControlReply(ok=False, message=f"{lane!r} is no lane.")
        why = self._loop.scheduler.views.why(job_key(lane, request.job))
        if why is None:
            return ControlReply(ok=False, message=f"No job {request.job} is held or running.")
        return ControlReply(ok=True, data=msgspec.json.encode(why))

    async def _result(self, data: bytes, lane: str) -> ControlReply:
        request = decode(data, ResultRequest)
        try:
            stored = await self._bus.last_message(
                subjects.results_stream(lane), subjects.result(lane, request.job)
            )
        except (NotFound, NoStream):
            return ControlReply(
                ok=False, message=f"Job {request.job} has no result in lane {lane}, or none yet."
            )
        record = decode(stored.data, TerminalRecord)
        if len(stored.data) > RESULT_BYTES_MAX:
            where = f"{subjects.result(lane, request.job)} in {subjects.results_stream(lane)}"
            return ControlReply(
                ok=False, message=f"The result is too large to repeat; read {where} by direct get."
            )
        return ControlReply(ok=True, data=encode_for(record, speaks_json=True))

    async def _estimate(self, data: bytes, lane: str) -> ControlReply:
        request = decode(data, EstimateRequest)
        found = self._snapshots.lane(lane)
        if found is None:
            return ControlReply(ok=False, message=f"{lane!r} is no lane."[:4096])
        for queue in found.queues:
            if (queue.band, queue.model) == (request.band, request.model):
                return _view(queue)
        offered = ", ".join(f"{queue.model} in band {queue.band}" for queue in found.queues)
        message = f"Lane {lane} takes no {request.model} in band {request.band}, but {offered}."
        return ControlReply(ok=False, message=message[:4096])


def _is_anothers(client: str, request: CancelRequest) -> bool:
    """Say whether only the jobs of a caller are meant, and this is known to be another's."""
    return bool(request.client) and client not in ("", request.client)


def _anothers(request: CancelRequest) -> ControlReply:
    message = f"Job {request.job} was submitted by another caller than {request.client[:64]}."
    return ControlReply(ok=False, message=message)


def _view(view: msgspec.Struct) -> ControlReply:
    return ControlReply(ok=True, data=encode_view(view))
