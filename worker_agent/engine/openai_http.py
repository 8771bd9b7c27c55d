"""Any OpenAI-compatible server as an engine: vLLM, SGLang, llama.cpp, TGI, whoever started it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

from broker.wire.messages import Load
from worker_agent.engine.base import (
    DETAIL_CHARS_MAX,
    RESPONSE_BYTES_MAX,
    EngineAway,
    EngineDisconnected,
    EngineError,
    EngineOutput,
    EngineRequest,
    EngineTimeout,
    Facts,
    Readiness,
    refusal,
)
from worker_agent.engine.door import door_advice, no_models_advice
from worker_agent.engine.exchange import STREAM_TYPE, error_for, open_exchange
from worker_agent.engine.http_client import HttpClient, Page, events, read
from worker_agent.engine.scrape import (
    LoadReader,
    models_in,
    parse_metrics,
    slots_in,
    takes_any_model,
    tokens_total,
)
from worker_agent.engine.tokenizer import TOKENIZE_PATH, TOKENS_BYTES_MAX

HEADER_S_MAX = 120.0
"""Longest wait for an answer to begin. llama.cpp sends its headers with the first token, so this
spans a whole prefill; it is the agent's default for a stall."""

ERROR_BYTES_MAX = 65_536
"""Most that is read of an answer that is no success."""

TOKENIZE_S_MAX = 10.0
"""Longest wait for a prompt's tokens: a loaded engine takes seconds, and nobody waits for them."""

_SUCCESS = range(200, 300)
_NO_SUCH_PAGE = (404, 405, 501)


class OpenAiHttpEngine:
    """A server at `http://host:port` or `unix:/path/of.sock`."""

    def __init__(
        self,
        base_url: str,
        *,
        slots: int,
        models: tuple[str, ...] = (),
        api_key: str = "",
        header_s_max: float = HEADER_S_MAX,
    ) -> None:
        """`models` are the names to answer to; without, those that the engine lists.

        Raises ValueError when the address is none.
        """
        self._client = HttpClient(base_url, api_key=api_key)
        self._slots_max = slots
        self._models = models
        self._header_s_max = header_s_max
        self._served: tuple[str, ...] = ()
        self._running = 0
        self._incarnation = 1
        self._was_ready = False
        self._was_away = False
        self._forget()

    @property
    def facts(self) -> Facts:
        """Return what is known now."""
        slots = min(self._slots_max, self._engine_slots or self._slots_max)
        return Facts(slots, self._kv_tokens_max, self._incarnation)

    async def start(self) -> None:
        """Make ready to reach it; it may be away."""
        await self._client.open()

    async def stop(self) -> None:
        """Close all connections, which aborts what runs."""
        await self._client.close()

    async def ready(self) -> Readiness:
        """Ask for its health and its models."""
        try:
            return await self._probe()
        except EngineDisconnected as error:
            self._was_away = True
            return Readiness(ready=False, detail=error.detail, away=isinstance(error, EngineAway))
        except EngineError as error:
            return Readiness(ready=False, detail=error.detail)

    async def load(self) -> Load:
        """Read its metrics; if it has none, tell what this agent has running there."""
        own = Load(running=self._running, kv_tokens_max=self._kv_tokens_max)
        try:
            page = await self._client.page("/metrics")
        except EngineError:
            return own
        if page.status_code not in _SUCCESS:
            return own
        text = page.body.decode(errors="replace")
        self._notice_restart(text, page.started)
        load = self._load_reader.read(text, kv_tokens_max=self._kv_tokens_max)
        self._kv_tokens_max = load.kv_tokens_max
        return load

    async def tokenize(self, question: bytes) -> bytes:
        """Ask `/tokenize` and return its answer's body. Raises EngineError."""
        async with (
            _in_time(TOKENIZE_S_MAX),
            self._client.post(
                TOKENIZE_PATH, question, request_id="tokenize", header_s_max=TOKENIZE_S_MAX
            ) as response,
        ):
            if response.status not in _SUCCESS:
                raise error_for(response.status, await read(response, ERROR_BYTES_MAX))
            return await read(response, TOKENS_BYTES_MAX)

    async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request: Chunks as they come, then Completed. Raises EngineError."""
        exchange = open_exchange(request)
        await self._check_model(exchange.model)
        self._running += 1
        try:
            async with self._client.post(
                request.endpoint,
                exchange.body,
                request_id=request.request_id,
                header_s_max=self._header_s_max,
            ) as response:
                status_code, content_type = response.status, response.content_type
                if status_code not in _SUCCESS:
                    location = response.headers.get("Location", "")
                    said = await read(response, ERROR_BYTES_MAX)
                    raise error_for(status_code, said, location=location)
                if exchange.assembly is None or content_type != STREAM_TYPE:
                    body = await read(response, RESPONSE_BYTES_MAX + 1)
                    yield exchange.in_one_piece(status_code, content_type, body)
                    return
                async with aclosing(events(response)) as stream:
                    async for data in stream:
                        yield exchange.chunk(data)
                yield exchange.streamed(status_code)
        finally:
            self._running -= 1

    async def _check_model(self, model: str) -> None:
        """Refuse what is not served here: llama.cpp would answer with another model."""
        names = self._models or self._served or (await self.ready()).models
        if names and model not in names:
            raise refusal(404, f"The model {model!r:.300} does not exist.", "model_not_found")

    async def _probe(self) -> Readiness:
        health = await self._client.page("/health")
        if health.status_code not in (*_SUCCESS, *_NO_SUCH_PAGE):
            advice = door_advice(health.status_code, location=health.location)
            return _not_ready("its health", health, advice, _said(health))
        models = await self._client.page("/v1/models")
        if models.status_code not in _SUCCESS:
            advice = no_models_advice(models.status_code, location=models.location)
            return _not_ready("/v1/models", models, advice)
        if self._was_away and self._was_ready:
            self._restarted()
        self._was_away = False
        self._served = models_in(models.body)
        missing = [name for name in self._models if name not in self._served]
        if missing and not takes_any_model(models.body):
            detail = f"it serves {', '.join(self._served)}, not {', '.join(missing)}"
            return Readiness(ready=False, detail=detail[:DETAIL_CHARS_MAX])
        if not (self._models or self._served):
            return _not_ready("/v1/models", models, " and names no model", _said(models))
        if not self._asked_props:
            props = await self._client.page("/props")
            self._engine_slots, self._kv_tokens_max = slots_in(props.body)
            self._asked_props = True
        self._was_ready = True
        return Readiness(ready=True, models=self._models or self._served)

    def _notice_restart(self, page: str, started: str) -> None:
        """A new start time, or counters that fell: between two looks it became another process.

        A page that has neither (an empty one, a proxy's) is no word on it.
        """
        total = tokens_total(parse_metrics(page))
        is_new = bool(started and self._started) and started != self._started
        if is_new or (total is not None and total < self._tokens_total):
            self._restarted()
        self._started = started or self._started
        self._tokens_total = self._tokens_total if total is None else total

    def _restarted(self) -> None:
        self._incarnation += 1
        self._forget()

    def _forget(self) -> None:
        """Know nothing of the engine: before the first look, and when it is another one."""
        self._asked_props = False
        self._engine_slots = 0
        self._kv_tokens_max = 0
        self._started = ""
        self._tokens_total = 0.0
        self._load_reader = LoadReader()


def _said(page: Page) -> str:
    return page.body[:200].decode(errors="replace").strip()


def _not_ready(what: str, page: Page, advice: str, said: str = "") -> Readiness:
    detail = f"{what} is HTTP {page.status_code}{advice}" + (f": {said}" if said else "")
    return Readiness(ready=False, detail=detail[:DETAIL_CHARS_MAX])


@asynccontextmanager
async def _in_time(longest_s: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(longest_s):
            yield
    except TimeoutError as error:
        message = f"no whole answer within {longest_s:g} s"
        raise EngineTimeout(message) from error
