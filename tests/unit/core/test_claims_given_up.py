"""Room that is kept for a job is kept no longer than it can use it, and from nobody it is not for.

A claim that outlives its use holds a worker, or a row, for ever.
"""

from dataclasses import replace

import pytest

from broker.core.decisions import Dispatch
from broker.core.events import JobSpec
from broker.core.policy import Policy, QuotaRow
from broker.core.routing import make_router
from broker.core.state import Worker
from broker.wire.messages import Load
from tests.unit.core.cluster import Cluster, a_policy, a_spec, keys, of, only

ROOM = Load(kv_tokens_max=1000)
"""For four jobs of 200 tokens, or one of 850 and none of them (0.95 is used)."""

LATE_S = 1.0
"""After this nobody may overtake the large job any more, whose patience is half a second."""


def a_claim(
    policy: Policy,
    *,
    large: JobSpec | None = None,
    models: tuple[str, ...] = ("tiny",),
    elsewhere: int = 0,
) -> tuple[Cluster, list[Dispatch]]:
    """A worker full of another lane's small jobs, kept for a large one; returns the small ones.

    Another worker has so many jobs of the large one's lane.
    """
    cluster = Cluster(policy, router=make_router(policy.routing))  # type: ignore[arg-type]
    cluster.join("w1", load=ROOM, models=models, slots=8)
    wanted = [a_spec(f"s{n}", lane="beta", prompt_tokens=150) for n in range(4)]
    small = [given(cluster, spec) for spec in wanted]
    if elsewhere:
        cluster.join("w2", load=ROOM, slots=8)
    small += [given(cluster, a_spec(f"a{n}", prompt_tokens=160)) for n in range(elsewhere)]
    cluster.hold(large or a_spec("large", prompt_tokens=800))
    cluster.tick(LATE_S)
    for name in cluster.beats:
        cluster.beat(name)
    cluster.hold(a_spec("s4", lane="beta", prompt_tokens=150, enqueued_at_s=cluster.at_s))
    assert claimant(cluster) == "acme.large"
    return cluster, small


def given(cluster: Cluster, spec: JobSpec) -> Dispatch:
    """Let a job come, go at once, and send its first token."""
    dispatch = only(Dispatch, cluster.hold(spec))
    cluster.first_token(dispatch)
    return dispatch


def claimant(cluster: Cluster) -> str:
    """Name the job for which room is kept."""
    waiting = cluster.scheduler._mind.claims.of("tiny")
    return "" if waiting is None else waiting.job.key


def test_a_claimant_without_a_seat_keeps_no_worker_idle() -> None:
    """Its lane's last seat went to another model: other lanes have the worker meanwhile."""
    cluster, small = a_claim(a_policy(QuotaRow(lane="acme", inflight_jobs_max=1)))
    cluster.join("w2", models=("other",))
    other = only(Dispatch, cluster.hold(a_spec("o1", model="other", prompt_tokens=1)))
    went = [key for one in small for key in keys(Dispatch, cluster.end(one))]
    assert went == ["beta.s4"]
    cluster.hold(a_spec("o2", model="other", prompt_tokens=1, enqueued_at_s=cluster.at_s))
    assert keys(Dispatch, cluster.end(other)) == [], "the seat is kept"
    late = next(one for one in of(Dispatch, cluster.decisions) if one.key == "beta.s4")
    assert keys(Dispatch, cluster.end(late)) == ["acme.large"]


def test_a_worker_serves_others_while_a_row_refuses_the_claimant() -> None:
    """Its lane's tokens are in use elsewhere: they are kept for it as they free, not the worker."""
    policy = a_policy(QuotaRow(lane="acme", inflight_tokens_max=1100))
    cluster, small = a_claim(policy, elsewhere=4)
    went = [key for one in small[:4] for key in keys(Dispatch, cluster.end(one))]
    assert went == ["beta.s4"]
    running = small[4:]
    for n in range(20):
        if "acme.large" in keys(Dispatch, cluster.decisions):
            break
        spec = a_spec(f"b{n}", enqueued_at_s=cluster.at_s, prompt_tokens=160)
        running += of(Dispatch, cluster.hold(spec))
        ended = running.pop(0)
        cluster.first_token(ended)
        running += of(Dispatch, cluster.end(ended))
    assert "acme.large" in keys(Dispatch, cluster.decisions)


def test_a_worker_without_the_claimants_adapter_is_not_kept() -> None:
    """It was unloaded: the job can't go there any more, and others can."""
    large = a_spec("large", prompt_tokens=800, adapter="poet")
    cluster, small = a_claim(a_policy(), large=large, models=("tiny", "poet"))
    cluster.beat("w1", models=("tiny",))
    assert claimant(cluster) == ""
    went = [key for one in small for key in keys(Dispatch, cluster.end(one))]
    assert went == ["beta.s4"]


def test_a_row_is_kept_for_the_more_urgent_of_two_models() -> None:
    """A batch line's claim does not stand in the way of people, whom it does not bind."""
    policy = a_policy(QuotaRow(inflight_tokens_max=1000))
    cluster = Cluster(policy)
    cluster.join("w1", "w2", models=("tiny", "other"), slots=8)
    small = [only(Dispatch, cluster.hold(a_spec(f"s{n}", band=1))) for n in range(4)]
    line = a_spec("line", band=3, model="other", prompt_tokens=800)
    cluster.hold(replace(line, enqueued_at_s=cluster.at_s - LATE_S))
    cluster.hold(replace(line, key="acme.next", enqueued_at_s=cluster.at_s))
    assert cluster.scheduler._mind.quotas.rows[0].claim is not None
    cluster.hold(a_spec("large", band=1, prompt_tokens=800))
    for n in range(40):
        if "acme.large" in keys(Dispatch, cluster.decisions):
            break
        cluster.tick(0.1)
        for name in ("w1", "w2"):
            cluster.beat(name)
        spec = a_spec(f"n{n}", band=1, enqueued_at_s=cluster.at_s)
        small += of(Dispatch, cluster.hold(spec))
        small += of(Dispatch, cluster.end(small.pop(0)))
    assert "acme.large" in keys(Dispatch, cluster.decisions)


def test_a_more_urgent_job_that_can_keep_nothing_takes_nothing_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The only worker with its adapter has no slot: not for a moment is the large job's free."""
    cluster, small = a_claim(a_policy())
    cluster.join("w2", models=("other", "poet"), slots=1)
    given(cluster, a_spec("busy", model="other", prompt_tokens=1))
    cluster.beat("w2", models=("tiny", "other", "poet"), slots=1)
    kept = cluster.scheduler.views.claims()
    freed: list[Worker] = []
    monkeypatch.setattr(cluster.scheduler._mind.router, "unclaim", freed.append)
    urgent = a_spec("urgent", band=1, adapter="poet", prompt_tokens=1)
    cluster.hold(replace(urgent, enqueued_at_s=cluster.at_s - 2 * LATE_S))
    why = cluster.scheduler.views.why("acme.urgent")
    assert why is not None
    assert not why.leased
    cluster.end(small[0])
    assert not freed
    assert cluster.scheduler.views.claims() == kept
    assert "beta.s4" not in keys(Dispatch, cluster.decisions)
