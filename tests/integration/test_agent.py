"""The agent as a process on a real nats-server: killed at every step, drained, cut off."""

import asyncio
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from broker.bus.base import BusError, NoResponders, StoredMessage
from broker.bus.nats import NatsBus
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import (
    Answer,
    End,
    Finished,
    Inventory,
    Kind,
    Outcome,
    Probe,
    Reason,
    TerminalRecord,
)
from ops.nats.server import NatsServer, ServerOptions
from tests.agent_processes import ROOT, an_agent_process
from tests.agents import WORKER, Lane
from tests.builders import LANE, a_job, an_attempt
from tests.engines import a_bad_engine

PLACES = (
    "publish:1:before:_INBOX",  # The order is obeyed, its answer never leaves.
    "last_message:1:before",
    "last_message:1:after",
    "publish:1:after:wrk.",  # The first token is told.
    "append:1:before",
    "append:1:after",  # The record stands, nobody knows.
    "publish:1:after:out.",  # The caller knows.
    "ack:1:before",
    "ack:1:after",
)
"""Between any two steps of an attempt's life."""


@pytest.fixture
async def lane(nats_bus: NatsBus) -> Lane:
    """The broker's and the caller's side."""
    lane = Lane(nats_bus)
    await lane.set_up()
    return lane


async def results(lane: Lane) -> list[StoredMessage]:
    """All records of the lane."""
    return [stored async for stored in lane.bus.messages(subjects.results_stream(LANE))]


async def gone(lane: Lane) -> None:
    """Wait until the lane's queue is empty."""
    queued = 1
    while queued:
        with suppress(BusError):
            queued = await lane.queued()
        await asyncio.sleep(0.01)


def ends(lane: Lane) -> list[bytes]:
    """Records that the caller was told."""
    return [event.record for event in lane.out if isinstance(event, End)]


async def recorded_exactly_once(lane: Lane) -> bytes:
    """One record, and the message removed."""
    await gone(lane)
    (stored,) = await results(lane)
    record = decode(stored.data, TerminalRecord)
    assert (record.job, record.kind) == ("job-1", Kind.COMPLETED)
    return stored.data


async def ended_exactly_once(lane: Lane) -> None:
    """One record, told to the caller, and the message removed."""
    record = await recorded_exactly_once(lane)
    await lane.until(lambda: bool(ends(lane)))
    assert set(ends(lane)) == {record}


@pytest.mark.parametrize("place", PLACES)
async def test_killed_at_any_step_the_job_ends_exactly_once(
    place: str, nats_server: NatsServer, lane: Lane
) -> None:
    """Kill -9, then the same worker in a new life gets the job again (cases 20, 23)."""
    async with an_agent_process(nats_server.url, place=place) as first:
        await lane.submit(a_job())
        async with asyncio.TaskGroup() as group:
            asking = group.create_task(_answered(lane))
            assert await first.ended() == -signal.SIGKILL
            asking.cancel()
    async with an_agent_process(nats_server.url) as second:
        beat = await lane.beat(lambda beat: beat.incarnation == second.ready["incarnation"])
        assert beat.inflight == ()
        reply = await lane.dispatch(a_job(), attempt=an_attempt(2))
        assert reply.answer is Answer.ACCEPTED
        finished = await lane.end_of("job-1")
        assert finished.outcome is Outcome.SETTLED
        await ended_exactly_once(lane)


async def _answered(lane: Lane) -> None:
    await lane.dispatch(a_job(), timeout_s=30.0)


async def test_killed_twice_at_different_steps_the_job_ends_exactly_once(
    nats_server: NatsServer, lane: Lane
) -> None:
    """The second life dies after the first one's record was found."""
    for number, place in enumerate(("append:1:after", "ack:1:before"), start=1):
        async with an_agent_process(nats_server.url, place=place) as agent:
            await lane.dispatch(a_job(), attempt=an_attempt(number))
            assert await agent.ended() == -signal.SIGKILL
    async with an_agent_process(nats_server.url):
        await lane.dispatch(a_job(), attempt=an_attempt(3))
        await lane.until(lambda: any(not end.ran for end in lane.ended("job-1")))
        await ended_exactly_once(lane)


async def test_a_dead_server_disturbs_no_running_job(nats_server: NatsServer, lane: Lane) -> None:
    """It is killed while the job runs and comes back: the job ends once, nothing is run again."""
    async with an_agent_process(nats_server.url) as agent:
        await lane.dispatch(a_job())
        await lane.until(lambda: bool(lane.notes))
        nats_server.kill()
        await asyncio.sleep(0.3)  # The fake engine's answer falls into the time without a server.
        nats_server.start()
        # The end is said once; whether this caller is connected again by then is his luck.
        await recorded_exactly_once(lane)
        await lane.until(lambda: any(end.acknowledged for end in _finished(lane)))
        assert lane.beats[-1].incarnation == agent.ready["incarnation"]


async def test_a_job_longer_than_its_ack_wait_is_delivered_once(
    nats_server: NatsServer, nats_bus: NatsBus, tmp_path: Path
) -> None:
    """The agent renews it for as long as it runs: three times its ack-wait here (case 22)."""
    lane = Lane(nats_bus)
    await lane.set_up(ack_wait_s=0.5)
    config = tmp_path / "worker.toml"
    config.write_text("[worker]\nrenew_s = 0.1\nspeed = 0.1\n")
    async with an_agent_process(nats_server.url, "--config", str(config)):
        await lane.dispatch(a_job())
        finished = await lane.end_of("job-1")
        assert finished.run_s > 1.5
        await ended_exactly_once(lane)
        assert lane.delivered == 1


def _finished(lane: Lane) -> list[Finished]:
    return [one for beat in lane.beats for one in beat.finished]


async def test_sigterm_finishes_what_runs_and_leaves(nats_server: NatsServer, lane: Lane) -> None:
    """Nothing new, all old finishes, `drained` is the last word, exit code 0 (case 28)."""
    async with an_agent_process(nats_server.url) as agent:
        await lane.dispatch(a_job())
        agent.process.send_signal(signal.SIGTERM)
        await lane.beat(lambda beat: beat.draining)
        reply = await lane.order(Probe(epoch=1, number=9))
        assert reply.answer is Answer.ACCEPTED
        assert await agent.ended() == 0
    await ended_exactly_once(lane)
    await lane.beat(lambda beat: beat.drained)
    (finished,) = lane.beats[-1].finished
    assert finished.acknowledged
    with pytest.raises(NoResponders):
        await lane.order(Probe(epoch=1, number=10))


async def test_a_drain_that_takes_too_long_hands_the_job_back(
    nats_server: NatsServer, lane: Lane
) -> None:
    """The broker hears of it at once, and the job's message is still there."""
    async with an_agent_process(nats_server.url, "--drain-s-max", "0.01") as agent:
        await lane.dispatch(a_job())
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.ended() == 0
    finished = await lane.end_of("job-1")
    assert (finished.outcome, finished.reason) == (Outcome.RETRY, Reason.HANDED_BACK)
    assert not finished.charged
    assert await lane.queued() == 1
    assert await results(lane) == []


async def test_a_second_signal_leaves_at_once(nats_server: NatsServer, lane: Lane) -> None:
    """What runs is dropped; the last heartbeat lists nothing, so the broker knows."""
    async with an_agent_process(nats_server.url) as agent:
        await lane.dispatch(a_job())
        agent.process.send_signal(signal.SIGTERM)
        await lane.beat(lambda beat: beat.draining)
        agent.process.send_signal(signal.SIGINT)
        assert await agent.ended() == 0
    await lane.beat(lambda beat: beat.inflight == ())
    assert lane.beats[-1].echo == 1


async def test_an_inventory_is_answered_at_once_and_in_full(
    nats_server: NatsServer, lane: Lane
) -> None:
    """A new leader need not wait for the next heartbeat: they are an hour apart here."""
    async with an_agent_process(nats_server.url) as agent:
        await lane.beat()
        lane.beats.clear()
        asked_s = asyncio.get_running_loop().time()
        await lane.bus.publish(subjects.INVENTORY, encode(Inventory(epoch=5)))
        await lane.until(lambda: any(beat.epoch == 5 for beat in lane.beats))
        assert asyncio.get_running_loop().time() - asked_s < 1.0
        beat = next(beat for beat in lane.beats if beat.epoch == 5)
        assert beat.summary is not None
        assert beat.summary.full
        assert beat.incarnation == agent.ready["incarnation"]


async def test_an_agent_whose_place_is_taken_ends(nats_server: NatsServer, lane: Lane) -> None:
    """It says so with an exit code of its own; the newer serves."""
    flags = ["--worker", WORKER, "--nats", nats_server.url, "--engine", "fake", "--model", "tiny"]
    older = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "worker_agent.main",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert older.stdout is not None
    await older.stdout.readline()
    async with an_agent_process(nats_server.url, "--replace"):
        _, errors = await older.communicate()
        assert older.returncode == 4
        assert b"give each worker a name of its own" in errors
        assert (await lane.dispatch(a_job())).answer is Answer.ACCEPTED
        await ended_exactly_once(lane)


def _run(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker_agent.main", *flags]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )


async def test_an_agent_without_its_engine_says_what_it_waits_for(
    nats_server: NatsServer, lane: Lane
) -> None:
    """It said "ready" as soon as orders were heard, whatever became of its engine."""
    async with a_bad_engine() as engine:
        engine.health_code = 503
        flags = ("--engine", "openai", "--base-url", engine.url)
        async with an_agent_process(nats_server.url, *flags) as agent:
            said = agent.ready
            assert (said["event"], said["engine"]) == ("waiting", engine.url)
            assert "HTTP 503" in str(said["detail"])
            beat = await lane.beat(lambda beat: beat.incarnation == said["incarnation"])
            assert not beat.ready
            engine.health_code = 200
            assert (await agent.next_said())["event"] == "ready"
            await lane.beat(lambda beat: beat.ready)


def test_wrong_settings_are_told_in_one_sentence() -> None:
    """Exit code 2, and no traceback."""
    done = _run("--worker", "w", "--engine", "fake", "--nats", "nats://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr == (
        "inferlane worker: a fake engine serves what `models` names: give at least one\n"
    )
    done = _run("--worker", "w", "--engine", "llama", "--gguf", "nowhere.gguf")
    assert done.returncode == 2
    assert "there is no model file 'nowhere.gguf'" in done.stderr


def test_wrong_credentials_are_no_endless_wait() -> None:
    """Exit code 1: waiting would not help."""
    with NatsServer(options=ServerOptions(user="u", password="right")) as server:
        url = server.url.replace("nats://", "nats://u:wrong@")
        done = _run("--worker", "w", "--engine", "fake", "--model", "tiny", "--nats", url)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "wrong" not in done.stderr
