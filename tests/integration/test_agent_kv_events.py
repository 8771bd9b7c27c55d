"""The agent goes by its engine's own word on the cache, and by its guess where there is none.

A scripted engine whose tokens are the bytes of the prompt, and a publisher on real ZeroMQ that says
what it stores and evicts.
"""

import socket
import zlib
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.wire.messages import Heartbeat, Job, Usage
from broker.wire.prefix import block_hashes, pack_hashes, unpack_hashes
from broker.wire.prompt import prompt_text
from tests.agents import ScriptedEngine, Stage, an_agent, an_answer
from tests.builders import MODEL, a_job, an_attempt
from tests.kv_publisher import BLOCK_SIZE, CLEARED, KvPublisher, a_publisher, removed, stored
from tests.turns import until
from worker_agent.engine import tokenizer
from worker_agent.engine.base import Chunk, EngineDisconnected
from worker_agent.engine.kv_event_feed import BLOCKS_PER_TURN_MAX
from worker_agent.kv_events import FAILURES_MAX, PROMPTS_WAITING_MAX, Hearing, KvEvents

TOKEN_BYTES = 8
"""Of the text that a token stands for: 32 tokens, two engine blocks, make one block of ours."""


class TokenizingEngine(ScriptedEngine):
    """Tells a prompt's tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.tells_tokens = True

    async def tokenize(self, question: bytes) -> bytes:
        self.asked += 1
        if not self.tells_tokens:
            message = "no such page"
            raise EngineDisconnected(message)
        return orjson.dumps({"tokens": tokens_of(orjson.loads(question))})


def tokens_of(body: dict[str, Any]) -> list[int]:
    """One for each TOKEN_BYTES of the canonical text."""
    text = prompt_text(body)
    starts = range(0, len(text), TOKEN_BYTES)
    return [zlib.crc32(text[start : start + TOKEN_BYTES]) for start in starts]


class Prompt:
    """A job's prompt with the engine blocks it makes."""

    def __init__(self, words: str, *, blocks: int = 8) -> None:
        body = {"model": MODEL, "prompt": (words * 2000)[: 256 * blocks + 100]}
        self.body = orjson.dumps(body)
        self.chain = block_hashes(prompt_text(body), seed=7)
        self.tokens = tokens_of(body)
        whole = len(self.tokens) // BLOCK_SIZE
        self.names = [hash(tuple(self.tokens[: BLOCK_SIZE * (n + 1)])) for n in range(whole)]

    def job(self, job_id: str) -> Job:
        """A job that asks it."""
        return a_job(
            id=job_id,
            endpoint="/v1/completions",
            body=self.body,
            blocks=pack_hashes(self.chain),
            prompt_tokens=len(self.tokens),
        )

    def stored(self) -> dict[str, Any]:
        """What an engine says that computed it."""
        return stored(self.names, self.tokens[: BLOCK_SIZE * len(self.names)])


class Told:
    """The prefix blocks that a broker believes of the worker, from all its heartbeats."""

    def __init__(self, stage: Stage) -> None:
        self._beats = stage.beats
        self._read = 0
        self._blocks: set[int] = set()

    @property
    def blocks(self) -> set[int]:
        """Up to the newest heartbeat."""
        for beat in self._beats[self._read :]:
            self._take(beat)
        self._read = len(self._beats)
        return self._blocks

    def _take(self, beat: Heartbeat) -> None:
        if beat.summary is not None:
            if beat.summary.full:
                self._blocks.clear()
            self._blocks.difference_update(unpack_hashes(beat.summary.removed))
            self._blocks.update(unpack_hashes(beat.summary.added))


def events_of(stage: Stage) -> KvEvents:
    """The agent's side of the engine's events."""
    events = stage.agent._kv_events
    assert events is not None
    return events


async def run(
    stage: Stage, engine: ScriptedEngine, prompt: Prompt, job_id: str, *, cached_tokens: int = 0
) -> None:
    """Run a job to its end."""
    await stage.dispatch(prompt.job(job_id), attempt=an_attempt(int(job_id.partition("-")[2])))
    usage = Usage(len(prompt.tokens), cached_tokens, 1)
    answer = an_answer(usage=usage, cached_tokens=cached_tokens)
    engine.say(job_id, Chunk(output_tokens=1), answer)
    await stage.end_of(job_id)


@asynccontextmanager
async def a_stage(
    folder: Path, *, replays: bool = True, **fields: Any
) -> AsyncGenerator[tuple[Stage, TokenizingEngine, KvPublisher]]:
    """An agent that hears its engine."""
    engine = TokenizingEngine()
    async with a_publisher(folder, replays=replays) as publisher:
        defaults: dict[str, Any] = {
            "kv_events": publisher.endpoint,
            "kv_events_replay": publisher.replay_endpoint,
        }
        async with an_agent(engine=engine, **{**defaults, **fields}) as stage:
            await publisher.heard_by_one()
            yield stage, engine, publisher


async def learned(stage: Stage, *prompts: Prompt) -> None:
    """Wait until the prompts' tokens are known."""
    cache = stage.agent._cache
    await until(lambda: all(cache.knows_tokens(prompt.chain) for prompt in prompts))


async def beats_say(stage: Stage, condition: Callable[[], bool]) -> None:
    """Wait until what was told makes it true."""
    await stage.until(condition)


async def test_an_eviction_is_in_the_next_summary(tmp_path: Path) -> None:
    """The blocks that need what was evicted, of each prompt that shares it, and no others."""
    one, other = Prompt("system prompt one "), Prompt("another prompt ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(one.stored(), other.stored())
        await run(stage, engine, one, "job-1")
        await run(stage, engine, other, "job-2")
        await beats_say(stage, lambda: told.blocks == {*one.chain, *other.chain})
        beats = len(stage.beats)
        await publisher.publish(removed(*one.names[9:]))
        await beats_say(stage, lambda: told.blocks == {*one.chain[:4], *other.chain})
        assert stage.beats[beats:]
        assert engine.asked == 2


async def test_a_reset_is_in_the_next_summary(tmp_path: Path) -> None:
    """A full one, without a block; what is stored afterwards is there again, unasked."""
    prompt = Prompt("words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        stage.beats.clear()
        told = Told(stage)
        await publisher.publish(CLEARED)
        await stage.until(lambda: any(beat.summary is not None for beat in stage.beats))
        (summary,) = [beat.summary for beat in stage.beats if beat.summary is not None]
        assert (summary.full, summary.added) == (True, b"")
        await publisher.publish(prompt.stored())
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        assert engine.asked == 1


async def test_a_gap_is_replayed(tmp_path: Path) -> None:
    """The eviction that was lost on the way counts all the same."""
    prompt = Prompt("words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        await publisher.publish(removed(*prompt.names[2:]), loses=True)
        await publisher.publish()
        await beats_say(stage, lambda: told.blocks == {prompt.chain[0]})
        assert events_of(stage).hearing is Hearing.WHOLE


async def test_a_gap_without_replay_takes_all_credit(tmp_path: Path) -> None:
    """Then the guess counts, less what the engine says is gone, until the cache is empty once."""
    prompt, new = Prompt("words "), Prompt("new words ")
    async with a_stage(tmp_path, replays=False) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        await publisher.publish(loses=True)
        await publisher.publish()
        await beats_say(stage, lambda: not told.blocks)
        assert events_of(stage).hearing is Hearing.PART
        await publisher.publish(new.stored())
        await run(stage, engine, prompt, "job-2")
        await run(stage, engine, new, "job-3")
        await learned(stage, new)
        await beats_say(stage, lambda: told.blocks == {*prompt.chain, *new.chain})
        # It was used last: what the engine evicted later than all the rest takes that along.
        await publisher.publish(removed(*new.names[2:]))
        await beats_say(stage, lambda: told.blocks == {new.chain[0]})
        await publisher.publish(CLEARED)
        await beats_say(stage, lambda: not told.blocks)
        assert events_of(stage).hearing is Hearing.WHOLE


async def test_a_computed_prompt_that_the_engine_did_not_keep_earns_no_credit(
    tmp_path: Path,
) -> None:
    """While its word is whole, the guess does not count."""
    prompt, kept = Prompt("words "), Prompt("kept words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(kept.stored())
        await until(lambda: events_of(stage).hearing is Hearing.WHOLE)
        await run(stage, engine, prompt, "job-1")
        await run(stage, engine, kept, "job-2")
        await beats_say(stage, lambda: told.blocks == set(kept.chain))
        await learned(stage, prompt, kept)
        await stage.beat()
        assert told.blocks == set(kept.chain)


async def test_an_engine_that_falls_silent_is_guessed_again(tmp_path: Path) -> None:
    """It says so in its notice, and goes back to the engine's word when that comes."""
    prompt, other = Prompt("words "), Prompt("other words ")
    async with a_stage(tmp_path, kv_silent_s_max=0.05) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        await run(stage, engine, other, "job-2")
        await stage.beat(lambda beat: "no KV events" in beat.notice)
        await run(stage, engine, other, "job-3", cached_tokens=250)
        await beats_say(stage, lambda: told.blocks == {*prompt.chain, *other.chain})
        await publisher.publish(removed(*prompt.names))
        await beats_say(stage, lambda: not told.blocks)
        await stage.beat(lambda beat: not beat.notice)
        assert events_of(stage).hearing is Hearing.WHOLE


async def test_an_engine_that_never_speaks_is_guessed(tmp_path: Path) -> None:
    """Nobody is at the endpoint: jobs run, prefixes are credited, people are told where to look."""
    engine, prompt = TokenizingEngine(), Prompt("words ")
    where = f"ipc://{tmp_path}/nobody"
    async with an_agent(engine=engine, kv_events=where, kv_silent_s_max=0.05) as stage:
        told = Told(stage)
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        beat = await stage.beat(lambda beat: bool(beat.notice))
        assert "no KV events from ipc://" in beat.notice
        assert (await stage.end_of("job-1")).cache_source == "model"


async def test_an_engine_that_tells_no_tokens_is_guessed(tmp_path: Path) -> None:
    """After so many refusals, with a notice; resets still count."""
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        engine.tells_tokens = False
        await publisher.publish()
        for number in range(1, FAILURES_MAX + 1):
            await run(stage, engine, Prompt(f"prompt {number} "), f"job-{number}")
        await stage.beat(lambda beat: "/tokenize" in beat.notice)
        prompt = Prompt("words ")
        await run(stage, engine, prompt, "job-9")
        await beats_say(stage, lambda: set(prompt.chain) <= told.blocks)
        assert engine.asked == FAILURES_MAX
        await publisher.publish(CLEARED)
        await beats_say(stage, lambda: not told.blocks)


async def test_an_engine_that_restarted_is_another_cache(tmp_path: Path) -> None:
    """Whether the agent sees it by the engine's pages or by its events first."""
    prompt = Prompt("words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        publisher.start_again()
        await publisher.publish()
        await beats_say(stage, lambda: not told.blocks)
        engine.incarnation += 1
        await stage.beat(lambda beat: beat.engine_incarnation == engine.incarnation)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-2")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))


async def test_prompts_that_cannot_wait_are_let_go(tmp_path: Path) -> None:
    """The oldest, without credit; a prompt too short to be reported is not asked about."""
    async with a_stage(tmp_path) as (stage, _, _publisher):
        events = events_of(stage)
        prompts = [
            Prompt(f"prompt {number} ", blocks=1) for number in range(PROMPTS_WAITING_MAX + 3)
        ]
        for prompt in prompts:
            events.given(tokenizer.Prompt(chain=prompt.chain, body=prompt.body))
        assert events.counts["let_go"] == 3
        await learned(stage, *prompts[3:])
        assert not stage.agent._cache.knows_tokens(prompts[0].chain)


async def test_how_far_each_source_was_off_is_counted(tmp_path: Path) -> None:
    """By source, and each end says whose word counted."""
    prompt = Prompt("words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        await run(stage, engine, prompt, "job-1")
        await publisher.publish(prompt.stored())
        await learned(stage, prompt)
        await until(lambda: events_of(stage).hearing is Hearing.WHOLE)
        await run(stage, engine, prompt, "job-2", cached_tokens=250)
        sources = [(await stage.end_of(job)).cache_source for job in ("job-1", "job-2")]
        assert sources == ["model", "events"]
        seen = {str(source): one for source, one in stage.agent._cache.predictions.items()}
        assert (seen["model"].requests, seen["model"].predicted_tokens) == (1, 0)
        assert (seen["events"].requests, seen["events"].cached_tokens) == (1, 250)
        assert seen["events"].error_tokens == pytest.approx(0, abs=16)


async def test_a_restart_that_only_the_engines_pages_tell_ends_its_word(tmp_path: Path) -> None:
    """Until events come again, the guess counts."""
    prompt = Prompt("words ")
    async with a_stage(tmp_path) as (stage, engine, publisher):
        told = Told(stage)
        await publisher.publish(prompt.stored())
        await run(stage, engine, prompt, "job-1")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        engine.incarnation += 1
        await beats_say(stage, lambda: not told.blocks)
        assert events_of(stage).hearing is Hearing.NOTHING
        await run(stage, engine, prompt, "job-2")
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        publisher.start_again()
        await publisher.publish(CLEARED)
        await beats_say(stage, lambda: not told.blocks)
        assert events_of(stage).hearing is Hearing.WHOLE


def two_ports() -> int:
    """A free port of the loopback with a free one behind it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                second.bind(("127.0.0.1", port + 1))
                return port


async def test_every_data_parallel_rank_is_heard(tmp_path: Path) -> None:
    """Each at a port of its own: what one holds counts until no other holds it either."""
    port, prompt, engine = two_ports(), Prompt("shared by two ranks "), TokenizingEngine()
    first, second = (f"tcp://127.0.0.1:{port + rank}" for rank in range(2))
    async with (
        a_publisher(tmp_path, replays=False, endpoint=first) as one,
        a_publisher(tmp_path, replays=False, endpoint=second) as two,
        an_agent(engine=engine, kv_events=first, kv_events_ranks=2) as stage,
    ):
        told = Told(stage)
        await one.heard_by_one()
        await two.heard_by_one()
        await one.publish(removed(1))
        await until(lambda: events_of(stage).hearing is Hearing.PART)
        await two.publish(removed(1))
        await until(lambda: events_of(stage).hearing is Hearing.WHOLE)
        await run(stage, engine, prompt, "job-1")
        await learned(stage, prompt)
        await two.publish(prompt.stored())
        await beats_say(stage, lambda: told.blocks == set(prompt.chain))
        await one.publish(prompt.stored())
        await two.publish(removed(*prompt.names))
        await one.publish(removed(*prompt.names[9:]))
        await beats_say(stage, lambda: told.blocks == set(prompt.chain[:4]))
        await one.publish(CLEARED)
        await beats_say(stage, lambda: told.blocks == set())


async def test_a_rank_that_falls_silent_beside_one_that_does_not(tmp_path: Path) -> None:
    """Its prompts are told of by nobody: the cache is guessed until one is told of again."""
    port, engine = two_ports(), TokenizingEngine()
    first, second = (f"tcp://127.0.0.1:{port + rank}" for rank in range(2))
    fields: dict[str, Any] = {
        "kv_events": first,
        "kv_events_ranks": 2,
        "kv_silent_s_max": 0.2,
    }
    async with (
        a_publisher(tmp_path, replays=False, endpoint=first) as one,
        a_publisher(tmp_path, replays=False, endpoint=second) as two,
        an_agent(engine=engine, **fields) as stage,
    ):
        for rank in (one, two):
            await rank.heard_by_one()
            await rank.publish(removed(1))
        await until(lambda: events_of(stage).hearing is Hearing.WHOLE)
        lost, told = Prompt("of the silent rank "), Prompt("of the other one ")
        await run(stage, engine, lost, "job-1")
        await learned(stage, lost)
        await one.publish(removed(2))
        await until(lambda: events_of(stage).hearing is Hearing.SILENT)
        await run(stage, engine, told, "job-2")
        await learned(stage, told)
        await one.publish(told.stored())
        await until(lambda: events_of(stage).hearing is Hearing.WHOLE)


async def test_a_huge_batch_takes_many_turns(tmp_path: Path) -> None:
    """Other work of the loop goes on between its blocks."""
    prompt = Prompt("a long one " * 5, blocks=400)
    async with a_stage(tmp_path) as (stage, engine, publisher):
        await run(stage, engine, prompt, "job-1")
        await learned(stage, prompt)
        cache, depths = stage.agent._cache, set[int]()
        await publisher.publish(prompt.stored())

        def seen() -> bool:
            depths.add(cache._engine.depth(prompt.chain))
            return len(prompt.chain) in depths

        await until(seen)
    assert len(prompt.names) > 10 * BLOCKS_PER_TURN_MAX
    assert len(depths) > 5
