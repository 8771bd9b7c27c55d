"""Nobody is overtaken for longer than its prefill seconds ÷ α, where it lacks nothing but room.

So decision 13 has it, and it is looked at here from outside, after each settling. A job is *late*
once others of its lane and band go that came when it had waited so long already. Then:

- room is kept for it, or for another of its model: it is not passed over and over;
- who came too late does not take the worker that is kept;
- once that worker is empty the job goes: what is left to wait is one residual of what runs there.

Jobs that a deadline, an adapter, a failed attempt or a quota row tells apart are left out, and so
are lanes beside others: a claim is asked for in a lane's turn only. Who waits for its best worker
while another is free lets others go to that one: so much later it is late.
"""

import math
from collections.abc import Mapping, Sequence

from broker.core.decisions import Decision, Dispatch, HeldBy, Requeue
from broker.core.events import JobSpec
from broker.core.scheduler import Scheduler
from broker.core.views import ClaimView, WorkerView
from broker.sim.scenario import Scenario
from broker.sim.violation import require
from broker.wire.ids import ONLINE_BANDS

ROUNDING_S = 1e-6
"""Times are sums of floats."""


class Overtaking:
    """Watches one leader."""

    def __init__(self, scenario: Scenario) -> None:
        self._order = scenario.policy.order
        self._prefill_tokens_s = scenario.policy.routing.prefill_tokens_s
        routing = scenario.policy.routing
        is_held = routing.policy != "round_robin" and routing.hold_for_affinity
        self._hold_s = routing.hold_s_max if is_held else 0.0
        self._is_alone = len({request.lane for request in scenario.requests}) == 1
        self._failed: dict[str, None] = {}
        """Jobs that came back from a worker: they may be kept from some."""
        self._claims: dict[str, ClaimView] = {}
        """As they stood after the last settling."""
        self._late: dict[str, None] = {}
        """Jobs that were late, and lacked room, after the last settling."""

    def stepped(self, decisions: Sequence[Decision]) -> None:
        """See who came back."""
        for decision in decisions:
            if isinstance(decision, Requeue):
                self._failed[decision.key] = None

    def settled(
        self,
        scheduler: Scheduler,
        waiting: Mapping[str, JobSpec],
        gone: Mapping[str, JobSpec],
        dispatched: Sequence[Dispatch],
        *,
        at_s: float,
    ) -> None:
        """Check a settling. `gone`: the jobs that were dispatched, as they waited.

        Raises Violation.
        """
        claims = {one.key: one for one in scheduler.views.claims()}
        workers = {one.worker: one for one in scheduler.views.workers()}
        rate = self._slowest_tokens_s(workers)
        patience = {key: self._patience_s(job, rate) for key, job in waiting.items()}
        for key, claim in claims.items():
            job, before = waiting.get(key), self._claims.get(key)
            if job is None or not claim.worker:
                continue
            if before == claim:
                late_from_s = job.enqueued_at_s + patience[key]
                self._check_kept(claim, job, late_from_s, gone, dispatched)
            self._check_goes(scheduler, claim, job, workers.get(claim.worker))
        late: dict[str, None] = {}
        if self._is_alone:
            late = {
                key: None
                for key, job in waiting.items()
                if at_s > job.enqueued_at_s + patience[key] + ROUNDING_S
                and self._is_plain(job)
                and self._lacks_room(scheduler, key)
            }
            if not claims and not self._claims:
                self._check_claimed(late, waiting, patience, gone)
        self._claims, self._late = claims, late

    def _check_claimed(
        self,
        late: Mapping[str, None],
        waiting: Mapping[str, JobSpec],
        patience: Mapping[str, float],
        gone: Mapping[str, JobSpec],
    ) -> None:
        for key in late:
            job = waiting[key]
            late_from_s = job.enqueued_at_s + patience[key] + self._hold_s + ROUNDING_S
            for other in gone.values() if key in self._late else ():
                passes = self._is_plain(other) and other.band == job.band
                require(
                    not passes or other.enqueued_at_s <= late_from_s,
                    f"{other.key} overtook {key}, which is late, and no room is kept for that",
                )

    def _check_kept(
        self,
        claim: ClaimView,
        job: JobSpec,
        late_from_s: float,
        gone: Mapping[str, JobSpec],
        dispatched: Sequence[Dispatch],
    ) -> None:
        for order in dispatched:
            other = gone.get(order.key)
            if order.worker != claim.worker or other is None:
                continue
            binds = other.enqueued_at_s > late_from_s + ROUNDING_S and other.band >= job.band
            require(not binds, f"{other.key} took {claim.worker}, which is kept for {claim.key}")

    def _check_goes(
        self, scheduler: Scheduler, claim: ClaimView, job: JobSpec, worker: WorkerView | None
    ) -> None:
        if worker is None or not self._is_plain(job) or job.band not in ONLINE_BANDS:
            return
        is_empty = not worker.inflight_jobs and not worker.kv_base_tokens
        is_open = worker.ready and not worker.draining and not worker.held_off
        waits = is_empty and is_open and worker.phase == "live" and worker.breaker == "closed"
        if waits:
            lacks = self._lacks_room(scheduler, claim.key)
            require(not lacks, f"{claim.key} waits for {claim.worker}, which is empty")

    def _is_plain(self, job: JobSpec) -> bool:
        return job.deadline_at_s is None and not job.adapter and job.key not in self._failed

    @staticmethod
    def _lacks_room(scheduler: Scheduler, key: str) -> bool:
        why = scheduler.views.why(key)
        return why is not None and not why.leased and why.held_by is HeldBy.ROOM

    def _slowest_tokens_s(self, workers: Mapping[str, WorkerView]) -> float:
        """Tell the slowest prefill rate that the mind may go by."""
        rates = [one.prefill_tokens_s for one in workers.values() if one.prefill_tokens_s]
        return min(self._prefill_tokens_s, *rates, math.inf)

    def _patience_s(self, job: JobSpec, prefill_tokens_s: float) -> float:
        """Tell for how long others may go first."""
        credit = self._order.wait_credit
        return job.prompt_tokens / prefill_tokens_s / credit if credit else math.inf
