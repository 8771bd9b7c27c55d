"""A caller that knows JSON and the subjects, and none of our code: what a foreign client does."""

import asyncio
import base64
import json
from typing import Any

from broker.bus.base import Appended, Bus, Message, NotFound, StoredMessage
from tests.builders import LANE, MODEL

CONTENT_TYPE = {"Content-Type": "application/json"}


def a_body(user: str = "hello", **fields: Any) -> dict[str, Any]:
    """Body of a short chat."""
    messages = [{"role": "user", "content": user}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, **fields}


def a_json_job(**fields: Any) -> dict[str, Any]:
    """A standard-band chat with the fields that every job has, and no more."""
    return {
        "id": "job-1",
        "lane": LANE,
        "band": 2,
        "model": MODEL,
        "client": "js",
        "body": a_body(),
        **fields,
    }


def packed(value: object) -> bytes:
    """As JSON.stringify writes it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def base64_of(data: bytes) -> str:
    """As btoa writes it."""
    return base64.b64encode(data).decode()


class JsonCaller:
    """One client of a lane."""

    def __init__(self, bus: Bus, *, client: str = "js", lane: str = LANE) -> None:
        self.heard: list[dict[str, Any]] = []
        self._bus = bus
        self._client = client
        self._lane = lane
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        """Hear of all this client's jobs."""
        await self._bus.subscribe(f"out.{self._lane}.{self._client}.*", self._hear)

    def _hear(self, message: Message) -> None:
        self.heard.append(json.loads(message.data))
        self._changed.set()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Events of a type."""
        return [event for event in self.heard if event["type"] == kind]

    async def first(self, kind: str, *, patience_s: float = 15.0) -> dict[str, Any]:
        """Wait for the first event of a type."""
        async with asyncio.timeout(patience_s):
            while not self.of(kind):
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)[0]

    async def submit(
        self, job: dict[str, Any] | bytes, *, message_id: str = "", headers: bool = True
    ) -> Appended:
        """Publish a job on the subject of its queue."""
        told = json.loads(job) if isinstance(job, bytes) else job
        subject = f"jobs.{self._lane}.{told.get('band', 2)}.{told.get('model', MODEL)}"
        return await self._bus.append(
            subject,
            job if isinstance(job, bytes) else packed(job),
            message_id=message_id,
            headers=CONTENT_TYPE if headers else None,
        )

    async def ask(self, verb: str, **question: Any) -> dict[str, Any]:
        """Put a question to the broker."""
        reply = await self._bus.request(
            f"ctl.lane.{self._lane}.{verb}", packed(question), timeout_s=5.0, headers=CONTENT_TYPE
        )
        return json.loads(reply.data)

    async def stored(self, job_id: str) -> StoredMessage:
        """Read a job's record as it stands. Raises NotFound."""
        return await self._bus.last_message(
            f"RESULTS_{self._lane}", f"results.{self._lane}.{job_id}"
        )

    async def record(self, job_id: str, *, patience_s: float = 15.0) -> dict[str, Any]:
        """Read a job's record, waiting for it."""
        async with asyncio.timeout(patience_s):
            while True:
                try:
                    return json.loads((await self.stored(job_id)).data)
                except NotFound:
                    await asyncio.sleep(0.005)
