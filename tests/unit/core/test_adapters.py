"""Adapters (LoRA) of a model: where their jobs run, whose cache they share, whom they hold up."""

import pytest

from broker.core.decisions import Dispatch, HeldBy
from broker.core.policy import PolicyName, RoutingPolicy
from broker.core.routing import make_router
from broker.wire.prefix import block_hashes, seed
from tests.builders import an_attempt
from tests.unit.core.cluster import EPOCH, MODEL, Cluster, a_policy, a_spec, in_flight, keys, only
from tests.unit.core.routing_builders import CACHE_AWARE, SYSTEM, Place, a_worker, where
from tests.unit.core.routing_builders import a_spec as a_job

ALL: list[PolicyName] = ["first_token", "weighted", "round_robin"]
TEXT = b"You are a helpful assistant. " * 400


def a_cluster(routing: PolicyName = "first_token") -> Cluster:
    """A cluster with a real router."""
    cluster = Cluster(a_policy(routing=RoutingPolicy(policy=routing)))
    cluster.scheduler._mind.router = make_router(cluster.scheduler._mind.policy.routing)
    return cluster


def blocks_of(adapter: str) -> list[int]:
    """The same text under an adapter."""
    return block_hashes(TEXT, seed=seed(model=MODEL, adapter=adapter, scope="acme"))


@pytest.mark.parametrize("policy", ALL)
def test_an_adapter_needs_its_model_beside_it(policy: PolicyName) -> None:
    """A worker that lists the adapter alone, or the model alone, is passed over."""
    workers = [
        a_worker("base", index=0),
        a_worker("alone", index=1, models=("lora",)),
        a_worker("both", index=2, models=(MODEL, "lora")),
    ]
    place = Place(workers, policy=policy)
    assert {where(place, adapter="lora") for _ in range(5)} == {"both"}
    place.router.gone(place.workers["both"])
    assert where(place, adapter="lora") == ""


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_session_does_not_stick_to_a_worker_without_the_adapter(policy: PolicyName) -> None:
    """A session that changes its adapter goes where that is, though another served it last."""
    workers = [
        a_worker("de", index=0, models=(MODEL, "lora-de")),
        a_worker("fr", index=1, models=(MODEL, "lora-fr")),
    ]
    place = Place(workers, policy=policy, switch_penalty_s=5.0, leave_weight=50.0)
    for adapter, home in [("lora-de", "de"), ("lora-fr", "fr"), ("lora-de", "de")] * 2:
        lease = place.give(place.spec(SYSTEM, session="s", adapter=adapter))
        assert lease.worker == home
        place.prefill(lease)
        place.end(lease)
    for _ in range(3):
        place.run(place.spec(SYSTEM, session="s"), "de")
        assert where(place, SYSTEM, session="s", adapter="lora-fr") == "fr"


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_adapters_of_one_model_share_no_hits(policy: PolicyName) -> None:
    """The same text, cached under one adapter, is worth nothing under another or under none."""
    adapters = ["", "lora-de", "lora-fr"]
    place = Place([a_worker(models=(MODEL, *adapters[1:]))], policy=policy)
    for adapter in adapters:
        job = a_job(f"{adapter}-1", blocks=blocks_of(adapter), adapter=adapter)
        first = place.place(job)
        assert first.hit_tokens == 0
        place.run(job)
        again = a_job(f"{adapter}-2", blocks=blocks_of(adapter), adapter=adapter)
        assert place.place(again).hit_tokens > 2000


def test_an_adapter_that_nobody_serves_waits_as_no_workers_and_goes_when_one_does() -> None:
    """Its model's other jobs go on meanwhile."""
    cluster = a_cluster()
    cluster.join("w1")
    cluster.hold(a_spec("tuned", adapter="lora"))
    why = cluster.scheduler.views.why("acme.tuned")
    assert why is not None
    assert why.held_by is HeldBy.NO_WORKERS
    assert keys(Dispatch, cluster.hold(a_spec("plain"))) == ["acme.plain"]
    assert keys(Dispatch, cluster.beat("w1", models=(MODEL, "lora"))) == ["acme.tuned"]


@pytest.mark.parametrize("routing", ALL)
def test_an_adapter_without_room_holds_up_nobody_else(routing: PolicyName) -> None:
    """Its one worker is full: a larger job without an adapter still goes to the others."""
    cluster = a_cluster(routing)
    cluster.join("w1", models=(MODEL, "lora"), slots=1)
    cluster.hold(a_spec("first", adapter="lora"), a_spec("second", adapter="lora"))
    cluster.join("w2", slots=4)
    dispatch = only(Dispatch, cluster.hold(a_spec("large", prompt_tokens=500)))
    assert (dispatch.key, dispatch.worker) == ("acme.large", "w2")


def test_a_new_leader_knows_the_adapter_of_what_runs() -> None:
    """The worker's list says it: where the job is lost unread, it goes where the adapter is."""
    cluster = a_cluster()
    listed = in_flight(a_spec(), an_attempt(epoch=EPOCH - 1), adapter="lora")
    cluster.join("w1", models=(MODEL, "lora"), inflight=(listed,))
    (lease,) = cluster.scheduler.leases()
    assert lease.job.adapter == "lora"
    assert lease.job.bare
    cluster.join("plain", "tuned")
    cluster.beat("tuned", models=(MODEL, "lora"))
    cluster.beat("w1", incarnation=2, models=(MODEL,), inflight=())
    moved = only(Dispatch, cluster.wait(1.0))
    assert moved.worker == "tuned"


@pytest.mark.parametrize("policy", CACHE_AWARE)
def test_a_session_sticks_for_each_of_its_adapters(policy: PolicyName) -> None:
    """What one adapter's turns left in a cache says nothing of where another's are."""
    both = (MODEL, "lora-de", "lora-fr")
    place = Place([a_worker(f"w{n}", index=n, models=both) for n in range(2)], policy=policy)
    for adapter, home in (("lora-de", "w0"), ("lora-fr", "w1")):
        place.run(place.spec(session="s", adapter=adapter), home)
    for adapter, home in (("lora-de", "w0"), ("lora-fr", "w1"), ("", "")):
        job = place.spec(session="s", adapter=adapter)
        told = place.router.explain(job, place.place(job), at_s=place.at_s)
        assert told.previous_worker == home
