"""Each verdict of the checker, on a hand-made history that deserves it, and on one that doesn't."""

from collections.abc import Sequence

import pytest

from broker.wire.messages import Kind as End
from ops.chaos.checker import FAILED, Remains, Strike, Verdict, check
from ops.chaos.history import Accepted, HistoryEvent, Mixed, RunBegan, RunEnded, ordered
from ops.chaos.plan import RERUNS_ALLOWED, Kind
from ops.chaos.setting import Row
from tests.chaos_histories import (
    JOB,
    PRODUCER,
    WORKER,
    a_life,
    a_record,
    a_run,
    a_strike,
    an_order,
)

STANDS = Remains(recorded={JOB: 1})
TWO = (Row("online", 2),)


def judged(
    *parts: Sequence[HistoryEvent] | HistoryEvent,
    strikes: Sequence[Strike] = (),
    remains: Remains = STANDS,
    rows: Sequence[Row] = (),
) -> Verdict:
    """Judge a history put together from parts."""
    events: list[HistoryEvent] = []
    for part in parts:
        events += part if isinstance(part, Sequence) else [part]
    return check(ordered(events), strikes, remains, rows=rows)


def test_a_whole_life_is_clean() -> None:
    """A job that was accepted, ran once and has its record is nothing to speak of."""
    verdict = judged(a_life())
    assert verdict.is_clean
    assert verdict.jobs == 1
    assert not verdict.reruns


# ---- lost and stuck ----


def test_an_accepted_job_without_record_and_message_is_lost() -> None:
    """Its message is gone, and nobody will ever know its answer."""
    verdict = judged(a_life(), remains=Remains())
    assert verdict.lost == (JOB,)
    assert not verdict.is_clean


def test_a_job_that_was_never_accepted_is_not_lost() -> None:
    """No promise was made."""
    verdict = judged(a_life(without=(Accepted,)), remains=Remains())
    assert verdict.lost == ()
    assert verdict.jobs == 0


def test_a_rejected_job_is_not_lost_though_its_record_has_run_out() -> None:
    """A rejection stands for seconds only, so that another try can succeed."""
    accepted = Accepted(at_s=1.0, job=JOB, by=PRODUCER)
    verdict = judged(accepted, a_record(kind=End.REJECTED), remains=Remains())
    assert verdict.is_clean


def test_a_batch_line_without_result_is_lost() -> None:
    """Whatever the cluster says: the file of results lacks it."""
    assert judged(remains=Remains(lines_lost=("line-1",))).lost == ("line-1",)


def test_an_accepted_job_without_record_is_stuck_while_its_message_stands() -> None:
    """Not lost: but nobody works on it."""
    verdict = judged(a_life(), remains=Remains(queued=frozenset({JOB})))
    assert verdict.stuck == (JOB,)
    assert verdict.lost == ()


def test_a_message_that_outlives_its_jobs_record_is_stuck() -> None:
    """It would be delivered again and again."""
    verdict = judged(a_life(), remains=Remains({JOB: 1}, frozenset({JOB})))
    assert verdict.stuck == (JOB,)


# ---- doubled ----


def test_two_records_that_won_are_a_second_result() -> None:
    """Compare-and-set lets one win."""
    verdict = judged(a_life(), a_record(7.0, by="worker-2"))
    assert verdict.duplicate_results == (JOB,)
    assert not verdict.is_clean


def test_a_record_that_lost_is_no_second_result() -> None:
    """The attempt came too late, and its answer is dropped."""
    assert judged(a_life(), a_record(7.0, by="worker-2", won=False)).is_clean


def test_two_stored_records_are_a_second_result() -> None:
    """Whoever wrote the other one."""
    assert judged(a_life(), remains=Remains({JOB: 2})).duplicate_results == (JOB,)


def test_a_result_after_a_rejection_is_the_first() -> None:
    """A job that was turned away may be tried again."""
    assert judged(a_life(), a_record(1.5, kind=End.REJECTED)).is_clean


def test_two_result_lines_of_one_batch_line_are_a_second_result() -> None:
    """The same line, twice in the batch's files."""
    verdict = judged(remains=Remains(lines_doubled=("line-1",)))
    assert verdict.duplicate_results == ("line-1",)


# ---- reruns ----


def a_rerun(*, first_ends_s: float | None = None, how: str = "aborted") -> list[HistoryEvent]:
    """A run from 4.5 on, and another elsewhere at 20."""
    second = a_run(20.0, 21.0, worker="worker-2")
    return [*a_run(4.5, first_ends_s, how=how), *second]


@pytest.mark.parametrize("kind", sorted(RERUNS_ALLOWED))
def test_a_rerun_after_its_worker_was_hit_is_allowed(kind: Kind) -> None:
    """Killed, silent beyond what a suspect is given, its engine stalled or failed."""
    verdict = judged(a_rerun(), strikes=[a_strike(kind, 5.0)])
    assert [rerun.because for rerun in verdict.reruns] == [kind.value]
    assert verdict.is_clean


@pytest.mark.parametrize("kind", sorted(set(Kind) - RERUNS_ALLOWED))
def test_a_rerun_after_any_other_fault_is_not_explained(kind: Kind) -> None:
    """None for faults of brokers, NATS and producers, for short silences and slow engines."""
    verdict = judged(a_rerun(), strikes=[a_strike(kind, 5.0)])
    assert len(verdict.unexplained) == 1
    assert not verdict.is_clean


def test_a_rerun_is_not_explained_by_a_fault_of_another_worker() -> None:
    """The job was not there."""
    verdict = judged(a_rerun(), strikes=[a_strike(Kind.KILL_WORKER, 5.0, member="worker-2")])
    assert len(verdict.unexplained) == 1


def test_a_rerun_is_not_explained_by_a_fault_that_was_over_before_the_job_came() -> None:
    """A worker that was killed and is back is as good as any."""
    verdict = judged(a_rerun(), strikes=[a_strike(Kind.KILL_WORKER, 2.0, for_s=1.0)])
    assert len(verdict.unexplained) == 1


def test_a_rerun_is_not_explained_by_a_fault_that_came_after_it() -> None:
    """The job was run again before there was a reason to."""
    verdict = judged(a_rerun(), strikes=[a_strike(Kind.KILL_WORKER, 20.5)])
    assert len(verdict.unexplained) == 1


def test_a_stopped_worker_may_begin_its_run_after_the_one_that_took_its_place() -> None:
    """It had the job first: that it was silent is why another has it."""
    orders = [an_order(4.0), an_order(15.0, worker="worker-2")]
    runs = [*a_run(15.1, 16.0, worker="worker-2"), *a_run(15.2, 15.3, run=5, how="aborted")]
    silent = a_strike(Kind.SILENCE_WORKER, 4.1, for_s=11.0)
    assert judged(orders, runs, strikes=[silent]).is_clean
    late = a_strike(Kind.SILENCE_WORKER, 15.05, for_s=0.1)
    assert len(judged(orders, runs, strikes=[late]).unexplained) == 1


def test_a_rerun_after_its_engine_failed_is_allowed() -> None:
    """The engine said so itself."""
    verdict = judged(a_rerun(first_ends_s=6.0, how=FAILED))
    assert [rerun.because for rerun in verdict.reruns] == [FAILED]


# ---- quotas ----


def runs_at_once(count: int) -> list[HistoryEvent]:
    """So many jobs of a lane that run side by side."""
    return [
        event
        for number in range(count)
        for event in a_run(4.0 + number / 10, 9.0, job=f"online.{number}", run=number)
    ]


def test_more_jobs_at_once_than_a_row_allows_overshoot() -> None:
    """The worst moment is told."""
    verdict = judged(runs_at_once(4), rows=TWO)
    assert [(one.lane, one.jobs, one.jobs_max) for one in verdict.overshoots] == [("online", 4, 2)]
    assert not verdict.is_clean


def test_as_many_jobs_as_a_row_allows_are_fine() -> None:
    """Also when one ends in the very moment in which the next begins."""
    third = a_run(9.0, 10.0, job="online.c", run=9)
    assert judged(runs_at_once(2), third, rows=TWO).is_clean


def test_jobs_of_other_lanes_count_for_other_rows() -> None:
    """Rows are of a lane."""
    assert judged(runs_at_once(4), rows=(Row("offline", 1),)).is_clean


def test_a_job_counts_until_its_worker_is_hit() -> None:
    """From then on the broker may have given it to another."""
    dead = a_run(3.0, None, job="online.dead", worker="worker-2")
    struck = a_strike(Kind.KILL_WORKER, 3.5, member="worker-2")
    assert judged(dead, runs_at_once(2), strikes=[struck], rows=TWO).is_clean
    assert not judged(dead, runs_at_once(2), rows=TWO).is_clean


def test_a_job_that_began_while_its_lease_was_in_doubt_does_not_count() -> None:
    """Seed 5: a worker that is being replaced goes on while its jobs are given to others."""
    old = a_run(3.5, 9.5, job="online.old", worker="worker-2")
    struck = a_strike(Kind.REPLACE_WORKER, 3.0, member="worker-2", for_s=2.0)
    assert judged(old, runs_at_once(2), strikes=[struck], rows=TWO).is_clean
    before = a_strike(Kind.REPLACE_WORKER, 1.0, member="worker-2", for_s=2.0)
    assert not judged(old, runs_at_once(2), strikes=[before], rows=TWO).is_clean


def test_a_job_that_was_taken_before_a_doubt_and_began_after_it_does_not_count() -> None:
    """Seed 101: a worker that wakes begins what it took before it was stopped."""
    taken = an_order(2.0, job="online.old", worker="worker-2")
    old = a_run(3.6, 9.5, job="online.old", worker="worker-2")
    struck = a_strike(Kind.SILENCE_WORKER, 2.5, member="worker-2", for_s=1.0)
    assert judged(taken, old, runs_at_once(2), strikes=[struck], rows=TWO).is_clean
    assert not judged(taken, old, runs_at_once(2), rows=TWO).is_clean


@pytest.mark.parametrize("kind", [Kind.SLOW_ENGINE, Kind.HANG_ENGINE, Kind.DELAY_WORKER])
def test_a_fault_that_takes_no_lease_lets_the_job_count(kind: Kind) -> None:
    """The broker knows of all that runs there."""
    hit = a_run(3.0, 9.0, job="online.hit", worker="worker-2")
    struck = a_strike(kind, 3.5, member="worker-2")
    assert not judged(hit, runs_at_once(2), strikes=[struck], rows=TWO).is_clean


# ---- the fence ----


def test_an_order_of_an_older_epoch_than_is_known_breaks_the_fence() -> None:
    """A leader of the past was obeyed."""
    verdict = judged(a_life(), an_order(5.0, job="online.b", epoch=2, epoch_known=3))
    assert verdict.out_of_fence == ("online.b",)
    assert not verdict.is_clean


def test_an_order_out_of_turn_breaks_the_fence() -> None:
    """Numbers count up in an epoch: `echo` proves what doesn't run."""
    orders = [an_order(5.0, number=7, job="online.b"), an_order(5.1, number=6, job="online.c")]
    assert judged(orders, remains=Remains()).out_of_fence == ("online.c",)


def test_numbers_begin_anew_with_an_epoch_and_with_a_life() -> None:
    """Neither breaks the fence."""
    orders = [
        an_order(5.0, number=7, epoch=1),
        an_order(5.1, number=1, epoch=2),
        an_order(5.2, number=1, epoch=2, life=200),
    ]
    assert judged(orders, remains=Remains()).out_of_fence == ()


def test_tokens_of_an_attempt_after_those_of_a_later_one_break_the_fence() -> None:
    """Attempts never mix."""
    mixed = Mixed(at_s=5.0, job=JOB, by=PRODUCER)
    assert judged(a_life(), mixed).out_of_fence == (JOB,)


def test_accounts_that_are_not_the_sum_of_the_records_are_told() -> None:
    """Unless a record was replaced by another: then both were counted, and that is told."""
    verdict = judged(a_life(), remains=Remains({JOB: 1}, miscounted=("a row",)))
    assert (verdict.miscounted, verdict.is_clean) == (("a row",), False)
    assert judged(a_life(), remains=Remains({JOB: 2}, miscounted=("a row",))).miscounted == ()


def test_runs_are_told_apart_by_worker_life_and_number() -> None:
    """An end of another life's run says nothing of this one."""
    events = [
        RunBegan(at_s=1.0, job=JOB, worker=WORKER, life=1, run=0),
        RunEnded(at_s=2.0, job=JOB, worker=WORKER, life=2, run=0, how=FAILED),
        RunBegan(at_s=3.0, job=JOB, worker=WORKER, life=2, run=1),
    ]
    assert len(judged(events).unexplained) == 1
