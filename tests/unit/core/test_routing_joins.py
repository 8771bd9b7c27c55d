"""Short prompts that wait in a worker behind a long one, and share its last step."""

import random
from typing import Any

import pytest

from broker.core.decisions import Dispatch, HeldBy
from broker.core.events import DispatchAllowed, JobSpec
from broker.core.placement import Placement
from broker.core.policy import RoutingPolicy
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.core.scoring import TRUST_MAX
from tests.unit.core.cluster import EPOCH, Cluster, a_policy, a_spec, keys, of, only
from tests.unit.core.routing_builders import CACHE_AWARE, SYSTEM, Place, a_worker, where

JOIN_S = 0.020
JOIN_TOKENS = 160
"""At 8,000 tokens a second."""

LONG_TOKENS = 4000


def behind_a_long_one(count: int = 1, **policy: Any) -> Place:
    """Workers that prefill a long prompt, each."""
    place = Place(count, **{"join_s_max": JOIN_S, **policy})
    for n in range(count):
        place.give(place.spec(prompt_tokens=LONG_TOKENS), f"w{n}")
    return place


@pytest.mark.parametrize("policy", [*CACHE_AWARE, "round_robin"])
@pytest.mark.parametrize(("tokens", "joins"), [(JOIN_TOKENS - 1, True), (JOIN_TOKENS, False)])
def test_a_short_prompt_joins_a_long_one(policy: str, tokens: int, joins: bool) -> None:
    """It is given to the worker, and not kept until that has nothing to prefill."""
    place = behind_a_long_one(policy=policy)
    assert bool(where(place, prompt_tokens=tokens)) is joins


def test_what_waits_behind_it_counts_together() -> None:
    """The long one itself does not count; its followers do, until they are prefilled."""
    place = behind_a_long_one()
    first = place.give(place.spec(prompt_tokens=100))
    assert where(place, prompt_tokens=60) == ""
    assert where(place, prompt_tokens=59) == "w0"
    place.prefill(first)
    assert where(place, prompt_tokens=JOIN_TOKENS - 1) == "w0"


def test_the_next_is_at_the_head_once_the_long_one_is_done() -> None:
    """Then the bound of prompts that are prefilled together counts as well: 640 tokens in all."""
    place = Place(1, join_s_max=JOIN_S)
    long = place.give(place.spec(prompt_tokens=LONG_TOKENS), "w0")
    place.give(place.spec(prompt_tokens=100))
    place.prefill(long)
    assert place.workers["w0"].behind_tokens == 0
    assert where(place, prompt_tokens=539) == "w0"
    assert where(place, prompt_tokens=540) == ""


def test_a_long_prompt_that_is_gone_leaves_its_followers() -> None:
    """A cancelled head counts no more, and who followed is the head."""
    place = Place(1, join_s_max=JOIN_S)
    long = place.give(place.spec(prompt_tokens=LONG_TOKENS), "w0")
    place.give(place.spec(prompt_tokens=100))
    place.give(place.spec(prompt_tokens=50))
    place.end(long)
    worker = place.workers["w0"]
    assert (worker.backlog_tokens, worker.behind_tokens) == (150, 50)


def test_without_the_knob_nothing_joins() -> None:
    """0: a worker that prefills a long prompt has no room."""
    assert where(behind_a_long_one(join_s_max=0.0), prompt_tokens=1) == ""


def test_a_long_one_joins_nobody() -> None:
    """It gets a worker with nothing to prefill, though a busy one may take short ones."""
    place = behind_a_long_one(2)
    assert where(place, prompt_tokens=LONG_TOKENS) == ""
    assert where(place, prompt_tokens=100) != ""


@pytest.mark.parametrize("lack", [{"slots": 1}, {"held_off": True}, {"kv_tokens_max": 4200}])
def test_other_room_is_needed_all_the_same(lack: dict[str, Any]) -> None:
    """A slot, KV cache, and a worker that did not say busy."""
    place = behind_a_long_one()
    place.change("w0", **lack)
    assert where(place, prompt_tokens=100) == ""


def test_what_is_cached_decides_how_short_it_is() -> None:
    """A long prompt of which all but a little is cached joins its holder; it is not held."""
    place = Place(2, join_s_max=JOIN_S)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=800), "w0")
    placement = place.place(place.spec(SYSTEM))
    assert (placement.worker, placement.held_for) == (place.workers["w0"], "")


@pytest.mark.parametrize(("hold_s_max", "worker"), [(0.52, "w0"), (0.50, "w1")])
def test_nobody_joins_for_a_much_later_first_token(hold_s_max: float, worker: str) -> None:
    """However much is cached, 0.75 s of backlog are too late after 0.24 s of prefill elsewhere."""
    place = Place(2, join_s_max=JOIN_S, hold_s_max=hold_s_max, bias=100.0)
    place.warm("w0", SYSTEM)
    place.give(place.spec(prompt_tokens=6000), "w0")
    assert where(place, SYSTEM) == worker


def test_who_would_join_too_late_waits_for_a_worker() -> None:
    """Where nobody is free, the best that comes in time is waited for, not the one with room."""
    place = Place(2, join_s_max=JOIN_S, hold_s_max=0.5)
    place.give(place.spec(prompt_tokens=8000), "w0")
    place.give(place.spec(prompt_tokens=1000), "w1")
    place.give(place.spec(prompt_tokens=JOIN_TOKENS - 1), "w1")
    assert where(place, prompt_tokens=100) == ""


def test_nobody_joins_who_computes_its_prefix_just_now() -> None:
    """In one step with it the engine would compute it twice; once that is done, it goes there."""
    place = Place(1, join_s_max=JOIN_S)
    first = place.give(place.spec(SYSTEM, ("one", 1)), "w0")
    asks = place.spec(SYSTEM, ("two", 1))
    assert place.place(asks).worker is None
    place.prefill(first)
    assert place.place(asks).worker is place.workers["w0"]
    second = place.give(place.spec(SYSTEM, ("one", 1), ("more", 1)))
    assert second.hit_tokens > 0
    assert place.place(asks).worker is place.workers["w0"]


@pytest.mark.parametrize(("trust", "later", "tokens"), [(0.95, 0.99, 1990), (1.0, 1.0, 2079)])
def test_who_has_the_prefix_and_computes_what_comes_after_it_is_joined(
    trust: float, later: float, tokens: int
) -> None:
    """More is believed of the same blocks now: by more trust, or by more tokens in each."""
    place = Place(1, join_s_max=JOIN_S)
    place.warm("w0", SYSTEM)
    place.change("w0", trust=trust)
    first = place.give(place.spec(SYSTEM, ("one", 20)), "w0")
    assert first.hit_tokens > 0
    place.change("w0", trust=later)
    assert where(place, SYSTEM, ("two", 1), prompt_tokens=tokens) == "w0"


def test_a_short_one_goes_where_its_first_token_comes_sooner() -> None:
    """To a worker with nothing to prefill, if there is one."""
    place = Place(2, join_s_max=JOIN_S)
    place.give(place.spec(prompt_tokens=LONG_TOKENS), "w0")
    assert where(place, prompt_tokens=100) == "w1"


def test_the_most_that_some_worker_takes_is_told_by_octaves() -> None:
    """No bound while one has nothing to prefill, then an octave's end, then nothing."""
    workers = [a_worker(f"w{n}", index=n, slots=2) for n in range(2)]
    place = Place(workers, join_s_max=JOIN_S)
    most = []
    for worker in ("w0", "w1", "w0", "w1"):
        most.append(place.router.most_tokens("tiny", batch=False))
        place.give(place.spec(prompt_tokens=LONG_TOKENS), worker)
    most.append(place.router.most_tokens("tiny", batch=False))
    assert most == [float("inf"), float("inf"), 256.0, 256.0, 0.0]
    assert place.router.most_tokens("unknown", batch=True) == 0.0


def test_a_line_that_lacks_just_room_is_not_told_that_workers_are_kept_from_it() -> None:
    """Nobody's prefixes live there: it may have every worker, and claim one like any other job."""
    place = behind_a_long_one()
    placement = place.place(place.spec(prompt_tokens=JOIN_TOKENS + 1, band=3))
    assert (placement.worker, placement.confined) == (None, False)


@pytest.mark.parametrize(("tokens", "worker"), [(7000, "w2"), (16_000, "w0"), (None, "w0")])
def test_a_forced_job_joins_as_any_other_does(tokens: int | None, worker: str) -> None:
    """An empty cache is no reason to wait long for a first token, or to compute twice (None)."""
    place = Place(3, join_s_max=JOIN_S, forced_share=1.0, hold_for_affinity=False)
    place.at_s += 1000.0
    place.change("w2", reported_at_s=place.at_s)
    place.router.cache_lost(place.workers["w2"])
    runs = () if tokens else (SYSTEM,)
    place.give(place.spec(*runs, **({"prompt_tokens": tokens} if tokens else {})), "w2")
    assert where(place, *runs, ("own", 1)) == worker


def test_a_job_is_too_long_only_if_it_is_with_all_that_may_be_found() -> None:
    """An engine that finds more than its blocks tell may have room for what seems too long."""
    place = behind_a_long_one()
    place.warm("w0", SYSTEM)
    place.change("w0", trust=TRUST_MAX)
    first = place.give(place.spec(prompt_tokens=JOIN_TOKENS - 1), "w0")
    job = place.spec(SYSTEM, ("own", 9))
    placement = place.place(job)
    place.end(first)
    assert placement.worker is None
    assert 0 < placement.least_tokens < place.router.most_tokens("tiny", batch=False)
    assert place.place(job).worker is place.workers["w0"]


LOOKS_MAX = 80
"""At the 64 candidates of one lane, of which one goes; few more once that is known."""


class Busy(Cluster):
    """Two workers that prefill a long prompt, and jobs too long to join them."""

    def __init__(self, waiting: int) -> None:
        super().__init__(started=False)
        policy = a_policy(routing=RoutingPolicy(join_s_max=JOIN_S))
        self.scheduler = Scheduler(
            policy, epoch=EPOCH, router=make_router(policy.routing), rng=random.Random(1)
        )
        self.step(DispatchAllowed(self.at_s))
        self.join("w1", "w2", slots=8)
        longs = [self.a_long(n) for n in range(2 + waiting)]
        self.given = of(Dispatch, self.hold(*longs))
        assert len(self.given) == 2

    def a_long(self, n: int) -> JobSpec:
        """A job that needs a worker of its own."""
        return a_spec(
            f"long-{n}",
            prompt_tokens=LONG_TOKENS,
            stream_sequence=n + 1,
            enqueued_at_s=self.at_s,
        )


def test_many_too_long_ones_are_not_looked_at_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While all workers are busy, an end costs a look at few of those that wait for one."""
    cluster = Busy(waiting=200)
    short = only(Dispatch, cluster.hold(a_spec("short", enqueued_at_s=cluster.at_s)))
    placed: list[str] = []
    router = cluster.scheduler._mind.router
    place = router.place

    def counted(job: JobSpec, **asked: Any) -> Placement:
        placed.append(job.key)
        return place(job, **asked)

    monkeypatch.setattr(router, "place", counted)
    cluster.first_token(short)
    cluster.end(short)
    assert sum("long" in key for key in placed) <= 4
    placed.clear()
    assert keys(Dispatch, cluster.first_token(cluster.given[0])) == ["acme.long-2"]
    assert len(placed) <= LOOKS_MAX


def test_a_short_one_passes_those_that_wait_for_a_worker_of_their_own() -> None:
    """It is found behind all of them, and takes nothing that they could have had."""
    cluster = Busy(waiting=100)
    why = cluster.scheduler.views.why("acme.long-50")
    assert why is not None
    assert why.held_by is HeldBy.ROOM
    late = a_spec("late", stream_sequence=1000, enqueued_at_s=cluster.at_s)
    assert keys(Dispatch, cluster.hold(late)) == ["acme.late"]


def test_short_ones_do_not_keep_a_long_one_waiting_for_ever() -> None:
    """One follows the other for as long as there are any; room is kept for who was overtaken."""
    cluster = Busy(waiting=1)
    running = list(cluster.given)
    for n in range(4000):
        short = a_spec(f"short-{n}", stream_sequence=9 + n, enqueued_at_s=cluster.at_s)
        more = of(Dispatch, cluster.hold(short))
        running += more
        if len(running) > 2:
            more = of(Dispatch, cluster.first_token(running.pop(0)))
            running += more
        if any(one.key == "acme.long-2" for one in running):
            return
        cluster.tick(0.005)
    pytest.fail("it was never given")


def test_a_line_that_short_ones_pass_has_room_kept_for_it() -> None:
    """It misses the room that is left by a few tokens, which is nobody's share."""
    cluster = Busy(waiting=0)
    line = a_spec("line", band=3, prompt_tokens=JOIN_TOKENS + 1, enqueued_at_s=cluster.at_s)
    cluster.hold(line)
    cluster.tick(1.0)
    cluster.beat("w1")
    cluster.hold(a_spec("short", stream_sequence=9, enqueued_at_s=cluster.at_s))
    claimant = cluster.scheduler._mind.claims.of("tiny")
    assert claimant is not None
    assert claimant.job is line
