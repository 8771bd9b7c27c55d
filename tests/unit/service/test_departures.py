"""Who went is told for an hour, one line a worker, within a bound."""

import asyncio
from pathlib import Path

from broker.core.decisions import WorkerGone
from broker.service.departures import REMEMBERED_S, WORKERS_MAX, Departure, Departures
from broker.wire.messages import Kind
from tests.agents import ScriptedEngine
from tests.clusters import PATIENCE_S, a_chat, a_cluster, until


async def test_a_killed_worker_is_told_with_its_jobs_and_that_it_is_back(tmp_path: Path) -> None:
    """As the leader's `workers` answer has it; what left says so, a standby knows nobody."""
    engine = ScriptedEngine()
    async with a_cluster(tmp_path, engine=engine, brokers=2) as cluster, cluster.client() as client:
        ticket = await client.submit(a_chat(), band=2)
        await until(lambda: bool(engine.running))
        (hand,) = cluster.hands
        await hand.kill()
        leader, standby = (member.broker.snapshots for member in cluster.members)
        await until(lambda: bool(leader.gone()))
        (lost,) = leader.gone()
        assert (lost.worker, lost.how, lost.times, lost.back) == ("w1", "lost", 1, False)
        assert (lost.jobs, lost.requeued_jobs) == (1, 1)
        assert lost.ago_s < PATIENCE_S
        again = await cluster.start_worker("w1")
        assert (await ticket.result()).kind is Kind.COMPLETED
        assert leader.gone()[0].back
        again.agent.leave()
        await asyncio.wait([again.task])
        await again.stop()
        await until(lambda: leader.gone()[0].how == "left")
        (left,) = leader.gone()
        assert (left.times, left.jobs, left.back) == (2, 1, False)
        assert standby.gone() == ()


def lost(worker: str = "w1", *, jobs: int = 3) -> WorkerGone:
    """A worker that was killed with so many jobs, one of which had a stream."""
    return WorkerGone(worker, "no responders", jobs=jobs, requeued_jobs=jobs - 1)


def test_how_a_worker_went() -> None:
    """Lost, unless it took nothing new any more, or its next life is there."""
    departures = Departures()
    departures.note(lost(), at_s=1.0)
    departures.note(WorkerGone("w2", "no responders", draining=True), at_s=2.0)
    departures.note(WorkerGone("w3", "restarted", draining=True, restarted=True), at_s=3.0)
    assert [(one.worker, one.how) for one in departures.latest(at_s=3.0)] == [
        ("w3", "restarted"),
        ("w2", "left"),
        ("w1", "lost"),
    ]


def test_a_worker_that_goes_again_and_again_is_one_line() -> None:
    """The latest time counts, and the jobs of all."""
    departures = Departures()
    departures.note(lost(jobs=2), at_s=1.0)
    departures.note(lost("w2"), at_s=2.0)
    departures.note(lost(jobs=4), at_s=3.0)
    latest, _ = departures.latest(at_s=3.0)
    assert latest == Departure("w1", "lost", "no responders", 3.0, 2, 6, 4)


def test_it_is_forgotten_after_an_hour() -> None:
    """Also what is added up."""
    departures = Departures()
    departures.note(lost(), at_s=0.0)
    assert len(departures.latest(at_s=REMEMBERED_S)) == 1
    assert departures.latest(at_s=REMEMBERED_S + 0.1) == ()
    departures.note(lost(), at_s=REMEMBERED_S + 1)
    assert departures.latest(at_s=REMEMBERED_S + 1)[0].times == 1


def test_beyond_the_bound_the_oldest_is_forgotten() -> None:
    """WORKERS_MAX."""
    departures = Departures()
    for number in range(WORKERS_MAX + 1):
        departures.note(lost(f"w{number}"), at_s=1.0)
    latest = departures.latest(at_s=1.0)
    assert (len(latest), latest[-1].worker) == (WORKERS_MAX, "w1")
