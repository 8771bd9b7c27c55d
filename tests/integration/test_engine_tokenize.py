"""A prompt's tokens are asked of the engine over HTTP, within bounds."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from worker_agent.engine import openai_http
from worker_agent.engine.base import EngineDisconnected, EngineRefused, EngineTimeout
from worker_agent.engine.openai_http import OpenAiHttpEngine
from worker_agent.engine.tokenizer import Tokenizing


@asynccontextmanager
async def an_engine(folder: Path, answer: web.Response | None) -> AsyncGenerator[OpenAiHttpEngine]:
    """A client of a server that gives this answer to `/tokenize`, or none."""
    asked = asyncio.Event()

    async def tokenize(request: web.Request) -> web.Response:
        assert await request.read() == b"question"
        if answer is None:
            await asked.wait()
        return answer or web.Response()

    app = web.Application()
    app.router.add_post("/tokenize", tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "e.sock")).start()
    engine = OpenAiHttpEngine(f"unix:{folder}/e.sock", slots=1)
    await engine.start()
    try:
        yield engine
    finally:
        asked.set()
        await engine.stop()
        await runner.cleanup()


async def test_tokens_are_asked(tmp_path: Path) -> None:
    """The answer comes as it is."""
    async with an_engine(tmp_path, web.Response(body=b"answer")) as engine:
        assert isinstance(engine, Tokenizing)
        assert await engine.tokenize(b"question") == b"answer"


async def test_a_refusal_is_the_engines_error(tmp_path: Path) -> None:
    """One that knows no chats, or has no such page."""
    async with an_engine(tmp_path, web.Response(status=404)) as engine:
        with pytest.raises(EngineRefused):
            await engine.tokenize(b"question")


async def test_an_answer_beyond_the_bound_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut is no JSON, and counts as a failure."""
    monkeypatch.setattr(openai_http, "TOKENS_BYTES_MAX", 3)
    async with an_engine(tmp_path, web.Response(body=b"answer")) as engine:
        assert await engine.tokenize(b"question") == b"ans"


async def test_an_engine_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt is not kept waiting behind it."""
    monkeypatch.setattr(openai_http, "TOKENIZE_S_MAX", 0.05)
    async with an_engine(tmp_path, None) as engine:
        with pytest.raises(EngineTimeout):
            await engine.tokenize(b"question")


async def test_an_engine_that_is_away_is_an_engines_error(tmp_path: Path) -> None:
    """As for requests."""
    engine = OpenAiHttpEngine(f"unix:{tmp_path}/nobody.sock", slots=1)
    await engine.start()
    with pytest.raises(EngineDisconnected):
        await engine.tokenize(b"question")
    await engine.stop()
