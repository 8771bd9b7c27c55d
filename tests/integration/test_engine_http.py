"""The engine client against a server that misbehaves on order, over TCP and a Unix socket."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.wire.messages import Load, Usage
from tests.builders import MODEL, a_chat_body
from tests.engines import BadEngine, Behaviour, a_bad_engine
from worker_agent.engine import http_client, openai_http
from worker_agent.engine.base import (
    DETAIL_CHARS_MAX,
    AnswerTooLarge,
    Chunk,
    Completed,
    EngineAway,
    EngineBusy,
    EngineDisconnected,
    EngineError,
    EngineFailed,
    EngineGarbage,
    EngineOutput,
    EngineRefused,
    EngineRequest,
    EngineTimeout,
)
from worker_agent.engine.openai_http import OpenAiHttpEngine


@asynccontextmanager
async def a_client(server: BadEngine, **fields: Any) -> AsyncGenerator[OpenAiHttpEngine]:
    """An engine client of four slots, started."""
    defaults: dict[str, Any] = {"slots": 4}
    engine = OpenAiHttpEngine(server.url, **{**defaults, **fields})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def a_request(*, stream: bool = True, **fields: Any) -> EngineRequest:
    """A chat whose caller reads along."""
    return EngineRequest(
        request_id="job-1",
        endpoint="/v1/chat/completions",
        body=a_chat_body(**fields),
        stream_to_client=stream,
    )


async def outputs(engine: OpenAiHttpEngine, request: EngineRequest) -> list[EngineOutput]:
    """All outputs of a request."""
    async with aclosing(engine.run(request)) as stream:
        return [output async for output in stream]


async def completed_of(engine: OpenAiHttpEngine, request: EngineRequest) -> Completed:
    """The last output of a request."""
    completed = (await outputs(engine, request))[-1]
    assert isinstance(completed, Completed)
    return completed


@pytest.mark.parametrize("over_unix", [False, True])
async def test_answer_over_tcp_and_unix(over_unix: bool, tmp_path: Path) -> None:
    """The same over either: chunks on the way, the whole at the end, cached tokens told."""
    socket_path = tmp_path / "e.sock" if over_unix else None
    async with a_bad_engine(socket_path=socket_path) as server, a_client(server) as engine:
        assert (await engine.ready()).models == (MODEL,)
        *chunks, completed = await outputs(engine, a_request(x_unknown=[1]))
        assert isinstance(completed, Completed)
        body = orjson.loads(completed.body)
        assert body["choices"][0]["message"]["content"] == "t0 t1 t2 t3 "
        assert (completed.usage, completed.cached_tokens) == (Usage(10, 7, 4), 7)
        data = [chunk.data for chunk in chunks if isinstance(chunk, Chunk)]
        assert [bool(d) for d in data] == [True] * 5 + [False]  # The report was not asked for.
        (seen,) = server.seen
        assert seen.headers["x-request-id"] == "job-1"
        assert seen.body == {
            **orjson.loads(a_chat_body(x_unknown=[1])),
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour.BROKEN_JSON, EngineGarbage),
        (Behaviour.WRONG_TYPE, EngineGarbage),
        (Behaviour.NOT_STREAMED, EngineGarbage),
        (Behaviour.HALF_STREAM, EngineGarbage),
        (Behaviour.REDIRECTS, EngineGarbage),
        (Behaviour.DROPS, EngineDisconnected),
        (Behaviour.DROPS_AT_ONCE, EngineDisconnected),
        (Behaviour.ERROR_IN_STREAM, EngineFailed),
        (Behaviour.FAILS, EngineFailed),
        (Behaviour.UNAVAILABLE, EngineFailed),
        (Behaviour.FORBIDS, EngineFailed),
        (Behaviour.BUSY, EngineBusy),
        (Behaviour.REFUSES, EngineRefused),
        (Behaviour.NOT_FOUND, EngineRefused),
        (Behaviour.HUGE, AnswerTooLarge),
    ],
)
async def test_misbehaviour(behaviour: Behaviour, kind: type[EngineError]) -> None:
    """Each way to go wrong is the error that says who is to blame, and the next job is fine."""
    async with a_bad_engine() as server, a_client(server) as engine:
        with pytest.raises(EngineError) as raised:
            await outputs(engine, a_request(behaviour=behaviour))
        assert type(raised.value) is kind
        assert raised.value.detail
        assert (await completed_of(engine, a_request())).status_code == 200
        assert (await engine.load()).running == 0


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour.BROKEN_JSON, EngineGarbage),
        (Behaviour.HALF_STREAM, EngineGarbage),
        (Behaviour.REFUSES, EngineRefused),
    ],
)
async def test_misbehaviour_without_a_reader(behaviour: Behaviour, kind: type[EngineError]) -> None:
    """The same for a caller who does not stream: the agent does all the same."""
    async with a_bad_engine() as server, a_client(server) as engine:
        with pytest.raises(kind):
            await outputs(engine, a_request(stream=False, behaviour=behaviour))


async def test_answer_in_one_piece_is_taken_from_an_engine_that_does_not_stream() -> None:
    """A caller who doesn't read along gets the answer of an engine that ignores `stream`."""
    async with a_bad_engine(Behaviour.NOT_STREAMED) as server, a_client(server) as engine:
        completed = await completed_of(engine, a_request(stream=False))
        assert orjson.loads(completed.body)["object"] == "chat.completion"


@pytest.mark.parametrize(
    ("behaviour", "usage"),
    [
        (Behaviour.NO_USAGE, Usage(1, 0, 4)),
        (Behaviour.NO_CACHED_TOKENS, Usage(10, 0, 4)),
    ],
)
async def test_unknown_cached_tokens_are_not_zero(behaviour: Behaviour, usage: Usage) -> None:
    """An engine that doesn't tell leaves them unknown: the cache model must not learn from it."""
    async with a_bad_engine(behaviour) as server, a_client(server) as engine:
        completed = await completed_of(engine, a_request())
        assert (completed.usage, completed.cached_tokens) == (usage, None)


async def test_no_answer_times_out() -> None:
    """An engine that takes a request and says nothing is given up after the bound."""
    async with (
        a_bad_engine(Behaviour.HANGS) as server,
        a_client(server, header_s_max=0.05) as engine,
    ):
        with pytest.raises(EngineTimeout, match=r"no answer within 0\.05 s"):
            await outputs(engine, a_request())
        await server.until(lambda: server.aborted == 1)


async def test_silence_after_the_first_token_is_left_to_the_agent() -> None:
    """Chunks come as they come; when none does, the reader decides, and closing aborts."""
    async with a_bad_engine(Behaviour.SILENT) as server, a_client(server) as engine:
        async with aclosing(engine.run(a_request())) as stream:
            first = await anext(stream)
            assert isinstance(first, Chunk)
            assert first.output_tokens == 1
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await anext(stream)
        await server.until(lambda: server.aborted == 1 and server.running == 0)


async def test_closing_in_mid_stream_closes_the_connection() -> None:
    """A cancelled job is aborted in the engine: it sees its caller go."""
    async with a_bad_engine(Behaviour.SLOW) as server, a_client(server) as engine:
        async with aclosing(engine.run(a_request())) as stream:
            server.let_token_go()
            await anext(stream)
            assert (await engine.load()).running == 1
        await server.until(lambda: server.running == 0)
        assert server.aborted == 1
        assert (await engine.load()).running == 0


async def test_cancelling_the_reader_closes_the_connection() -> None:
    """At whichever await the task that reads is cancelled: before the headers, too."""
    for behaviour in (Behaviour.HANGS, Behaviour.SILENT):
        async with a_bad_engine(behaviour) as server, a_client(server) as engine:
            async with asyncio.TaskGroup() as group:
                task = group.create_task(outputs(engine, a_request()))
                await server.until(lambda s=server: s.running == 1)
                task.cancel()
            await server.until(lambda s=server: s.running == 0)
            assert server.aborted == 1


async def test_stop_aborts_what_runs() -> None:
    """Closing the client ends its requests as disconnected, not by hanging."""
    async with a_bad_engine(Behaviour.SILENT) as server, a_client(server) as engine:
        stream = engine.run(a_request())
        await anext(stream)
        await engine.stop()
        with pytest.raises(EngineDisconnected):
            await anext(stream)
        with pytest.raises(EngineDisconnected, match="not open"):
            await outputs(engine, a_request())


async def test_engine_that_is_away() -> None:
    """A refused connection is not ready and a disconnect, and never an exception of the library."""
    engine = OpenAiHttpEngine("http://127.0.0.1:1", slots=4)
    await engine.start()
    readiness = await engine.ready()
    assert not readiness.ready
    assert readiness.away
    assert "127.0.0.1:1" in readiness.detail
    with pytest.raises(EngineAway):
        await outputs(engine, a_request())
    assert await engine.load() == Load()
    await engine.stop()


async def test_error_page_is_cut() -> None:
    """Of a long error page only its beginning is read, and less is passed on."""
    async with a_bad_engine(Behaviour.FAILS_AT_LENGTH) as server, a_client(server) as engine:
        with pytest.raises(EngineFailed) as raised:
            await outputs(engine, a_request())
        assert len(raised.value.body) == openai_http.ERROR_BYTES_MAX
        assert len(raised.value.detail) < DETAIL_CHARS_MAX


async def test_page_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine can't fill the agent's memory with what it tells of itself."""
    monkeypatch.setattr(http_client, "PAGE_BYTES_MAX", 30)
    async with a_bad_engine() as server, a_client(server) as engine:
        server.metrics = "tgi_batch_current_size 7\ntgi_queue_size 8\n"
        assert await engine.load() == Load(running=7)


async def test_engine_that_does_not_say_how_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for its health, it must answer within a bound, or it is not ready."""
    monkeypatch.setattr(http_client, "PAGE_S_MAX", 0.05)
    async with a_bad_engine() as server, a_client(server) as engine:
        assert (await engine.ready()).ready
        server.pages_hang = True
        readiness = await engine.ready()
        assert (readiness.ready, readiness.detail) == (
            False,
            "/health gave no answer within 0.05 s",
        )
        server.pages_hang = False
        assert (await engine.ready()).ready
        assert engine.facts.incarnation == 1  # Slow is not restarted.


async def test_connection_that_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that drops connections is given up soon, as away."""
    monkeypatch.setattr(http_client, "CONNECT_S_MAX", 0.05)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):  # Fills its queue of one.
            engine = OpenAiHttpEngine(f"http://127.0.0.1:{port}", slots=4, models=(MODEL,))
            await engine.start()
            with pytest.raises(EngineDisconnected, match=r"no connection within 0\.05 s"):
                await outputs(engine, a_request())
            await engine.stop()


async def test_peer_that_does_not_speak_http() -> None:
    """Bytes that are no HTTP are garbage."""

    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"-ERR unknown command\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    engine = OpenAiHttpEngine(f"http://127.0.0.1:{port}", slots=4, models=(MODEL,))
    await engine.start()
    try:
        with pytest.raises(EngineGarbage, match="not HTTP"):
            await outputs(engine, a_request())
        assert not (await engine.ready()).ready
    finally:
        await engine.stop()
        server.close()


async def test_unknown_model_is_refused_before_the_engine_is_asked() -> None:
    """llama.cpp would answer whatever model is asked for: the check is ours."""
    async with a_bad_engine() as server, a_client(server) as engine:
        with pytest.raises(EngineRefused, match="does not exist") as raised:
            await outputs(engine, a_request(model="other"))
        assert raised.value.status_code == 404
        assert server.seen == []


async def test_engine_that_serves_another_model_is_not_ready() -> None:
    """A worker that is told to serve what its engine doesn't have says so."""
    async with a_bad_engine() as server, a_client(server, models=("wanted",)) as engine:
        readiness = await engine.ready()
        assert (readiness.ready, readiness.detail) == (False, f"it serves {MODEL}, not wanted")


@pytest.mark.parametrize(
    ("page", "code", "told"),
    [
        ("health_code", 302, "its health is HTTP 302 to http://sso.example/login, which is not"),
        ("health_code", 401, "its health is HTTP 401, the engine's door is shut: give its key"),
        ("models_code", 302, "/v1/models is HTTP 302 to http://sso.example/login, which is not"),
        ("models_code", 403, "/v1/models is HTTP 403, the engine's door is shut: give its key"),
        ("models_code", 404, "/v1/models is HTTP 404: no OpenAI API is there; is base_url right?"),
        ("models_code", 405, "/v1/models is HTTP 405: no OpenAI API is there; is base_url right?"),
    ],
)
async def test_wrong_address_or_key_says_what_to_set(page: str, code: int, told: str) -> None:
    """The agent's own settings are at fault, and the sentence says which."""
    async with a_bad_engine() as server, a_client(server) as engine:
        setattr(server, page, code)
        server.location = "http://sso.example/login?token=secret"
        readiness = await engine.ready()
        assert not readiness.ready
        assert told in readiness.detail
        assert "secret" not in readiness.detail


async def test_redirected_request_says_where_to() -> None:
    """A redirect in place of an answer is not followed."""
    async with a_bad_engine(Behaviour.REDIRECTS) as server, a_client(server) as engine:
        with pytest.raises(EngineGarbage, match=r"HTTP 307 to http://127\.0\.0\.1:1/, w"):
            await outputs(engine, a_request())


async def test_engine_that_loads_is_not_ready_yet() -> None:
    """A health page that says 503 is waited for; one that isn't there is done without."""
    async with a_bad_engine() as server, a_client(server) as engine:
        server.health_code = 503
        readiness = await engine.ready()
        assert not readiness.ready
        assert "503" in readiness.detail
        server.health_code = 404
        assert (await engine.ready()).ready


async def test_key_is_sent() -> None:
    """An engine behind a key gets it."""
    async with a_bad_engine() as server, a_client(server, api_key="secret") as engine:
        await outputs(engine, a_request())
        assert server.seen[0].headers["authorization"] == "Bearer secret"


async def test_large_body_arrives_whole() -> None:
    """A body near the wire's bound goes through."""
    async with a_bad_engine() as server, a_client(server) as engine:
        await outputs(engine, a_request(user="x" * 7_800_000))
        assert len(server.seen[0].body["messages"][1]["content"]) == 7_800_000


async def test_load_is_read_from_the_metrics_page() -> None:
    """With a metrics page the load is the engine's own word; its size is a fact from then on."""
    async with a_bad_engine() as server, a_client(server) as engine:
        assert await engine.load() == Load()
        server.metrics = "sglang:num_running_reqs 5\nsglang:max_total_num_tokens 2000\n"
        assert await engine.load() == Load(running=5, kv_tokens_max=2000)
        assert engine.facts.kv_tokens_max == 2000


async def test_restart_between_two_looks_is_noticed_by_counters() -> None:
    """Token counters that fell are another process: its cache is empty."""
    async with a_bad_engine() as server, a_client(server) as engine:
        incarnations: list[int] = []
        for total in (100, 200, 200, 50, 60):
            server.metrics = f"vllm:prompt_tokens_total {total}\n"
            await engine.load()
            incarnations.append(engine.facts.incarnation)
        assert incarnations == [1, 1, 1, 2, 2]


@pytest.mark.parametrize("page", ["\n", "<html>busy</html>", "vllm:num_requests_running 1\n"])
async def test_a_page_that_counts_nothing_is_no_restart(page: str) -> None:
    """An empty page or a proxy's took all cache credit, and laid what broke off to a death."""
    async with a_bad_engine() as server, a_client(server) as engine:
        for told in ("vllm:prompt_tokens_total 100\n", page, "vllm:prompt_tokens_total 101\n"):
            server.metrics = told
            await engine.load()
        assert engine.facts.incarnation == 1
        server.metrics = page
        await engine.load()
        server.metrics = "vllm:prompt_tokens_total 7\n"
        await engine.load()
        assert engine.facts.incarnation == 2, "a restart behind such a page is one"


@pytest.mark.parametrize("models", [(), ("",), ("x" * 257,)])
async def test_an_engine_that_lists_no_model_is_not_ready_and_says_so(
    models: tuple[str, ...],
) -> None:
    """Ready without a model, a worker looked well and was given nothing."""
    async with a_bad_engine() as server, a_client(server) as engine:
        server.models = models
        readiness = await engine.ready()
        assert not readiness.ready
        assert "/v1/models is HTTP 200 and names no model" in readiness.detail


async def test_engine_that_was_away_comes_back_as_another(tmp_path: Path) -> None:
    """Away and back again is a restart; not there yet at the start is none."""
    engine = OpenAiHttpEngine(f"unix:{tmp_path}/e.sock", slots=4)
    await engine.start()
    assert not (await engine.ready()).ready
    async with a_bad_engine(socket_path=tmp_path / "e.sock"):
        assert (await engine.ready()).ready
        assert engine.facts.incarnation == 1
    assert not (await engine.ready()).ready
    async with a_bad_engine(socket_path=tmp_path / "e.sock"):
        assert (await engine.ready()).ready
        assert engine.facts.incarnation == 2
    await engine.stop()
