"""Is this broker's file the one that the cluster runs with? Leaders write marks, all others read.

Who leads next goes by its own file, so brokers with different files are a takeover away from other
quotas, models or retention. Whoever stands by compares, and says so before that.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator

import msgspec
import structlog
from msgspec import NODEFAULT, Struct, structs

from broker.bus import topology
from broker.bus.base import Bus, BusError, NotFound
from broker.service.config import Config
from broker.service.queues import topology_of
from broker.wire.codec import MalformedMessage, decode, encode
from broker.wire.file_mark import FILE_MARK_KEY, FileMark, differences
from broker.wire.subjects import CONFIG_BUCKET

SHARED = ("policy", "streams", "retention")
"""Tables that are the cluster's; `[nats]` and `[broker]` are each broker's own."""

DIGEST_BYTES = 8

LOOK_S = 5.0
"""How often a standby compares: files change by hand, and takeovers take as long."""

_encoder = msgspec.json.Encoder(order="deterministic")

_log = structlog.get_logger(__name__)


def mark_of(config: Config) -> FileMark:
    """Digest a configuration."""
    values: dict[str, str] = {}
    for table in SHARED:
        value = getattr(config, table)
        values |= dict(_values(value, table) if isinstance(value, Struct) else _one(value, table))
    return FileMark(values=values, topology=_digest(topology_of(config)))


def _values(record: Struct, prefix: str) -> Iterator[tuple[str, str]]:
    for field in structs.fields(record):
        value, key = getattr(record, field.name), f"{prefix}.{field.name}"
        if isinstance(value, Struct):
            yield from _values(value, key)
        elif value != _default(field):
            yield key, _digest(value)


def _one(value: tuple[Struct, ...], key: str) -> Iterator[tuple[str, str]]:
    if value:
        yield key, _digest(value)


def _default(field: structs.FieldInfo) -> object:
    factory = field.default_factory
    return field.default if factory is NODEFAULT else factory()


def _digest(value: object) -> str:
    return hashlib.blake2b(_encoder.encode(value), digest_size=DIGEST_BYTES).hexdigest()


async def read_mark(bus: Bus) -> FileMark | None:
    """Read the mark of who leads or led last; None: nobody wrote one. Raises BusError."""
    try:
        return decode((await bus.kv_get(CONFIG_BUCKET, FILE_MARK_KEY)).value, FileMark)
    except (NotFound, MalformedMessage):
        return None


async def is_declared(bus: Bus, config: Config) -> bool:
    """Say whether the server stands at this very configuration. Raises BusError.

    A stream or bucket that somebody deleted is missed whatever the mark says.
    """
    if await read_mark(bus) != mark_of(config):
        return False
    return not await topology.absent(bus, topology_of(config))


async def write_mark(bus: Bus, config: Config) -> None:
    """Tell that this configuration counts now. Only a leader may. Raises BusError."""
    await bus.kv_put(CONFIG_BUCKET, FILE_MARK_KEY, encode(mark_of(config)))


class FileWatch:
    """Compares a standby's file with the leader's."""

    def __init__(
        self, bus: Bus, *, config: Callable[[], Config], leads: Callable[[], bool]
    ) -> None:
        """Ask `config` and `leads` at each look: both change."""
        self._bus = bus
        self._config = config
        self._leads = leads
        self.different: tuple[str, ...] = ()
        """Keys in which the two differ, at two looks running; empty for a leader."""
        self._seen: tuple[str, ...] = ()

    async def run(self) -> None:
        """Compare until cancelled."""
        while True:
            try:
                await self.look()
            except BusError as error:
                _log.debug("file_marks.unread", error=str(error))
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Compare once. Raises BusError.

        Whoever changes the file of a cluster sends each broker SIGHUP, one after the other: that
        they differ meanwhile is no news.
        """
        theirs = None if self._leads() else await read_mark(self._bus)
        found = differences(mark_of(self._config()), theirs) if theirs is not None else ()
        self.different, self._seen = (found if self._seen else ()), found
