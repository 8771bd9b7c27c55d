"""How often a job failed, across brokers: KV ATTEMPTS, written only when an attempt fails.

A key is written behind the failure and deleted behind the job's end, so at a takeover some keys are
of jobs whose record stands. They are dropped, but for dead letters: the last leader may have died
between record and letter, and only this key tells.
"""

import asyncio

import structlog

from broker.bus.base import Bus, BusError, NoStream, NotFound
from broker.core.retries import remembered
from broker.service.recovery import until_answered
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.ids import is_token, split_job_key
from broker.wire.messages import Failure, JobAttempts, Kind, TerminalRecord
from broker.wire.subjects import ATTEMPTS_BUCKET

FAILURES_KEPT_MAX = 16
"""Failures kept per job: more than any cap on retries, few enough for one small value."""

LOADS_AT_ONCE_MAX = 64
"""Keys read at the same time: ten thousand take a fraction of a second at a start."""

RETRY_S = 0.5

_log = structlog.get_logger(__name__)


class AttemptBook:
    """Failures by job key; a mirror of the bucket, written behind."""

    def __init__(self, bus: Bus) -> None:
        """Make an empty book; `load` fills it."""
        self._bus = bus
        self.failures: dict[str, tuple[Failure, ...]] = {}
        self.dead_letters: dict[str, TerminalRecord] = {}
        """Records of dead letters that may be unwritten, by job key."""
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()

    async def load(self) -> None:
        """Read the bucket, however long it takes the server to answer."""
        keys = await until_answered(lambda: self._bus.kv_keys(ATTEMPTS_BUCKET))
        room = asyncio.Semaphore(LOADS_AT_ONCE_MAX)

        async def load_one(key: str) -> None:
            async with room:
                await until_answered(lambda: self._load_one(key))

        async with asyncio.TaskGroup() as group:
            for key in keys:
                if _is_key(key):
                    group.create_task(load_one(key))

    def add(self, key: str, failure: Failure) -> None:
        """Note one more failure of a job."""
        failures = (*self.failures.get(key, ()), failure)
        # First those go that count for nothing: a busy engine makes many of them.
        kept = remembered(failures, kept_max=FAILURES_KEPT_MAX)
        self.failures[key] = kept[-FAILURES_KEPT_MAX:]
        self._mark(key)

    def forget(self, key: str) -> None:
        """The job ended."""
        known = (self.failures.pop(key, None), self.dead_letters.pop(key, None))
        if known != (None, None):
            self._mark(key)

    async def run(self) -> None:
        """Write what changed until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._dirty:
                key = next(iter(self._dirty))
                del self._dirty[key]
                await self._write(key)

    async def _load_one(self, key: str) -> None:
        lane, job_id = split_job_key(key)
        try:
            stored = await self._bus.last_message(
                subjects.results_stream(lane), subjects.result(lane, job_id)
            )
            record = decode(stored.data, TerminalRecord)
        except NotFound:
            await self._load_failures(key)
        except NoStream as error:
            # Of a lane that is no more, or in an election: the failures count in any case.
            _log.info("attempts.record_unknown", job=key, error=str(error))
            await self._load_failures(key)
        except MalformedMessage:
            self._mark(key)
        else:
            if record.kind is Kind.DEAD_LETTERED:
                self.dead_letters[key] = record
            else:
                self._mark(key)

    async def _load_failures(self, key: str) -> None:
        try:
            entry = await self._bus.kv_get(ATTEMPTS_BUCKET, key)
            self.failures[key] = decode(entry.value, JobAttempts).failures
        except (NotFound, MalformedMessage) as error:
            _log.warning("attempts.unreadable", job=key, error=str(error))

    def _mark(self, key: str) -> None:
        if _is_key(key):
            self._dirty[key] = None
            self._wake.set()

    async def _write(self, key: str) -> None:
        failures = self.failures.get(key)
        try:
            if failures is None:
                await self._bus.kv_delete(ATTEMPTS_BUCKET, key)
            else:
                value = encode(JobAttempts(failures=failures))
                await self._bus.kv_put(ATTEMPTS_BUCKET, key, value)
        except BusError as error:
            _log.warning("attempts.write_failed", job=key, error=str(error))
            await asyncio.sleep(RETRY_S)
            self._mark(key)


def _is_key(key: str) -> bool:
    """Say whether this may name a job: what a worker lists could be anything."""
    return all(is_token(part) for part in split_job_key(key))
