"""The modelled agent: it answers, echoes and reports as a real one does."""

from collections.abc import Sequence

import pytest

from broker.core.decisions import Decision, Dispatch, Explanation, HeldBy, Resync
from broker.core.events import Event, JobSpec, WorkerReported
from broker.core.policy import LanePolicy, Policy
from broker.engine_model.profile import Profile
from broker.sim.agent import ENGINE_START_S, FINISHED_MAX, Agent
from broker.sim.host import Host
from broker.sim.mind import MODEL, MindRouter
from broker.sim.network import Network
from broker.sim.world import sequence_request
from broker.wire.messages import Answer, Attempt, CacheSummary, Kind, Outcome, Reason, Usage
from broker.wire.prefix import unpack_hashes
from tests.unit.sim.worlds import BY_HAND, a_profile, a_request, a_world

EXPLAINED = Explanation("first_token", (), "", 0, 0.0, 0.0, HeldBy.NOTHING)


def an_agent(profile: Profile = BY_HAND) -> Agent:
    """Return an agent that has reported its empty cache."""
    agent = Agent(Host(0, profile, journal=True), models=(MODEL,), incarnation=7)
    agent.heartbeat(at_s=0.0)
    return agent


def an_order(
    job: str = "j0", *, number: int = 1, epoch: int = 1, attempt: int = 1, hit_tokens: int = 0
) -> Dispatch:
    """Return an order to run a job."""
    return Dispatch(
        key=job,
        worker="w0",
        attempt=Attempt(epoch, attempt),
        number=number,
        stream_sequence=1,
        predicted_hit_tokens=hit_tokens,
        enqueued_at_s=0.0,
        failures=(),
        run_s_max=600.0,
        stall_s=60.0,
        explanation=EXPLAINED,
    )


def a_job(key: str = "j0") -> JobSpec:
    """Return a job."""
    return JobSpec(key, "main", 1, MODEL, prompt_tokens=100, output_tokens_max=8)


def give(agent: Agent, order: Dispatch, *, at_s: float = 0.0) -> Answer:
    """Give an order."""
    return agent.take(order, a_request(), a_job(order.key), at_s=at_s)


def compute(agent: Agent, *blocks: int, index: int = 0, at_s: float) -> None:
    """Let the engine answer a prompt of these blocks, to its end."""
    request = a_request(index, blocks=blocks, prompt_tokens=len(blocks) * 100 + 1)
    agent.host.model.submit(sequence_request(request), at_s)
    agent.host.model.advance(at_s + 10.0)


def added(summary: CacheSummary | None) -> set[int]:
    """Return what a summary adds."""
    assert summary is not None
    return set(unpack_hashes(summary.added))


# ---- orders --------------------------------------------------------------------------------------


def test_an_order_is_accepted_and_echoed() -> None:
    """The next report echoes the last order processed, and lists the run."""
    agent = an_agent()
    assert give(agent, an_order(number=3, hit_tokens=60)) is Answer.ACCEPTED
    beat = agent.heartbeat(at_s=1.0)
    assert (beat.epoch, beat.echo) == (1, 3)
    (entry,) = beat.inflight
    assert (entry.key, entry.attempt, entry.cached_tokens) == ("j0", Attempt(1, 1), 60)
    assert not entry.prefilled


def test_the_echo_never_goes_back() -> None:
    """An order that was overtaken is refused as busy and leaves the echo where it is."""
    agent = an_agent()
    assert give(agent, an_order("j0", number=5)) is Answer.ACCEPTED
    assert give(agent, an_order("j1", number=4)) is Answer.BUSY
    assert agent.heartbeat(at_s=1.0).echo == 5
    assert set(agent.runs) == {"j0"}


def test_a_job_that_runs_is_a_duplicate() -> None:
    """The second order for it is told so, whatever its number, and runs nothing."""
    agent = an_agent()
    give(agent, an_order(number=1))
    assert give(agent, an_order(number=2, attempt=2)) is Answer.DUPLICATE
    assert give(agent, an_order(number=1)) is Answer.DUPLICATE
    assert agent.runs["j0"].attempt == Attempt(1, 1)
    assert agent.heartbeat(at_s=1.0).echo == 2


def test_no_more_runs_than_slots() -> None:
    """With all slots taken it is busy, until one ends."""
    agent = an_agent(a_profile(slots=1))
    assert give(agent, an_order("j0", number=1)) is Answer.ACCEPTED
    assert give(agent, an_order("j1", number=2)) is Answer.BUSY
    agent.end("j0", kind=Kind.COMPLETED, usage=Usage(), at_s=1.0)
    assert give(agent, an_order("j1", number=3), at_s=1.0) is Answer.ACCEPTED


def test_a_draining_agent_takes_nothing_new() -> None:
    """It says so, keeps what it runs, and reports it."""
    agent = an_agent()
    give(agent, an_order("j0", number=1))
    agent.draining = True
    assert give(agent, an_order("j1", number=2)) is Answer.DRAINING
    beat = agent.heartbeat(at_s=1.0)
    assert beat.draining
    assert [entry.key for entry in beat.inflight] == ["j0"]


def test_an_old_leader_is_refused() -> None:
    """Once a new epoch is known, orders of an older one are stale, and the echo starts anew."""
    agent = an_agent()
    give(agent, an_order("j0", number=9, epoch=1))
    assert give(agent, an_order("j1", number=1, epoch=2)) is Answer.ACCEPTED
    assert give(agent, an_order("j2", number=10, epoch=1)) is Answer.STALE_EPOCH
    beat = agent.heartbeat(at_s=1.0)
    assert (beat.epoch, beat.echo) == (2, 1)
    agent.learn(1)
    assert agent.epoch == 2


def test_an_engine_that_died_is_busy_until_it_serves_again() -> None:
    """What ran comes back as lost, to be tried again; a second later orders are taken."""
    agent = an_agent()
    give(agent, an_order("j0", number=1))
    give(agent, an_order("j1", number=2))
    died = agent.engine_died(at_s=2.0)
    assert [(f.key, f.outcome, f.reason) for f in died] == [
        ("j0", Outcome.RETRY, Reason.WORKER_LOST),
        ("j1", Outcome.RETRY, Reason.WORKER_LOST),
    ]
    assert give(agent, an_order("j2", number=3), at_s=2.5) is Answer.BUSY
    assert not agent.heartbeat(at_s=2.5).ready
    back_s = 2.0 + ENGINE_START_S
    assert agent.heartbeat(at_s=back_s).ready
    assert give(agent, an_order("j2", number=4), at_s=back_s) is Answer.ACCEPTED


# ---- notes and reports ---------------------------------------------------------------------------


def test_first_tokens_and_ends_say_what_happened() -> None:
    """TTFT and run time count from the order's arrival; what was cached is as the engine says."""
    agent = an_agent()
    give(agent, an_order(hit_tokens=60), at_s=1.0)
    note = agent.first_token("j0", cached_tokens=40, at_s=1.5)
    assert (note.worker, note.incarnation, note.key) == ("w0", 7, "j0")
    assert (note.ttft_s, note.cached_tokens) == (0.5, 40)
    (entry,) = agent.heartbeat(at_s=1.6).inflight
    assert (entry.prefilled, entry.cached_tokens) == (True, 40)
    end = agent.end("j0", kind=Kind.COMPLETED, usage=Usage(100, 40, 5), at_s=3.0)
    assert (end.outcome, end.kind, end.run_s) == (Outcome.SETTLED, Kind.COMPLETED, 2.0)
    assert not agent.runs


def test_an_end_is_told_again_in_one_report() -> None:
    """The next heartbeat repeats ends; the one after doesn't."""
    agent = an_agent()
    give(agent, an_order())
    end = agent.end("j0", kind=Kind.COMPLETED, usage=Usage(), at_s=1.0)
    assert agent.heartbeat(at_s=1.0).finished == (end,)
    assert agent.heartbeat(at_s=2.0).finished == ()


def test_ends_that_wait_are_bounded() -> None:
    """A report carries no more than its limit of ends."""
    agent = an_agent()
    for number in range(1, FINISHED_MAX + 3):
        give(agent, an_order(number=number))
        agent.fail("j0", Reason.STALLED)
    assert len(agent.heartbeat(at_s=1.0).finished) == FINISHED_MAX


def test_reports_are_numbered_and_say_the_load() -> None:
    """Sequence rises by one; slots, memory and the rate of prefill are the profile's."""
    agent = an_agent()
    agent.host.model.submit(sequence_request(a_request()), 0.0)
    agent.host.model.advance(0.05)
    beat = agent.heartbeat(at_s=0.05)
    assert (beat.worker, beat.incarnation, beat.sequence) == ("w0", 7, 2)
    assert (beat.slots, beat.load.running, beat.load.waiting) == (4, 1, 0)
    assert beat.load.kv_tokens_max == BY_HAND.kv_tokens_max
    assert beat.load.kv_tokens_used == 100
    assert beat.load.prefill_tokens_s == 1000.0


def test_the_rate_of_decoding_is_what_answers_show_between_prefills() -> None:
    """A step of 10 ms while nothing is prefilled; nothing is said where nothing was seen."""
    agent = an_agent()
    engine = agent.host.model
    engine.submit(sequence_request(a_request(0, output_tokens=60)), 0.0)
    engine.advance(0.2)  # 90 ms of decoding: too little.
    assert agent.heartbeat(at_s=0.2).load.decode_tokens_s == 0.0
    engine.submit(sequence_request(a_request(1, prompt_tokens=900, output_tokens=60)), 0.3)
    engine.advance(1.4)
    assert agent.heartbeat(at_s=1.4).load.decode_tokens_s == pytest.approx(100.0)
    assert agent.heartbeat(at_s=1.4).load.decode_tokens_s == 0.0


def test_a_new_engine_is_seen_from_its_start() -> None:
    """What the one before it decoded is not taken from what this one did."""
    agent = an_agent()
    for life in range(2):
        request = a_request(life, output_tokens=60)
        agent.host.model.submit(sequence_request(request), 0.0)
        agent.host.model.advance(10.0)
        assert agent.heartbeat(at_s=10.0).load.decode_tokens_s == pytest.approx(100.0)
        agent.host.restart()


# ---- cache summaries -----------------------------------------------------------------------------


def test_the_first_summary_is_full_then_only_changes_are_told() -> None:
    """Full and empty at first; then what was stored since; nothing where nothing changed."""
    agent = Agent(Host(0, BY_HAND, journal=True), models=(MODEL,), incarnation=1)
    first = agent.heartbeat(at_s=0.0).summary
    assert first is not None
    assert (first.full, first.sequence, added(first)) == (True, 1, set())
    compute(agent, 1, 2, index=0, at_s=0.0)
    second = agent.heartbeat(at_s=10.0).summary
    assert second is not None
    assert (second.full, second.sequence, added(second)) == (False, 2, {1, 2})
    assert agent.heartbeat(at_s=11.0).summary is None


def test_evicted_blocks_are_told_as_removed() -> None:
    """A cache of 400 tokens that held blocks 1 to 3 and then 4 to 6 tells which are gone."""
    agent = an_agent(a_profile(kv_tokens_max=400))
    compute(agent, 1, 2, 3, index=0, at_s=0.0)
    agent.heartbeat(at_s=10.0)
    compute(agent, 4, 5, 6, index=1, at_s=10.0)
    summary = agent.heartbeat(at_s=20.0).summary
    assert summary is not None
    assert added(summary) == {4, 5, 6}
    gone = set(unpack_hashes(summary.removed))
    assert gone
    assert gone == {1, 2, 3} - set(agent.host.model.kv.blocks())


def test_a_full_summary_lists_all_that_is_there() -> None:
    """Asked for, the next one is full; it stands for the changes that were not told yet."""
    agent = an_agent()
    compute(agent, 1, 2, index=0, at_s=0.0)
    agent.heartbeat(at_s=10.0)
    compute(agent, 3, index=1, at_s=10.0)
    agent.ask_full()
    full = agent.heartbeat(at_s=20.0).summary
    assert full is not None
    assert (full.full, added(full), len(full.removed)) == (True, {1, 2, 3}, 0)
    assert agent.heartbeat(at_s=21.0).summary is None


class Watching:
    """Notes the summaries that reach the mind, and when it asks for a full one."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, bool]] = []
        """Sequence; whether it was full; whether a full one was asked for then."""

    def stepped(self, event: Event | None, decisions: Sequence[Decision], at_s: float) -> None:
        """Note one."""
        del at_s
        if isinstance(event, WorkerReported) and (summary := event.heartbeat.summary) is not None:
            asks = any(isinstance(decision, Resync) for decision in decisions)
            self.seen.append((summary.sequence, summary.full, asks))


def test_a_gap_leads_to_a_full_summary() -> None:
    """A summary behind a lost one makes the mind ask, and the next that it sees is full."""
    requests = [
        a_request(n, n * 0.5, blocks=(10 * n, 10 * n + 1), prompt_tokens=201) for n in range(20)
    ]
    world = a_world(*requests, journal=True)
    policy = Policy(models=(MODEL,), lanes=(LanePolicy(name="main"),))
    watching = Watching()
    network = Network(lost_ratio=0.4)
    world.run(MindRouter(world, policy, seed=3, network=network, observer=watching))
    sequences = [sequence for sequence, _, _ in watching.seen]
    assert sequences == sorted(sequences)
    gaps = 0
    for before, now, after in zip(
        watching.seen, watching.seen[1:], watching.seen[2:], strict=False
    ):
        is_gap = now[0] > before[0] + 1 and not now[1]
        assert now[2] is is_gap
        assert after[1] is is_gap or after[0] > now[0] + 1
        gaps += is_gap
    assert gaps
