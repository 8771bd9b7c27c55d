"""What must hold whatever happens: the mind is watched step by step, beside the truth of the world.

The watcher keeps its own list of jobs that the leader knows, from what it was told and what it
decided, and looks into every agent. It reads no private state of the mind.
"""

import math
from collections.abc import Sequence

from broker.core.admission import PRESSURE_ROW
from broker.core.blame import is_ended
from broker.core.decisions import (
    Abort,
    Cancel,
    DeadLetter,
    Decision,
    Difference,
    DifferenceKind,
    Dispatch,
    Drained,
    DrainOrder,
    Expire,
    FailStream,
    Probe,
    Queued,
    Reject,
    Release,
    WorkerGone,
)
from broker.core.events import (
    CancelRequested,
    DispatchAllowed,
    DrainRequested,
    Event,
    JobHeld,
    JobSpec,
    LinkChanged,
    WorkerReported,
)
from broker.sim.books import WAIT_S_MAX, check_books
from broker.sim.mind import TICK_S, MindRouter
from broker.sim.overtaking import Overtaking
from broker.sim.scenario import Scenario
from broker.sim.violation import require
from broker.sim.world import World
from broker.wire.ids import BATCH_BAND
from broker.wire.messages import Attempt, Reason

RETRY_AFTER_S_MAX = 300.0
DISPATCHES_MAX = 64
"""Orders for one request. A lossy half-minute takes under twenty; a loop takes thousands."""
DECISIONS_MIN = 16
DECISIONS_PER_HEAD = 6
"""A step may decide this much for each job and worker known, and DECISIONS_MIN on top."""

LATE_S_MAX = 2 * TICK_S
"""Ticks find what is late; one may fall between a deadline and a dispatch."""

Terminal = Release | Reject | Expire | Cancel | DeadLetter | FailStream


class Checkers:
    """Watches one run; raises Violation at the first thing that must not be."""

    def __init__(self, scenario: Scenario, world: World) -> None:
        self._scenario = scenario
        self._world = world
        self.dispatches = 0
        self.steps = 0
        self._jobs: dict[str, JobSpec] = {}
        """All that ever were held, by any leader."""
        self._dispatched: dict[str, int] = {}
        self._wished: dict[str, None] = {}
        """Jobs whose end was asked for."""
        self._lead(0)

    def watch(self, router: MindRouter) -> None:
        """Begin."""
        self._router = router

    def _lead(self, epoch: int) -> None:
        """Forget what only the last leader knew."""
        self._epoch = epoch
        self._known: dict[str, None] = {}
        self._allowed = False
        self._link_up = True
        self._attempts = 0
        self._orders: dict[str, int] = {}
        self._gone: dict[str, int] = {}
        """By worker that was given up, the last attempt before that."""
        self._aborted: dict[tuple[str, Attempt], None] = {}
        self._stopped: dict[str, None] = {}
        """Jobs that it was told to stop."""
        self._drains: dict[str, None] = {}
        """Workers that an operator wants empty."""
        self._drained: dict[str, None] = {}
        """Workers that said so."""
        self._reports: dict[str, tuple[int, int]] = {}
        """By worker, the newest report: incarnation and sequence. One before it says nothing."""
        self._left: list[Dispatch] = []
        """Of this settling."""
        self._overtaking = Overtaking(self._scenario)

    # ---- each step -----------------------------------------------------------------------------

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """Check a step."""
        if self._router.epoch != self._epoch:
            self._lead(self._router.epoch)
        self.steps += 1
        if event is not None:
            self._hear(event)
        heads = len(self._known) + len(self._router.agents)
        bound = DECISIONS_MIN + DECISIONS_PER_HEAD * heads
        require(len(decisions) <= bound, f"{len(decisions)} decisions in one step")
        for decision in decisions:
            self._see(decision, at_s)
        self._overtaking.stepped(decisions)
        if event is not None and isinstance(event, WorkerReported):
            self._check_report(event, decisions)
        if event is None or decisions:
            self._check_known()
        if event is None:
            scheduler, left = self._router.scheduler, self._left
            waiting = sum(not scheduler.is_leased(key) for key in self._known)
            check_books(scheduler, self._scenario.policy, waiting, left)
            self._check_overtaking(left, at_s)
            self._left = []

    def _check_overtaking(self, left: Sequence[Dispatch], at_s: float) -> None:
        scheduler = self._router.scheduler
        waits = [key for key in self._known if not scheduler.is_leased(key)]
        waiting = {key: self._jobs[key] for key in waits if key in self._jobs}
        gone = {one.key: self._jobs[one.key] for one in left if one.key in self._jobs}
        self._overtaking.settled(scheduler, waiting, gone, left, at_s=at_s)

    def _check_known(self) -> None:
        """No job is forgotten that has not ended, and none is known that has."""
        scheduler = self._router.scheduler
        for key in self._jobs:
            known = scheduler.is_known(key)
            require(known == (key in self._known), f"{key}: known is {known}, should be the other")

    def _hear(self, event: Event) -> None:
        match event:
            case JobHeld(_, job):
                self._jobs[job.key] = job
                self._known[job.key] = None
            case CancelRequested(_, key):
                self._wished[key] = None
                if key in self._known:
                    self._stopped[key] = None
            case DrainRequested(_, worker, draining):
                if not draining:
                    self._drained.pop(worker, None)
                    self._drains.pop(worker, None)
                elif any(one.worker == worker for one in self._router.scheduler.views.workers()):
                    self._drains[worker] = None
            case WorkerReported(_, beat):
                number = (beat.incarnation, beat.sequence)
                is_new = number > self._reports.get(beat.worker, (-1, -1))
                if is_new:
                    self._reports[beat.worker] = number
                if is_new and not beat.draining and beat.worker not in self._drains:
                    self._drained.pop(beat.worker, None)
            case LinkChanged(_, up):
                self._link_up = up
            case DispatchAllowed():
                self._allowed = True
            case _:
                pass

    def _see(self, decision: Decision, at_s: float) -> None:
        match decision:
            case Dispatch():
                self._see_dispatch(decision, at_s)
            case Release() | Reject() | Expire() | Cancel() | DeadLetter() | FailStream():
                self._see_end(decision, at_s)
            case Abort():
                self._number(decision)
                self._aborted[decision.key, decision.attempt] = None
            case Probe() | DrainOrder():
                self._number(decision)
            case Difference(kind=DifferenceKind.RUNS_UNLEASED):
                self._see_adopted(decision)
            case Queued(key=key, position=position, wait_s=wait_s):
                require(0 <= position < len(self._jobs), f"{key} waits at place {position}")
                self._check_time(wait_s, f"{key} is told to wait")
            case Drained(worker=worker):
                self._see_drained(worker)
            case WorkerGone(worker=worker, cause=cause):
                if cause != "restarted":
                    self._reports.pop(worker, None)  # It may return in the same life.
                self._gone[worker] = self._attempts
                self._drains.pop(worker, None)
                self._drained.pop(worker, None)
            case _:
                pass

    # ---- reports -------------------------------------------------------------------------------

    def _see_adopted(self, found: Difference) -> None:
        ours = found.detail.startswith(f"attempt {self._epoch}.")
        message = f"{found.key}, {found.detail}, was given up here, and is taken back"
        require(found.key in self._known or not ours, message)
        self._known[found.key] = None

    def _check_report(self, event: WorkerReported, decisions: Sequence[Decision]) -> None:
        """A report of a new life ends the old one, and whoever runs twice is told to stop."""
        beat = event.heartbeat
        for view in self._router.scheduler.views.workers():
            if view.worker == beat.worker:
                new = view.incarnation >= beat.incarnation
                require(new, f"{beat.worker} reports a new life, and is still known by the old one")
        stopped = [one.key for one in decisions if isinstance(one, Abort)]
        for one in decisions:
            match one:
                case Difference(
                    kind=DifferenceKind.RUNS_TWICE | DifferenceKind.STALE_ATTEMPT, key=key
                ):
                    require(key in stopped, f"{key} runs where it must not, and is not stopped")
                case _:
                    pass

    # ---- dispatches ----------------------------------------------------------------------------

    def _see_dispatch(self, order: Dispatch, at_s: float) -> None:
        key, worker = order.key, order.worker
        self._number(order)
        self.dispatches += 1
        count = self._dispatched[key] = self._dispatched.get(key, 0) + 1
        require(count <= DISPATCHES_MAX, f"{key} was dispatched {count} times")
        require(key in self._known, f"{key} was dispatched, and had ended")
        require(key not in self._stopped, f"{key} was dispatched, and was to be stopped")
        require(self._allowed and self._link_up, f"{key} was dispatched before it could be")
        require(worker not in self._drains, f"{key} was dispatched to {worker}, which drains")
        attempt = order.attempt
        require(
            attempt.epoch == self._epoch and attempt.number > self._attempts,
            f"attempt {attempt} of {key} is not a new one",
        )
        self._check_time(order.explanation.predicted_ttft_s, f"{key}'s first token is predicted")
        self._check_time(order.explanation.queue_s, f"{key}'s queue is predicted")
        self._check_deadline(key, at_s)
        self._check_alone(order)
        self._attempts = attempt.number
        self._left.append(order)

    def _check_deadline(self, key: str, at_s: float) -> None:
        """No worker's time is spent for nobody; a job that has its record costs none."""
        job = self._jobs.get(key)
        if job is None or job.deadline_at_s is None or _index(key) not in self._world.open:
            return
        late_s = at_s - job.deadline_at_s
        require(late_s <= LATE_S_MAX, f"{key} was dispatched {late_s:.2f} s after its deadline")

    def _check_alone(self, order: Dispatch) -> None:
        """No engine runs the job under an attempt that this leader gave and has not given up."""
        for name, agent in self._router.agents.items():
            run = agent.runs.get(order.key)
            if run is None or run.attempt.epoch != self._epoch:
                continue
            is_given_up = run.attempt.number <= self._gone.get(name, -1)
            require(
                is_given_up or (order.key, run.attempt) in self._aborted,
                f"{order.key} was dispatched to {order.worker}, and {name} runs it",
            )

    def _number(self, order: Dispatch | Abort | Probe | DrainOrder) -> None:
        last = self._orders.get(order.worker, 0)
        require(order.number > last, f"order {order.number} to {order.worker} comes after {last}")
        self._orders[order.worker] = order.number

    def _see_drained(self, worker: str) -> None:
        require(worker not in self._drained, f"{worker} was said to be drained twice")
        self._drained[worker] = None
        view = next(one for one in self._router.scheduler.views.workers() if one.worker == worker)
        require(view.draining, f"{worker} was said to be drained, and does not drain")

    # ---- ends ----------------------------------------------------------------------------------

    def _see_end(self, end: Terminal, at_s: float) -> None:
        require(end.key in self._known, f"{end.key} ended twice: {type(end).__name__}")
        del self._known[end.key]
        match end:
            case Reject():
                self._check_rejected(end)
            case Expire(key=key, reason=reason):
                self._check_expired(key, reason, at_s)
            case Cancel(key=key):
                require(key in self._wished, f"{key} was cancelled, and nobody asked for it")
            case DeadLetter(key=key, failures=failures):
                leases = self._scenario.policy.leases
                true = failures and is_ended(failures, leases)
                require(true, f"{key} became a dead letter after {len(failures)} failures")
            case FailStream(key=key):
                job = self._jobs[key]
                may = job.streamed and not job.restart_visible
                require(may, f"{key} was failed as a stream, and is none")
            case Release(key=key):
                require(
                    _index(key) not in self._world.open, f"{key} was released without its record"
                )

    def _check_rejected(self, end: Reject) -> None:
        job = self._jobs[end.key]
        if end.reason is Reason.DEADLINE_INFEASIBLE:
            true = job.deadline_at_s is not None and end.used > end.limit
        elif job.band == BATCH_BAND:
            ratio = self._scenario.policy.pressure.release_ratio
            true = end.row == PRESSURE_ROW and end.used >= ratio * end.limit
        else:
            bounded = any(row.queued_jobs_max for row in self._scenario.policy.quotas)
            true = end.reason is Reason.QUEUE_FULL and bounded
        require(true, f"{end.key} was rejected for {end.reason}")
        self._check_time(end.retry_after_s, f"{end.key} is told to try again")

    def _check_expired(self, key: str, reason: Reason, at_s: float) -> None:
        job = self._jobs[key]
        wait_s_max = self._scenario.policy.bands[job.band].wait_s_max
        if reason is Reason.DEADLINE_EXPIRED:
            late = job.deadline_at_s is not None and at_s >= job.deadline_at_s
        else:
            late = wait_s_max is not None and at_s >= job.enqueued_at_s + wait_s_max
        require(late, f"{key} expired early ({reason})")

    def _check_time(self, seconds: float, says: str) -> None:
        fine = math.isfinite(seconds) and 0 <= seconds <= WAIT_S_MAX
        require(fine, f"{says} {seconds} s")

    # ---- the end of a run ----------------------------------------------------------------------

    def check_over(self) -> None:
        """All has ended, once; nothing is counted any more; every drained worker said so."""
        world, router = self._world, self._router
        require(not world.open, f"{len(world.open)} requests never ended")
        for key in self._known:
            require(False, f"{key} ended, and the mind still holds it: {self._why(key)}")  # noqa: FBT003 - The list is what must be empty.
        for name, agent in router.agents.items():
            require(not agent.runs, f"{name} still runs {list(agent.runs)}")
            model = agent.host.model
            require(model.running + model.waiting == 0, f"the engine of {name} is not empty")
        workers = {view.worker: view for view in router.scheduler.views.workers()}
        for name, view in workers.items():
            require(name in router.agents, f"{name} is lost, and still known")
            told = name in self._drained
            require(not view.draining or told, f"{name} is drained, and was not said to be")
        for name in router.agents:
            require(name in workers, f"{name} reports, and is not known")

    def is_over(self) -> bool:
        """Say whether all has ended, at the mind too."""
        world = self._world
        busy = any(agent.runs for agent in self._router.agents.values())
        return world.ended_count == len(world.requests) and not self._known and not busy

    def left(self) -> str:
        """Say what still holds the first few jobs that did not end."""
        keys = [*self._known][:3]
        return "; ".join(self._why(key) for key in keys) or f"{len(self._world.open)} at no leader"

    def _why(self, key: str) -> str:
        why = self._router.scheduler.views.why(key)
        if why is None:
            return f"{key} is not known"
        where = f"leased to {why.worker}" if why.leased else f"waits, held by {why.held_by}"
        return f"{key} {where} {why.row}".rstrip()


def _index(key: str) -> int:
    """Return the number of a job's request."""
    return int(key.split(".j")[1])
