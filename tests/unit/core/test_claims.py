"""Room that is kept for a job which smaller ones would overtake for ever."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.core.bands import Way
from broker.core.claim import Claim
from broker.core.decisions import Dispatch, HeldBy
from broker.core.events import DrainRequested, JobSpec, PolicyChanged
from broker.core.policy import OrderPolicy, QuotaRow
from broker.core.routing import make_router
from broker.wire.messages import Load, Reason
from tests.unit.core.cluster import Cluster, a_policy, a_spec, keys, of

PREFILL_TOKENS_S = 8000.0
"""The default policy's assumption, which holds for workers that tell none."""

ALPHA = 0.2
LARGE_TOKENS = 800
PATIENCE_S = LARGE_TOKENS / PREFILL_TOKENS_S / ALPHA
"""For so long others may go before the large job: half a second."""

SMALL_TOKENS = 150
KV_TOKENS = 1100
"""With 50 tokens of output: five small jobs, or the large one and no small one (0.9 is used)."""


class Trickle:
    """Workers full of small jobs: as one ends another has come, and a large one waits among them.

    Workers have four slots, and KV cache for no more than the large job or four small ones.
    """

    def __init__(
        self,
        *quotas: QuotaRow,
        workers: tuple[str, ...] = ("w1",),
        kv_tokens_max: int = KV_TOKENS,
        large: JobSpec | None = None,
        policy: str = "",
    ) -> None:
        router = make_router(a_policy().routing) if policy else None
        self.cluster = Cluster(a_policy(*quotas), router=router)  # type: ignore[arg-type]
        self.running: list[Dispatch] = []
        self.number = 0
        self.overtook: list[JobSpec] = []
        self.specs: dict[str, JobSpec] = {}
        for name in workers:
            self.cluster.join(name, load=Load(kv_tokens_max=kv_tokens_max))
        for _ in range(6 * len(workers)):
            self.comes()
        self.large = large or a_spec(
            "large", prompt_tokens=LARGE_TOKENS, enqueued_at_s=self.cluster.at_s
        )
        self.take(self.cluster.hold(self.large))

    @property
    def is_large_running(self) -> bool:
        return any(one.key == self.large.key for one in self.running)

    @property
    def claimant(self) -> str:
        """Name the job for which room is kept."""
        waiting = self.cluster.scheduler._mind.claims.of(self.large.model)
        return "" if waiting is None else waiting.job.key

    def take(self, decisions: list) -> None:  # type: ignore[type-arg]
        """Note who went."""
        self.running += of(Dispatch, decisions)

    def comes(self, **fields: object) -> None:
        """A small job comes."""
        self.number += 1
        name = f"s{self.number}"
        fields = {"prompt_tokens": SMALL_TOKENS, "enqueued_at_s": self.cluster.at_s, **fields}
        spec = a_spec(name, stream_sequence=self.number, **fields)  # type: ignore[arg-type]
        self.specs[spec.key] = spec
        self.take(self.cluster.hold(spec))

    def ends(self, *, elsewhere: str = "") -> None:
        """The job that has run longest (not at a certain worker) ends."""
        first = next(one for one in self.running if one.worker != elsewhere)
        self.running.remove(first)
        self.take(self.cluster.first_token(first))
        self.take(self.cluster.end(first))

    def passes(self, seconds: float) -> None:
        """Let time pass; the workers report."""
        self.take(self.cluster.tick(seconds))
        for name in self.cluster.beats:
            self.take(self.cluster.beat(name))

    def goes_on(self, seconds: float, **fields: object) -> None:
        """Each 0.1 s a small job ends and another comes, until the large one runs."""
        for _ in range(round(seconds / 0.1)):
            if self.is_large_running:
                return
            self.passes(0.1)
            self.comes(**fields)
            if self.running:
                self.ends()

    def goes_on_to_claim(self) -> None:
        """Go on until room is kept for the large job."""
        for _ in range(20):
            if self.claimant == self.large.key:
                return
            self.goes_on(0.1)
        pytest.fail("no room was kept")

    @property
    def kept(self) -> str:
        """Name the worker that is kept for it."""
        worker = self.cluster.scheduler._mind.claims.worker_of(self.large.model)
        return "" if worker is None else worker.id

    def late(self) -> list[str]:
        """Name the jobs that went while the large one waited, later than it may be overtaken by."""
        late_from_s = self.large.enqueued_at_s + PATIENCE_S
        went = keys(Dispatch, self.cluster.decisions)
        before = went[: went.index(self.large.key)] if self.large.key in went else went
        return [key for key in before if self.specs[key].enqueued_at_s > late_from_s]


@pytest.mark.parametrize("policy", ["", "first_token"])
def test_a_large_job_goes_though_small_ones_never_end(policy: str) -> None:
    """KV cache frees in small pieces: those that came after its patience leave them to it."""
    trickle = Trickle(policy=policy)
    assert not trickle.is_large_running
    trickle.goes_on(PATIENCE_S - 0.2)
    assert trickle.claimant != trickle.large.key
    trickle.goes_on(5.0)
    assert trickle.is_large_running
    assert trickle.late() == []
    assert trickle.claimant != trickle.large.key
    (pool,) = (one for one in trickle.cluster.scheduler.views.pools() if one.model == "tiny")
    assert (2, Way.CLAIM) in {(band, way) for band, way, _ in pool.work_tokens}


def test_what_it_waits_for_is_one_residual() -> None:
    """From its patience on it waits for no more ends than there are jobs on one worker."""
    trickle = Trickle(workers=("w1", "w2", "w3"))
    trickle.goes_on(PATIENCE_S)
    ended = len(trickle.cluster.decisions)
    trickle.goes_on(20.0)
    assert trickle.is_large_running
    went = keys(Dispatch, trickle.cluster.decisions[ended:])
    assert went.index(trickle.large.key) <= 4 * 3


def test_other_workers_go_on_meanwhile() -> None:
    """One worker is kept, and empties; on the others late jobs run as before."""
    trickle = Trickle(workers=("w1", "w2", "w3"))
    trickle.goes_on_to_claim()
    kept = trickle.kept
    for _ in range(20):
        trickle.comes()
        trickle.ends(elsewhere=kept)
    assert not trickle.is_large_running
    late = set(trickle.late())
    went = {one.key: one.worker for one in of(Dispatch, trickle.cluster.decisions)}
    assert late
    assert kept not in {went[key] for key in late}


def test_prefill_room_is_kept_as_well() -> None:
    """A backlog that small jobs top up never ends: no KV cache is lacking, and it goes all same."""
    trickle = Trickle(
        kv_tokens_max=0,
        policy="first_token",
        large=a_spec("large", prompt_tokens=LARGE_TOKENS, enqueued_at_s=1000.0),
    )
    for _ in range(200):
        if trickle.is_large_running:
            break
        trickle.passes(0.05)
        trickle.comes()
        trickle.comes()
        trickle.ends()
    assert trickle.is_large_running
    assert trickle.late() == []


@pytest.mark.parametrize(
    "row",
    [QuotaRow(inflight_tokens_max=1200), QuotaRow(lane="acme", inflight_tokens_max=1200)],
    ids=["all lanes", "its lane"],
)
def test_a_row_of_tokens_in_flight_keeps_its_share(row: QuotaRow) -> None:
    """The row that refuses it leaves what it needs to it; its workers have room enough."""
    trickle = Trickle(row, kv_tokens_max=0)
    trickle.goes_on(10.0)
    assert trickle.is_large_running
    assert trickle.late() == []


def test_a_token_bucket_fills_for_it() -> None:
    """A bucket that small jobs empty as it fills: their tokens are kept for it once it is due."""
    trickle = Trickle(QuotaRow(tokens_per_min=1800), kv_tokens_max=0)
    cluster = trickle.cluster
    for _ in range(120):
        if trickle.is_large_running:
            break
        trickle.passes(1.0)
        trickle.comes()
        while trickle.running and not trickle.is_large_running:
            trickle.ends()
    assert trickle.is_large_running
    assert trickle.late() == []
    # Its cost is 900 and that of the six before it 250 each: at 30 a second.
    assert cluster.at_s - trickle.large.enqueued_at_s <= 80.0


def test_more_urgent_jobs_pass_it() -> None:
    """Bands are strict: what is kept for a standard job is not kept from interactive ones."""
    trickle = Trickle()
    trickle.goes_on_to_claim()
    trickle.passes(0.5)
    for _ in range(20):
        trickle.comes(band=1)
        trickle.comes(band=1)
        trickle.ends()
    went = keys(Dispatch, trickle.cluster.decisions)
    assert trickle.large.key not in went
    assert {trickle.specs[key].band for key in went[-8:]} == {1}


def test_less_urgent_jobs_do_not() -> None:
    """Nor do those of other lanes."""
    trickle = Trickle()
    trickle.goes_on(5.0, band=3, lane="beta")
    assert trickle.is_large_running


def test_a_more_urgent_job_takes_the_claim_over() -> None:
    """One claim a model: the band decides whose."""
    trickle = Trickle()
    trickle.goes_on_to_claim()
    urgent = a_spec(
        "urgent", prompt_tokens=LARGE_TOKENS, band=1, enqueued_at_s=trickle.cluster.at_s - 1
    )
    trickle.specs[urgent.key] = urgent
    trickle.take(trickle.cluster.hold(urgent))
    trickle.goes_on(10.0)
    went = keys(Dispatch, trickle.cluster.decisions)
    assert went.index(urgent.key) < went.index(trickle.large.key)


def cancelled(trickle: Trickle) -> None:
    """Its owner gives it up."""
    trickle.take(trickle.cluster.cancel(trickle.large.key))


def reloaded(trickle: Trickle) -> None:
    """A new policy forgives no wait."""
    policy = a_policy(order=OrderPolicy(lane_slack_tokens=1.0, wait_credit=0.0))
    trickle.take(trickle.cluster.step(PolicyChanged(trickle.cluster.at_s, policy)))


def drained(trickle: Trickle) -> None:
    """The worker is to take nothing new."""
    trickle.take(trickle.cluster.step(DrainRequested(trickle.cluster.at_s, "w1", draining=True)))


def unready(trickle: Trickle) -> None:
    """Its engine takes nothing."""
    trickle.take(trickle.cluster.beat("w1", ready=False))


@pytest.mark.parametrize("leaves", [cancelled, reloaded])
def test_what_was_kept_is_free_when_the_claim_is_void(leaves: Callable[[Trickle], None]) -> None:
    """The job is cancelled, or a new policy forgives no wait: small jobs have the worker again."""
    trickle = Trickle()
    trickle.goes_on_to_claim()
    leaves(trickle)
    assert trickle.claimant == ""
    trickle.goes_on(2.0)
    assert trickle.late()


@pytest.mark.parametrize("stops", [drained, unready])
def test_a_worker_that_takes_nothing_new_is_not_kept(stops: Callable[[Trickle], None]) -> None:
    """The claim goes on at another worker."""
    trickle = Trickle()
    trickle.goes_on_to_claim()
    assert trickle.kept
    stops(trickle)
    assert trickle.claimant == ""
    trickle.take(trickle.cluster.join("w2", load=Load(kv_tokens_max=KV_TOKENS)))
    trickle.goes_on(10.0)
    assert trickle.is_large_running


def test_a_worker_that_is_silent_is_not_kept() -> None:
    """Past its lease it may be gone: room is kept where there is some."""
    trickle = Trickle(workers=("w1", "w2"))
    trickle.goes_on_to_claim()
    kept = trickle.kept
    other = "w2" if kept == "w1" else "w1"
    for _ in range(60):
        trickle.take(trickle.cluster.wait_for(other, 1.0))
    assert trickle.kept != kept
    for _ in range(20):
        if not trickle.is_large_running:
            trickle.comes()
            trickle.ends(elsewhere=kept)
    assert trickle.is_large_running
    assert not set(trickle.late())


def test_a_claimant_that_rests_keeps_nothing() -> None:
    """A failed attempt's back-off is no wait for room."""
    trickle = Trickle()
    trickle.goes_on(10.0)
    assert trickle.is_large_running
    (large,) = [one for one in trickle.running if one.key == trickle.large.key]
    trickle.take(trickle.cluster.fail(large, reason=Reason.ENGINE_FAILED))
    assert trickle.claimant == ""


def test_what_is_kept_for_a_job_that_failed_everywhere_stays_kept() -> None:
    """It may go again where it failed, as there is no other: so that worker is kept for it.

    Who is before it in its line, for a deadline, but came too late, does not take it.
    """
    trickle = Trickle(policy="first_token")
    trickle.goes_on(10.0)
    (large,) = [one for one in trickle.running if one.key == trickle.large.key]
    trickle.running.remove(large)
    trickle.take(trickle.cluster.fail(large, reason=Reason.ENGINE_FAILED))
    trickle.goes_on_to_claim()
    while len(trickle.running) > 3:
        trickle.ends()
    trickle.comes(deadline_at_s=trickle.cluster.at_s + 100.0)
    assert trickle.kept == "w1"
    assert not trickle.is_large_running
    assert f"acme.s{trickle.number}" not in [one.key for one in trickle.running]


def test_an_operator_sees_what_a_late_job_waits_for() -> None:
    """The worker has a slot and KV cache for it, which are another's."""
    trickle = Trickle()
    trickle.goes_on_to_claim()
    while len(trickle.running) > 3:
        trickle.ends()
    trickle.comes()
    why = trickle.cluster.scheduler.views.why(f"acme.s{trickle.number}")
    assert why is not None
    assert why.held_by is HeldBy.ROOM


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), workers=st.integers(1, 3), large_tokens=st.integers(700, 1700))
def test_no_job_is_overtaken_for_longer_than_its_prefill_seconds_by_alpha(
    seed: int, workers: int, large_tokens: int
) -> None:
    """Jobs of one lane and band, on workers short of KV cache, that end in any order.

    From the moment a job has waited so long and finds no room, one is kept: no worker that is kept
    takes a job that the claim binds; and whoever is overdue while a worker has room for others has
    a claim, or another has it who came before.
    """
    rng = random.Random(seed)
    cluster = Cluster(a_policy())
    for number in range(workers):
        cluster.join(f"w{number}", load=Load(kv_tokens_max=2000))
    running: list[Dispatch] = []

    def take(decisions: list) -> None:  # type: ignore[type-arg]
        went = set[str]()
        for one in of(Dispatch, decisions):
            went.add(one.key)
            lease = next(lease for lease in cluster.scheduler.leases() if lease.job.key == one.key)
            claim = claims_before.get(one.worker)
            assert claim is None or claim.key in went or not claim.binds(lease.job)
            running.append(one)

    def step(act: Callable[[], list]) -> None:  # type: ignore[type-arg]
        claims_before.clear()
        claims_before.update(cluster.router.claims)
        kept = cluster.scheduler._mind.claims.of("tiny")
        take(act())
        if kept is not None and kept.job.key in cluster.scheduler._mind.ledger:
            assert cluster.scheduler._mind.claims.of("tiny") is not kept

    claims_before: dict[str, Claim] = {}
    for number in range(120):
        step(lambda: cluster.tick(rng.uniform(0.0, 0.1)))
        for name in cluster.beats:
            step(lambda name=name: cluster.beat(name))
        spec = a_spec(
            f"j{number}",
            prompt_tokens=rng.choice((40, 40, 40, large_tokens)),
            enqueued_at_s=cluster.at_s,
            stream_sequence=number + 1,
        )
        step(lambda spec=spec: cluster.hold(spec))
        while running and rng.random() < 0.55:
            ended = running.pop(rng.randrange(len(running)))
            step(lambda ended=ended: cluster.end(ended))
        check_overdue(cluster)
    while running:
        step(lambda: cluster.tick(0.05))
        ended = running.pop(0)
        step(lambda ended=ended: cluster.end(ended))
    assert len(keys(Dispatch, cluster.decisions)) == 120
    assert cluster.scheduler._mind.claims.of("tiny") is None
    assert not cluster.router.claims


def check_overdue(cluster: Cluster) -> None:
    """While somebody is overdue and a worker has a slot, some room is kept."""
    mind = cluster.scheduler._mind
    has_slot = any(len(one.leases) < one.slots for one in mind.fleet.workers.values())
    overdue = [
        one
        for one in mind.queues.waiting.values()
        if cluster.at_s - one.job.enqueued_at_s > one.job.prompt_tokens / PREFILL_TOKENS_S / ALPHA
    ]
    pool = mind.queues.pool("tiny")
    if has_slot and overdue and not pool.closed:
        # Or nobody came since it is overdue, so that nobody went past it.
        assert mind.claims.of("tiny") is not None or pool.overdue_at_s <= cluster.at_s
