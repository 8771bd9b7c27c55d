"""An engine's publisher of KV-cache events, played by the test: PUB and replay on real ZeroMQ.

It numbers, keeps and replays as vLLM's does, and can lose a batch on the way, forget what it kept
and start again from 0.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

BLOCK_SIZE = 16


def stored(
    names: Sequence[Any],
    tokens: Sequence[Any],
    *,
    parent: Any = None,
    **fields: Any,
) -> dict[str, Any]:
    """An event of the newer form."""
    defaults: dict[str, Any] = {
        "type": "BlockStored",
        "block_hashes": list(names),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
    return {**defaults, **fields}


def removed(*names: Any, **fields: Any) -> dict[str, Any]:
    """An event of the newer form."""
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **fields}


CLEARED = {"type": "AllBlocksCleared"}


def a_payload(*events: Any, at_s: float = 1.0) -> bytes:
    """A batch as it is on the wire."""
    return msgspec.msgpack.encode([at_s, list(events), 0])


class KvPublisher:
    """Publishes to whoever listens."""

    def __init__(
        self, folder: Path, context: "zmq.asyncio.Context", *, replays: bool, endpoint: str = ""
    ) -> None:
        self.endpoint = endpoint or f"ipc://{folder}/kv"
        self.replay_endpoint = f"ipc://{folder}/replay" if replays else ""
        self.kept: list[tuple[int, bytes]] = []
        self.replays: list[int] = []
        """Sequences that replays were asked from."""
        self._next = 0
        self._at_s = 0.0
        # An XPUB is a PUB that tells who subscribes: what is sent before is lost.
        self._pub = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        self._pub.bind(self.endpoint)
        if replays:
            self._router.bind(self.replay_endpoint)

    async def heard_by_one(self) -> None:
        """Wait for a subscriber."""
        await self._pub.recv()

    async def publish(self, *events: Any, loses: bool = False) -> None:
        """Send one batch. `loses`: it never arrives."""
        self._at_s += 1.0
        await self.send(a_payload(*events, at_s=self._at_s), loses=loses)

    async def send(self, payload: bytes, *, loses: bool = False) -> None:
        """Send one batch as it is."""
        sequence, self._next = self._next, self._next + 1
        self.kept.append((sequence, payload))
        if not loses:
            await self.frames(b"kv@w1", sequence.to_bytes(8, "big"), payload)

    async def frames(self, *frames: bytes) -> None:
        """Send anything."""
        await self._pub.send_multipart(frames)

    def start_again(self) -> None:
        """Be a new engine at the same place."""
        self.kept.clear()
        self._next = 0

    async def serve(self) -> None:
        """Replay, for ever."""
        while True:
            client, _, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            for sequence, payload in list(self.kept):
                if sequence >= first:
                    number = sequence.to_bytes(8, "big")
                    await self._router.send_multipart([client, b"", number, payload])
            await self._router.send_multipart([client, b"", b"\xff" * 8, b""])

    def close(self) -> None:
        """Be gone."""
        self._pub.close(linger=0)
        self._router.close(linger=0)


@asynccontextmanager
async def a_publisher(
    folder: Path, *, replays: bool = True, endpoint: str = ""
) -> AsyncGenerator[KvPublisher]:
    """A publisher until the block ends."""
    context = zmq.asyncio.Context()
    publisher = KvPublisher(folder, context, replays=replays, endpoint=endpoint)
    try:
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(publisher.serve())
            yield publisher
            serving.cancel()
    finally:
        publisher.close()
        context.term()
