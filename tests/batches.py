"""Batch files for tests: lines, inputs, a way to run them in this process, and the invariant."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson

from broker.bus.memory import MemoryBus
from producers.batch.plan import Bounds, Plan, default_errors
from producers.batch.runner import Report, Tally, run_batch
from producers.client import Client
from producers.config import ClientConfig
from tests.builders import LANE, MODEL
from tests.lanes import QUICK
from tests.responder import Responder

SMALL = Bounds(lookahead_lines=16, write_s=0.01, checkpoint_s=0.03, grace_s=0.05, gather_s=0.02)
"""Bounds that a small file reaches."""


def a_line(custom_id: str = "a", *, system: str = "Be brief.", **fields: Any) -> bytes:
    """A good line; any field may be another, None leaves it out."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": custom_id}]
    line = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": messages, "max_tokens": 16},
        **fields,
    }
    return orjson.dumps({key: value for key, value in line.items() if value is not None})


def lines(count: int, *, first: int = 0) -> list[bytes]:
    """Good lines `id-0`, `id-1`, ..."""
    return [a_line(f"id-{number}") for number in range(first, first + count)]


def a_plan(folder: Path, content: Iterable[bytes] | bytes | None = None, **fields: Any) -> Plan:
    """A plan over `in.jsonl` of this content."""
    source = folder / "in.jsonl"
    if content is not None:
        data = content if isinstance(content, bytes) else b"".join(c + b"\n" for c in content)
        source.write_bytes(data)
    output = folder / "out.jsonl"
    defaults: dict[str, Any] = {
        "input": str(source),
        "output": output,
        "errors": default_errors(output),
        "lane": LANE,
    }
    return Plan(**{**defaults, **fields})


def results(path: Path) -> list[dict[str, Any]]:
    """Lines of a result file; none when it isn't there."""
    if not path.exists():
        return []
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def whole_lines(path: Path) -> int:
    """How many lines of a result file are written to their end, while it is being written."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def codes(plan: Plan) -> list[str]:
    """Codes of the error file, sorted."""
    return sorted(line["error"]["code"] for line in results(plan.errors) if line["error"])


def check_invariant(plan: Plan, ids: Iterable[str]) -> None:
    """Each custom id stands exactly once in output and error file together."""
    both = results(plan.output) + results(plan.errors)
    found = Counter(line["custom_id"] for line in both if line["custom_id"] is not None)
    assert found == Counter(set(ids))
    assert len({line["id"] for line in both}) == len(both)


class Cluster:
    """A responder and a way to run batches on it, all in this process."""

    def __init__(self, bus: MemoryBus, responder: Responder) -> None:
        self.bus = bus
        self.responder = responder
        self.config: ClientConfig = QUICK
        self.lane = LANE
        self.clients: list[Client] = []

    @asynccontextmanager
    async def connect(self, client_id: str) -> AsyncGenerator[Client]:
        """Open a client on a connection of its own."""
        own = self.bus.connection()
        try:
            async with Client(
                own, lane=self.lane, client_id=client_id, config=self.config
            ) as client:
                self.clients.append(client)
                yield client
        finally:
            await own.close()

    async def run(
        self,
        plan: Plan,
        *,
        stop: asyncio.Event | None = None,
        tally: Tally | None = None,
        bounds: Bounds = SMALL,
        retry: bool = False,
    ) -> Report:
        """Run a plan as the command does."""
        async with asyncio.timeout(30):
            return await run_batch(
                plan,
                self.connect,
                stop=stop or asyncio.Event(),
                tally=tally or Tally(),
                bounds=bounds,
                retry=retry,
            )


@asynccontextmanager
async def a_cluster(**fields: Any) -> AsyncGenerator[Cluster]:
    """A cluster that serves lane `acme`."""
    bus = MemoryBus()
    async with Responder(bus, **fields) as responder:
        yield Cluster(bus, responder)
    await bus.close()
