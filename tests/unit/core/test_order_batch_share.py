"""Batch that is held because people's prefixes live where there would be room."""

import random
from typing import Any

import pytest

from broker.core.decisions import Decision, Dispatch, HeldBy
from broker.core.events import DispatchAllowed, JobSpec
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.wire.messages import Load
from tests.unit.core.cluster import EPOCH, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.routing_builders import BLOCK_TOKENS, chain

HORIZON_S = 20.0
THINK_S = 6.0


def a_turn(turn: int, **fields: Any) -> JobSpec:
    """A person's turn: all that was said before, and two blocks more."""
    blocks = chain(("chat", 30 + 2 * turn))
    return a_spec(
        f"turn-{turn}",
        band=1,
        blocks=blocks,
        block_tokens=float(BLOCK_TOKENS),
        prompt_tokens=len(blocks) * BLOCK_TOKENS + 10,
        **fields,
    )


def lines(first: int, count: int, **fields: Any) -> list[JobSpec]:
    """Lines of a batch that share nothing."""
    return [
        a_spec(f"line-{n}", band=3, stream_sequence=n + 1, prompt_tokens=4000, **fields)
        for n in range(first, first + count)
    ]


class Beside(Cluster):
    """Two workers of two slots; a person came back to what is cached on one of them."""

    def __init__(self, **routing: Any) -> None:
        super().__init__(started=False)
        policy = a_policy(routing=RoutingPolicy(online_prefix_s=HORIZON_S, **routing))
        self.scheduler = Scheduler(
            policy, epoch=EPOCH, router=make_router(policy.routing), rng=random.Random(1)
        )
        self.step(DispatchAllowed(self.at_s))
        self.join("w1", "w2", slots=2)
        self.turns = 0
        self.home = self.says().worker
        self.wait(THINK_S)
        assert self.says().worker == self.home

    def says(self) -> Dispatch:
        """Let the person's next turn run."""
        dispatch = only(Dispatch, self.hold(a_turn(self.turns, enqueued_at_s=self.at_s)))
        self.turns += 1
        self.runs(dispatch)
        return dispatch

    def runs(self, dispatch: Dispatch) -> list[Decision]:
        """Let a job run to its end."""
        return self.first_token(dispatch, cached_tokens=dispatch.predicted_hit_tokens) + self.end(
            dispatch
        )

    def held_by(self, key: str) -> HeldBy:
        """Say what holds a job."""
        why = self.scheduler.views.why(key)
        assert why is not None
        return why.held_by


def test_lines_wait_for_their_workers_and_people_do_not() -> None:
    """A line goes where nobody comes back, the next waits for that, and is told why."""
    cluster = Beside()
    first = only(Dispatch, cluster.hold(*lines(0, 2)))
    assert first.worker != cluster.home
    assert cluster.held_by("acme.line-1") is HeldBy.BATCH_SHARE
    assert cluster.says().worker == cluster.home
    larger = a_spec("larger", band=1, prompt_tokens=5000, enqueued_at_s=cluster.at_s)
    assert only(Dispatch, cluster.hold(larger)).worker == cluster.home
    following = only(Dispatch, cluster.runs(first))
    assert (following.key, following.worker) == ("acme.line-1", first.worker)


def test_a_line_that_is_passed_over_is_told_the_same() -> None:
    """It is too long to join the line before it, and home has room for it still."""
    cluster = Beside()
    cluster.hold(*lines(0, 2, enqueued_at_s=cluster.at_s))
    for _ in range(3):
        cluster.says()
        assert cluster.held_by("acme.line-1") is HeldBy.BATCH_SHARE


def test_a_line_without_its_adapter_s_worker_closes_nothing_to_the_others() -> None:
    """Home has it too, and is closed to batch; a third worker, without it, takes any line."""
    cluster = Beside(join_s_max=0.0)
    for name in ("w1", "w2"):
        cluster.beat(name, models=("tiny", "poet"))
    for _ in range(2):
        cluster.says()
        cluster.wait(THINK_S)
    poets = lines(0, 2, adapter="poet", enqueued_at_s=cluster.at_s)
    first = only(Dispatch, cluster.hold(*poets))
    assert first.worker != cluster.home
    assert cluster.held_by("acme.line-1") is HeldBy.BATCH_SHARE
    cluster.join("w3", slots=2)
    other = lines(2, 1, enqueued_at_s=cluster.at_s)
    assert keys(Dispatch, cluster.hold(*other)) == ["acme.line-2"]


def test_a_line_goes_to_an_idle_worker_when_nobody_came_back() -> None:
    """No event but time is needed: it is not held longer than `online_prefix_s`."""
    cluster = Beside()
    cluster.hold(*lines(0, 2, enqueued_at_s=cluster.at_s))
    cluster.wait(HORIZON_S - 1.0)
    assert cluster.held_by("acme.line-1") is HeldBy.BATCH_SHARE
    assert keys(Dispatch, cluster.wait(1.1)) == ["acme.line-1"]


def test_many_held_lines_are_not_looked_at_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """While batch's workers are full, an end elsewhere costs one look at them, not one a line."""
    cluster = Beside()
    cluster.hold(*lines(0, 200, enqueued_at_s=cluster.at_s))
    placed: list[str] = []
    router = cluster.scheduler._mind.router
    place = router.place

    def counted(job: JobSpec, **asked: Any) -> Placement:
        placed.append(job.key)
        return place(job, **asked)

    monkeypatch.setattr(router, "place", counted)
    cluster.says()
    assert sum("line" in key for key in placed) <= 4
    assert cluster.held_by("acme.line-150") is HeldBy.BATCH_SHARE


def test_a_line_too_long_for_all_keeps_nobody_smaller_from_where_batch_may_not_go() -> None:
    """No KV cache is left on batch's worker, a little on the other, and not enough for the line."""
    cluster = Beside()
    (other,) = {"w1", "w2"} - {cluster.home}
    cluster.beat(other, load=Load(kv_tokens_max=1000))
    cluster.beat(cluster.home, load=Load(kv_tokens_max=5000))
    for name, prompt_tokens in (("fills", 900), ("stays", 4000)):
        spec = a_spec(name, band=1, prompt_tokens=prompt_tokens, enqueued_at_s=cluster.at_s)
        cluster.first_token(only(Dispatch, cluster.hold(spec)))
    went = {lease.job.key: lease.worker for lease in cluster.scheduler.leases()}
    assert went == {"acme.fills": other, "acme.stays": cluster.home}
    line = a_spec("line", lane="beta", band=3, output_tokens_max=900)
    assert not of(Dispatch, cluster.hold(line))
    small = a_spec("small", band=1, prompt_tokens=20, enqueued_at_s=cluster.at_s)
    assert only(Dispatch, cluster.hold(small)).worker == cluster.home


def test_without_a_share_lines_go_anywhere() -> None:
    """`batch_cache_share` 1: as if nobody's prefixes mattered."""
    cluster = Beside(batch_cache_share=1.0)
    went = [one.worker for one in cluster.hold(*lines(0, 2)) if isinstance(one, Dispatch)]
    assert sorted(went) == ["w1", "w2"]
