"""What a server tells its monitor and not its clients: above all, what a power cut may lose."""

from typing import TypeVar

import aiohttp
import msgspec

NANOSECONDS = 1_000_000_000


class MonitorUnavailable(Exception):
    """The monitor did not answer as one; the message says where and how."""


class Durability(msgspec.Struct, frozen=True, kw_only=True):
    """How a server keeps what it has acknowledged."""

    sync_always: bool
    """Whether each write is on the disk before it is acknowledged."""
    sync_interval_s: float
    """Else how often writes are flushed."""
    storage_bytes_max: int
    store_dir: str

    @property
    def power_cut_loss_s(self) -> float:
        """Seconds of acknowledged writes that a power cut of this one machine may lose."""
        return 0.0 if self.sync_always else self.sync_interval_s


_Answer = TypeVar("_Answer")


class _Config(msgspec.Struct, frozen=True):
    sync_interval: int = 120 * NANOSECONDS
    sync_always: bool = False
    max_storage: int = 0
    store_dir: str = ""


class _JetStream(msgspec.Struct, frozen=True):
    config: _Config | None = None
    disabled: bool = False


class _Group(msgspec.Struct, frozen=True):
    leader: str = ""


class _Stream(msgspec.Struct, frozen=True):
    name: str
    cluster: _Group = _Group()


class _Account(msgspec.Struct, frozen=True):
    stream_detail: list[_Stream] = []


class _Leaders(msgspec.Struct, frozen=True):
    meta_cluster: _Group = _Group()
    account_details: list[_Account] = []


async def read_leaders(monitor_url: str, *, timeout_s: float = 3.0) -> tuple[str, dict[str, str]]:
    """Ask which server leads the cluster, and which leads each stream; empty: nobody now.

    Raises MonitorUnavailable.
    """
    url = f"{monitor_url.rstrip('/')}/jsz?accounts=true&streams=true"
    answer = await _read(url, _Leaders, timeout_s=timeout_s)
    streams = [stream for account in answer.account_details for stream in account.stream_detail]
    return answer.meta_cluster.leader, {one.name: one.cluster.leader for one in streams}


async def read_durability(monitor_url: str, *, timeout_s: float = 3.0) -> Durability:
    """Ask a server's monitor (`http://host:8222`). Raises MonitorUnavailable."""
    answer = await _read(f"{monitor_url.rstrip('/')}/jsz", _JetStream, timeout_s=timeout_s)
    if answer.config is None or answer.disabled:
        message = f"JetStream is not enabled on the server at {monitor_url}"
        raise MonitorUnavailable(message)
    return Durability(
        sync_always=answer.config.sync_always,
        sync_interval_s=answer.config.sync_interval / NANOSECONDS,
        storage_bytes_max=answer.config.max_storage,
        store_dir=answer.config.store_dir,
    )


async def _read(url: str, answer: type[_Answer], *, timeout_s: float) -> _Answer:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(url) as response,
        ):
            return msgspec.json.decode(await response.read(), type=answer)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
        message = f"no NATS monitor answers at {url} ({error or type(error).__name__})"
        raise MonitorUnavailable(message) from error
