"""The report: the figures that scripts read, and the sentences that people do."""

from pathlib import Path

from ops.chaos.bounds import Promise, Timed
from ops.chaos.checker import Remains, Verdict, check
from ops.chaos.plan import Kind
from ops.chaos.report import SHOWN_MAX, UNSEEN, Judgement, report, told
from ops.chaos.run import Options, Outcome
from tests.chaos_histories import JOB, WORKER, a_life, a_run, a_strike


def a_report(verdict: Verdict, outcome: Outcome) -> dict[str, object]:
    """Report on one job's life."""
    judgement = Judgement(
        verdict, not_calm=tuple(outcome.not_calm), interrupted=outcome.interrupted
    )
    return report(Options(folder=Path("unused")), outcome, judgement, a_life())


def test_a_clean_run() -> None:
    """All figures are there, all that must be 0 is."""
    outcome = Outcome([a_strike(Kind.KILL_NATS, 4.7, member="", for_s=0.5)], inflight=[60])
    verdict = check(a_life(), outcome.strikes, Remains({JOB: 1}))
    figures = a_report(verdict, outcome)
    wanted = {
        "jobs": 1,
        "lost": 0,
        "duplicate_results": 0,
        "reruns": 0,
        "stuck": 0,
        "quota_overshoots": 0,
        "faults": {"kill_nats": 1},
        "recovery_s": {"p50": 0.8, "max": 0.8},
        "inflight_at_fault_min": 60,
        "ok": True,
    }
    assert {name: figures[name] for name in wanted} == wanted
    assert figures["steps"] == {
        **dict.fromkeys(("submit", "hold", "dispatch", "record", "ack", "done"), 0),
        "run": 1,
    }


def test_a_run_without_faults_has_no_recovery() -> None:
    """Nothing to recover from, and in flight is nothing known."""
    figures = a_report(check([], [], Remains()), Outcome())
    assert figures["recovery_s"] == {"p50": 0.0, "max": 0.0}
    assert figures["inflight_at_fault_min"] == 0


def test_a_run_that_was_stopped_is_not_ok() -> None:
    """What it has not done can't be judged."""
    figures = a_report(check([], [], Remains()), Outcome(interrupted=True))
    assert figures["ok"] is False


def test_findings_are_named_a_bounded_number_of_them() -> None:
    """A thousand lost jobs make no report of a thousand lines."""
    lost = tuple(f"line-{number}" for number in range(SHOWN_MAX + 5))
    verdict = check([], [], Remains(lines_lost=lost))
    figures = a_report(verdict, Outcome())
    assert figures["lost"] == SHOWN_MAX + 5
    found = figures["found"]
    assert isinstance(found, dict)
    assert found["lost"] == lost[:SHOWN_MAX]


def test_people_are_told_of_each_finding() -> None:
    """By name, and of a rerun where the job was before."""
    runs = [*a_life(), *a_run(9.0, 10.0, worker="worker-2")]
    text = "\n".join(told(Judgement(check(runs, [], Remains())), 1.0))
    assert f"lost: {JOB}" in text
    assert f"{JOB}, begun on {WORKER}, and again 4.5 s later" in text


def test_a_promise_that_was_not_kept_fails_a_run_that_lost_nothing() -> None:
    """And people are told which, after which fault."""
    struck = a_strike(Kind.KILL_WORKER, 4.7, number=12)
    late = Timed(Promise.KILLED_WORKER, struck, 5.0, 8.44, disturbed=False)
    judgement = Judgement(check([], [], Remains()), (late,))
    assert not judgement.is_ok
    text = "\n".join(told(judgement, 1.0))
    assert "a killed worker's jobs run elsewhere within 5 s, but after fault 12" in text
    assert f"(kill_worker {WORKER}) it took 8.4 s" in text


def test_a_cluster_that_never_came_back_fails_a_run() -> None:
    """It may have lost nothing, and still serves nobody."""
    judgement = Judgement(check([], [], Remains()), not_calm=(3,))
    assert not judgement.is_ok
    assert any("after fault 3" in line for line in told(judgement, 1.0))


def test_what_is_not_seen_of_a_cluster_of_others_is_no_zero() -> None:
    """It is null in the report, and people are told so."""
    judgement = Judgement(check(a_life(), [], Remains({JOB: 1})), is_others=True)
    figures = report(Options(folder=Path("unused")), Outcome(), judgement, a_life())
    assert [figures[name] for name in UNSEEN] == [None] * len(UNSEEN)
    assert figures["lost"] == 0
    assert judgement.is_ok
    assert "not seen from outside" in "\n".join(told(judgement, 1.0))
