"""Each way an attempt can end, and what is recorded, told, acknowledged and reported of it."""

import asyncio
import time

import pytest

from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import (
    BODY_BYTES_MAX,
    Answer,
    AttemptEnded,
    End,
    Failure,
    Finished,
    FirstToken,
    Kind,
    Outcome,
    Reason,
    TerminalRecord,
    Tokens,
    Usage,
)
from tests.agents import Said, ScriptedEngine, Stage, an_agent, an_answer
from tests.builders import LANE, a_chat_body, a_job, an_attempt
from tests.turns import until
from worker_agent.engine.base import (
    Chunk,
    EngineAway,
    EngineBusy,
    EngineDisconnected,
    EngineError,
    EngineFailed,
    EngineGarbage,
    EngineRefused,
    EngineTimeout,
)


async def ended(stage: Stage, engine: ScriptedEngine, *outputs: Said) -> Finished:
    """Run job-1 with these outputs to its end; returns the end that was told."""
    await stage.dispatch(a_job())
    engine.say("job-1", *outputs)
    return await stage.end_of("job-1")


async def test_the_record_has_the_whole_story() -> None:
    """Answer, usage, who ran it and when, what failed before: all that anyone asks later."""
    engine = ScriptedEngine()
    before = Failure(an_attempt(1), "worker-9", Reason.STALLED, 990.0)
    usage = Usage(prompt_tokens=40, cached_tokens=32, output_tokens=2)
    async with an_agent(engine=engine) as stage:
        job = a_job(request_id=f"{LANE}.job-1", api_key_name="alice")
        await stage.dispatch(job, attempt=an_attempt(2), failures=(before,))
        engine.say("job-1", Chunk(output_tokens=1), an_answer("it", usage=usage, cached_tokens=32))
        await stage.end_of("job-1")
        record = await stage.record("job-1")
    assert (record.kind, record.body, record.usage) == (Kind.COMPLETED, b"it", usage)
    assert (record.attempt, record.worker) == (an_attempt(2), "worker-1")
    assert (record.failures, record.request_id) == ((before,), f"{LANE}.job-1")
    assert record.api_key_name == "alice"
    assert (record.band, record.model, record.client) == (2, "tiny", "client-1")
    assert 0 < record.dispatched_at_s <= record.first_token_at_s <= record.ended_at_s


async def test_tokens_go_to_the_jobs_own_client_in_order() -> None:
    """(attempt, index) from 0, each event untouched, then the end with the stored record."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        heard: list[str] = []
        await stage.bus.subscribe("out.>", lambda message: heard.append(message.subject))
        await stage.dispatch(a_job(stream=True, client="me"), attempt=an_attempt(3))
        engine.say(
            "job-1",
            Chunk(data=b"{1}", output_tokens=1),
            Chunk(output_tokens=2),
            Chunk(data=b"{2}", output_tokens=3),
            an_answer(),
        )
        await stage.end_of("job-1")
        first, second, end = stage.out
        assert first == Tokens(job="job-1", attempt=an_attempt(3), index=0, data=b"{1}")
        assert second == Tokens(job="job-1", attempt=an_attempt(3), index=1, data=b"{2}")
        assert isinstance(end, End)
        assert decode(end.record, TerminalRecord) == await stage.record("job-1")
        assert set(heard) == {subjects.out(LANE, "me", "job-1")}


async def test_a_job_that_does_not_stream_gets_no_tokens() -> None:
    """Only its end; the broker hears of the first token all the same."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await ended(stage, engine, Chunk(data=b"{}", output_tokens=1, cached_tokens=8), an_answer())
        assert [type(event) for event in stage.out] == [End]
        first, _ = stage.notes
        assert isinstance(first, FirstToken)
        assert (first.key, first.cached_tokens) == (f"{LANE}.job-1", 8)


async def test_the_first_token_is_told_once_and_at_once() -> None:
    """It frees prefill room: it does not wait for the heartbeat, nor for the answer's end."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, heartbeat_s=60.0) as stage:
        await stage.dispatch(a_job())
        engine.say("job-1", Chunk(), Chunk(output_tokens=1), Chunk(output_tokens=2))
        await stage.until(lambda: bool(stage.notes))
        await until(lambda: stage.agent.ledger.running[f"{LANE}.job-1"].output_tokens == 2)
        assert [type(note) for note in stage.notes] == [FirstToken]
        engine.say("job-1", an_answer())


async def test_an_end_is_told_before_the_ack() -> None:
    """The slot is free for the next job while the message is still being acknowledged."""
    engine = ScriptedEngine(slots=1)
    async with an_agent(engine=engine) as stage:
        finished = await ended(stage, engine, an_answer())
        assert not finished.acknowledged
        await stage.until(
            lambda: any(one.acknowledged for beat in stage.beats for one in beat.finished)
        )


@pytest.mark.parametrize(
    ("error", "reason", "charged"),
    [
        (EngineFailed("out of memory", status_code=500), Reason.ENGINE_FAILED, True),
        (EngineDisconnected("gone"), Reason.ENGINE_FAILED, True),
        (EngineGarbage("not JSON"), Reason.ENGINE_GARBAGE, True),
        (EngineTimeout("no headers"), Reason.ENGINE_TIMEOUT, True),
        (EngineBusy("429", status_code=429), Reason.ENGINE_FAILED, False),
        (EngineAway("connection refused"), Reason.ENGINE_FAILED, False),
    ],
)
async def test_an_engines_fault_is_a_retry_without_a_record(
    error: EngineError, reason: Reason, charged: bool
) -> None:
    """Another worker may do better: no record, no ack, no end; charged unless it never ran."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        finished = await ended(stage, engine, error)
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, reason)
        assert (finished.charged, finished.detail) == (charged, error.detail)
        assert not await stage.has_record("job-1")
        assert await stage.queued() == 1
        assert stage.out == []


@pytest.mark.parametrize("is_back", [False, True])
async def test_an_engine_that_died_is_told_as_a_worker_lost(is_back: bool) -> None:
    """Whom it is charged to is the broker's word; nothing new is taken until it is there again."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine, poll_s=60.0) as stage:
        jobs = [a_job(id=f"job-{number}") for number in range(3)]
        for number, job in enumerate(jobs, start=1):
            await stage.dispatch(job, attempt=an_attempt(number))
        await until(lambda: len(engine.running) == len(jobs))
        if is_back:
            engine.incarnation += 1
        else:
            engine.is_away = True
        for job in jobs:
            engine.say(job.id, EngineDisconnected("broke off"))
        for job in jobs:
            finished = await stage.end_of(job.id)
            assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.WORKER_LOST)
            assert (finished.charged, finished.detail) == (False, "the engine died: broke off")
        reply = await stage.dispatch(a_job(id="late"), attempt=an_attempt(9))
        assert reply.answer is (Answer.ACCEPTED if is_back else Answer.BUSY)
        engine.say("late", an_answer())


async def test_an_engine_that_ends_without_a_result_gave_garbage() -> None:
    """Half an answer is none."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        finished = await ended(stage, engine, Chunk(output_tokens=1), None)
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.ENGINE_GARBAGE)


async def test_an_engines_own_timeout_is_not_taken_for_one_of_ours() -> None:
    """A TimeoutError that leaks from an engine client is its fault, not a stall."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        finished = await ended(stage, engine, TimeoutError("connect"))
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.ENGINE_FAILED)


async def test_a_fault_of_the_agent_costs_one_attempt_only() -> None:
    """Whatever an engine raises, the slot is free, the job goes elsewhere, the agent lives on."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        finished = await ended(stage, engine, ZeroDivisionError("bug"))
        assert (finished.outcome, finished.charged) == (Outcome.RETRY, True)
        assert "ZeroDivisionError" in finished.detail
        await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2))
        engine.say("job-2", an_answer())
        assert (await stage.end_of("job-2")).kind is Kind.COMPLETED


async def test_a_refused_request_fails_with_the_engines_own_words() -> None:
    """4xx is the job's own error: recorded with status and body, not tried elsewhere."""
    engine = ScriptedEngine()
    body = b'{"error":{"message":"too long"}}'
    async with an_agent(engine=engine) as stage:
        error = EngineRefused("too long", status_code=400, body=body)
        finished = await ended(stage, engine, error)
        assert (finished.outcome, finished.kind) == (Outcome.SETTLED, Kind.FAILED)
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.FAILED, Reason.ENGINE_REFUSED)
        assert (record.status_code, record.body) == (400, body)
        await stage.acknowledged()
        assert await stage.queued() == 0


async def test_an_answer_too_large_for_a_record_fails_the_job() -> None:
    """No worker could do better."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await ended(stage, engine, an_answer(body=b"x" * (BODY_BYTES_MAX + 1)))
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.FAILED, Reason.PAYLOAD_TOO_LARGE)
        assert (record.body, record.usage.output_tokens) == (b"", 1)


async def test_the_largest_answer_is_stored() -> None:
    """A body at its bound fits a record, also with a history of failures."""
    engine = ScriptedEngine()
    failures = (Failure(an_attempt(1), "worker-9", Reason.STALLED, 1.0, "x" * 4096),) * 3
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), failures=failures)
        engine.say("job-1", an_answer(body=b"x" * BODY_BYTES_MAX))
        await stage.end_of("job-1")
        assert len((await stage.record("job-1")).body) == BODY_BYTES_MAX
        assert len(stage.out) == 1


async def test_a_record_that_no_reader_would_take_is_written_without_its_body() -> None:
    """A body at its bound and a long history of failures together are too much."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        failures = (Failure(an_attempt(1), "worker-9", Reason.STALLED, 1.0, "x" * 4096),) * 40
        await stage.dispatch(a_job(), failures=failures)
        engine.say("job-1", an_answer(body=b"x" * BODY_BYTES_MAX))
        finished = await stage.end_of("job-1")
        assert (finished.kind, finished.reason) == (Kind.FAILED, Reason.PAYLOAD_TOO_LARGE)


async def test_silence_is_a_stall_and_aborts_the_engine() -> None:
    """Nothing for `stall_s`: charged to the worker, tried elsewhere."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), stall_s=0.02)
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.STALLED)
        assert (finished.charged, finished.detail) == (True, "no new token for 0.02 s")
        assert engine.aborted == ["job-1"]
        assert not await stage.has_record("job-1")


async def test_each_new_token_moves_the_stall_and_nothing_else_does() -> None:
    """A job may run many times longer than its stall (case 22); chatter without tokens is none."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), stall_s=10.0)
        await until(lambda: "job-1" in engine.running)
        ends = [stage.stalls_at("job-1")]
        for tokens in (1, 2, 3):
            await asyncio.sleep(0.002)  # The loop's clock counts milliseconds.
            engine.say("job-1", Chunk(output_tokens=tokens))
            await until(lambda: stage.stalls_at("job-1") > ends[-1])
            ends.append(stage.stalls_at("job-1"))
        engine.say("job-1", Chunk(output_tokens=3), Chunk(data=b": ping", output_tokens=3))
        await until(lambda: engine.left("job-1") == 0)
        assert stage.stalls_at("job-1") == ends[-1]
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED


async def test_a_stall_after_many_tokens_is_found_when_it_is_due() -> None:
    """`stall_s` after the last of them: not before, and never is the next look at it later."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), stall_s=0.1)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        tokens = 0
        while loop.time() < began_s + 0.15:
            tokens += 1
            engine.say("job-1", Chunk(output_tokens=tokens))
            await asyncio.sleep(0.005)
            assert stage.looks_at("job-1") <= stage.stalls_at("job-1") + 1e-6
        due_at_s = stage.stalls_at("job-1")
        await until(lambda: bool(stage.ended("job-1")))
        (finished,) = stage.ended("job-1")
        assert finished.reason is Reason.STALLED
        assert loop.time() >= due_at_s


async def test_the_run_time_is_bounded_however_lively_the_engine() -> None:
    """`run_s_max` ends an engine that never stops."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), run_s_max=0.05)
        tokens = 0
        while not stage.ended("job-1"):
            tokens += 1
            engine.say("job-1", Chunk(output_tokens=tokens))
            await asyncio.sleep(0.005)
        (finished,) = stage.ended("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.RUN_TIME_EXCEEDED)
        assert finished.charged
        assert engine.aborted == ["job-1"]


async def test_a_deadline_that_passes_is_a_terminal_record() -> None:
    """The answer would come too late for its caller: expired, told, acknowledged."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        now_s = stage.agent._now_s()
        await stage.dispatch(a_job(deadline_at_s=now_s + 0.05))
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.kind) == (Outcome.SETTLED, Kind.EXPIRED)
        record = await stage.record("job-1")
        assert (record.kind, record.reason) == (Kind.EXPIRED, Reason.DEADLINE_EXPIRED)
        assert engine.aborted == ["job-1"]
        assert [type(event) for event in stage.out] == [End]


@pytest.mark.parametrize("off_s", [-600.0, 600.0])
async def test_a_workers_clock_says_nothing_of_a_deadline(off_s: float) -> None:
    """What is left by the broker's clock counts, however many minutes the worker's is off."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        job = a_job(deadline_at_s=time.time() + off_s)
        await stage.dispatch(job, deadline_left_s=60.0)
        await until(lambda: job.id in engine.requests)
        engine.say(job.id, an_answer())
        assert (await stage.end_of(job.id)).outcome is Outcome.SETTLED
        late = a_job(id="job-2", deadline_at_s=time.time() + off_s)
        await stage.dispatch(late, attempt=an_attempt(2), deadline_left_s=0.0)
        await stage.end_of("job-2")
        assert "job-2" not in engine.requests


async def test_a_job_whose_deadline_passed_never_reaches_the_engine() -> None:
    """Nothing is run for nobody."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(deadline_at_s=1.0))
        assert (await stage.end_of("job-1")).kind is Kind.EXPIRED
        assert engine.requests == {}


@pytest.mark.parametrize("kind", list(Kind))
async def test_a_job_whose_record_stands_is_acknowledged_and_not_run(kind: Kind) -> None:
    """Whatever the end was: its writer may have died before it told anybody."""
    engine = ScriptedEngine()
    standing = TerminalRecord(job="job-1", lane=LANE, kind=kind, ended_at_s=1.0, body=b"first")
    async with an_agent(engine=engine) as stage:
        await stage.bus.append(subjects.result(LANE, "job-1"), encode(standing))
        await stage.dispatch(a_job())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.kind, finished.ran) == (Outcome.SETTLED, kind, False)
        assert engine.requests == {}
        await stage.acknowledged()
        assert await stage.queued() == 0
        assert await stage.record("job-1") == standing
        assert stage.out == [End(job="job-1", record=encode(standing))]


async def test_a_standing_record_that_is_garbage_is_still_the_one() -> None:
    """A careless writer's bytes don't hold the job in its stream for ever."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.bus.append(subjects.result(LANE, "job-1"), b"\xc1garbage")
        await stage.dispatch(a_job())
        finished = await stage.end_of("job-1")
        assert (finished.outcome, finished.reason) == (Outcome.SETTLED, Reason.MALFORMED)
        await stage.acknowledged()
        assert await stage.queued() == 0


async def test_the_loser_of_the_record_says_nothing_to_the_caller() -> None:
    """Another attempt was first: its kind is reported, its end is its own to tell, the message
    goes.
    """
    engine = ScriptedEngine()
    first = TerminalRecord(job="job-1", lane=LANE, kind=Kind.CANCELLED, ended_at_s=1.0)
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job())
        await until(lambda: "job-1" in engine.running)
        await stage.bus.append(subjects.result(LANE, "job-1"), encode(first))
        engine.say("job-1", an_answer())
        finished = await stage.end_of("job-1")
        assert (finished.kind, finished.ran) == (Kind.CANCELLED, True)
        assert finished.usage == Usage()
        await stage.acknowledged()
        assert await stage.queued() == 0
        assert stage.out == []


async def test_a_result_reports_hits_only_where_the_engine_tells_them() -> None:
    """Silence about the cache must not count against the prediction."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(), predicted_hit_tokens=64)
        engine.say("job-1", an_answer(cached_tokens=None))
        assert (await stage.end_of("job-1")).predicted_hit_tokens == 0
        await stage.dispatch(a_job(id="job-2"), attempt=an_attempt(2), predicted_hit_tokens=64)
        engine.say("job-2", an_answer(cached_tokens=0))
        assert (await stage.end_of("job-2")).predicted_hit_tokens == 64


async def test_a_model_goes_by_the_engines_own_name() -> None:
    """The body is untouched but for that name."""
    engine = ScriptedEngine()
    body = a_chat_body(seed=7)
    async with an_agent(engine=engine, models={"tiny": "/models/tiny.gguf"}) as stage:
        await stage.dispatch(a_job(body=body))
        engine.say("job-1", an_answer())
        await stage.end_of("job-1")
        sent = engine.requests["job-1"].body
    assert sent == body.replace(b'"model":"tiny"', b'"model":"/models/tiny.gguf"')


async def test_garbage_blocks_are_ignored() -> None:
    """They are a hint for routing; the job runs."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await stage.dispatch(a_job(blocks=b"abc"))
        engine.say("job-1", an_answer())
        assert (await stage.end_of("job-1")).kind is Kind.COMPLETED


async def test_notes_carry_the_agents_incarnation() -> None:
    """A note of an earlier life is not taken for one of this."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        await ended(stage, engine, Chunk(output_tokens=1), an_answer())
        assert {note.incarnation for note in stage.notes} == {stage.agent.incarnation}
        assert isinstance(stage.notes[-1], AttemptEnded)
