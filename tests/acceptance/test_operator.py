"""An operator's day on a real cluster: look, drain, replay, and learn what is wrong from codes."""

import asyncio

import aiohttp
import orjson
import pytest

from broker.bus.nats import NatsBus
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import (
    Attempt,
    DeadLetter,
    Failure,
    Job,
    Kind,
    Reason,
    TerminalRecord,
)
from ops.cluster import LocalCluster
from producers.client import Client
from tests.acceptance.commands import inferlane
from tests.acceptance.conftest import StartCluster

LANE = "online"


def a_chat(*, tokens: int = 8) -> dict[str, object]:
    """A chat of so many tokens."""
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": tokens}


async def test_a_day_of_an_operator(start_cluster: StartCluster) -> None:
    """Everything that the commands show is what the cluster does."""
    cluster, bus = await start_cluster()
    async with Client(bus, lane=LANE) as client:
        ticket = await client.submit(a_chat(), band=2)
        await ticket.result()

    seen = (await inferlane(cluster, "workers", "--json")).json["workers"]
    assert {(one["worker"], one["phase"], one["ready"]) for one in seen} == {
        ("worker-1", "live", True),
        ("worker-2", "live", True),
    }
    lanes = await inferlane(cluster, "lanes", LANE)
    assert "2 standard" in lanes.out
    reconciled = (await inferlane(cluster, "reconcile", "--json")).json
    assert reconciled["differences"] == []
    await _status_page(str(cluster.members["broker-1"].said["http"]))
    await _doctor(cluster)
    await _drain(cluster, bus)


@pytest.mark.timeout(120)
async def test_a_killed_worker_is_still_told_of(start_cluster: StartCluster) -> None:
    """Who looks after it is gone sees that it was lost, when, and that its job runs elsewhere."""
    cluster, bus = await start_cluster()
    async with Client(bus, lane=LANE) as client, asyncio.timeout(60):
        ticket = await client.submit(a_chat(tokens=400), band=2)
        while (look := await ticket.look()) is None or not look.worker:
            pass
        name = look.worker
        await cluster.members[name].kill()
        record = await ticket.result()
        seen = (await inferlane(cluster, "workers", "--json")).json
    assert (record.kind, record.worker != name) == (Kind.COMPLETED, True)
    (lost,) = seen["gone"]
    assert (lost["worker"], lost["how"], lost["back"]) == (name, "lost", False)
    assert (lost["jobs"], lost["requeued_jobs"]) == (1, 1)
    told = await inferlane(cluster, "workers")
    assert "Went of late" in told.out
    doctor = await inferlane(cluster, "doctor", "--json")
    assert f"{name} was lost" in doctor.out


async def _status_page(url: str) -> None:
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/healthz") as answer:
            assert answer.status == 200
        async with session.get("/readyz") as answer:
            assert (await answer.json())["role"] == "leader"
        async with session.get("/metrics") as answer:
            text = await answer.text()
        async with session.get("/") as answer:
            page = await answer.text()
    assert 'inferlane_jobs_ended_total{band="2",kind="completed",lane="online"} 1.0\n' in text
    assert 'inferlane_worker_up{worker="worker-1"} 1.0\n' in text
    assert "worker-2" in page


async def _doctor(cluster: LocalCluster) -> None:
    """Sound: the one warning is of durability, which only the operator can tell."""
    examined = await inferlane(cluster, "doctor", "--json")
    assert [one["about"] for one in examined.json if one["level"] == "FAIL"] == []
    assert "durability" in {one["about"] for one in examined.json if one["level"] == "warn"}
    clocks = [one["found"] for one in examined.json if one["about"] == "clocks"]
    assert clocks[0].startswith("4 compared with this one")
    assert examined.code == 0


async def _drain(cluster: LocalCluster, bus: NatsBus) -> None:
    """A worker that is drained gets nothing, until it is taken back."""
    drained = await inferlane(cluster, "drain", "worker-1", "--wait")
    assert (drained.code, drained.out) == (0, "worker-1 is draining\nworker-1 is drained\n")
    async with Client(bus, lane=LANE) as client:
        tickets = [await client.submit(a_chat(), band=2) for _ in range(4)]
        records = [await ticket.result() for ticket in tickets]
    assert {record.worker for record in records} == {"worker-2"}
    assert (await inferlane(cluster, "drain", "worker-1", "--undo")).code == 0
    unknown = await inferlane(cluster, "drain", "worker-9")
    assert unknown.code == 1
    assert "worker-9" in unknown.err


async def _give_up(bus: NatsBus, job: Job) -> None:
    """Leave a dead letter as the broker does."""
    failure = Failure(Attempt(1, 1), "worker-1", Reason.ENGINE_FAILED, 1.0, detail="HTTP 500")
    record = TerminalRecord(
        job=job.id,
        lane=job.lane,
        kind=Kind.DEAD_LETTERED,
        ended_at_s=2.0,
        band=job.band,
        model=job.model,
        reason=Reason.ENGINE_FAILED,
        message="Failed 1 times.",
        failures=(failure,),
    )
    subject = subjects.jobs(job.lane, job.band, job.model)
    letter = DeadLetter(job=encode(job), subject=subject, record=record)
    await bus.append(subjects.result(job.lane, job.id), encode(record))
    await bus.append(subjects.dead_letter(job.lane, job.id), encode(letter))


async def test_a_dead_letter_runs_again(start_cluster: StartCluster) -> None:
    """Listed, read, replayed: the new job ends, the old record stands, the letter is gone."""
    cluster, bus = await start_cluster(workers=1)
    body = orjson.dumps(a_chat())
    await _give_up(
        bus,
        Job(id="j1", lane=LANE, band=2, model="tiny", client="c1", body=body, deadline_at_s=5.0),
    )
    listed = await inferlane(cluster, "dlq", "list", LANE, "--json")
    assert orjson.loads(listed.out)["job"] == f"{LANE}.j1"
    shown = await inferlane(cluster, "dlq", "show", f"{LANE}.j1")
    assert "HTTP 500" in shown.out
    assert '"content": "hello"' in shown.out

    replayed = await inferlane(cluster, "dlq", "replay", "--lane", LANE, "--all")
    assert (replayed.code, replayed.out) == (0, f"{LANE}.j1 runs again as {LANE}.j1-r1\n")
    record = await _record(bus, "j1-r1")
    assert record.kind is Kind.COMPLETED
    assert (await _record(bus, "j1")).kind is Kind.DEAD_LETTERED
    assert (await inferlane(cluster, "dlq", "list")).out == "No dead letters.\n"
    gone = await inferlane(cluster, "dlq", "replay", f"{LANE}.j1")
    assert (gone.code, gone.out) == (1, "")


async def _record(bus: NatsBus, job_id: str) -> TerminalRecord:
    stream, subject = subjects.results_stream(LANE), subjects.result(LANE, job_id)
    async with asyncio.timeout(20):
        while not await bus.subject_counts(stream, subject=subject):
            await asyncio.sleep(0.05)
    return decode((await bus.last_message(stream, subject)).data, TerminalRecord)


async def test_codes_when_parts_are_gone(start_cluster: StartCluster) -> None:
    """No broker: 3, and doctor says FAIL; no server: 3 everywhere. Never a traceback."""
    cluster, _ = await start_cluster(workers=1)
    await cluster.members["broker-1"].stop()
    without_broker = await inferlane(cluster, "workers")
    assert (without_broker.code, without_broker.out) == (3, "")
    assert "no broker leads: start one with `inferlane broker" in without_broker.err
    examined = await inferlane(cluster, "doctor", "--json", "--listen-s", "0.1")
    assert examined.code == 1
    assert [one["about"] for one in examined.json if one["level"] == "FAIL"] == ["broker"]

    await asyncio.to_thread(cluster.server.kill)
    commands = (["lanes"], ["dlq", "list"], ["doctor"], ["reconcile"], ["drain", "w"])
    for ended in await asyncio.gather(*(inferlane(cluster, *one) for one in commands)):
        assert ended.code == 3
        assert "Traceback" not in ended.err
