"""When a worker is suspect, probed and gone, when the lease clock stands, and what stalls."""

from broker.core.decisions import Decision, Dispatch, Probe, Requeue, WorkerGone
from broker.core.events import DispatchAllowed, LinkChanged, Unanswered
from broker.core.leases import TICK_WORKERS_MAX, LeaseClock
from broker.core.policy import LeasePolicy
from broker.core.state import Phase
from tests.unit.core.cluster import Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.invariants import check_sums
from tests.unit.core.silences import answer_probe, phase_of, silence


def test_the_clock_runs_with_time_until_stopped() -> None:
    """Stopped it shows the same instant; resumed it goes on without the time between."""
    clock = LeaseClock()
    assert clock.read(10.0) == 10.0
    clock.stop(12.0)
    assert (clock.read(12.0), clock.read(20.0)) == (12.0, 12.0)
    assert clock.stands
    clock.resume(25.0)
    assert clock.read(24.9) == 12.0
    assert clock.stands
    assert clock.read(25.0) == 12.0
    assert not clock.stands
    assert clock.read(26.0) == 13.0


def test_stopping_twice_is_stopping_once() -> None:
    """A second reason to stop keeps it standing, also when it was about to run on."""
    clock = LeaseClock()
    clock.stop(10.0)
    clock.stop(11.0)
    clock.resume(15.0)
    clock.stop(14.0)
    assert clock.read(100.0) == 10.0
    clock.resume(101.0)
    assert clock.read(103.0) == 12.0


def test_a_clock_that_should_have_run_on_is_read_before_it_stops_again() -> None:
    """The time between the resume and the next stop counts."""
    clock = LeaseClock()
    clock.stop(10.0)
    clock.resume(12.0)
    clock.stop(15.0)
    assert clock.read(20.0) == 13.0


def test_resuming_a_running_clock_or_in_the_past_changes_nothing() -> None:
    """Only a standing clock resumes, and never before it stopped."""
    clock = LeaseClock()
    clock.resume(5.0)
    assert clock.read(10.0) == 10.0
    clock.stop(10.0)
    clock.resume(4.0)
    assert clock.read(11.0) == 11.0


def test_a_worker_that_misses_one_heartbeat_keeps_its_jobs() -> None:
    """Under `lease_s` of silence nothing happens, and it still gets work."""
    cluster = Cluster()
    cluster.join("w1")
    assert not of(Probe, cluster.tick(2.9))
    assert phase_of(cluster, "w1") is Phase.LIVE
    assert keys(Dispatch, cluster.hold(a_spec())) == ["acme.j1"]


def test_a_silent_worker_is_probed_and_gets_nothing_new() -> None:
    """From `lease_s` on: suspect, one probe, no dispatch; what it runs it keeps."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    probe = only(Probe, cluster.tick(3.0))
    assert (probe.worker, probe.number) == ("w1", 2)
    assert phase_of(cluster, "w1") is Phase.SUSPECT
    assert not of(Dispatch, cluster.hold(a_spec("j2")))
    assert cluster.scheduler.is_leased("acme.j1")
    assert not of(Probe, cluster.tick(0.5)), "one at a time"


def test_case_8_nothing_goes_to_a_worker_whose_lease_is_gone() -> None:
    """A dead worker is not picked again, whatever it held in its cache."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    silence(cluster, 3, but=("w2",))
    decisions = answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    assert [one.worker for one in of(WorkerGone, decisions)] == ["w1"]
    cluster.hold_many(8)
    assert {one.worker for one in of(Dispatch, cluster.decisions)} == {"w2"}


def test_any_word_of_a_suspect_clears_it() -> None:
    """A report or a probe's answer: it is live again, keeps its jobs and gets new ones at once."""
    for how in ("report", "probe"):
        cluster = Cluster()
        cluster.join("w1")
        cluster.hold(a_spec("j1"))
        cluster.tick(3.0)
        cluster.hold(a_spec("j2"))
        if how == "report":
            decisions = cluster.beat("w1")
            assert not answer_probe(cluster, "w1", missed=Unanswered.TIMEOUT)
        else:
            decisions = answer_probe(cluster, "w1", incarnation=1)
        assert phase_of(cluster, "w1") is Phase.LIVE
        assert keys(Dispatch, decisions) == ["acme.j2"]
        assert cluster.scheduler.is_leased("acme.j1")
        assert not of(Probe, cluster.tick(2.9))
        assert of(Probe, cluster.tick(0.1))


def test_no_responders_revokes_at_once() -> None:
    """Nobody listens where it was: its jobs wait again in the same step and go elsewhere."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"), a_spec("j2"))
    cluster.join("w2")
    silence(cluster, 3, but=("w2",))
    decisions = answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    assert keys(Requeue, decisions) == ["acme.j1", "acme.j2"]
    assert [(one.key, one.worker) for one in of(Dispatch, decisions)] == [
        ("acme.j1", "w2"),
        ("acme.j2", "w2"),
    ]
    gone = WorkerGone("w1", "no responders", jobs=2, requeued_jobs=2)
    assert only(WorkerGone, decisions) == gone
    assert decisions[0] == gone, "whose end it is comes before what becomes of its jobs"
    check_sums(cluster.scheduler)


def test_a_worker_that_goes_says_what_becomes_of_its_jobs() -> None:
    """Those that had a stream end with it; one that was draining leaves."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1", streamed=True), a_spec("j2"))
    streamed = of(Dispatch, cluster.decisions)[0]
    assert streamed.key == "acme.j1"
    cluster.first_token(streamed)
    cluster.beat("w1", draining=True)
    silence(cluster, 3)
    decisions = answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    told = only(WorkerGone, decisions)
    assert (told.jobs, told.requeued_jobs, told.draining) == (2, 1, True)


def test_a_probe_that_times_out_leaves_it_suspect_until_revoke_s() -> None:
    """Probed again each heartbeat; revoked after 10 s of silence, not before."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    probes = 0
    for _ in range(9):
        decisions = cluster.tick(1.0)
        probes += len(of(Probe, decisions))
        assert not of(WorkerGone, decisions)
        answer_probe(cluster, "w1", missed=Unanswered.TIMEOUT)
    assert probes == 7
    gone = cluster.tick(1.0)
    assert only(WorkerGone, gone).cause == "silent for 10 s"
    assert keys(Requeue, gone) == ["acme.j1"]
    assert not cluster.scheduler.views.workers()


def test_no_responders_of_a_worker_that_just_spoke_is_a_reconnect() -> None:
    """Its connection blinked: doubted and probed, not revoked before `lease_s` of silence."""
    cluster = Cluster()
    cluster.join("w1", "w2")
    j1 = only(Dispatch, cluster.hold(a_spec("j1")))
    decisions = cluster.answer(j1, Unanswered.NO_RESPONDERS)
    assert only(Probe, decisions).worker == j1.worker
    assert only(Dispatch, decisions).worker != j1.worker
    assert phase_of(cluster, j1.worker) is Phase.SUSPECT
    other = only(Dispatch, decisions).worker
    assert not answer_probe(cluster, j1.worker, missed=Unanswered.NO_RESPONDERS)
    assert phase_of(cluster, j1.worker) is Phase.SUSPECT
    again = silence(cluster, 1, but=(other,))
    assert [one.worker for one in of(Probe, again)] == [j1.worker]
    silence(cluster, 2, but=(other,))
    assert of(WorkerGone, answer_probe(cluster, j1.worker, missed=Unanswered.NO_RESPONDERS))


def test_a_live_worker_is_not_revoked_by_a_late_answer() -> None:
    """No responders that arrives after its next report says nothing."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.tick(3.0)
    cluster.beat("w1")
    cluster.tick(3.0 - 1e-6)
    assert not answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    assert phase_of(cluster, "w1") is Phase.LIVE


def test_a_probe_answered_by_a_new_life_revokes_the_old() -> None:
    """The process restarted: what it ran is gone; an older life's answer says nothing."""
    cluster = Cluster()
    cluster.join("w1", incarnation=5)
    cluster.hold(a_spec("j1"))
    cluster.tick(3.0)
    assert not answer_probe(cluster, "w1", incarnation=4)
    assert phase_of(cluster, "w1") is Phase.SUSPECT
    decisions = answer_probe(cluster, "w1", incarnation=6)
    assert only(WorkerGone, decisions) == WorkerGone(
        "w1", "restarted", restarted=True, jobs=1, requeued_jobs=1
    )
    assert keys(Requeue, decisions) == ["acme.j1"]


def test_a_probe_of_an_unknown_worker_is_nothing() -> None:
    """It was forgotten while the probe was out."""
    assert not answer_probe(Cluster(), "w9", incarnation=1)


def test_nothing_is_suspected_or_revoked_before_start_up_is_over() -> None:
    """Reports collected long ago do no harm until dispatch is allowed."""
    cluster = Cluster(started=False)
    cluster.join("w1")
    assert not cluster.tick(60.0)
    assert phase_of(cluster, "w1") is Phase.LIVE
    cluster.step(DispatchAllowed(cluster.at_s))
    assert of(Probe, cluster.tick(0.1))


def test_a_worker_that_joins_again_is_watched_anew() -> None:
    """Its old watch is void: one worker is never probed twice as often."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.tick(2.0)
    cluster.beat("w1", incarnation=2)
    assert not of(Probe, cluster.tick(2.9))
    assert len(of(Probe, cluster.tick(0.1))) == 1


def test_order_numbers_go_on_when_a_worker_returns() -> None:
    """A forgotten worker that returns in this epoch never sees a number twice."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    cluster.tick(3.0)
    answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    cluster.beat("w1", inflight=(), echo=2)
    assert only(Dispatch, cluster.hold(a_spec("j2"))).number == 3


def test_the_clock_stands_while_our_own_link_is_down() -> None:
    """However long: nobody is suspected, nor in the grace period after; then it runs on."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    cluster.tick(1.0)
    cluster.step(LinkChanged(cluster.at_s, up=False))
    assert not silence(cluster, 60)
    cluster.step(LinkChanged(cluster.at_s, up=True))
    assert not silence(cluster, 3)
    assert phase_of(cluster, "w1") is Phase.LIVE
    assert not of(Probe, cluster.tick(1.9))
    assert len(of(Probe, cluster.tick(0.2))) == 1


def test_nothing_is_dispatched_while_the_link_is_down() -> None:
    """It could not be sent; it goes when the link is back, in the same step."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.step(LinkChanged(cluster.at_s, up=False))
    assert not of(Dispatch, cluster.hold(a_spec("j1")))
    assert keys(Dispatch, cluster.step(LinkChanged(cluster.at_s, up=True))) == ["acme.j1"]


def test_most_of_the_fleet_silent_at_once_is_the_network() -> None:
    """Three of four fall silent: nobody is suspected, and they keep their jobs when they return."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    cluster.hold_many(8)
    assert not of(Probe, silence(cluster, 8, but=("w4",)))
    for name in ("w1", "w2", "w3"):
        assert phase_of(cluster, name) is Phase.LIVE
        cluster.beat(name)
    assert not of(Requeue, cluster.decisions)
    assert len(cluster.scheduler.leases()) == 8


def test_after_the_fleet_spoke_again_there_is_a_grace_period() -> None:
    """When enough are back the rest gets `grace_s`, then what was left of its lease."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    silence(cluster, 5, but=("w4",))
    decisions = silence(cluster, 3, but=("w1", "w2", "w4"))
    assert not of(Probe, decisions)
    assert [one.worker for one in of(Probe, silence(cluster, 1, but=("w1", "w2", "w4")))] == ["w3"]


def test_a_fleet_that_stays_silent_is_not_forgiven_for_ever() -> None:
    """After `revoke_s` of forgiveness the silent are suspected and go the usual way."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3")
    cluster.hold(a_spec("j1"))
    assert not of(Probe, silence(cluster, 12))
    assert len(of(Probe, silence(cluster, 2))) == 3
    assert len(of(WorkerGone, silence(cluster, 8))) == 3


def test_forgiveness_is_given_again_once_the_fleet_has_spoken() -> None:
    """The second outage is forgiven as the first was."""
    cluster = Cluster()
    names = ("w1", "w2", "w3")
    cluster.join(*names)
    silence(cluster, 14)
    for name in names:
        cluster.beat(name)
    assert {phase_of(cluster, name) for name in names} == {Phase.LIVE}
    silence(cluster, 1, but=names)
    assert not of(Probe, silence(cluster, 12))


def test_half_of_the_fleet_is_not_most_of_it() -> None:
    """Two of four: they are suspected."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    assert len(of(Probe, silence(cluster, 3, but=("w3", "w4")))) == 2


def test_one_silent_worker_is_never_the_fleet() -> None:
    """Also where it is the only one."""
    cluster = Cluster()
    cluster.join("w1")
    assert len(of(Probe, silence(cluster, 3))) == 1


def test_a_fleet_that_fell_silent_at_once_is_seen_before_its_first_is_revoked() -> None:
    """Reports are staggered: the first silent worker is forgiven as the last."""
    cluster = Cluster()
    for name in ("w1", "w2", "w3", "w4"):
        cluster.join(name)
        cluster.tick(0.24)
    decisions: list[Decision] = []
    for _ in range(100):
        decisions += cluster.tick(0.1)
    assert not of(Probe, decisions)


def test_no_responders_while_the_clock_stands_revokes_nobody() -> None:
    """After an outage agents may not have reconnected yet."""
    cluster = Cluster()
    cluster.join("w1")
    cluster.hold(a_spec("j1"))
    cluster.tick(3.0)
    cluster.step(LinkChanged(cluster.at_s, up=False))
    cluster.tick(5.0)
    cluster.step(LinkChanged(cluster.at_s, up=True))
    assert not answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS)
    assert cluster.scheduler.is_leased("acme.j1")
    cluster.tick(3.0)
    assert of(Probe, cluster.tick(1.0))
    assert of(WorkerGone, answer_probe(cluster, "w1", missed=Unanswered.NO_RESPONDERS))


def test_the_link_coming_back_does_not_end_the_fleets_forgiveness() -> None:
    """Both reasons must be over before the clock runs on."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    silence(cluster, 4, but=("w4",))
    cluster.step(LinkChanged(cluster.at_s, up=False))
    cluster.step(LinkChanged(cluster.at_s, up=True))
    assert not of(Probe, silence(cluster, 5, but=("w4",)))
    assert phase_of(cluster, "w1") is Phase.LIVE


def test_the_fleet_speaking_does_not_start_the_clock_while_the_link_is_down() -> None:
    """A last report in the pipe is no sign of a link."""
    cluster = Cluster()
    cluster.join("w1", "w2", "w3", "w4")
    silence(cluster, 4, but=("w4",))
    cluster.step(LinkChanged(cluster.at_s, up=False))
    for name in ("w1", "w2"):
        cluster.beat(name)
    assert not of(Probe, silence(cluster, 30))


def test_a_tick_looks_at_a_bounded_number_of_workers() -> None:
    """The rest are looked at by the next."""
    cluster = Cluster(a_policy(leases=LeasePolicy(silent_fleet_ratio=1.0)))
    cluster.join(*(f"w{n}" for n in range(TICK_WORKERS_MAX + 6)))
    cluster.tick(2.0)
    cluster.tick()
    assert len(of(Probe, cluster.tick(1.0))) == TICK_WORKERS_MAX
    assert len(of(Probe, cluster.tick())) == 6


def test_a_live_worker_that_restarted_counts_no_more_until_it_speaks() -> None:
    """Found out by a probe while it counted: its slots leave the pool and the rows at once."""
    cluster = Cluster(a_policy())
    cluster.join("w1")
    before = cluster.scheduler.views.pools()[0]
    answer_probe(cluster, "w1", incarnation=2)
    after = cluster.scheduler.views.pools()[0]
    assert (before.workers, after.workers, after.slots) == (1, 0, 0)
