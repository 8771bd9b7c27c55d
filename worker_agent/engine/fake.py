"""The engine model on real time: prefill, decode and cache hits as on a GPU, without one.

It shows the effect of routing where no accelerator is at hand, and lets the agent be tested whole.
One timer drives the model from event to event; a reader that is slow gets several tokens in one
chunk, so nothing piles up.
"""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

from broker.engine_model.events import Finished, FirstToken, SequenceRequest, TokenGenerated
from broker.engine_model.model import EngineModel
from broker.engine_model.profile import Profile
from broker.wire.messages import Load, Usage
from broker.wire.prefix import BLOCK_BYTES, block_hashes, seed
from broker.wire.prompt import BYTES_PER_TOKEN
from worker_agent.engine.assembly import EMBEDDINGS
from worker_agent.engine.base import (
    Chunk,
    Completed,
    EngineDisconnected,
    EngineOutput,
    EngineRequest,
    Facts,
    Readiness,
    refusal,
)
from worker_agent.engine.fake_answers import Answer

BLOCK_TOKENS = round(BLOCK_BYTES / BYTES_PER_TOKEN)


@dataclass(slots=True)
class _Progress:
    """How far a request is; written by the timer, read by whoever runs it."""

    changed: asyncio.Event = field(default_factory=asyncio.Event)
    output_tokens: int = 0
    cached_tokens: int = 0
    usage: Usage | None = None
    lost: bool = False


class FakeEngine:
    """An engine of a given profile. `speed` 10 makes ten of its seconds pass in one."""

    def __init__(
        self,
        profile: Profile,
        *,
        models: tuple[str, ...],
        slots: int | None = None,
        speed: float = 1.0,
    ) -> None:
        self._profile = replace(profile, slots=min(slots or profile.slots, profile.slots))
        self._models = models
        self._speed = speed
        self._incarnation = 0
        self._model: EngineModel | None = None
        self._progress: dict[str, _Progress] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._runs = 0

    @property
    def facts(self) -> Facts:
        """Return what is known now."""
        profile = self._profile
        return Facts(profile.slots, profile.kv_tokens_max, max(1, self._incarnation))

    async def start(self) -> None:
        """Start with an empty cache."""
        assert self._model is None
        self._model = EngineModel(self._profile, progress=True)
        self._incarnation += 1

    async def stop(self) -> None:
        """End; what runs is lost, as with a real engine."""
        self._model = None
        if self._timer is not None:
            self._timer.cancel()
        for progress in self._progress.values():
            progress.lost = True
            progress.changed.set()

    async def ready(self) -> Readiness:
        """Tell whether it was started."""
        if self._model is None:
            return Readiness(ready=False, detail="the fake engine is not started")
        return Readiness(ready=True, models=self._models)

    async def run(self, request: EngineRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one request: Chunks as tokens come, then Completed."""
        answer = Answer(
            request_id=request.request_id,
            endpoint=request.endpoint,
            body=request.body,
            models=self._models,
        )
        self._runs += 1
        key = f"{self._runs}"  # A job's second attempt may meet its first one here.
        progress = self._submit(key, answer)
        try:
            streams = request.stream_to_client and answer.endpoint != EMBEDDINGS
            done = 0
            while progress.usage is None or done < progress.output_tokens:
                await progress.changed.wait()
                progress.changed.clear()
                if progress.lost:
                    message = "the fake engine was stopped"
                    raise EngineDisconnected(message)
                tokens = progress.output_tokens
                if tokens > done:
                    data = answer.delta(done, tokens) if streams else b""
                    yield Chunk(
                        data=data, output_tokens=tokens, cached_tokens=progress.cached_tokens
                    )
                    done = tokens
            if streams and (data := answer.usage_event(progress.usage)):
                yield Chunk(data=data, output_tokens=done, cached_tokens=progress.cached_tokens)
            yield Completed(
                status_code=200,
                body=answer.whole(progress.usage),
                usage=progress.usage,
                cached_tokens=progress.usage.cached_tokens,
            )
        finally:
            self._forget(key)

    async def load(self) -> Load:
        """Return how loaded the model is. Its rates are what it can do, not what it did."""
        profile, model = self._profile, self._model
        if model is None:
            return Load()
        self._advance()
        share = model.kv.used_tokens / profile.kv_tokens_max
        step_tokens = profile.step_tokens_max
        return Load(
            running=model.running,
            waiting=model.waiting,
            kv_tokens_used=model.kv.used_tokens,
            kv_tokens_max=profile.kv_tokens_max,
            prefill_tokens_s=self._speed * step_tokens / profile.prefill_s.at(step_tokens),
            decode_tokens_s=self._speed / profile.decode_s.at(share),
        )

    def _submit(self, key: str, answer: Answer) -> _Progress:
        if self._model is None:
            message = "the fake engine is not started"
            raise EngineDisconnected(message)
        blocks = block_hashes(answer.text, seed=seed(model=answer.model, scope="engine"))
        request = SequenceRequest(
            request_id=key,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            blocks=blocks,
            block_tokens=BLOCK_TOKENS,
        )
        if not self._model.fits(request):
            text = f"prompt and answer need more than {self._profile.kv_tokens_max} tokens"
            raise refusal(400, text, "context_length_exceeded")
        self._advance()
        progress = self._progress[key] = _Progress()
        self._model.submit(request, self._now_s())
        # The step begins once all who came in this turn of the loop are in.
        self._arm(0.0)
        return progress

    def _forget(self, key: str) -> None:
        del self._progress[key]
        if self._model is not None:
            self._advance()
            self._model.cancel(key, self._now_s())
            self._wake()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() * self._speed

    def _wake(self) -> None:
        """Pass on what happened, and sleep until the next event."""
        if self._model is None:
            return
        self._advance()
        next_at_s = self._model.next_event_at_s()
        if next_at_s is not None:
            self._arm((next_at_s - self._now_s()) / self._speed)
        elif self._timer is not None:
            self._timer.cancel()

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, delay_s), self._wake)

    def _advance(self) -> None:
        assert self._model is not None
        for event in self._model.advance(self._now_s()):
            progress = self._progress.get(event.request_id)
            if progress is None:
                continue
            match event:
                case FirstToken(cached_tokens=cached_tokens):
                    progress.output_tokens = 1
                    progress.cached_tokens = cached_tokens
                case TokenGenerated(output_tokens=output_tokens):
                    progress.output_tokens = output_tokens
                case Finished(usage=usage):
                    progress.usage = usage
            progress.changed.set()
