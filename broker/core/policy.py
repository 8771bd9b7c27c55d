"""Every knob of the mind: unit, default, reason. Table `[policy]` of the one TOML file.

Records are frozen and refuse unknown keys, so that a typing error in the file is an error, not a
silence.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0)]

PolicyName = Literal["first_token", "weighted", "round_robin"]


class QuotaRow(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One limit over the jobs that match all of `model`, `lane`, `band` that are given.

    A job must pass every row that matches it, all or nothing.
    """

    model: str | None = None
    lane: str | None = None
    band: Annotated[int, Meta(ge=0, le=3)] | None = None
    inflight_jobs_max: Limit | None = None
    """Jobs leased to workers at once."""
    inflight_jobs_max_per_worker: Positive | None = None
    """The same, times the live workers of the model: follows the fleet."""
    lendable_share: Share = 0.0
    """Of the jobs that it may have at once, how many others may have while it leaves them idle:
    rows of the same model that name the same things (all lanes, all bands) lend to each other."""
    ceiling_ratio: Annotated[float, Meta(ge=1)] = 1.0
    """With what others lend it may have so many times its own."""
    inflight_tokens_max: Limit | None = None
    """Weighted tokens leased at once."""
    queued_jobs_max: Limit | None = None
    """Online jobs waiting at the broker; one more is rejected as `queue_full`. Batch is bounded by
    its stream."""
    tokens_per_min: Limit | None = None
    """Weighted tokens started a minute (token bucket of one minute, empty after a takeover)."""
    result_bytes_max: Limit | None = None
    """Bytes of a lane's results that stand, with those to come of the jobs in flight; the row names
    a lane and nothing else. One more online job is rejected as `results_full`, batch waits."""

    @property
    def name(self) -> str:
        """What people call the row: `lane=acme band=1`, or `all`."""
        given = (("model", self.model), ("lane", self.lane), ("band", self.band))
        return " ".join(f"{key}={value}" for key, value in given if value is not None) or "all"


class BandPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How one band competes."""

    guaranteed_share: Share
    """Least share of dispatched work (weighted tokens) while it has demand, against higher
    bands."""
    aging_s: Positive | None = None
    """A job that has waited longer rises one band, once. None: never by the clock."""
    wait_s_max: Positive | None = None
    """Longest wait; then the job ends as `expired` with `wait_expired`. None: its own deadline
    only."""


DEFAULT_BANDS = (
    BandPolicy(guaranteed_share=0.0, wait_s_max=10.0),
    BandPolicy(guaranteed_share=0.20, wait_s_max=60.0),
    BandPolicy(guaranteed_share=0.10, aging_s=60.0, wait_s_max=600.0),
    BandPolicy(guaranteed_share=0.05),
)


class LanePolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One tenant."""

    name: str
    weight: Positive = 1.0
    """Share of work against other lanes of the same band."""
    models: tuple[str, ...] = ()
    """Models it may use; empty = all configured."""
    bands: tuple[Annotated[int, Meta(ge=0, le=3)], ...] = (0, 1, 2, 3)
    paused: bool = False


class RoutingPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a job runs."""

    policy: PolicyName = "first_token"
    bias: NotNegative = 2.0
    """first_token: extra weight of uncached work, for the cache it costs others."""
    decode_weight: NotNegative = 0.08
    """first_token: γ, weight of the seconds that the job's own decoding will take there."""
    slowdown_weight: NotNegative = 0.04
    """first_token: weight of the seconds that its KV adds to the decoding of the jobs there."""
    interference_weight: NotNegative = 0.015
    """first_token: weight of the seconds for which its prefill holds up the jobs there."""
    size_weight: NotNegative = 1.2
    """first_token: weight of being far from the workers that have the jobs of its size, in seconds
    for which a mean job holds up each that runs beside it, where more than a few do; where many
    do, in proportion to their number. What is cached goes before. 0: sizes are not set apart."""
    turnover_weight: NotNegative = 1.8
    """first_token: by how much `bias` counts more at workers whose caches are filled anew sooner
    than the mean, and less at the others: for each token that caches save, beyond a few, for each
    one computed, where many jobs run. 0: all caches are the same."""
    switch_penalty_s: NotNegative = 0.05
    """first_token: seconds a worker must be better by, to take a warm prefix from the last one."""
    saving_s_min: NotNegative = 0.002
    """first_token: marginal savings below this earn nothing."""
    load_weight: NotNegative = 1.2
    miss_weight: NotNegative = 0.7
    leave_weight: NotNegative = 0.3
    hit_ratio_min: Share = 0.30
    """weighted: a smaller cached share of the prompt is ignored."""
    hot_uses_min: NotNegative = 4.0
    """first_token: a prefix is hot once so many uses a minute are expected of one more copy; then
    what the copy costs is shared among them. 0: whoever makes it pays all."""
    hot_slowdown_max: Annotated[float, Meta(ge=1)] = 3.5
    """Such a copy is made once tokens come so many times slower from all that hold the prefix than
    from another worker. So many times slower than from another holder, and a prefix sticks to
    that one instead of to its last worker, under either policy."""
    replicas_max: Limit = 0
    """Holders of a prefix among whom its jobs are shared before it spreads further, unless all are
    over `wait_s_over_best_max`. 0: it spreads wherever that is quicker."""
    warmup_s: NotNegative = 60.0
    """For so long, or until its cache is half full, a worker that joined with an empty cache counts
    half its load."""
    forced_share: Share = 0.0
    """Share of jobs sent to such a worker whatever is cached elsewhere. Where the score has the
    decoding, which draws jobs to idle workers anyway, it gains nothing."""
    sticky_s: NotNegative = 30.0
    """How long since its last dispatch a prefix (or session) sticks to its worker."""
    wait_s_over_best_max: NotNegative = 2.0
    """Stickiness ends where the predicted first token is this much later than the best."""
    backlog_s_max: Positive = 0.080
    """θ of late binding: prompts are prefilled together while all of them take less than this; a
    longer one gets a worker that has nothing to prefill."""
    join_s_max: NotNegative = 0.030
    """So much of short prompts may wait in a worker behind one of any length that it prefills. They
    join the last step of that, and need none of their own. 0: none does."""
    hold_for_affinity: bool = True
    """A job waits for its best worker while that, wait included, is better than the best free
    one."""
    hold_decode_share: Share = 0.36
    """What the two decode weights count when a worker is waited for: the wait is certain. Where
    many run on each, in proportion more, until they count in full."""
    hold_s_max: NotNegative = 1.0
    """A job is not held for a worker whose first token would come later by more than this, and
    joins no backlog for one."""
    kv_fill_ratio_max: Share = 0.95
    batch_cache_share: Share = 0.25
    """Batch has the workers that hold no prefix that people come back to, and as many of the others
    as bring it to this share of all, one at least. 1: any worker."""
    online_prefix_s: Positive = 120.0
    """How long after such a use a worker counts as one of those."""
    prefill_tokens_s: Positive = 8000.0
    """Assumed prefill rate until a worker reports its own."""
    decode_tokens_s: Positive = 50.0
    """Assumed decode rate of one job until a worker reports its own."""
    prefix_tokens_min: Limit = 1024
    """Shorter matches earn nothing: a lone block is not worth a detour."""
    index_entries_max: Limit = 4_000_000
    """Most (block, worker) entries of the prefix index; the least recently used go first."""
    index_ttl_s: Positive = 600.0
    """A block unused for this long is forgotten."""


class OrderPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which job is next."""

    lane_slack_tokens: NotNegative = 8192.0
    """Q: lanes within this much of the least served are equal, so that locality may choose."""
    wait_credit: NotNegative = 0.2
    """α: seconds of prefill forgiven for each second waited."""
    candidates_max: Annotated[int, Meta(ge=1, le=1_000_000)] = 64
    """Jobs looked at from the head of each lane's queue."""
    window_margin_ratio: Annotated[float, Meta(ge=1)] = 1.25
    """A batch competes one band up once what is left of it would, at its pace, take more than its
    window leaves ÷ this; while pressure holds batch, it does not."""
    aged_share_max: Share = 0.25
    """Most of dispatched work that bands 2-3 take together while higher bands have demand, and by
    aging band 1 while band 0 has."""


class PressurePolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What batch gives way when online jobs must wait: three steps, by their expected wait."""

    online_floor_share: Share = 0.1
    """Of a model's slots, what is kept free for online jobs: batch never gets it, and standard
    jobs not while online ones run. People come in bunches, and find what jobs of minutes leave
    free. At least one slot where there are two; 0: none."""
    borrow_wait_s: Positive = 2.0
    """Step 1, from this expected wait of bands 0-1 on: they borrow batch's seats before batch uses
    them itself."""
    hold_batch_wait_s: Positive = 5.0
    """Step 2: batch gets its guaranteed share and no idle capacity, its window at risk or not."""
    refuse_batch_wait_s: Positive = 20.0
    """Step 3: batch that is submitted from then on is refused, to be tried again later."""
    release_ratio: Share = 0.5
    """A step ends when the wait is under so much of its threshold."""


class LeasePolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a worker is gone, and what becomes of its jobs."""

    heartbeat_s: Positive = 1.0
    lease_s: Positive = 3.0
    """Silence after which a worker is probed and gets nothing new."""
    revoke_s: Positive = 10.0
    """Silence after which a suspect's jobs go elsewhere."""
    grace_s: Positive = 3.0
    """Extra time after the broker's own link was down, or most of the fleet fell silent at once."""
    stall_s: Positive = 120.0
    """A running job without a new token for this long is aborted and tried elsewhere."""
    run_s_max: Positive = 3600.0
    failures_max: Annotated[int, Meta(ge=1)] = 3
    """Charged failures after which a job is dead-lettered."""
    retry_base_s: Positive = 0.5
    retry_s_max: Positive = 30.0
    """Back-off: base · 2^(n-1), ± 25 % jitter, at most this."""
    dispatch_answer_s: Positive = 2.0
    """How long an order may go unanswered before its fate is left to the heartbeats' echo."""
    silent_fleet_ratio: Share = 0.5
    """More of the fleet falling silent at once is the network, not the workers."""


class BreakerPolicy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a worker gets no new jobs because its engine fails them."""

    failures_max: Limit = 3
    """Different jobs that fail there in a row, none completed between. 0: no breaker. As few as a
    job's own `failures_max`, and fewer than Envoy's 5: each failure costs a job a retry."""
    open_s: Positive = 2.0
    """Then nothing new goes there for so long; after that one job is tried."""
    open_s_max: Positive = 10.0
    """Where that fails, too, the time doubles up to this. A look costs one job a retry, so it may
    be had often; not to look costs the recovery of a fleet that was sick as a whole: no longer than
    a critical job waits. (Envoy: 30 s to 300 s, SMG: 60 s; they have health checks as well.)"""


class Policy(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it."""

    models: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    """Other names that requests may carry, each for one of `models`, or of `adapters`. Queues,
    quotas and metrics know the model alone."""
    adapters: dict[str, tuple[str, ...]] = {}
    """Adapters (LoRA) of each model, as workers list them beside it. Empty: any may be asked for,
    and waits where none is served; else an adapter that is not listed is refused."""
    lanes: tuple[LanePolicy, ...] = ()
    quotas: tuple[QuotaRow, ...] = ()
    bands: tuple[BandPolicy, BandPolicy, BandPolicy, BandPolicy] = DEFAULT_BANDS
    routing: RoutingPolicy = RoutingPolicy()
    order: OrderPolicy = OrderPolicy()
    pressure: PressurePolicy = PressurePolicy()
    leases: LeasePolicy = LeasePolicy()
    breaker: BreakerPolicy = BreakerPolicy()
