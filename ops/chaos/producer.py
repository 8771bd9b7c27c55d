"""A producer of a chaos run: chats or batches, through the project's own client, until told to end.

    python -m ops.chaos.producer FOLDER NAME chats|batches URL LANE MODEL

It may be killed at any moment and started again: its history tells it which jobs were submitted and
have not ended, and it takes those up under their own ids before it makes new ones.
"""

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import orjson
import structlog
import uvloop

from broker.bus import logs
from broker.bus.nats import connect
from broker.wire.ids import job_key
from broker.wire.messages import Attempt, Kind, TerminalRecord
from ops.chaos.history import Mixed, Submitted, Told, read_one
from ops.chaos.setting import (
    BATCH_CONCURRENCY,
    BATCH_LINES,
    BATCH_PRODUCER,
    CHAT_BANDS,
    CHATS_AT_ONCE,
    MODEL,
)
from ops.chaos.spy import Spy, a_spy
from producers.batch.plan import Plan, default_errors
from producers.batch.runner import Tally, run_batch
from producers.client import Client
from producers.config import ClientConfig
from producers.errors import ProducerError
from producers.request import Wish, build_job
from producers.ticket import Ticket

AGAIN_S = 0.2
"""Pause after a trouble that another try may escape."""

LATE_SHARE = 0.02
"""Of chats, those whose deadline passes before any worker has them: the broker ends them."""

LATE_S = 0.02

CONFIG = ClientConfig(watchdog_s=5.0, watchdog_s_max=20.0)

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Aim:
    """Where a producer's jobs go."""

    url: str
    lane: str
    model: str


def stop_file(folder: Path) -> Path:
    """Name the file that tells all producers to make no new jobs."""
    return folder / "stop"


@dataclass(slots=True)
class _Chats:
    """Chats, a fixed number at once; each is followed to its end."""

    folder: Path
    spy: Spy
    client: Client
    model: str
    left: list[str]
    """Chats of an earlier life."""
    next_number: int
    leaving: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Chat until told to stop; what was begun is ended."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CHATS_AT_ONCE):
                group.create_task(self._chat_on())

    async def _chat_on(self) -> None:
        while not self.leaving.is_set():
            if self.left:
                name, known = self.left.pop(), True
            elif stop_file(self.folder).exists():
                return
            else:
                name, known = f"{self.spy.name}-{self.next_number}", False
                self.next_number += 1
            await self._until_ended(name, known=known)

    async def _until_ended(self, name: str, *, known: bool) -> None:
        while not self.leaving.is_set():
            try:
                record = await self._once(name, known=known)
            except ProducerError as error:
                _log.warning("again", job=name, error=str(error))
                await asyncio.sleep(AGAIN_S)
                known = True
            else:
                self._tell(record)
                return

    async def _once(self, name: str, *, known: bool) -> TerminalRecord:
        body, wish = chat_of(name, model=self.model)
        lane = self.client.lane
        job = build_job(body, wish, lane=lane, client=self.spy.name, offer=self.client.offer)
        ticket = await self.client.submit_job(job, known=known, queue_full_wait_s=60.0)
        if job.stream:
            await self._read(ticket)
        return await ticket.result()

    async def _read(self, ticket: Ticket) -> None:
        """Read a stream as a caller does, and see that attempts never mix."""
        latest: Attempt | None = None
        async for chunk in ticket.stream(raise_for_kind=False):
            if chunk.attempt is None:
                continue
            if latest is not None and chunk.attempt < latest and not chunk.whole:
                key = job_key(self.client.lane, ticket.job_id)
                self.spy.pen.write(Mixed(at_s=time.time(), job=key, by=self.spy.name))
            latest = chunk.attempt

    def _tell(self, record: TerminalRecord) -> None:
        key = job_key(self.client.lane, record.job)
        self.spy.pen.write(
            Told(at_s=time.time(), job=key, by=self.spy.name, kind=record.kind.value)
        )


def chat_of(name: str, *, model: str = MODEL) -> tuple[dict[str, object], Wish]:
    """Make the chat of a name: always the same one."""
    rng = random.Random(name)
    body = _chat_body(rng, model)
    wish = Wish(
        job_id=name,
        band=rng.choice(CHAT_BANDS),
        deadline_s=LATE_S if rng.random() < LATE_SHARE else None,
        stream=rng.choice((True, False)),
        restart_visible=rng.choice((True, False)),
    )
    return body, wish


def _chat_body(rng: random.Random, model: str) -> dict[str, object]:
    words = " ".join(rng.choice(("why", "how", "when", "who")) for _ in range(rng.randint(5, 60)))
    return {
        "model": model,
        "messages": [{"role": "user", "content": words}],
        "max_tokens": rng.randint(2, 8),
    }


def _unfinished(spy: Spy) -> tuple[list[str], int]:
    """Read this producer's own history: open chats, and the number of the next."""
    names: dict[str, None] = {}
    next_number = 0
    for event in read_one(spy.pen.path):
        match event:
            case Submitted(job=job):
                name = job.partition(".")[2]
                names[name] = None
                next_number = max(next_number, int(name.rpartition("-")[2]) + 1)
            case Told(job=job, kind=kind) if kind != Kind.REJECTED:
                names.pop(job.partition(".")[2], None)
            case _:
                pass
    return list(names), next_number


async def _chats(folder: Path, spy: Spy, aim: _Aim, leaving: asyncio.Event) -> None:
    left, next_number = _unfinished(spy)
    async with _client(spy, aim.url, aim.lane, spy.name) as client:
        chats = _Chats(folder, spy, client, aim.model, left, next_number, leaving)
        _say_ready()
        work = asyncio.create_task(chats.run())
        watch = asyncio.create_task(leaving.wait())
        await asyncio.wait([work, watch], return_when=asyncio.FIRST_COMPLETED)
        watch.cancel()
        if not work.done():
            work.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)


async def _batches(folder: Path, spy: Spy, aim: _Aim, leaving: asyncio.Event) -> None:
    """Run one batch after another; one that was begun is gone on with."""
    _say_ready()
    number = 0
    while not leaving.is_set():
        plan = _batch(folder, number, aim.lane)
        if not _is_begun(plan):
            if stop_file(folder).exists():
                return
            _write_lines(Path(plan.input), aim.model)
        client = partial(_client, spy, aim.url, aim.lane)
        try:
            report = await run_batch(plan, client, stop=leaving, tally=Tally())
        except ProducerError as error:
            _log.warning("batch goes on", number=number, error=str(error))
            await asyncio.sleep(AGAIN_S)
        else:
            number += not report.interrupted


def batches(folder: Path, lane: str) -> list[Plan]:
    """List the batches that were begun in a folder."""
    numbers = range(len(list(folder.glob("batch-*.in.jsonl"))))
    return [_batch(folder, number, lane) for number in numbers]


def _is_begun(plan: Plan) -> bool:
    return Path(plan.input).exists()


def _batch(folder: Path, number: int, lane: str) -> Plan:
    output = folder / f"batch-{number}.out.jsonl"
    return Plan(
        input=str(folder / f"batch-{number}.in.jsonl"),
        output=output,
        errors=default_errors(output),
        lane=lane,
        concurrency=BATCH_CONCURRENCY,
    )


def _write_lines(path: Path, model: str) -> None:
    rng = random.Random(path.name)
    lines = [
        orjson.dumps(
            {
                "custom_id": f"{path.stem}-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": _chat_body(rng, model),
            }
        )
        for number in range(BATCH_LINES)
    ]
    # Whole or not at all: this process may be killed here.
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(b"\n".join(lines) + b"\n")
    unfinished.rename(path)


@asynccontextmanager
async def _client(spy: Spy, url: str, lane: str, client_id: str) -> AsyncGenerator[Client]:
    bus = await connect(url, name=spy.name)
    try:
        async with Client(spy.on(bus), lane=lane, client_id=client_id, config=CONFIG) as client:
            yield client
    finally:
        await bus.close()


def _say_ready() -> None:
    sys.stdout.write('{"event":"ready"}\n')
    sys.stdout.flush()


async def _serve(folder: Path, name: str, what: str, aim: _Aim) -> None:
    leaving = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, leaving.set)
    spy = a_spy(folder=folder, name=name)
    await (_batches if what == BATCH_PRODUCER else _chats)(folder, spy, aim, leaving)


def main() -> None:
    """Produce until stopped."""
    folder, name, what, url, lane, model = sys.argv[1:]
    logs.set_up(producer=name)
    uvloop.run(_serve(Path(folder), name, what, _Aim(url, lane, model)))


if __name__ == "__main__":
    main()
