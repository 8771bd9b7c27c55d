"""What a server tells its monitor and not its clients: above all, what a power cut may lose."""

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


class _Config(msgspec.Struct, frozen=True):
    sync_interval: int = 120 * NANOSECONDS
    sync_always: bool = False
    max_storage: int = 0
    store_dir: str = ""


class _JetStream(msgspec.Struct, frozen=True):
    config: _Config | None = None
    disabled: bool = False


async def read_durability(monitor_url: str, *, timeout_s: float = 3.0) -> Durability:
    """Ask a server's monitor (`http://host:8222`). Raises MonitorUnavailable."""
    url = f"{monitor_url.rstrip('/')}/jsz"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout_s)) as session,
            session.get(url) as response,
        ):
            answer = msgspec.json.decode(await response.read(), type=_JetStream)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
        message = f"no NATS monitor answers at {monitor_url} ({error or type(error).__name__})"
        raise MonitorUnavailable(message) from error
    if answer.config is None or answer.disabled:
        message = f"JetStream is not enabled on the server at {monitor_url}"
        raise MonitorUnavailable(message)
    return Durability(
        sync_always=answer.config.sync_always,
        sync_interval_s=answer.config.sync_interval / NANOSECONDS,
        storage_bytes_max=answer.config.max_storage,
        store_dir=answer.config.store_dir,
    )
