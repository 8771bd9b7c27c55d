"""The HTTP door before a real cluster, driven by the unmodified `openai` client, sync and async."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from broker.bus.nats import NatsBus
from ops.cluster import LocalCluster, Member
from ops.demo.setting import ONLINE_KEY
from tests.acceptance.conftest import StartCluster
from tests.turns import until

MODEL = "tiny"

LEFT_S_MAX = 5.0
"""A job whose caller left is over within a second; on a busy machine within this."""
MESSAGES: Any = [{"role": "user", "content": "Hello, how are you today?"}]


class Door:
    """A cluster with a gateway, and clients of it."""

    def __init__(self, cluster: LocalCluster, bus: NatsBus, gateway: Member) -> None:
        self.cluster = cluster
        self.bus = bus
        self.gateway = gateway

    @property
    def base_url(self) -> str:
        """Where the API is."""
        return f"{self.gateway.said['http']}/v1"

    def sync(self, **fields: Any) -> openai.OpenAI:
        """The client for programs that wait."""
        return openai.OpenAI(**self._fields(fields))

    def async_(self, **fields: Any) -> openai.AsyncOpenAI:
        """The client for programs that don't."""
        return openai.AsyncOpenAI(**self._fields(fields))

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": self.base_url, "api_key": ONLINE_KEY, "max_retries": 0, **fields}


@asynccontextmanager
async def a_door(start_cluster: StartCluster, **setting: Any) -> AsyncGenerator[Door]:
    """A cluster with modelled engines and a gateway."""
    cluster, bus = await start_cluster(**{"workers": 1, **setting})
    gateway = cluster.add_gateway("gateway-1", cluster.folder / "inferlane.toml")
    await gateway.start()
    yield Door(cluster, bus, gateway)


async def test_the_unmodified_client_waiting(start_cluster: StartCluster) -> None:
    """Chat, completions, embeddings, responses, streams, models, raw answers, errors."""
    async with a_door(start_cluster) as door:
        with door.sync() as client:
            await asyncio.to_thread(_everything, client)


def _everything(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
    assert chat.choices[0].message.content
    assert chat.usage
    assert chat.usage.completion_tokens == 8
    assert chat._request_id
    assert chat._request_id.startswith("req_")

    completion = client.completions.create(model=MODEL, prompt="Hello", max_tokens=8)
    assert completion.choices[0].text

    embedding = client.embeddings.create(
        model=MODEL, input="Hello", encoding_format="float", extra_body={"unknown": 1}
    )
    assert len(embedding.data[0].embedding) == 8

    response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    assert response.output_text
    assert response.status == "completed"

    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "inferlane"

    pieces = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == chat.choices[0].message.content
    assert pieces[-1].usage
    assert pieces[-1].usage.completion_tokens == 8

    events = list(
        client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True)
    )
    assert events[-1].type == "response.completed"

    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, extra_headers={"X-Inferlane-Band": "0"}
    )
    assert raw.headers["X-Inferlane-Worker"] == "worker-1"
    assert int(raw.headers["X-Inferlane-Queue-Ms"]) >= 0
    assert int(raw.headers["X-Inferlane-Cached-Tokens"]) >= 0
    assert raw.parse().choices[0].message.content == text
    _errors(client)


def _errors(client: openai.OpenAI) -> None:
    """Each kind of error is the client's own class, with its code."""
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (not_found.value.code, not_found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert bad.value.code == "previous_response_id_unsupported"
    with pytest.raises(openai.BadRequestError) as engines:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=999_999)
    assert engines.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong-key").models.list()
    with pytest.raises(openai.APIStatusError) as deadline:
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_headers={"X-Inferlane-Deadline": "1ms"}
        )
    assert deadline.value.status_code == 408


async def test_the_unmodified_client_not_waiting(start_cluster: StartCluster) -> None:
    """The same over `asyncio`: many at once, streams among them; a time-out of the client's own."""
    async with a_door(start_cluster) as door, door.async_() as client:

        async def chat(number: int) -> str:
            told = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Number {number}"}],
                max_tokens=8,
            )
            return told.choices[0].message.content or ""

        async def stream(number: int) -> str:
            pieces = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"Number {number}"}],
                max_tokens=8,
                stream=True,
            )
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces])

        whole = await asyncio.gather(*(chat(number) for number in range(12)))
        streamed = await asyncio.gather(*(stream(number) for number in range(12)))
        assert whole == streamed
        assert all(whole)
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=1.0).chat.completions.create(
                model=MODEL, messages=MESSAGES, max_tokens=2000
            )
        # He has left: nothing of his job is queued or runs, long before its 20 s are over.
        async with asyncio.timeout(LEFT_S_MAX):
            await until(lambda: _is_empty(door.bus))


async def test_a_retry_of_the_client_waits_as_it_was_told(start_cluster: StartCluster) -> None:
    """While the gateway is away the client tries again by itself, and gets its answer."""
    async with a_door(start_cluster) as door, door.async_(max_retries=5) as client:
        port = door.base_url.rsplit(":", 1)[1].removesuffix("/v1")
        await client.models.list()
        assert await door.gateway.stop() == 0
        command = (*door.gateway.command, "--port", port)
        again = door.cluster.add("gateway-2", command)
        asking = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8)
        )
        await again.start()
        assert (await asking).choices[0].message.content


async def test_fetched_later_from_another_gateway(start_cluster: StartCluster) -> None:
    """`Prefer: respond-async` over the client's own verbs: 202 here, the answer there."""
    async with a_door(start_cluster) as door, door.async_() as client:
        other = door.cluster.add_gateway("gateway-2", door.cluster.folder / "inferlane.toml")
        await other.start()
        told: Any = await client.post(
            "/chat/completions",
            cast_to=object,
            body={"model": MODEL, "messages": MESSAGES, "max_tokens": 8},
            options={"headers": {"Prefer": "respond-async"}},
        )
        assert told["object"] == "job"
        elsewhere = door.async_(base_url=f"{other.said['http']}/v1")
        async with elsewhere, asyncio.timeout(10):
            path = told["url"].removeprefix("/v1")
            while True:
                job: Any = await elsewhere.get(path, cast_to=object)
                if job["status"] == "completed":
                    break
                await asyncio.sleep(0.02)
        assert job["response"]["body"]["choices"][0]["message"]["content"]


async def test_a_worker_that_dies_in_the_midst_of_a_stream(start_cluster: StartCluster) -> None:
    """The client's own error with our reason, and no word of a second attempt."""
    async with a_door(start_cluster) as door, door.async_() as client:
        pieces = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=2000, stream=True
        )
        await anext(pieces)
        await door.cluster.members["worker-1"].kill()
        async with asyncio.timeout(30):
            with pytest.raises(openai.APIError) as lost:
                async for _ in pieces:
                    pass
        assert lost.value.code == "worker_lost"


async def test_sigterm_lets_a_stream_end(start_cluster: StartCluster) -> None:
    """It takes nothing new, the stream comes to its end, and the process ends with 0."""
    async with a_door(start_cluster) as door, door.async_() as client:
        pieces = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=100, stream=True
        )
        first = await anext(pieces)
        door.gateway.signal(signal.SIGTERM)
        rest = [piece async for piece in pieces]
        assert first.choices
        assert rest[-1].choices[0].finish_reason == "length"
        async with asyncio.timeout(10):
            assert await door.gateway.ended() == 0


async def test_ctrl_c_twice_leaves_nothing_running(start_cluster: StartCluster) -> None:
    """The second one cuts streams off, and cancels their jobs: no worker goes on for nobody."""
    async with a_door(start_cluster) as door, door.async_() as client:
        pieces = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=4000, stream=True
        )
        await anext(pieces)
        door.gateway.signal(signal.SIGINT)
        # Two signals at once may arrive as one.
        await until(lambda: "gateway.stopping" in door.gateway.log.read_text())
        door.gateway.signal(signal.SIGINT)
        # Long before the stream's own end, or `drain_s_max`.
        async with asyncio.timeout(10):
            with pytest.raises(openai.APIError):
                async for _ in pieces:
                    pass
            assert await door.gateway.ended() == 0
            await until(lambda: _is_empty(door.bus))


async def _is_empty(bus: NatsBus) -> bool:
    return (await bus.stream_state("JOBS_online")).messages == 0


async def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    """Exit code 3, one sentence, no traceback."""
    config = tmp_path / "f.toml"
    config.write_text('[gateway.keys.a]\nlane = "acme"\nkey = "sk-alice-1"\n')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ops.cli.main", "gateway", "-c", str(config)),
        *("--nats", "nats://127.0.0.1:1", "--port", "0"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ},
    )
    out, err = await process.communicate()
    assert (process.returncode, out) == (3, b"")
    assert b"no NATS server can be used at nats://127.0.0.1:1" in err
    assert b"Traceback" not in err
