"""A real llama.cpp: one that the agent runs, and ones that were started by hand."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from tests.builders import MODEL, a_chat_body
from tests.llama_by_hand import CONTEXT_TOKENS, TINY_GGUF, a_hand_started_llama
from worker_agent.engine import llama as llama_module
from worker_agent.engine.base import (
    Chunk,
    Completed,
    Engine,
    EngineDisconnected,
    EngineFailed,
    EngineOutput,
    EngineRefused,
    EngineRequest,
    Readiness,
)
from worker_agent.engine.llama import LlamaEngine
from worker_agent.engine.llama_server import LlamaOptions
from worker_agent.engine.openai_http import OpenAiHttpEngine

pytestmark = pytest.mark.engine

SYSTEM = "You are a patient teacher. " * 40
"""1,080 tokens: a byte each."""


@asynccontextmanager
async def a_llama(*, restart_s: float = 0.01, **fields: Any) -> AsyncGenerator[LlamaEngine]:
    """An engine of two slots on the tiny model, started."""
    options: dict[str, Any] = {"gguf": str(TINY_GGUF), "model": MODEL, "slots": 2}
    engine = LlamaEngine(LlamaOptions(**{**options, **fields}), restart_s_min=restart_s)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def until_ready(engine: Engine) -> Readiness:
    """Ask until it is ready."""
    while not (readiness := await engine.ready()).ready:
        await asyncio.sleep(0.01)
    return readiness


def a_request(
    *, endpoint: str = "/v1/chat/completions", stream: bool = True, body: Any = None, **fields: Any
) -> EngineRequest:
    """A chat whose caller reads along."""
    packed = a_chat_body(**fields) if body is None else orjson.dumps({"model": MODEL, **body})
    return EngineRequest(request_id="r", endpoint=endpoint, body=packed, stream_to_client=stream)


async def outputs(engine: Engine, request: EngineRequest) -> list[EngineOutput]:
    """All outputs of a request."""
    async with aclosing(engine.run(request)) as stream:
        return [output async for output in stream]


async def answer(engine: Engine, request: EngineRequest) -> tuple[dict[str, Any], Completed]:
    """The whole answer of a request."""
    completed = (await outputs(engine, request))[-1]
    assert isinstance(completed, Completed)
    return orjson.loads(completed.body), completed


async def lost(engine: Engine, request: EngineRequest) -> bool:
    """Whether a request ends with its engine."""
    try:
        await outputs(engine, request)
    except EngineDisconnected:
        return True
    return False


async def until_gone(process_id: int) -> None:
    """Wait for the end of a process that may be nobody's child."""
    descriptor = os.pidfd_open(process_id)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)


async def test_chat_and_its_cache() -> None:
    """A chat streams token by token, and the next one with its prefix says what was cached."""
    async with a_llama() as engine:
        assert (await until_ready(engine)).models == (MODEL,)
        *chunks, completed = await outputs(engine, a_request(system=SYSTEM, user="one"))
        assert isinstance(completed, Completed)
        assert completed.usage.output_tokens == 16
        assert len([c for c in chunks if isinstance(c, Chunk) and c.data]) >= 16
        assert completed.cached_tokens == 0
        _, warm = await answer(engine, a_request(system=SYSTEM, user="two"))
        assert warm.cached_tokens is not None
        assert 1080 <= warm.cached_tokens < warm.usage.prompt_tokens
        assert (engine.facts.slots, engine.facts.kv_tokens_max) == (2, 2 * 4096)
        load = await engine.load()
        assert (load.running, load.kv_tokens_max) == (0, 2 * 4096)
        assert load.prefill_tokens_s > load.decode_tokens_s > 0


async def test_reassembled_answer_has_the_form_of_an_unstreamed_one() -> None:
    """What is put together from the stream has the fields and types that llama.cpp itself gives."""
    fixed: dict[str, Any] = {
        "temperature": 0,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
    }
    async with a_hand_started_llama() as server:
        engine = OpenAiHttpEngine(server.url, slots=2, models=(MODEL,))
        await engine.start()
        streamed, _ = await answer(engine, a_request(**fixed))
        plain, _ = await answer(engine, a_request(stream=False, use_beam_search=True, **fixed))
        await engine.stop()
    assert _shape(streamed) == _shape(plain)
    assert streamed["choices"][0]["message"] == plain["choices"][0]["message"]


def _shape(value: Any) -> Any:
    """Names and types of a JSON value; of what differs from run to run, no more."""
    match value:
        case dict():
            return {name: _shape(inner) for name, inner in value.items()}
        case list():
            return [_shape(inner) for inner in value]
        case float() | int():
            return "number"
        case _:
            return type(value).__name__


@pytest.mark.parametrize("over_unix", [False, True])
async def test_unmodified_engine(over_unix: bool, tmp_path: Path) -> None:
    """A server started by hand is used as it is, and never given more than its own slots."""
    socket_path = tmp_path / "e.sock" if over_unix else None
    async with a_hand_started_llama(slots=2, socket_path=socket_path) as server:
        engine = OpenAiHttpEngine(server.url, slots=8, models=(MODEL,))
        await engine.start()
        assert await engine.ready() == Readiness(ready=True, models=(MODEL,))
        assert (engine.facts.slots, engine.facts.kv_tokens_max) == (2, 2 * CONTEXT_TOKENS)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(engine, a_request(user=f"{i}", n=1))) for i in range(2)
            ]
        assert all(task.result()[1].usage.output_tokens == 16 for task in tasks)
        await engine.stop()


async def test_other_endpoints() -> None:
    """Completions and responses work, embeddings of a chat engine are the job's own error."""
    async with a_llama() as engine:
        await until_ready(engine)
        text = a_request(endpoint="/v1/completions", body={"prompt": "ab", "max_tokens": 3})
        body, completed = await answer(engine, text)
        assert len(body["choices"][0]["text"]) == completed.usage.output_tokens == 3
        asked = a_request(endpoint="/v1/responses", body={"input": "ab", "max_output_tokens": 3})
        body, completed = await answer(engine, asked)
        assert (body["status"], completed.usage.output_tokens) == ("completed", 3)
        with pytest.raises(EngineRefused, match="embeddings"):
            await outputs(engine, a_request(endpoint="/v1/embeddings", body={"input": "ab"}))


async def test_job_errors() -> None:
    """Too long a prompt and an unknown model are refused with words that a caller can use."""
    async with a_llama() as engine:
        await until_ready(engine)
        with pytest.raises(EngineRefused, match="exceeds the available context size") as raised:
            await outputs(engine, a_request(user="x" * 5000))
        assert raised.value.status_code == 400
        assert orjson.loads(raised.value.body)["error"]["type"] == "exceed_context_size_error"
        with pytest.raises(EngineRefused, match="'other' does not exist"):
            await outputs(engine, a_request(model="other"))


async def test_closing_frees_the_slot() -> None:
    """A request that is given up stops generating: the only slot serves the next one at once."""
    async with a_llama(slots=1, context_tokens=16_384) as engine:
        await until_ready(engine)
        async with aclosing(engine.run(a_request(max_tokens=15_000))) as stream:
            await anext(stream)
        async with asyncio.timeout(5):
            _, completed = await answer(engine, a_request(max_tokens=4))
        assert completed.usage.output_tokens == 4


async def test_crash_is_an_event_and_not_the_end() -> None:
    """Killed, the engine loses its request, comes back as the next incarnation, and is cold."""
    async with a_llama(restart_s=0.3, context_tokens=16_384) as engine:
        await until_ready(engine)
        await answer(engine, a_request(system=SYSTEM))
        assert engine.facts.incarnation == 1
        async with asyncio.TaskGroup() as group:
            task = group.create_task(lost(engine, a_request(max_tokens=15_000)))
            while not (await engine.load()).running:
                await asyncio.sleep(0.01)
            assert engine.process_id is not None
            os.kill(engine.process_id, signal.SIGKILL)
        assert task.result()
        while "SIGKILL" not in (await engine.ready()).detail:
            await asyncio.sleep(0.01)
        await until_ready(engine)
        assert engine.facts.incarnation == 2
        _, completed = await answer(engine, a_request(system=SYSTEM))
        assert completed.cached_tokens == 0


async def test_stop_ends_the_process_and_leaves_nothing(tmp_path: Path) -> None:
    """After stop there is neither process nor folder; stopping twice is fine."""
    options = LlamaOptions(gguf=str(TINY_GGUF), model=MODEL, slots=1)
    engine = LlamaEngine(options, runtime_dir=tmp_path)
    await engine.start()
    await until_ready(engine)
    process_id = engine.process_id
    assert process_id is not None
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    await engine.stop()
    await engine.stop()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    assert await engine.ready() == Readiness(ready=False, detail="stopped", away=True)
    await engine.start()
    await until_ready(engine)
    assert engine.facts.incarnation == 2
    await engine.stop()


async def test_unreadable_model_says_why_and_is_tried_again(tmp_path: Path) -> None:
    """A file that is no model: not ready, with llama.cpp's reason; put right, it comes up."""
    path = tmp_path / "model.gguf"
    path.write_text("no model at all")
    async with a_llama(gguf=str(path)) as engine:
        while "starts again in 0.02 s" not in (readiness := await engine.ready()).detail:
            await asyncio.sleep(0.01)
        assert "failed to load model" in readiness.detail
        path.write_bytes(TINY_GGUF.read_bytes())
        await until_ready(engine)


async def test_pause_between_starts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it failed, the next start is never further away than the bound."""
    monkeypatch.setattr(llama_module, "RESTART_S_MAX", 0.02)
    async with a_llama(gguf=__file__) as engine:
        details: set[str] = set()
        while engine.facts.incarnation < 5:
            details.add((await engine.ready()).detail)
            await asyncio.sleep(0.001)
    pauses = {detail.rpartition("; ")[2] for detail in details if "; " in detail}
    assert pauses <= {"starts again in 0.01 s", "starts again in 0.02 s"}
    assert pauses
    assert max(map(len, details)) < llama_module.LOG_BYTES_MAX + 100


async def test_pause_starts_anew_after_a_stable_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that ran well and then crashed is started again as soon as the first time."""
    monkeypatch.setattr(llama_module, "STABLE_S", 0.0)
    async with a_llama(gguf=__file__) as engine:
        details: set[str] = set()
        while engine.facts.incarnation < 4:
            details.add((await engine.ready()).detail.rpartition("; ")[2])
            await asyncio.sleep(0.001)
        assert "starts again in 0.01 s" in details
        assert "starts again in 0.02 s" not in details


async def test_llama_cpp_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the extra, the error says which one to install."""
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    options = LlamaOptions(gguf=str(TINY_GGUF), model=MODEL)
    with pytest.raises(EngineFailed, match=r"inferlane\[llama\]"):
        await LlamaEngine(options, runtime_dir=tmp_path).start()
    assert list(tmp_path.iterdir()) == []


async def test_missing_model_is_told_at_start(tmp_path: Path) -> None:
    """A path without a file is a mistake to hear of at once."""
    engine = LlamaEngine(LlamaOptions(gguf="/nowhere/x.gguf", model=MODEL), runtime_dir=tmp_path)
    with pytest.raises(EngineFailed, match=r"/nowhere/x\.gguf: no such model file"):
        await engine.start()
    await engine.stop()


def test_socket_path_too_long(tmp_path: Path) -> None:
    """A runtime folder that is too deep for a socket is refused, and leaves nothing there."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    options = LlamaOptions(gguf=str(TINY_GGUF), model=MODEL)
    with pytest.raises(ValueError, match="choose a shorter runtime folder"):
        LlamaEngine(options, runtime_dir=deep)
    assert list(deep.iterdir()) == []


OWNER = """
import asyncio, pathlib, sys
from worker_agent.engine.llama import LlamaEngine
from worker_agent.engine.llama_server import LlamaOptions

async def main():
    options = LlamaOptions(gguf=sys.argv[1], model="tiny", slots=1)
    engine = LlamaEngine(options, runtime_dir=pathlib.Path(sys.argv[2]))
    await engine.start()
    while not (await engine.ready()).ready:
        await asyncio.sleep(0.01)
    print(engine.process_id, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_engine_ends_with_an_agent_that_was_killed(tmp_path: Path) -> None:
    """A kill -9 of the agent leaves no engine behind to hold the GPU."""
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", OWNER, str(TINY_GGUF), str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    process_id = int(await owner.stdout.readline())
    owner.kill()
    await until_gone(process_id)
    await owner.communicate()


LOADING_OWNER = """
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "worker_agent.engine.llama_server", sys.argv[1], str(os.getpid())],
    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
print(child.pid, flush=True)
child.wait()
"""


async def test_engine_ends_with_its_agent_while_it_loads(tmp_path: Path) -> None:
    """Also while llama.cpp loads a model and hears nothing: here it waits for a pipe."""
    model = tmp_path / "model.gguf"
    os.mkfifo(model)
    options = LlamaOptions(gguf=str(model), model=MODEL, socket_path=str(tmp_path / "e.sock"))
    owner = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LOADING_OWNER, msgspec.json.encode(options).decode()),
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    process_id = int(await owner.stdout.readline())
    # The pipe can be opened for writing as soon as llama.cpp has opened it to read.
    writer = await asyncio.to_thread(model.open, "wb")
    owner.kill()
    await until_gone(process_id)
    await owner.communicate()
    writer.close()


async def test_stop_kills_what_does_not_end_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is stopped (SIGSTOP) can't hear the end of its input, and is killed."""
    monkeypatch.setattr(llama_module, "STOP_S_MAX", 0.05)
    engine = LlamaEngine(
        LlamaOptions(gguf=str(TINY_GGUF), model=MODEL, slots=1), runtime_dir=tmp_path
    )
    await engine.start()
    await until_ready(engine)
    process_id = engine.process_id
    assert process_id is not None
    os.kill(process_id, signal.SIGSTOP)
    await engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
