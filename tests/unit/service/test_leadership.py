"""The whole way of a job through one process: producers, brokers, agents, one server."""

import asyncio
import time
from collections import Counter
from pathlib import Path

import orjson
import pytest

from broker.bus.base import LinkDown, NoStream, NotFound, Timeout
from broker.core.policy import QuotaRow
from broker.service import leadership
from broker.service.election import leader_now
from broker.service.leadership import Leadership
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.messages import DeadLetter, Failure, JobAttempts, Kind, Reason
from broker.wire.subjects import JobAddress
from producers.errors import BodyTooLarge, UnknownModel
from producers.ticket import Ticket
from tests.agents import ScriptedEngine, an_answer
from tests.builders import LANE, MODEL, a_job, an_attempt
from tests.clusters import a_chat, a_cluster, until
from tests.crashing import Failing, Gate, Step


async def ended(ticket: Ticket) -> Kind:
    """Wait for a job's end."""
    async with asyncio.timeout(15):
        return (await ticket.result(raise_for_kind=False)).kind


async def test_a_job_goes_all_the_way_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Stored, held, dispatched, run, recorded, told, acknowledged, forgotten."""
    async with a_cluster(tmp_path) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2)
        assert await ended(ticket) is Kind.COMPLETED
        await cluster.until_empty()
        leader = cluster.members[0].leader
        await until(lambda: not len(leader.shelf))
        assert not leader.scheduler.leases()
        assert not leader.book.failures
        assert leader.shelf.held_bytes == 0


async def test_many_jobs_of_all_bands_with_no_memory_for_bodies(tmp_path: Path) -> None:
    """A budget of no bytes: every body is read again when it is dispatched, none is lost."""
    async with a_cluster(tmp_path, held_bytes_max=0, workers=2) as cluster:
        async with cluster.client() as client:
            tickets = [
                await client.submit(a_chat(f"{number}"), band=number % 4) for number in range(40)
            ]
            assert {await ended(ticket) for ticket in tickets} == {Kind.COMPLETED}
        await cluster.until_empty()
        assert len(await cluster.records()) == 40
        assert cluster.members[0].leader.shelf.held_bytes == 0


async def test_a_queued_job_is_cancelled(tmp_path: Path) -> None:
    """No worker: it waits, is cancelled, and its record says so."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2)
        await until(lambda: len(cluster.members[0].leader.shelf) == 1)
        assert await ticket.cancel()
        assert await ended(ticket) is Kind.CANCELLED
        await cluster.until_empty()
        await until(lambda: not len(cluster.members[0].leader.shelf))


async def test_cancel_stops_the_engine_within_a_second(tmp_path: Path) -> None:
    """Case 35: the request is aborted, slot and quota are free."""
    engine = ScriptedEngine()
    async with a_cluster(tmp_path, engine=engine) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2, job_id="job-1")
        await until(lambda: "job-1" in engine.running)
        asked_at_s = time.monotonic()
        assert await ticket.cancel()
        await until(lambda: engine.aborted == ["job-1"])
        assert time.monotonic() - asked_at_s < 1.0
        assert await ended(ticket) is Kind.CANCELLED
        leader = cluster.members[0].leader
        await until(lambda: not leader.scheduler.leases())
        assert [row.inflight_jobs for row in leader.scheduler.views.rows()] == [0, 0]
        await cluster.until_empty()


async def test_a_job_whose_deadline_passes_in_the_queue_expires(tmp_path: Path) -> None:
    """It never ran."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2, deadline_s=0.2)
        record = await ticket.result(raise_for_kind=False)
        assert (record.kind, record.reason) == (Kind.EXPIRED, Reason.DEADLINE_EXPIRED)
        await cluster.until_empty()


def _used(leader: Leadership) -> list[tuple[int, float, int]]:
    """What is used of each row, but for results: a refusal's own record takes some bytes."""
    rows = leader.scheduler.views.rows()
    return [(row.inflight_jobs, row.inflight_tokens, row.queued_jobs) for row in rows]


async def test_a_full_queue_refuses_without_using_quota_and_a_later_try_succeeds(
    tmp_path: Path,
) -> None:
    """Case 13, and the record of a rejection runs out: the same id succeeds afterwards."""
    engine = ScriptedEngine(slots=1)
    rows = (QuotaRow(inflight_jobs_max=1, queued_jobs_max=1),)
    async with (
        a_cluster(tmp_path, engine=engine, policy={"quotas": rows}) as cluster,
        cluster.client() as client,
    ):
        leader = cluster.members[0].leader
        runs = await client.submit(a_chat(), band=2, job_id="runs")
        await until(lambda: "runs" in engine.running)
        waits = await client.submit(a_chat(), band=2, job_id="waits")
        await until(lambda: len(leader.shelf) == 2)
        before = _used(leader)
        refused = await client.submit(a_chat(), band=2, job_id="late")
        record = await refused.result(raise_for_kind=False)
        assert (record.kind, record.reason) == (Kind.REJECTED, Reason.QUEUE_FULL)
        assert record.retry_after_s >= 1
        again = await client.submit(a_chat(), band=2, job_id="late2", queue_full_wait_s=30.0)
        await until(lambda: again.rejected)
        assert _used(leader) == before
        for job_id in ("runs", "waits", "late2"):
            engine.say(job_id, an_answer())
        assert {await ended(one) for one in (runs, waits, again)} == {Kind.COMPLETED}
        assert again.submission == 1
        await cluster.until_empty()


async def test_the_log_tells_what_a_job_asked_for_once(tmp_path: Path) -> None:
    """A refused job's end tells it; of a job that ran its dispatch did."""
    engine = ScriptedEngine(slots=1)
    rows = (QuotaRow(inflight_jobs_max=1, queued_jobs_max=0),)
    async with (
        a_cluster(
            tmp_path, engine=engine, policy={"quotas": rows}, log_bytes_max=100_000
        ) as cluster,
        cluster.client() as client,
    ):
        runs = await client.submit(a_chat(), band=2, job_id="runs")
        await until(lambda: "runs" in engine.running)
        refused = await client.submit(a_chat(), band=2, job_id="late")
        assert await ended(refused) is Kind.REJECTED
        engine.say("runs", an_answer())
        assert await ended(runs) is Kind.COMPLETED
        await cluster.until_empty()
        log = cluster.members[0].log
        await until(lambda: log.lines_written >= 3)
        lines = [orjson.loads(one) for one in log.path.read_bytes().splitlines()]
    late, ran = (
        [one for one in lines if one["key"] == f"{LANE}.{name}" and one["event"] == "end"]
        for name in ("late", "runs")
    )
    assert [(one["kind"], one["row"], one["output_tokens_max"]) for one in late] == [
        ("rejected", "all", 8)
    ]
    assert ["enqueued_at_s" in one for one in ran] == [False]


async def test_two_messages_with_one_id_run_once_and_both_callers_hear(tmp_path: Path) -> None:
    """An impatient client and its twin: one run, two answers, an empty queue."""
    engine = ScriptedEngine()
    async with (
        a_cluster(tmp_path, engine=engine) as cluster,
        cluster.client("c1") as one,
        cluster.client("c2") as other,
    ):
        first = await one.submit(a_chat(), band=2, job_id="same")
        await until(lambda: "same" in engine.running)
        job = a_job(id="same", client="c2", submission=5)
        await cluster.bus.append(subjects.jobs(LANE, 2, MODEL), encode(job))
        second = await other.submit_job(job, known=True, sequence=2)
        leader = cluster.members[0].leader
        await until(lambda: bool(leader.shelf.jobs()[0].duplicates))
        engine.say("same", an_answer())
        assert await ended(first) is Kind.COMPLETED
        assert await ended(second) is Kind.COMPLETED
        await cluster.until_empty()
        assert len(engine.requests) == 1


async def test_what_the_offer_does_not_allow_is_refused_before_it_is_stored(
    tmp_path: Path,
) -> None:
    """Unknown model and oversize body: nothing is stored, and the sentence says why."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        with pytest.raises(UnknownModel):
            await client.submit({**a_chat(), "model": "other"}, band=2)
        with pytest.raises(BodyTooLarge):
            await client.submit(a_chat("x" * 8_000_000), band=2)
        with pytest.raises(NoStream):
            await cluster.bus.append(subjects.jobs(LANE, 2, "other"), encode(a_job(model="other")))
        assert await cluster.queued() == 0


async def test_garbage_between_good_jobs_stops_nothing(tmp_path: Path) -> None:
    """Each has its record, the good ones run, the queue is empty."""
    async with a_cluster(tmp_path) as cluster, cluster.client() as client:
        await cluster.bus.append(subjects.jobs(LANE, 2, MODEL), b"\xc1")
        ticket = await client.submit(a_chat(), band=2)
        await cluster.bus.append(subjects.jobs(LANE, 2, MODEL), b"")
        assert await ended(ticket) is Kind.COMPLETED
        await cluster.until_empty()
        await until(lambda: not len(cluster.members[0].leader.shelf))
        records = await cluster.records()
        assert {records[f"bad-j{sequence}"].reason for sequence in (1, 3)} == {Reason.MALFORMED}


async def test_an_order_lost_with_the_link_is_found_not_to_run(tmp_path: Path) -> None:
    """LinkDown says nothing of the order: a probe moves the worker's echo past it, and it runs."""
    lost = Failing("request", LinkDown("cut"), prefix="work.")
    async with a_cluster(tmp_path, brokers=0, workers=0) as cluster:
        await (await cluster.start_broker(fault=lost)).ready()
        await cluster.start_worker()
        async with cluster.client() as client:
            ticket = await client.submit(a_chat(), band=2)
            assert await ended(ticket) is Kind.COMPLETED
        assert lost.raised == 1


# ---- who leads ----


async def test_a_killed_leaders_jobs_are_served_by_the_next_and_run_once(tmp_path: Path) -> None:
    """Case 31: what ran goes on, what was held comes first, and nobody waits for the ack-wait."""
    engine = ScriptedEngine(slots=1)
    async with a_cluster(tmp_path, engine=engine, brokers=2) as cluster, cluster.client() as client:
        first, second = cluster.members
        tickets = [await client.submit(a_chat(), band=2, job_id=f"j{n}") for n in range(4)]
        await until(lambda: "j0" in engine.running and len(first.leader.shelf) == 4)
        await first.kill()
        newer = await client.submit(a_chat(), band=2, job_id="newer")
        await second.ready()
        assert second.leader.scheduler.is_leased(f"{LANE}.j0")
        for ticket in (*tickets, newer):
            engine.say(ticket.job_id, an_answer())
        for ticket in (*tickets, newer):
            assert await ended(ticket) is Kind.COMPLETED
        assert list(engine.requests) == ["j0", "j1", "j2", "j3", "newer"]
        await cluster.until_empty()
        await until(lambda: not len(second.leader.shelf))
        assert {record.kind for record in (await cluster.records()).values()} == {Kind.COMPLETED}


async def test_a_leader_that_steps_down_drops_its_jobs_without_a_word(tmp_path: Path) -> None:
    """No record, no ack: held jobs wait for the successor, here itself."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        member = cluster.members[0]
        ticket = await client.submit(a_chat(), band=2)
        await until(lambda: len(member.leader.shelf) == 1)
        epoch = member.leader.term.epoch
        member.link.disconnect()
        await until(lambda: member.broker.leadership is None)
        assert await cluster.queued() == 1
        assert not await cluster.records()
        member.link.reconnect()
        await member.ready()
        assert member.leader.term.epoch > epoch
        await cluster.start_worker()
        assert await ended(ticket) is Kind.COMPLETED


async def test_a_graceful_stop_hands_over_at_once(tmp_path: Path) -> None:
    """The key is free, no pull is left, and the successor leads well within T."""
    async with a_cluster(tmp_path, workers=0, brokers=2, leader_ttl_s=30.0) as cluster:
        first, second = cluster.members
        tasks_before = len(asyncio.all_tasks())
        stopped_at_s = time.monotonic()
        await first.stop()
        state = await cluster.bus.consumer_state(f"JOBS_{LANE}", "b2-tiny")
        assert state.waiting <= 1
        await second.ready()
        assert time.monotonic() - stopped_at_s < 5
        now = await leader_now(cluster.bus)
        assert now is not None
        assert now[0].broker == "b2"
        assert len(asyncio.all_tasks()) <= tasks_before


async def test_a_leader_that_fails_by_a_fault_of_ours_resigns_and_stands_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not half dead: logged, counted, the key given up, and jobs are served by the next term."""
    async with (
        a_cluster(tmp_path, leader_ttl_s=30.0, renew_s=1.0) as cluster,
        cluster.client() as client,
    ):
        member = cluster.members[0]
        epoch = member.leader.term.epoch
        ticket = await client.submit(a_chat(max_tokens=64), band=2)
        monkeypatch.setattr(member.leader.renewals, "_renew_s", "a fault of ours")
        await until(lambda: member.is_ready and member.leader.term.epoch > epoch)
        assert await ended(ticket) is Kind.COMPLETED
        await cluster.until_empty()


async def test_a_server_that_goes_away_in_the_middle_of_a_start_ends_nothing(
    tmp_path: Path,
) -> None:
    """Each step of the start fails once or twice: it is asked again, in the same term."""
    failed: Counter[str] = Counter()
    started = asyncio.Event()

    def fault(step: Step) -> None:
        asked = step.operation in {"reset_consumer", "last_message", "kv_get"}
        if started.is_set() and step.when == "before" and asked and failed[step.operation] < 2:
            failed[step.operation] += 1
            message = "away"
            raise Timeout(message)

    async with a_cluster(tmp_path, brokers=0) as cluster:
        first = await cluster.start_broker("b1")
        await first.ready()
        async with cluster.client() as client:
            ticket = await client.submit(a_chat(), band=2)
            assert await ended(ticket) is Kind.COMPLETED
            await first.kill()
            await cluster.bus.kv_put(
                subjects.ATTEMPTS_BUCKET,
                f"{LANE}.ghost",
                encode(JobAttempts(failures=(a_failure(),))),
            )
            second = await cluster.start_broker("b2", fault=fault)
            started.set()
            await second.ready()
            assert list(second.leader.book.failures) == [f"{LANE}.ghost"]
            assert (failed["last_message"], failed["kv_get"]) == (2, 2)
            assert await ended(await client.submit(a_chat(), band=2)) is Kind.COMPLETED


async def test_a_dead_letter_half_done_is_finished_by_the_next_leader(tmp_path: Path) -> None:
    """Case 29: killed between record and letter, the letter is written and the message leaves."""
    gate = Gate("append", prefix="dlq.")
    async with a_cluster(tmp_path, brokers=0, workers=0) as cluster, cluster.client() as client:
        dying = await cluster.start_broker("b1", fault=gate)
        await dying.ready()
        ticket = await client.submit(a_chat(), band=2, job_id="doomed")
        key = f"{LANE}.doomed"
        await until(lambda: key in dying.leader.shelf)
        held = dying.leader.shelf.get(key)
        assert held is not None
        dying.leader.book.failures[key] = (a_failure(),)
        dying.leader.endings.end(
            held, Kind.DEAD_LETTERED, reason=Reason.STALLED, failures=(a_failure(),)
        )
        await gate.reached.wait()
        assert await cluster.record("doomed") is not None
        await dying.kill()
        second = await cluster.start_broker("b2")
        await second.ready()
        assert await ended(ticket) is Kind.DEAD_LETTERED
        await cluster.until_empty()
        stored = await cluster.bus.last_message(f"DLQ_{LANE}", f"dlq.{LANE}.doomed")
        assert decode(stored.data, DeadLetter).record.failures == (a_failure(),)
        await until(lambda: key not in second.leader.shelf)
        async with asyncio.timeout(5):
            while True:
                try:
                    await cluster.bus.kv_get(subjects.ATTEMPTS_BUCKET, key)
                except NotFound:
                    break
                await asyncio.sleep(0.01)


async def test_a_rejected_jobs_next_try_may_come_before_its_message_is_gone(
    tmp_path: Path,
) -> None:
    """The ack of the rejection hangs; the next try waits behind it and then runs, at once."""
    gate = Gate("ack")
    async with a_cluster(tmp_path, brokers=0) as cluster, cluster.client() as client:
        member = await cluster.start_broker("b1", fault=gate)
        await member.ready()
        await cluster.hands[0].stop()
        first = a_job(id="again", client="client-1")
        await cluster.bus.append(subjects.jobs(LANE, 2, MODEL), encode(first))
        key = f"{LANE}.again"
        await until(lambda: key in member.leader.shelf)
        held = member.leader.shelf.get(key)
        assert held is not None
        member.leader.scheduler._mind.forgets(key)
        member.leader.endings.end(held, Kind.REJECTED, reason=Reason.QUEUE_FULL, retry_after_s=1.0)
        await gate.reached.wait()
        while await cluster.record("again") is not None:
            await asyncio.sleep(0.01)
        ticket = await client.submit_job(first)
        await until(lambda: bool(held.behind))
        await cluster.start_worker("w2")
        gate.open.set()
        assert await ended(ticket) is Kind.COMPLETED
        await cluster.until_empty()
        await until(lambda: not len(member.leader.shelf))


async def test_a_worker_that_dies_has_its_jobs_run_elsewhere(tmp_path: Path) -> None:
    """Probed, revoked, requeued: the body is read again, since it was dropped."""
    engine = ScriptedEngine()
    async with a_cluster(tmp_path, engine=engine) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2, job_id="j")
        await until(lambda: "j" in engine.running)
        await cluster.hands[0].kill()
        await cluster.start_worker("w2")
        assert await ended(ticket) is Kind.COMPLETED
        assert ticket.record is not None
        assert ticket.record.worker == "w2"
        await cluster.until_empty()


async def test_clients_hear_of_their_queues(tmp_path: Path) -> None:
    """Each second, from which they build their tickets."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        await client.submit(a_chat(), band=2)
        await until(lambda: client.queue_wait_s(2, MODEL) is not None)


async def test_an_ending_given_up_by_a_fault_of_ours_lets_its_job_come_again(
    tmp_path: Path,
) -> None:
    """Not renewed any more, it is delivered anew; the leader lives on.

    The key lives long: the tracebacks of a fault take their time on a busy machine.
    """
    broken = Failing("append", RuntimeError("a fault of ours"), prefix="results.")
    async with (
        a_cluster(tmp_path, brokers=0, workers=0, leader_ttl_s=30.0) as cluster,
        cluster.client() as client,
    ):
        member = await cluster.start_broker("b1", fault=broken)
        await member.ready()
        await client.submit(a_chat(), band=2, job_id="j", deadline_s=0.1)
        await until(lambda: broken.raised == 1)
        await until(lambda: not len(member.leader.shelf))
        assert await cluster.queued() == 1
        report = asyncio.create_task(member.leader.reconciler.reconcile())
        async with asyncio.timeout(15):
            assert [found.kind for found in (await report).differences] == ["delivered_unheld"]
        await cluster.until_empty()
        record = await cluster.record("j")
        assert record is not None
        assert record.kind is Kind.EXPIRED


async def test_a_hand_over_that_the_server_does_not_answer_is_left_to_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAVE_S_MAX: the key and the pulls run out by themselves."""
    monkeypatch.setattr(leadership, "LEAVE_S_MAX", 0.05)
    hanging = Gate("kv_delete")
    async with a_cluster(tmp_path, brokers=0, workers=0) as cluster:
        member = await cluster.start_broker("b1", fault=hanging)
        await member.ready()
        async with asyncio.timeout(5):
            await member.stop()
        assert hanging.reached.is_set()
        assert await leader_now(cluster.bus) is not None


async def test_another_message_of_a_cancelled_id_does_not_take_the_held_one_along(
    tmp_path: Path,
) -> None:
    """Cancelled by the sequence of a duplicate: the held job stays, with its own message."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        leader = cluster.members[0].leader
        await client.submit(a_chat(), band=2, job_id="j")
        await until(lambda: len(leader.shelf) == 1)
        address = JobAddress(LANE, 3, MODEL)
        leader.endings.end_unpulled(a_job(id="j"), address, sequence=99)
        async with asyncio.timeout(5):
            while await cluster.record("j") is None:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0)
        assert len(leader.shelf) == 1


def a_failure() -> Failure:
    """An attempt that stalled."""
    return Failure(an_attempt(), "w1", Reason.STALLED, 1.0)
