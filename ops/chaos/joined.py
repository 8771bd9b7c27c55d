"""Producers of a chaos run's own in a cluster that others run."""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlsplit

from broker.bus.nats import connect
from ops.chaos.nodes import Link
from ops.chaos.setting import Hit, Load, Setting
from ops.chaos.stage import Stage
from ops.cluster import Member
from ops.warden import Warden

PORT = 4222
"""NATS's own, where an address names none."""

_RANK = 1


class JoinedStage(Stage):
    """The producers, each behind a link of its own to the servers of another's cluster."""

    def __init__(self, folder: Path, *, url: str, load: Load, hits: tuple[Hit, ...] = ()) -> None:
        """Prepare; nothing runs yet."""
        super().__init__(folder, setting=Setting.of(1), load=load)
        self.hits = hits
        self._url = url
        self._warden: Warden | None = None

    @property
    def mark(self) -> Mapping[str, str]:
        """That of the one who ends them should we be killed."""
        return {} if self._warden is None else self._warden.mark

    async def _open(self, stack: AsyncExitStack) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._warden = warden = Warden()
        stack.callback(warden.close)
        addresses, login = addresses_of(self._url)
        for name in self.producers:
            link = await stack.enter_async_context(Link(addresses, login=login))
            self.links[name] = link
            command = self.load.command(name, folder=self.folder, url=link.url)
            member = Member(name, command, self.folder, self.mark, warden=warden)
            self._members[name] = member
            stack.push_async_callback(member.stop)
        self._bus = await connect(self._url, name="chaos")
        stack.push_async_callback(self._bus.close)
        await self._listen(self._bus)

    async def start(self) -> None:
        """Start the producers."""
        for name in self.producers:
            await self.member(name).start()

    def has_recovered(self, *, since_s: float) -> bool:
        """Nothing is known of workers that are not ours: they are well."""
        del since_s
        return True

    async def replace(self, name: str) -> None:
        """Never: only workers are replaced, and none is ours."""
        raise NotImplementedError(name)


def addresses_of(url: str) -> tuple[list[tuple[str, int]], str]:
    """Part NATS addresses into hosts with ports, and the login that stands in the first.

    Raises ValueError for other than plain NATS: no link can be put into what is encrypted.
    """
    parts = [urlsplit(one if "://" in one else f"nats://{one}") for one in url.split(",")]
    if not all(part.scheme == "nats" and part.hostname for part in parts):
        message = f"a link can be put only before nats://host:port, not before {url!r}"
        raise ValueError(message)
    login, at, _ = parts[0].netloc.rpartition("@")
    return [(part.hostname or "", part.port or PORT) for part in parts], f"{login}{at}"
