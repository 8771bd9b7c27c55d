"""How often a job failed, across brokers: KV ATTEMPTS, written only when an attempt fails."""

import asyncio

import structlog

from broker.bus.base import Bus, BusError, NotFound
from broker.wire import subjects
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.ids import split_job_key
from broker.wire.messages import Failure, JobAttempts
from broker.wire.subjects import ATTEMPTS_BUCKET

FAILURES_KEPT_MAX = 16
"""Failures kept per job: more than any cap on retries, few enough for one small value."""

RETRY_S = 0.5

_log = structlog.get_logger(__name__)


class AttemptBook:
    """Failures by job key; a mirror of the bucket, written behind."""

    def __init__(self, bus: Bus) -> None:
        """Make an empty book; `load` fills it."""
        self._bus = bus
        self.failures: dict[str, tuple[Failure, ...]] = {}
        self._dirty: dict[str, None] = {}
        self._wake = asyncio.Event()

    async def load(self) -> None:
        """Read the bucket, forgetting jobs whose record stands already."""
        for key in await self._bus.kv_keys(ATTEMPTS_BUCKET):
            lane, job_id = split_job_key(key)
            try:
                await self._bus.last_message(
                    subjects.results_stream(lane), subjects.result(lane, job_id)
                )
            except NotFound:
                await self._load_one(key)
            else:
                await self._bus.kv_delete(ATTEMPTS_BUCKET, key)

    def add(self, key: str, failure: Failure) -> None:
        """Note one more failure of a job."""
        self.failures[key] = (*self.failures.get(key, ()), failure)[-FAILURES_KEPT_MAX:]
        self._mark(key)

    def forget(self, key: str) -> None:
        """The job ended."""
        if self.failures.pop(key, None) is not None:
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
        try:
            entry = await self._bus.kv_get(ATTEMPTS_BUCKET, key)
            self.failures[key] = decode(entry.value, JobAttempts).failures
        except (NotFound, MalformedMessage) as error:
            _log.warning("attempts.unreadable", job=key, error=str(error))

    def _mark(self, key: str) -> None:
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
