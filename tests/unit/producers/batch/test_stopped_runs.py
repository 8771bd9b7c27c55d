"""A run that was stopped while its jobs were in the cluster, and the run that takes them up."""

import asyncio
from pathlib import Path

from producers.batch.plan import Plan
from producers.batch.runner import Tally
from producers.batch.state import Counts
from tests.batches import Cluster, a_cluster, a_plan, check_invariant, lines
from tests.lanes import until


async def test_a_run_that_was_stopped_takes_its_waiting_jobs_up(tmp_path: Path) -> None:
    """A job whose message still stands in the queue is waited for, not stored again."""
    plan = a_plan(tmp_path, [*lines(20), b"bad"])
    async with a_cluster() as cluster:
        cluster.responder.may_run.clear()
        await _stopped_once_stored(cluster, plan)
        async with asyncio.TaskGroup() as tasks:
            tally = Tally()
            running = tasks.create_task(cluster.run(plan, tally=tally))
            await until(lambda: tally.submitted == 20)
            cluster.responder.may_run.set()
        assert running.result().counts == Counts(completed=20, bad=1)
        assert set(cluster.responder.deliveries.values()) == {1}


async def test_what_ended_while_nobody_ran_it_is_collected(tmp_path: Path) -> None:
    """A run was stopped and its jobs ran on: the next one collects, and nothing is run twice."""
    plan = a_plan(tmp_path, lines(100))
    async with a_cluster() as cluster:
        cluster.responder.may_run.clear()
        await _stopped_once_stored(cluster, plan)
        cluster.responder.may_run.set()
        await until(lambda: sum(cluster.responder.runs.values()) == 100)
        report = await cluster.run(plan)
        assert report.counts == Counts(completed=100)
        assert set(cluster.responder.deliveries.values()) == {1}
    check_invariant(plan, (f"id-{number}" for number in range(100)))


async def _stopped_once_stored(cluster: Cluster, plan: Plan) -> None:
    """Begin a run, and stop it when all its good lines are in the cluster."""
    stop, tally = asyncio.Event(), Tally()
    good = len([line for line in Path(plan.input).read_bytes().splitlines() if line != b"bad"])
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(cluster.run(plan, stop=stop, tally=tally))
        await until(lambda: tally.submitted == good)
        stop.set()
    assert running.result().interrupted
