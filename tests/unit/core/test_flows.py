"""Batches of one lane take turns."""

import random
from collections import Counter
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from broker.core.decisions import Dispatch
from broker.core.estimates import Estimates
from broker.core.events import DispatchAllowed, JobSpec, PolicyChanged
from broker.core.flows import FLOWS_FAIR_MAX, FLOWS_KEPT_MAX, FLOWS_OTHERS_MAX, Flows
from broker.core.lanes import DEBT_TOKENS_MAX
from broker.core.policy import Policy
from broker.core.pressure import Pressure
from broker.core.queues import LineEntry, Queue, Queues, Waiting
from broker.core.quotas import Quotas
from broker.core.routing import make_router
from broker.core.scheduler import Scheduler
from broker.core.windows import ESTIMATES_MAX, FLOWS_MAX
from broker.wire.ids import BATCH_BAND
from tests.unit.core.cluster import EPOCH, MODEL, Cluster, a_policy, a_spec, of, only

SLACK = 100.0
COST = 1000.0
_sequence = count(1)


def a_queue(policy: Policy | None = None) -> Queue:
    """A queue of batch."""
    policy = policy or a_policy()
    return Queues(policy, Quotas(policy.quotas)).queue(lane="acme", band=BATCH_BAND, model=MODEL)


QUEUE = a_queue()


def an_entry(client: str, *, due_at_s: float = 1e6, jobs_behind: int = 0) -> LineEntry:
    """A job of a client, younger than those made before."""
    sequence = next(_sequence)
    job = a_spec(
        f"{client}-{sequence}",
        client=client,
        band=BATCH_BAND,
        stream_sequence=sequence,
        jobs_behind=jobs_behind,
    )
    waiting = Waiting(
        job, QUEUE, 0.0, due_at_s=due_at_s, output_tokens_expected=1, work_tokens=COST
    )
    return (*waiting.place, waiting)


def filled(**jobs: int) -> Flows:
    """So many jobs of each client in line."""
    made = Flows()
    for client, many in jobs.items():
        for _ in range(many):
            made.enter(an_entry(client))
    return made


def served(line_up: Flows, rounds: int, *, cost: float = COST) -> list[str]:
    """Let the first of the least served client go, so often; say whose they were."""
    went: list[str] = []
    for _ in range(rounds):
        first = line_up.fair(slack_tokens=SLACK)[0][0]
        line_up.leave(first[:3], first[3].job.client)
        line_up.charge(first[3].job.client, cost, slack_tokens=SLACK)
        went.append(first[3].job.client)
    return went


def test_who_comes_later_gets_its_half_at_once() -> None:
    """Not the end of the large one, nor what that was served before, counts."""
    line_up = filled(large=500)
    served(line_up, 100)
    for _ in range(20):
        line_up.enter(an_entry("small"))
    went = served(line_up, 39)
    assert abs(Counter(went)["small"] - 20) <= 1
    assert set(served(line_up, 60)[3:]) == {"large"}


def test_turns_are_by_work_and_not_by_jobs() -> None:
    """Of two clients the one with jobs of four times the cost gets a quarter of the jobs."""
    line_up = filled(heavy=100, light=100)
    went: Counter[str] = Counter()
    for _ in range(50):
        first = line_up.fair(slack_tokens=SLACK)[0][0]
        client = first[3].job.client
        line_up.leave(first[:3], client)
        line_up.charge(client, 4 * COST if client == "heavy" else COST, slack_tokens=SLACK)
        went[client] += 1
    assert went == {"light": 40, "heavy": 10}


def test_what_a_job_did_not_cost_is_given_back() -> None:
    """A refund moves its client up, and a cost that was too low moves it down."""
    line_up = filled(a=5, b=5, c=5)
    assert served(line_up, 3) == ["a", "b", "c"]
    line_up.correct("c", -COST / 2)
    assert [one.client for one in line_up] == ["c", "a", "b"]
    line_up.correct("a", COST)
    assert [one.client for one in line_up] == ["c", "b", "a"]
    line_up.correct("stranger", COST)
    assert len(line_up) == 3


def test_the_fair_ones_are_those_within_the_slack() -> None:
    """So locality chooses between equals alone; then come the next ones."""
    line_up = filled(a=2, b=2, c=2)
    line_up.correct("b", SLACK)
    line_up.correct("c", SLACK + 1)
    lines = line_up.fair(slack_tokens=SLACK)
    assert [line[0][3].job.client for line in lines] == ["a", "b"]
    (other,) = line_up.others(slack_tokens=SLACK)
    assert other[0][3].job.client == "c"


def test_one_look_sees_a_bounded_number_of_clients() -> None:
    """However many there are; and it sees nobody where nobody waits."""
    line_up = filled(**{f"c{number}": 1 for number in range(200)})
    assert len(line_up.fair(slack_tokens=SLACK)) == FLOWS_FAIR_MAX
    assert len(line_up.others(slack_tokens=SLACK)) == FLOWS_OTHERS_MAX
    assert Flows().fair(slack_tokens=SLACK) == Flows().others(slack_tokens=SLACK) == []


def test_who_has_nothing_in_line_banks_nothing() -> None:
    """A client that sleeps while others are served is lifted to the least of them."""
    line_up = filled(a=1, b=500)
    served(line_up, 101)
    line_up.enter(an_entry("a"))
    assert Counter(served(line_up, 40))["a"] == 1


def test_who_comes_to_an_empty_line_is_not_ahead_of_who_left_it() -> None:
    """The last one's counter, charged for its last job, is where the next begins."""
    line_up = filled(a=1)
    served(line_up, 1, cost=50 * COST)
    for client in ("b", "a"):
        for _ in range(20):
            line_up.enter(an_entry(client))
    assert Counter(served(line_up, 20)) == {"a": 10, "b": 10}


def test_who_can_not_go_banks_a_bounded_debt() -> None:
    """While it stood in line and could not go, another was served without end."""
    line_up = filled(stuck=1000, other=1000)
    for _ in range(500):
        line_up.charge("other", COST, slack_tokens=SLACK)
    went = served(line_up, 200)
    assert went.index("other") <= (DEBT_TOKENS_MAX + SLACK) / COST + 2


def test_clients_that_left_are_forgotten_and_others_are_not() -> None:
    """Their number is bounded; one that waits keeps its line."""
    line_up = filled(waits=1)
    for number in range(FLOWS_KEPT_MAX + 50):
        entry = an_entry(f"gone-{number}")
        line_up.enter(entry)
        line_up.leave(entry[:3], entry[3].job.client)
    assert len(line_up._flows) == FLOWS_KEPT_MAX
    assert [one.client for one in line_up] == ["waits"]


def test_the_newest_job_says_how_many_are_behind() -> None:
    """Also where an older one is pulled after it."""
    line_up = Flows()
    older, newer = an_entry("a", jobs_behind=9), an_entry("a", jobs_behind=8)
    line_up.enter(newer)
    line_up.enter(older)
    assert [one.jobs_behind for one in line_up] == [8]


def test_a_place_is_told_by_turns() -> None:
    """Before a job go its client's, and as many of each other client's as there are."""
    line_up = filled(large=50)
    small = [an_entry("small") for _ in range(3)]
    for entry in small:
        line_up.enter(entry)
    told = [line_up.ahead_of(entry[:3], "small", jobs_in_line=53) for entry in small]
    assert told == [0, 2, 4]
    last = an_entry("large")
    line_up.enter(last)
    assert line_up.ahead_of(last[:3], "large", jobs_in_line=54) == 53


# ---- in the scheduler ----------------------------------------------------------------------------


def lines(batch: str, many: int, *, deadline_at_s: float, **fields: Any) -> list[JobSpec]:
    """Lines of a batch, in the order of their stream."""
    return [
        a_spec(
            f"{batch}-{number}",
            client=batch,
            band=BATCH_BAND,
            stream_sequence=next(_sequence),
            deadline_at_s=deadline_at_s,
            prompt_tokens=4000,
            **fields,
        )
        for number in range(many)
    ]


def went(cluster: Cluster, first: Dispatch, many: int) -> list[str]:
    """Let jobs run one after the other on the one slot; say of which batches they were."""
    found, dispatch = [], first
    for _ in range(many):
        dispatch = only(Dispatch, cluster.end(dispatch))
        found.append(dispatch.key.removeprefix("acme.").split("-")[0])
    return found


def a_running_cluster() -> tuple[Cluster, Dispatch]:
    """One worker of one slot, busy."""
    cluster = Cluster()
    cluster.join("w1", slots=1)
    return cluster, only(Dispatch, cluster.hold(a_spec("busy", band=BATCH_BAND)))


def test_a_small_batch_is_not_stuck_behind_a_large_one() -> None:
    """Handed in later, with a window that ends later, it has ended after twice its lines."""
    cluster, dispatch = a_running_cluster()
    cluster.hold(*lines("large", 200, deadline_at_s=cluster.at_s + 80_000))
    cluster.hold(*lines("small", 10, deadline_at_s=cluster.at_s + 80_100))
    found = went(cluster, dispatch, 30)
    last = max(number for number, batch in enumerate(found) if batch == "small")
    assert found.count("small") == 10
    assert last <= 2 * 10 + 4  # The slack is two jobs of this size.


def test_a_batch_whose_window_is_at_risk_goes_first() -> None:
    """What its runner has not published yet counts: forty lines would come in time."""
    cluster, dispatch = a_running_cluster()
    late = cluster.at_s + 3600
    cluster.hold(*lines("other", 100, deadline_at_s=cluster.at_s + 80_000))
    cluster.hold(*lines("late", 40, deadline_at_s=late, jobs_behind=100_000))
    cluster.tick(1.0)
    assert set(went(cluster, dispatch, 30)) == {"late"}


def test_a_batch_that_comes_in_time_presses_nobody() -> None:
    """The same without what is behind it: they take turns."""
    cluster, dispatch = a_running_cluster()
    cluster.hold(*lines("other", 100, deadline_at_s=cluster.at_s + 80_000))
    cluster.hold(*lines("early", 40, deadline_at_s=cluster.at_s + 3600))
    cluster.tick(1.0)
    assert 13 <= went(cluster, dispatch, 30).count("early") <= 17


def test_one_look_asks_a_bounded_number_of_batches() -> None:
    """Of more that are at risk, those whose windows end first are aged."""
    cluster, _ = a_running_cluster()
    for number in range(FLOWS_MAX + 8):
        deadline_at_s = cluster.at_s + 10 + number
        cluster.hold(*lines(f"b{number:02}", 1, deadline_at_s=deadline_at_s))
    cluster.tick(1.0)
    queue = cluster.scheduler._mind.queues.pool(MODEL).queues["acme", BATCH_BAND]
    assert aged_in(queue) == [f"b{number:02}" for number in range(ESTIMATES_MAX)]
    for _ in range(FLOWS_MAX // ESTIMATES_MAX):
        cluster.tick(0.05)
    assert aged_in(queue) == [f"b{number:02}" for number in range(FLOWS_MAX)]


def aged_in(queue: Queue) -> list[str]:
    """Whose lines stand one band up."""
    return [entry[3].job.client for entry in queue.aged]


def test_a_look_at_many_batches_takes_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step few are asked about, or the loop stood still; it goes round all the same, also
    where lanes are taken away in between.
    """
    asked: list[str] = []
    real = Estimates.wait_s

    def wait_s(self: Estimates, queue: Queue, *, position: int) -> float:
        asked.append(queue.lane)
        return real(self, queue, position=position)

    lanes = tuple(f"lane{number}" for number in range(12))
    cluster = Cluster(a_policy(lanes=lanes))
    cluster.join("w1", slots=1)
    for lane in lanes:
        for number in range(4):
            late_s = cluster.at_s + 80_000 + number
            jobs = lines(f"{lane}-{number}", 2, deadline_at_s=late_s)
            cluster.hold(*(replace(job, key=f"{lane}.{job.key}", lane=lane) for job in jobs))
    monkeypatch.setattr(Estimates, "wait_s", wait_s)
    monkeypatch.setattr(Pressure, "time_passed", lambda _: None)
    counts: list[int] = []
    for _ in range(12):
        before = len(asked)
        cluster.tick(0.05)
        counts.append(len(asked) - before)
    assert max(counts) == ESTIMATES_MAX
    assert counts.count(0) >= 4  # Done, before a second is over.
    assert set(asked) == set(lanes)
    cluster.tick(1.0)
    cluster.step(PolicyChanged(cluster.at_s, a_policy(lanes=lanes[:2])))
    asked.clear()
    cluster.wait(2.0)
    assert set(asked) == set(lanes[:2])


def test_a_batch_that_can_not_go_keeps_no_other_from_going() -> None:
    """No worker has the adapter that its lines want, and it is far behind: another's go."""
    policy = a_policy()
    cluster = Cluster(router=None, policy=policy)
    cluster.scheduler = Scheduler(
        policy, epoch=EPOCH, router=make_router(policy.routing), rng=random.Random(1)
    )
    cluster.step(DispatchAllowed(cluster.at_s))
    cluster.join("w1", slots=1)
    deadline_at_s = cluster.at_s + 80_000
    first = cluster.hold(*lines("short", 12, deadline_at_s=deadline_at_s))
    dispatch = of(Dispatch, first)[0]
    for _ in range(4):  # It gets ahead of the slack.
        dispatch = of(Dispatch, cluster.end(dispatch))[0]
    cluster.hold(*lines("odd", 5, deadline_at_s=deadline_at_s, adapter="nobody"))
    found = went(cluster, dispatch, 5)
    assert found == ["short"] * 5
