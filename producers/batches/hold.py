"""A runner's hold on one batch: its record, changed by compare-and-set, and the lease in it.

The lease only keeps two runners from doing the same work; that no line stands twice is the result
files' own rule. So a clock that is wrong costs work, never a line.
"""

import asyncio
import time
from collections.abc import Callable

from msgspec.structs import replace

from broker.bus.base import LinkDown, NoStream, Timeout, WrongSequence
from producers.batches.errors import LeaseLost
from producers.batches.records import Batch, Lease
from producers.batches.shelf import Shelf

Change = Callable[[Batch], Batch]

_RETRY_S = 0.2


class Hold:
    """One batch, held. Made by `take`."""

    def __init__(self, shelf: Shelf, batch: Batch, revision: int, *, lease_s: float) -> None:
        assert batch.lease is not None, "it was just taken"
        self.batch = batch
        self.shelf = shelf
        self._revision = revision
        self._lease = batch.lease
        self._lease_s = lease_s
        self._lock = asyncio.Lock()
        self._until_s = time.monotonic() + lease_s

    @property
    def is_first(self) -> bool:
        """Whether nobody ran this batch before."""
        return self._lease.number == 1

    async def change(self, change: Change) -> Batch:
        """Change the batch, and renew the lease with it.

        `change` may be asked again with a newer record, also one that has it already. Raises
        LeaseLost: also when the server was out of reach until the lease was over.
        """
        async with self._lock:
            while True:
                changed = change(self.batch)
                began_s = time.monotonic()
                if not changed.has_ended:
                    lease = replace(self._lease, until_s=time.time() + self._lease_s)
                    changed = replace(changed, lease=lease)
                try:
                    self._revision = await self.shelf.put(changed, self._revision)
                except WrongSequence:
                    await self._read()
                except (Timeout, LinkDown, NoStream):
                    await self._pause()
                else:
                    self.batch = changed
                    self._until_s = began_s + self._lease_s
                    return changed

    async def look(self) -> Batch:
        """Read what others did to the batch. Raises LeaseLost, BusError."""
        async with self._lock:
            await self._read()
            return self.batch

    async def release(self) -> None:
        """Leave the batch to the next runner at once. Raises LeaseLost, BusError."""
        async with self._lock:
            await self._read()
            batch = replace(self.batch, lease=replace(self._lease, runner="none", until_s=0.0))
            await self.shelf.put(batch, self._revision)

    async def _read(self) -> None:
        batch, revision = await self.shelf.entry(self.batch.id)
        if batch.has_ended or batch.lease is None or batch.lease.number != self._lease.number:
            message = f"batch {batch.id} has another runner now, or has ended"
            raise LeaseLost(message)
        self.batch, self._revision = batch, revision

    async def _pause(self) -> None:
        if time.monotonic() > self._until_s:
            message = f"the lease of batch {self.batch.id} is over, and could not be renewed"
            raise LeaseLost(message)
        await asyncio.sleep(_RETRY_S)


def is_free(batch: Batch, *, now_s: float) -> bool:
    """Say whether a runner may take a batch."""
    return not batch.has_ended and (batch.lease is None or batch.lease.until_s <= now_s)


async def take(shelf: Shelf, batch_id: str, *, runner: str, lease_s: float) -> Hold | None:
    """Take a batch that nobody runs; None when somebody does, or was faster, or it has ended.

    Raises NoSuchBatch, BusError.
    """
    batch, revision = await shelf.entry(batch_id)
    now_s = time.time()
    if not is_free(batch, now_s=now_s):
        return None
    number = batch.lease.number + 1 if batch.lease else 1
    taken = replace(batch, lease=Lease(runner=runner, until_s=now_s + lease_s, number=number))
    try:
        revision = await shelf.put(taken, revision)
    except WrongSequence:
        return None
    return Hold(shelf, taken, revision, lease_s=lease_s)
