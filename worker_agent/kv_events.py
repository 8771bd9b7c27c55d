"""Keeps the model of the cache on the engine's own word, and says when it can't.

Events say which engine blocks come and go; a prompt's tokens, asked once after it was given to the
engine, say which of our blocks those are. Asking stands beside the jobs, never before them: one
question at a time, and of more prompts than can wait the oldest are let go, without credit.

The engine's word counts while it is whole: heard from its first batch on, or since its cache was
last empty, and prompts' tokens can be had. Otherwise the guess counts, less what the engine says is
gone. It falls silent when a prompt was computed that it should have told of, and nothing came.
"""

import asyncio
from asyncio import to_thread
from collections import Counter, deque
from collections.abc import Callable, Sequence
from enum import StrEnum

import structlog

from worker_agent.cache_model import CacheModel, CacheSource
from worker_agent.engine.base import EngineError
from worker_agent.engine.kv_event_feed import KvEventFeed
from worker_agent.engine.kv_event_wire import AllBlocksCleared, Batch
from worker_agent.engine.tokenizer import Prompt, Tokenizing, question_of, understood

PROMPTS_WAITING_MAX = 64
"""Prompts whose tokens are not asked yet: as many as large engines run at once."""

FAILURES_MAX = 3
"""Questions in a row that came to nothing, and the engine is taken to tell no tokens."""

FAILED_PAUSE_S = 30.0
"""Before it is asked again then: whoever mends it sees it work within half a minute."""

_log = structlog.get_logger(__name__)


class Hearing(StrEnum):
    """How much of the engine's word there is."""

    NOTHING = "nothing"
    """Not heard yet."""
    WHOLE = "whole"
    PART = "part"
    """What is cached from before is not known."""
    SILENT = "silent"
    """Whole, until it stopped."""


class _Rank:
    """What one data-parallel rank tells."""

    def __init__(self, number: int, told_to: "KvEvents") -> None:
        self.hearing = Hearing.NOTHING
        self._number = number
        self._told_to = told_to

    def heard(self, batch: Batch) -> None:
        """Take the next batch."""
        self._told_to.heard(batch, rank=self._number)

    def lost(self, *, whole: bool) -> None:
        """Know nothing any more."""
        self._told_to.lost(whole=whole, rank=self._number)


class KvEvents:
    """One engine's events, its prompts' tokens, and the model that both go into."""

    def __init__(
        self,
        *,
        cache: CacheModel,
        engine: Tokenizing,
        endpoint: str,
        replay_endpoint: str,
        tick_s: Callable[[], float],
        silent_s_max: float,
        ranks: int = 1,
    ) -> None:
        """`ranks`: data-parallel ones, at the endpoints' ports and those that follow."""
        self._cache = cache
        self._engine = engine
        self._endpoint = endpoint
        self._tick_s = tick_s
        self._silent_s_max = silent_s_max
        self._ranks = [_Rank(number, self) for number in range(ranks)]
        self._feeds = [
            KvEventFeed(
                endpoint_of(endpoint, number),
                rank,
                replay_endpoint=endpoint_of(replay_endpoint, number),
            )
            for number, rank in enumerate(self._ranks)
        ]
        self._hearing = Hearing.NOTHING
        self._waiting: deque[Prompt] = deque(maxlen=PROMPTS_WAITING_MAX)
        self._has_waiting = asyncio.Event()
        self._failures = 0
        self._owed: tuple[float, Sequence[int]] | None = None
        """When a prompt was computed that no event has told of yet, and its chain."""
        self.counts: Counter[str] = Counter()
        """Prompts asked, let go, refused by the engine, and such as nobody could ask about."""

    @property
    def hearing(self) -> Hearing:
        """How much of the engine's word there is."""
        return self._hearing

    @property
    def notice(self) -> str:
        """What keeps the engine's word from counting, for people; empty while all is well."""
        if self._hearing is Hearing.SILENT or (
            self._hearing is Hearing.NOTHING and self._is_late()
        ):
            hint = ""
            if self._endpoint.startswith("tcp://"):
                hint = " (the engine must bind tcp://*:PORT: to tcp://127.0.0.1 it connects)"
            return f"no KV events from {self._endpoint}{hint}: the cache is guessed"
        if self._failures >= FAILURES_MAX:
            return "the engine's /tokenize fails: its cache is guessed"
        return ""

    async def run(self) -> None:
        """Listen, ask and watch, for ever."""
        async with asyncio.TaskGroup() as group:
            for feed in self._feeds:
                group.create_task(feed.run())
            group.create_task(self._ask())
            group.create_task(self._watch())

    # ---- jobs -----------------------------------------------------------------------------------

    def given(self, prompt: Prompt) -> None:
        """Note a request given to the engine: its tokens are asked soon."""
        if not self._cache.is_reported(prompt.chain) or self._cache.knows_tokens(prompt.chain):
            return
        if len(self._waiting) == PROMPTS_WAITING_MAX:
            self.counts["let_go"] += 1
        self._waiting.append(prompt)
        self._has_waiting.set()

    def prefilled(self, chain: Sequence[int]) -> None:
        """Note a prompt's first token: the engine has stored it, and told so or soon will."""
        # A rank that fell silent is found again by any prompt that it tells of.
        may_owe = len(self._ranks) == 1 or self._hearing is not Hearing.SILENT
        is_owed = self._owed is not None and may_owe and not self._is_told(self._owed[1])
        if not is_owed and self._cache.is_reported(chain):
            self._owed = self._tick_s(), chain

    def resync(self) -> None:
        """Begin anew: the engine restarted."""
        for feed, rank in zip(self._feeds, self._ranks, strict=True):
            feed.resync()
            rank.hearing = Hearing.NOTHING
        self._turn(Hearing.NOTHING)

    # ---- the feeds' sink ------------------------------------------------------------------------

    def heard(self, batch: Batch, *, rank: int = 0) -> None:
        """Take a rank's next batch."""
        is_only = len(self._ranks) == 1
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._ranks[rank].hearing = Hearing.WHOLE
            self._turn(self._heard_of_all())
        elif is_only and self._hearing is Hearing.SILENT:
            self._turn(self._heard_of_all())
        self._cache.heard(batch.events, at_s=self._tick_s(), rank=rank)
        # Of several ranks one may be silent while others go on: what is owed must be told of.
        if is_only or (self._owed is not None and self._is_told(self._owed[1])):
            self._owed = None
        if self._hearing is Hearing.SILENT and self._owed is None:
            self._turn(self._heard_of_all())

    def lost(self, *, whole: bool, rank: int = 0) -> None:
        """Know nothing of a rank any more."""
        one = self._ranks[rank]
        if one.hearing is not Hearing.NOTHING:
            _log.info("kv events begin anew", whole=whole, rank=rank)
            self._cache.lost(rank, at_s=self._tick_s())
        one.hearing = Hearing.WHOLE if whole else Hearing.PART
        self._turn(self._heard_of_all())

    def _heard_of_all(self) -> Hearing:
        """Tell how much there is of the whole engine's word: all of each rank's, or a part."""
        hearings = {rank.hearing for rank in self._ranks}
        return hearings.pop() if len(hearings) == 1 else Hearing.PART

    # ---- duties ---------------------------------------------------------------------------------

    async def _ask(self) -> None:
        while True:
            await self._has_waiting.wait()
            prompt = self._waiting.popleft()
            if not self._waiting:
                self._has_waiting.clear()
            if self._cache.knows_tokens(prompt.chain):
                continue
            await self._ask_one(prompt)
            if self._failures >= FAILURES_MAX:
                await asyncio.sleep(FAILED_PAUSE_S)

    async def _ask_one(self, prompt: Prompt) -> None:
        question = await to_thread(question_of, prompt)
        if question is None:
            self.counts["unaskable"] += 1
            return
        self.counts["asked"] += 1
        try:
            answer = await self._engine.tokenize(question)
            tokenized = await to_thread(understood, prompt, answer)
        except EngineError as error:
            self.counts["refused"] += 1
            self._failures += 1
            _log.info("the engine tells no tokens", error=error.detail[:400])
        else:
            self._failures = 0
            self._cache.learn(tokenized, at_s=self._tick_s())
        self._turn(self._hearing)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._silent_s_max / 4)
            if self._hearing is Hearing.WHOLE and self._is_late():
                self._turn(Hearing.SILENT)

    def _is_late(self) -> bool:
        if self._owed is None:
            return False
        since_s, chain = self._owed
        return self._tick_s() - since_s > self._silent_s_max and not self._is_told(chain)

    def _is_told(self, chain: Sequence[int]) -> bool:
        """Tell whether a prompt's blocks were told of, as far as can be known."""
        can_know = self._hearing is not Hearing.WHOLE or self._cache.knows_tokens(chain)
        return not can_know or self._cache.is_held(chain)

    def _turn(self, hearing: Hearing) -> None:
        """Change state, and whose word counts with it."""
        has_tokens = self._failures < FAILURES_MAX
        is_whole = hearing is Hearing.WHOLE and has_tokens
        source = CacheSource.EVENTS if is_whole else CacheSource.MODEL
        if hearing is not self._hearing or source is not self._cache.source:
            self._hearing = hearing
            self._cache.believe(source)
            _log.info("cache", source=source, events=hearing, tokens=has_tokens, **self._counted())

    def _counted(self) -> dict[str, int]:
        feeds = sum((feed.counts for feed in self._feeds), Counter[str]())
        return {**feeds, **self.counts}


def endpoint_of(endpoint: str, rank: int) -> str:
    """Return where a rank publishes, or replays: its port is the first one's plus its number.

    So vLLM and SGLang have it; only tcp:// endpoints have a port.
    """
    if not endpoint or not rank:
        return endpoint
    host, _, port = endpoint.rpartition(":")
    return f"{host}:{int(port) + rank}"
