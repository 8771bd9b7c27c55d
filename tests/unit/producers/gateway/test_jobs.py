"""`Prefer: respond-async`: 202 at once, and what /v1/jobs tells then."""

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest

from broker.wire.messages import Job, Reason, TerminalRecord
from producers.gateway import jobs
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE
from tests.clusters import a_chat
from tests.gateways import a_front, a_gateway
from tests.responder import a_rejection
from tests.turns import until
from tests.unit.producers.gateway.test_generate import CHAT, a_whole

ASYNC = {"Prefer": "respond-async, wait=5"}


def _named(number: int) -> dict[str, str]:
    return {**ASYNC, "X-Inferlane-Job-Id": f"job-{number}", "X-Request-Id": f"r.job-{number}"}


BODY = orjson.dumps({"id": "x", "object": "chat.completion", "choices": []})


async def test_a_job_from_its_queue_to_its_answer(tmp_path: Path) -> None:
    """Position and wait, then its worker, then the engine's answer with its usage."""
    engine = ScriptedEngine(slots=1)
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, _):
        status, first, headers = await front.ask_all(CHAT, a_chat(), headers=_named(1))
        assert status == 202
        assert headers["Preference-Applied"] == "respond-async"
        assert headers["Location"].startswith("/v1/jobs/job-1?at=1.")
        assert (first["id"], first["object"], first["url"]) == (
            "job-1",
            "job",
            headers["Location"],
        )
        await until(lambda: "job-1" in engine.running)
        _, second, _ = await front.ask_all(CHAT, a_chat(), headers=_named(2))
        assert second["status"] == "queued"
        assert second["position"] == 0
        assert second["wait_s"] >= 0
        told = (await front.ask("/v1/jobs/job-1"))[1]
        assert (told["status"], told["worker"]) == ("running", "w1")
        engine.say("job-1", an_answer(BODY.decode()))
        while (told := (await front.ask(first["url"]))[1])["status"] == "running":
            await asyncio.sleep(0)
        assert told["status"] == "completed"
        assert told["response"] == {"status_code": 200, "body": orjson.loads(BODY)}
        assert told["usage"] == {"prompt_tokens": 40, "cached_tokens": 0, "output_tokens": 1}
        assert told["error"] is None
        status, told = await front.ask("/v1/jobs/job-2", method="DELETE")
        assert (status, told["status"]) == (200, "cancelling")


async def test_any_gateway_can_tell(tmp_path: Path) -> None:
    """One that did not submit a job asks the broker, and finds the record."""
    engine = ScriptedEngine(slots=1)
    async with a_whole(tmp_path, cluster={"engine": engine}) as (front, cluster):
        link = cluster.bus.connection()
        async with a_gateway(link) as other:
            await front.ask(CHAT, a_chat(), headers=_named(1))
            await until(lambda: "job-1" in engine.running)
            _, second = await front.ask(CHAT, a_chat(), headers=_named(2))
            _, told = await other.ask("/v1/jobs/job-1")
            assert (told["status"], told["worker"]) == ("running", "w1")
            _, told = await other.ask("/v1/jobs/job-2")
            assert (told["status"], told["position"]) == ("queued", 0)
            status, told = await other.ask(second["url"], method="DELETE")
            assert (status, told["status"]) == (200, "cancelling")
            while (told := (await other.ask("/v1/jobs/job-2"))[1])["status"] != "cancelled":
                await asyncio.sleep(0)
            assert told["error"]["code"] == "cancelled"
            engine.say("job-1", an_answer(BODY.decode()))
            while (told := (await other.ask("/v1/jobs/job-1"))[1])["status"] != "completed":
                await asyncio.sleep(0)
            status, told = await other.ask("/v1/jobs/job-1", method="DELETE")
            assert (status, told["status"]) == (200, "completed"), "what has ended stays"
        await link.close()


async def test_a_job_that_no_broker_has_seen(tmp_path: Path) -> None:
    """Its place in the stream, told in its URL, is enough to say that it waits."""
    async with a_whole(tmp_path) as (front, cluster):
        await front.ask(CHAT, a_chat())
        client = await front.gateway.lanes.of(LANE)
        for member in cluster.members:
            await member.stop()
        _, told = await front.ask(CHAT, a_chat(), headers=_named(1))
        ticket = client.ticket_of("job-1")
        assert ticket is not None
        client.forget(ticket)
        await cluster.start_broker("b9")
        await until(lambda: cluster.members[-1].is_ready)
        while (found := await front.ask(told["url"]))[1]["status"] != "completed":
            assert found[0] == 200
            await asyncio.sleep(0)


async def test_a_rejected_job_has_its_reason() -> None:
    """202 was said before the broker could; what it says is told then."""

    def reject(job: Job) -> TerminalRecord:
        return a_rejection(job, Reason.QUOTA_EXCEEDED)

    async with a_front() as (front, played):
        played.reject = reject
        status, told = await front.ask(CHAT, a_chat(), headers=_named(1))
        assert status == 202
        assert (told["status"], told["error"]["code"]) == ("rejected", "quota_exceeded")
        assert told["response"] is None


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/jobs/none", 404, "job_not_found"),
        ("/v1/jobs/none?at=1.5", 404, "job_not_found"),
        ("/v1/jobs/no.ne", 404, "job_not_found"),
        ("/v1/jobs/none?at=9.9", 400, "invalid_request"),
        ("/v1/jobs/none?at=1." + "9" * 40, 400, "invalid_request"),
    ],
)
async def test_a_job_that_is_not_there(tmp_path: Path, path: str, status: int, code: str) -> None:
    """404; and 400 for a place that was never told."""
    async with a_whole(tmp_path) as (front, _):
        for method in ("GET", "DELETE"):
            found, told = await front.ask(path, method=method)
            assert (found, told["error"]["code"]) == (status, code)


async def test_another_lane_can_not_see_it() -> None:
    """A key sees the jobs of its lane."""
    async with a_front() as (front, _):
        await front.ask(CHAT, a_chat(), headers=_named(1))
        other = {"Authorization": "Bearer sk-bolt-1"}
        status, _ = await front.ask("/v1/jobs/job-1", headers=other)
    assert status != 200


async def test_tickets_of_later_jobs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the oldest the broker is asked instead; the job goes on."""
    monkeypatch.setattr(jobs, "TICKETS_MAX", 2)
    async with a_front() as (front, played):
        played.may_run.clear()
        for number in range(3):
            await front.ask(CHAT, a_chat(), headers=_named(number))
        client = await front.gateway.lanes.of(LANE)
        assert [bool(client.ticket_of(f"job-{number}")) for number in range(3)] == [
            False,
            True,
            True,
        ]
        monkeypatch.setattr(jobs, "TICKET_BYTES_MAX", 0)
        await front.ask(CHAT, a_chat(), headers=_named(3))
        assert client.open_tickets == 0
        played.may_run.set()


async def test_a_reader_that_leaves_does_not_cancel_what_is_kept() -> None:
    """Somebody will ask for it later."""
    async with a_front() as (front, played):
        played.may_run.clear()
        await front.ask(CHAT, a_chat(), headers=_named(1))
        waits: dict[str, Any] = {k: v for k, v in _named(1).items() if k != "Prefer"}
        reading = asyncio.create_task(front.ask(CHAT, a_chat(), headers=waits))
        await until(lambda: front.gateway.under_way.count == 1)
        reading.cancel()
        await until(lambda: front.gateway.under_way.count == 0)
        played.may_run.set()
        while (await front.ask("/v1/jobs/job-1"))[1]["status"] != "completed":
            await asyncio.sleep(0)
        assert played.cancelled == set()
