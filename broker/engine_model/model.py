"""A model of one continuous-batching inference engine, in steps, in virtual time.

Each step decodes one token for every running request and prefills waiting prompts, first come
first served, into what is left of the step's token budget (chunked prefill: Agrawal et al.,
Sarathi-Serve, OSDI 2024; block-wise prefix cache and preemption by recomputation: Kwon et al.,
PagedAttention, SOSP 2023). A step takes P(tokens prefilled) + D(share of the KV cache in use); one
that yields no token takes P alone. P, D and the sizes are the profile's.

Pure: time comes with each call, and nothing is random. Calls may not go back in time. Requests
submitted at one instant start in one step if nothing was asked in between (`next_event_at_s` begins
the step).
"""

from collections import deque
from heapq import heappop, heappush

from broker.engine_model.events import (
    EngineEvent,
    Finished,
    FirstToken,
    SequenceRequest,
    TokenGenerated,
)
from broker.engine_model.kv_cache import KvCache
from broker.engine_model.phase import Phase
from broker.engine_model.profile import Profile
from broker.engine_model.sequence import SequenceState, Stage
from broker.wire.messages import Usage


class EngineModel:
    """One engine. Cost is per request and per change of the batch, not per token."""

    def __init__(self, profile: Profile, *, progress: bool = False) -> None:
        """With `progress`, every token is an event and `next_event_at_s` stops at every step."""
        assert 1 <= profile.slots <= profile.step_tokens_max
        self.profile = profile
        self.kv = KvCache(profile.kv_tokens_max)
        self.prefilled_tokens = 0
        """Prompt tokens computed since the start, recomputed ones included."""
        self.generated_tokens = 0
        self.decoded_tokens = 0
        """Of these, those of steps that prefilled nothing."""
        self.decoded_s = 0.0
        """What their answers took for them: a step counts once for each."""
        self.preemptions = 0
        self.busy_s = 0.0
        """Time spent in steps that are over."""
        self._progress = progress
        self._now_s = 0.0
        self._phase: Phase | None = None
        self._chunks: list[tuple[SequenceState, int]] = []
        self._plan_at_s: float | None = None
        self._events: list[EngineEvent] = []
        self._sequences: dict[str, SequenceState] = {}
        self._waiting: deque[SequenceState] = deque()
        self._running: dict[int, SequenceState] = {}
        self._prefilling: list[SequenceState] = []
        self._decoding = 0
        self._finishing: list[tuple[int, int]] = []
        self._tick = 0  # Steps with decoding so far: what finish_tick and since_tick count.
        self._orders = 0

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot or for memory."""
        return len(self._waiting)

    def fits(self, request: SequenceRequest) -> bool:
        """Tell whether prompt and answer can be held at all."""
        return request.prompt_tokens + request.output_tokens <= self.profile.kv_tokens_max

    def submit(self, request: SequenceRequest, at_s: float) -> None:
        """Queue a request that `fits`, under an id that is not in use."""
        assert self.fits(request)
        assert request.request_id not in self._sequences
        assert request.prompt_tokens >= 1
        assert request.output_tokens >= 1
        self._settle(at_s)
        sequence = SequenceState(request, self._orders, self.profile.block_tokens)
        self._orders += 1
        self._sequences[request.request_id] = sequence
        may_join = not self._waiting and len(self._running) < self.profile.slots
        self._waiting.append(sequence)
        if self._phase is not None:
            if may_join:
                self._cut(at_s)
        elif self._plan_at_s is None:
            self._plan_at_s = at_s

    def cancel(self, request_id: str, at_s: float) -> bool:
        """Drop a request now; the step under way still takes its time. False if it isn't here."""
        self._settle(at_s)
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence.stage is Stage.WAITING:
            self._waiting.remove(sequence)
        else:
            self._vacate(sequence)
        sequence.stage = Stage.GONE
        if self._phase is not None:
            self._cut(at_s)
        return True

    def next_event_at_s(self) -> float | None:
        """Return the earliest instant at which `advance` may have something to tell; None if idle.

        Never later than the next event; if there is none at that instant, ask again.
        """
        if self._events:
            return self._now_s
        if self._phase is None:
            if self._plan_at_s is None:
                return None
            self._plan()
            if self._phase is None:
                return None
        phase = self._phase
        return phase.end_s(phase.done + 1 if self._progress else phase.steps_max)

    def advance(self, to_s: float) -> list[EngineEvent]:
        """Return all that happened up to and at `to_s` and was not told yet, in order of time."""
        self._settle(to_s)
        events, self._events = self._events, []
        return events

    def output_tokens(self, request_id: str) -> int:
        """Return how many tokens a request has at the last instant given; 0 if it isn't here."""
        sequence = self._sequences.get(request_id)
        return self._generated(sequence) if sequence else 0

    def match_tokens(self, request: SequenceRequest) -> int:
        """Return how many prompt tokens the cache would serve if the request were admitted now."""
        return self.kv.match(request.blocks, tokens_max=request.prompt_tokens - 1)[1]

    def clear_cache(self) -> None:
        """Forget all blocks that no running request holds."""
        self.kv.clear_idle()

    # ---- time ----

    def _settle(self, to_s: float) -> None:
        assert to_s >= self._now_s
        while True:
            if self._phase is None:
                if self._plan_at_s is None or self._plan_at_s >= to_s:
                    break
                self._plan()
                continue
            phase = self._phase
            if steps := phase.steps_by(to_s) - phase.done:
                self._complete(phase, steps)
            if phase.done < phase.steps_max:
                break
            self._end(phase)
        self._now_s = to_s

    def _cut(self, at_s: float) -> None:
        assert self._phase is not None
        self._phase.cut(at_s)
        if self._phase.done == self._phase.steps_max:
            self._end(self._phase)

    def _end(self, phase: Phase) -> None:
        self._plan_at_s = phase.end_s(phase.done)
        self.busy_s += self._plan_at_s - phase.start_s
        self._phase = None

    # ---- the make-up of a step ----

    def _plan(self) -> None:
        """Begin the next step or run of steps at `_plan_at_s`, or go idle."""
        start_s, self._plan_at_s = self._plan_at_s, None
        assert start_s is not None
        while self._decoding > self.kv.reclaimable_tokens:
            self._preempt()
        chunks = self._prefill_chunks()
        if not chunks and not self._decoding:
            assert not self._waiting
            return
        completes = any(sequence.prefilled + size == sequence.target for sequence, size in chunks)
        self._chunks = chunks
        self._phase = Phase(
            self.profile,
            start_s=start_s,
            used_tokens=self.kv.used_tokens,
            decoding=self._decoding,
            prefill_tokens=sum(size for _, size in chunks),
            yields_tokens=completes or self._decoding > 0,
            steps_max=1 if chunks else self._decode_steps_max(),
        )

    def _prefill_chunks(self) -> list[tuple[SequenceState, int]]:
        """Fill the step's budget: prompts begun before, then new ones, in order."""
        budget = self.profile.step_tokens_max - self._decoding
        chunks: list[tuple[SequenceState, int]] = []
        for sequence in self._prefilling:
            size = min(budget, sequence.target - sequence.prefilled)
            chunks.append((sequence, size))
            budget -= size
        while budget and self._waiting and len(self._running) < self.profile.slots:
            # What runs already grows by a token each in this very step.
            room = self.kv.reclaimable_tokens - self._decoding
            if not self._admit(self._waiting[0], room):
                break
            sequence = self._waiting.popleft()
            size = min(budget, sequence.target - sequence.prefilled)
            chunks.append((sequence, size))
            budget -= size
        return chunks

    def _admit(self, sequence: SequenceState, room_tokens: int) -> bool:
        """Give a slot and memory for the whole prompt, if there is room."""
        hit_blocks, hit_tokens = self.kv.match(sequence.blocks, tokens_max=sequence.target - 1)
        hits = sequence.blocks[:hit_blocks]
        private = sequence.target - hit_tokens
        if self.kv.match_idle(hits) + private > room_tokens:
            return False
        for block in hits:
            self.kv.hold(block)
        allocated = self.kv.allocate(private)
        assert allocated
        sequence.hit_blocks = sequence.held = hit_blocks
        sequence.hit_tokens = sequence.prefilled = hit_tokens
        sequence.private_tokens = private
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = hit_tokens
        sequence.stage = Stage.PREFILLING
        self._running[sequence.order] = sequence
        self._prefilling.append(sequence)
        return True

    def _decode_steps_max(self) -> int:
        """Steps until the next request finishes or memory runs out."""
        while True:
            tick, order = self._finishing[0]
            sequence = self._running.get(order)
            if sequence is not None and sequence.finish_tick == tick:
                break
            heappop(self._finishing)
        return min(tick - self._tick, self.kv.reclaimable_tokens // self._decoding)

    def _preempt(self) -> None:
        """Send the youngest running request back to the head of the queue, to be computed again."""
        order = next(reversed(self._running))
        sequence = self._running[order]
        self._vacate(sequence)
        sequence.reset()
        sequence.stage = Stage.WAITING
        self._waiting.appendleft(sequence)
        self.preemptions += 1

    # ---- the effect of a step ----

    def _complete(self, phase: Phase, steps: int) -> None:
        if self._decoding:
            self._tick += steps
            grown = self.kv.allocate(steps * self._decoding)
            assert grown
            self.generated_tokens += steps * self._decoding
            if not self._chunks:
                step_s = phase.end_s(phase.done + steps) - phase.end_s(phase.done)
                self.decoded_tokens += steps * self._decoding
                self.decoded_s += step_s * self._decoding
            if self._progress:
                self._tell_tokens(phase, steps)
        phase.done += steps
        at_s = phase.end_s(phase.done)
        chunks, self._chunks = self._chunks, []
        for sequence, size in chunks:
            if sequence.stage is Stage.PREFILLING:
                self._prefill(sequence, size, at_s)
        self._finish_due(at_s)

    def _tell_tokens(self, phase: Phase, steps: int) -> None:
        decoding = [s for s in self._running.values() if s.stage is Stage.DECODING]
        for step in range(1, steps + 1):
            at_s = phase.end_s(phase.done + step)
            for sequence in decoding:
                count = self._generated(sequence) - steps + step
                self._events.append(TokenGenerated(sequence.request.request_id, at_s, count))

    def _prefill(self, sequence: SequenceState, size: int, at_s: float) -> None:
        sequence.prefilled += size
        self.prefilled_tokens += size
        self._store_blocks(sequence)
        if sequence.prefilled < sequence.target:
            return
        self._prefilling.remove(sequence)
        sequence.stage = Stage.DECODING
        self._decoding += 1
        sequence.generated += 1
        self.generated_tokens += 1
        sequence.since_tick = self._tick
        sequence.finish_tick = self._tick + sequence.request.output_tokens - sequence.generated
        heappush(self._finishing, (sequence.finish_tick, sequence.order))
        request_id = sequence.request.request_id
        if sequence.generated == 1:
            self._events.append(FirstToken(request_id, at_s, sequence.cached_tokens))
        elif self._progress:
            self._events.append(TokenGenerated(request_id, at_s, sequence.generated))

    def _store_blocks(self, sequence: SequenceState) -> None:
        """Make the blocks whose last token is prefilled known to all."""
        size = sequence.block_tokens
        ready = sequence.hit_blocks + (sequence.prefilled - sequence.hit_tokens) // size
        for block in sequence.blocks[sequence.held : ready]:
            self.kv.store(block, size)
            sequence.private_tokens -= size
            sequence.held += 1

    def _finish_due(self, at_s: float) -> None:
        while self._finishing and self._finishing[0][0] <= self._tick:
            tick, order = heappop(self._finishing)
            sequence = self._running.get(order)
            if sequence is None or sequence.finish_tick != tick:
                continue
            self._vacate(sequence)
            sequence.stage = Stage.GONE
            request = sequence.request
            del self._sequences[request.request_id]
            usage = Usage(request.prompt_tokens, sequence.cached_tokens, request.output_tokens)
            self._events.append(Finished(request.request_id, at_s, usage))

    def _generated(self, sequence: SequenceState) -> int:
        since = self._tick - sequence.since_tick if sequence.stage is Stage.DECODING else 0
        return sequence.generated + since

    def _vacate(self, sequence: SequenceState) -> None:
        """Take slot and memory back; blocks stay for reuse, the deepest to be evicted first."""
        if sequence.stage is Stage.DECODING:
            self._decoding -= 1
            grown = self._tick - sequence.since_tick
            sequence.generated += grown
            sequence.private_tokens += grown
        else:
            self._prefilling.remove(sequence)
        del self._running[sequence.order]
        self.kv.free(sequence.private_tokens)
        for block in reversed(sequence.blocks[: sequence.held]):
            self.kv.release(block)
