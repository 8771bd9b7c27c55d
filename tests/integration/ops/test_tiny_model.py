"""The shipped model in a real llama.cpp server, on a port and on a Unix socket."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import xllamacpp

from ops.tiny_model.make_tiny_model import SHIPPED_FILE

pytestmark = pytest.mark.engine

SYSTEM_PROMPT = ("You are a patient assistant. " * 70)[:2000]
ANSWER_TOKENS = 24


def a_server(host: str) -> xllamacpp.Server:
    """Start a llama.cpp server with two slots of 8k tokens and no host cache."""
    params = xllamacpp.CommonParams()
    params.model.path = str(SHIPPED_FILE)
    params.hostnames, params.port = [host], 0
    params.n_parallel, params.n_ctx = 2, 2 * 8192
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_ram_mib, params.verbosity = 0, 0
    return xllamacpp.Server(params)


@pytest.fixture(params=["tcp", "unix"])
async def engine(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a client of a fresh server; the server ends with its last reference."""
    socket = tmp_path / "engine.sock"
    server = a_server(str(socket) if request.param == "unix" else "127.0.0.1")
    # This server closes the connection after a streamed answer although it says keep-alive.
    if request.param == "unix":
        connector: aiohttp.BaseConnector = aiohttp.UnixConnector(str(socket), force_close=True)
        base = "http://engine"
    else:
        connector, base = aiohttp.TCPConnector(force_close=True), server.listening_address
    async with aiohttp.ClientSession(base, connector=connector) as session:
        yield session
    del server


async def streamed(session: aiohttp.ClientSession, **fields: Any) -> tuple[list[str], Any]:
    """Ask for a streamed chat; return its pieces of text and the usage."""
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}} | fields
    pieces: list[str] = []
    usage: Any = None
    async with session.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            usage = chunk.get("usage") or usage
            pieces += [c["delta"]["content"] for c in chunk["choices"] if c["delta"].get("content")]
    return pieces, usage


def a_chat(question: str) -> list[dict[str, str]]:
    """Put a question under the system prompt that all chats share."""
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]


async def test_chats_stream_and_share_the_system_prompt(engine: aiohttp.ClientSession) -> None:
    """A second chat under the same system prompt finds all of it in the cache, and says so."""
    first, usage = await streamed(engine, messages=a_chat("Why?"), max_tokens=ANSWER_TOKENS)
    _, later = await streamed(engine, messages=a_chat("How?"), max_tokens=ANSWER_TOKENS)
    assert len(first) == usage["completion_tokens"] == ANSWER_TOKENS
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert later["prompt_tokens_details"]["cached_tokens"] >= len(SYSTEM_PROMPT)


async def test_one_byte_is_one_token(engine: aiohttp.ClientSession) -> None:
    """A prompt grows by as many tokens as bytes, whatever the script it is written in."""
    for question in ("0123456789", "naïve £", "你好"):
        _, short = await streamed(engine, messages=a_chat(""), max_tokens=1)
        _, long = await streamed(engine, messages=a_chat(question), max_tokens=1)
        assert long["prompt_tokens"] - short["prompt_tokens"] == len(question.encode())


async def test_answers_are_words(engine: aiohttp.ClientSession) -> None:
    """Only letters and spaces come out, at any temperature up to 1, and never an early end."""
    for temperature in (0.0, 1.0):
        pieces, usage = await streamed(
            engine, messages=a_chat("Hm?"), max_tokens=200, temperature=temperature
        )
        text = "".join(pieces)
        assert usage["completion_tokens"] == 200
        assert text.replace(" ", "a").isalpha()
        assert text.isascii()


async def test_prompt_beyond_the_slot_is_refused(engine: aiohttp.ClientSession) -> None:
    """A prompt longer than a slot's context is the caller's error: 400, with its own type."""
    messages = [{"role": "user", "content": "x" * 9000}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    async with engine.post("/v1/chat/completions", json=body) as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "exceed_context_size_error"
