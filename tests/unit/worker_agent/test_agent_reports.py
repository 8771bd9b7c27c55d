"""What heartbeats say: a broker rebuilds all it needs from them."""

import time

import pytest

from broker.bus.base import Timeout
from broker.engine_model.decode_meter import DECODE_S_MIN
from broker.wire.codec import MESSAGE_BYTES_MAX, encode
from broker.wire.messages import Answer, Attempt, FirstToken, Heartbeat, Job, Kind, Outcome, Usage
from broker.wire.prefix import pack_hashes, unpack_hashes
from tests.agents import ScriptedEngine, Stage, a_config, an_agent, an_answer
from tests.builders import LANE, a_job, an_attempt
from tests.crashing import Failing, Gate, Step
from tests.turns import until
from worker_agent.agent import Agent
from worker_agent.engine.base import Chunk

CHAIN = list(range(1, 41))


def a_long_job(job_id: str = "job-1", *, chain: list[int] = CHAIN) -> Job:
    """A job whose prompt has whole blocks."""
    return a_job(id=job_id, blocks=pack_hashes(chain), prompt_tokens=64 * len(chain))


async def run(stage: Stage, engine: ScriptedEngine, job: Job, number: int = 1) -> None:
    """Run a job to its end."""
    await stage.dispatch(job, attempt=an_attempt(number))
    usage = Usage(prompt_tokens=job.prompt_tokens + 32, output_tokens=1)
    engine.say(job.id, Chunk(output_tokens=1), an_answer(usage=usage))
    await stage.end_of(job.id)


def told(beats: list[Heartbeat]) -> list[int]:
    """Blocks that these heartbeats add."""
    summaries = [beat.summary for beat in beats if beat.summary is not None]
    return [block for summary in summaries for block in unpack_hashes(summary.added)]


async def test_the_first_heartbeat_says_who_and_what() -> None:
    """Name, life, models, slots, a full summary, and numbers that rise from 1."""
    engine = ScriptedEngine(slots=3)
    async with an_agent(engine=engine, cache_sequences=2) as stage:
        await stage.until(lambda: len(stage.beats) >= 3)
        first = stage.beats[0]
        assert (first.worker, first.incarnation) == ("worker-1", stage.agent.incarnation)
        assert (first.models, first.slots, first.cache_sequences) == (("tiny",), 3, 2)
        assert first.summary is not None
        assert first.summary.full
        assert [beat.sequence for beat in stage.beats[:3]] == [1, 2, 3]
        assert stage.beats[2].ready


async def test_a_worker_is_ready_only_once_it_hears_orders() -> None:
    """An order sent before would reach nobody, and the worker would be taken for dead."""
    gate = Gate("kv_get")
    async with an_agent(fault=gate, heartbeat_s=60.0, waits_up=False) as stage:
        await gate.reached.wait()
        beat = await stage.beat()
        assert not beat.ready
        gate.open.set()
        await stage.beat(lambda beat: beat.ready)
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        await stage.end_of("job-1")


async def test_a_worker_is_up_only_once_the_server_knows_what_it_hears() -> None:
    """It says so behind its subscriptions; a server that does not answer is asked again."""
    failing, seen = Failing("rtt_s", Timeout("slow"), times=2), list[str]()

    def fault(step: Step) -> None:
        seen.append(step.operation)
        failing(step)

    async with an_agent(fault=fault) as stage:
        assert failing.raised == 2
        assert seen.count("rtt_s") == 4  # Two before which it failed, and around the third.
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED


async def test_models_are_the_engines_where_none_are_configured() -> None:
    """What the engine lists is what is served."""
    engine = ScriptedEngine()
    engine.models = ("tiny", "other")
    async with an_agent(engine=engine, models={}) as stage:
        await stage.until(lambda: bool(stage.beats))
        assert stage.beats[-1].models == ("tiny", "other")
        assert (await stage.dispatch(a_job())).answer is Answer.ACCEPTED
        engine.say("job-1", an_answer())


async def test_the_rate_of_decoding_is_the_engines_until_answers_show_it() -> None:
    """Then it is what was seen since the last report: 0 where nothing was."""
    engine = ScriptedEngine()
    engine.decode_tokens_s = 7.0
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        tokens = 1
        engine.say("job-1", Chunk(output_tokens=tokens))
        await stage.beat(lambda beat: beat.load.decode_tokens_s == 7.0)
        while stage.beats[-1].load.decode_tokens_s == 7.0:
            tokens += 1
            engine.say("job-1", Chunk(output_tokens=tokens))
            heard = len(stage.beats)
            await stage.until(lambda heard=heard: len(stage.beats) > heard)
        rates = [beat.load.decode_tokens_s for beat in stage.beats]
        seen = next(rate for rate in rates if rate not in (0.0, 7.0))
        assert 0 < seen <= tokens / DECODE_S_MIN
        await stage.beat(lambda beat: beat.load.decode_tokens_s == 0.0)
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")


async def test_a_running_job_is_listed_for_as_long_as_it_runs() -> None:
    """Never dropped for its age (cases 21 and 22), with its tokens so far."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), stall_s=1e6, run_s_max=1e6)
        engine.say("job-1", Chunk(output_tokens=3, cached_tokens=9))
        await stage.beat(lambda beat: bool(beat.inflight))
        await stage.beat(lambda beat: beat.inflight[0].output_tokens == 3)
        stage.beats.clear()
        await stage.until(lambda: len(stage.beats) >= 5)
        for beat in stage.beats:
            (listed,) = beat.inflight
            assert (listed.key, listed.prefilled, listed.cached_tokens) == (
                f"{LANE}.job-1",
                True,
                9,
            )
        assert stage.beats[-1].load.running == 1
        engine.say("job-1", an_answer())


async def test_a_finished_job_is_repeated_and_then_forgotten() -> None:
    """Acknowledged, it stays for `finished_beats` heartbeats."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, finished_beats=3) as stage:
        await run(stage, engine, a_job())
        await stage.until(lambda: any(beat.finished for beat in stage.beats))
        await stage.beat(lambda beat: not beat.finished)
        carried = [one for beat in stage.beats for one in beat.finished]
        assert sum(one.acknowledged for one in carried) == 3
        assert {(one.outcome, one.kind) for one in carried} == {(Outcome.SETTLED, Kind.COMPLETED)}


async def test_prefixes_are_told_once_their_prefill_is_done() -> None:
    """Parents before children, by a delta in the next heartbeat."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await run(stage, engine, a_long_job())
        await stage.until(lambda: bool(told(stage.beats)))
        assert told(stage.beats) == CHAIN


async def test_a_heartbeat_that_did_not_go_out_is_made_up_for_in_full() -> None:
    """Its delta is lost: the next summary replaces all."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.until(lambda: bool(stage.beats))
        stage.pulse_link.disconnect()
        await run(stage, engine, a_long_job())
        reports = stage.agent._reports
        await until(lambda: stage.agent._reports > reports + 1)
        stage.beats.clear()
        stage.pulse_link.reconnect()
        await stage.until(lambda: bool(told(stage.beats)))
        summary = next(beat.summary for beat in stage.beats if beat.summary is not None)
        assert summary.full
        assert told(stage.beats) == CHAIN


async def test_an_engine_restart_takes_all_credit_back_at_once() -> None:
    """A new engine incarnation comes with a full and empty summary."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await run(stage, engine, a_long_job())
        await stage.until(lambda: bool(told(stage.beats)))
        engine.incarnation = 2
        await stage.beat(lambda beat: beat.engine_incarnation == 2)
        beat = next(beat for beat in stage.beats if beat.engine_incarnation == 2)
        assert beat.summary is not None
        assert (beat.summary.full, beat.summary.added) == (True, b"")


async def test_the_models_capacity_is_the_engines() -> None:
    """Its KV cache, as soon as it tells, bounds what is credited; learning it is no restart."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await run(stage, engine, a_long_job())
        await stage.until(lambda: bool(told(stage.beats)))
        engine.kv_tokens_max = 50 * 64
        await run(stage, engine, a_long_job("job-2", chain=list(range(100, 140))), 2)
        await stage.until(lambda: len(told(stage.beats)) == 80)
        removed = [
            block
            for beat in stage.beats
            if beat.summary is not None and not beat.summary.full
            for block in unpack_hashes(beat.summary.removed)
        ]
        assert set(removed) < set(CHAIN)
        assert len(removed) >= 30


async def test_an_unchanged_cache_is_not_told_again() -> None:
    """Heartbeats without news carry no summary."""
    async with an_agent() as stage:
        await stage.until(lambda: len(stage.beats) >= 4)
        assert [beat.summary is None for beat in stage.beats[1:4]] == [True, True, True]


@pytest.mark.parametrize("slots", [4096])
async def test_the_largest_heartbeat_fits_a_message(slots: int) -> None:
    """Every list at its bound, every text at its longest."""
    engine = ScriptedEngine(slots=slots)
    async with an_agent(engine=engine, slots=slots, heartbeat_s=60.0) as stage:
        agent = stage.agent
        config = a_config()
        _fill(agent, slots, unacknowledged=config.ack_retries_max, confirmed=config.finished_max)
        heartbeat = agent.report(0).heartbeat
        assert len(heartbeat.inflight) == slots
        assert len(heartbeat.finished) == config.ack_retries_max + config.finished_max
        assert len(encode(heartbeat)) < MESSAGE_BYTES_MAX
        agent.ledger.running.clear()


def _fill(agent: Agent, slots: int, *, unacknowledged: int, confirmed: int) -> None:
    """Put as much into the ledger as its bounds allow."""
    from broker.wire.messages import Dispatch, Finished, Reason  # noqa: PLC0415

    number = 0

    def accept() -> None:
        nonlocal number
        number += 1
        job = a_job(id=f"{number:064}", lane="l" * 64, client="c" * 64, model="m" * 256, blocks=b"")
        order = Dispatch(
            epoch=2**50,
            number=number,
            attempt=Attempt(2**50, number),
            lane=job.lane,
            stream="JOBS_" + job.lane,
            stream_sequence=2**50,
            ack_subject="a" * 256,
            job=b"",
            run_s_max=1.0,
            stall_s=1.0,
        )
        agent.ledger.accept(order, job, at_s=1.0, tick_s=1.0)

    for index in range(unacknowledged + confirmed):
        accept()
        (running,) = agent.ledger.running.values()
        settled = index < unacknowledged
        finished = Finished(
            key=running.key,
            attempt=running.attempt,
            outcome=Outcome.SETTLED if settled else Outcome.RETRY,
            reason=Reason.RUN_TIME_EXCEEDED,
            detail="\N{GRINNING FACE}" * 512,
        )
        agent.ledger.end(running, finished)
    for _ in range(slots):
        accept()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_a_clock_that_is_set_changes_no_length_of_time(step_s: float) -> None:
    """How long a job ran is what the broker's estimates learn from: one hour would spoil them."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await until(lambda: bool(engine.running))
        for part in (stage.agent, stage.agent._attempts, stage.agent._supervisor):
            part._now_s = lambda: time.time() + step_s
        engine.say("job-1", Chunk(output_tokens=1))
        await stage.until(lambda: any(isinstance(note, FirstToken) for note in stage.notes))
        engine.say("job-1", an_answer())
        finished = await stage.end_of("job-1")
        (first,) = [note for note in stage.notes if isinstance(note, FirstToken)]
    assert 0 < first.ttft_s <= finished.run_s < 60.0
    assert finished.ttft_s == first.ttft_s


async def test_a_clock_that_is_set_takes_no_credit_for_the_cache() -> None:
    """A block that was used this minute is young, whatever the hour is said to be."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, cache_refresh_s=0.01) as stage:
        await run(stage, engine, a_long_job())
        await stage.until(lambda: bool(told(stage.beats)))
        for part in (stage.agent, stage.agent._supervisor):
            part._now_s = lambda: time.time() + 1e6
        heard = len(stage.beats)
        await stage.until(lambda: len(stage.beats) > heard + 3)
        summaries = [beat.summary for beat in stage.beats if beat.summary is not None]
        assert not any(unpack_hashes(one.removed) for one in summaries)
