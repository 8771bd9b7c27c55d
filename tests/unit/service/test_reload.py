"""A new configuration under load: lanes and models come and go, and no message is an orphan."""

import asyncio
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.bus.base import BusError, LinkDown, NoStore, NotFound
from broker.core.policy import LanePolicy, Policy, QuotaRow
from broker.service import retiring as retiring_module
from broker.service.config import Config
from broker.service.reload import RELOADED, RESTARTED, merged
from broker.service.retiring import former_queues
from broker.wire import subjects
from broker.wire.codec import decode, encode
from broker.wire.ids import BANDS
from broker.wire.messages import Kind, LaneOffer, Reason
from broker.wire.subjects import CONFIG_BUCKET, JobAddress, lane_offer_key
from producers.client import Client
from producers.errors import UnknownModel
from producers.ticket import Ticket
from tests.agents import ScriptedEngine, a_fake_engine, an_answer
from tests.builders import LANE, MODEL, a_job
from tests.clusters import Cluster, Member, a_chat, a_cluster, until
from tests.crashing import Failing, faulty
from tests.leaders import OTHER_LANE, Desk, a_config, a_desk
from tests.unit.service.test_reconcile import kinds, reconcile

NEW_LANE = "gamma"
NEW_MODEL = "large"
MODELS = {MODEL: MODEL, NEW_MODEL: NEW_MODEL}
BOTH = (LanePolicy(name=LANE), LanePolicy(name=OTHER_LANE))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queues on their way out are looked at all the time."""
    monkeypatch.setattr(retiring_module, "LOOK_S", 0.01)


def with_policy(config: Config, **fields: object) -> Config:
    """The same with another policy."""
    return replace(config, policy=replace(config.policy, **fields))


async def reloaded(member: Member, config: Config) -> None:
    """Reload a leader, and wait until it counts."""
    member.broker.reload(config)
    await until(lambda: member.broker._config.policy == config.policy)


async def consumers(cluster: Cluster, stream: str) -> list[str]:
    """Names of a stream's consumers; none where there is no stream."""
    found = cluster.bus.server.streams.get(stream)
    return sorted(found.consumers) if found is not None else []


async def offered(cluster: Cluster, lane: str) -> LaneOffer | None:
    """What clients are told of a lane."""
    try:
        entry = await cluster.bus.kv_get(CONFIG_BUCKET, lane_offer_key(lane))
    except NotFound:
        return None
    return decode(entry.value, LaneOffer)


@dataclass
class Load:
    """A lane's jobs, one after the other, while something else happens."""

    cluster: Cluster
    kinds: list[Kind] = field(default_factory=list[Kind])
    stopping: bool = False

    async def run(self) -> None:
        """Submit until told to stop; each must end."""
        async with self.cluster.client(client_id="load") as client:
            while not self.stopping:
                ticket = await client.submit(a_chat(), band=2)
                self.kinds.append((await ticket.result(raise_for_kind=False)).kind)


async def ended(ticket: Ticket) -> tuple[Kind, Reason | None]:
    """How a job ended."""
    async with asyncio.timeout(15):
        record = await ticket.result(raise_for_kind=False)
    return record.kind, record.reason


async def test_lanes_and_models_come_and_go_under_load(tmp_path: Path) -> None:
    """What is new serves at once, what is old ends, and a lane beside them notices nothing."""
    async with a_cluster(tmp_path, workers=0) as cluster:
        engine = a_fake_engine(models=tuple(MODELS))
        await cluster.start_worker("w1", engine=engine, models=MODELS)
        member, before = cluster.members[0], cluster.config
        load = Load(cluster)
        async with asyncio.TaskGroup() as group:
            group.create_task(load.run())
            lanes = (*BOTH, LanePolicy(name=NEW_LANE))
            more = with_policy(before, models=(MODEL, NEW_MODEL), lanes=lanes)
            await reloaded(member, more)
            async with cluster.client(lane=NEW_LANE) as client:
                ticket = await client.submit({**a_chat(), "model": NEW_MODEL}, band=3)
                assert await ended(ticket) == (Kind.COMPLETED, None)
            async with cluster.client(client_id="c2") as client:
                ticket = await client.submit({**a_chat(), "model": NEW_MODEL}, band=1)
                assert await ended(ticket) == (Kind.COMPLETED, None)
            await reloaded(member, before)
            await until(lambda: not member.leader.retiring.leaving)
            await until(lambda: f"JOBS_{NEW_LANE}" not in cluster.bus.server.streams)
            count = len(load.kinds)
            await until(lambda: len(load.kinds) > count)
            load.stopping = True
        assert set(load.kinds) == {Kind.COMPLETED}
        assert await consumers(cluster, f"JOBS_{LANE}") == ["b0-tiny", "b1-tiny", "b2-tiny"]
        assert f"BATCH_{NEW_LANE}" not in cluster.bus.server.streams
        assert f"RESULTS_{NEW_LANE}" in cluster.bus.server.streams
        assert await offered(cluster, NEW_LANE) is None
        assert not next(iter(member.metrics._troubles.differences.collect())).samples


async def _waits_and_runs(client: Client, engine: ScriptedEngine) -> tuple[Ticket, Ticket]:
    runs = await client.submit({**a_chat(), "model": NEW_MODEL}, band=2, job_id="runs")
    await until(lambda: "runs" in engine.running)
    return runs, await client.submit({**a_chat(), "model": NEW_MODEL}, band=2, job_id="waits")


async def test_what_waits_in_a_removed_queue_is_refused_and_what_runs_ends(
    tmp_path: Path,
) -> None:
    """The consumer stays until the last message is gone; a client that asks again is told."""
    engine = ScriptedEngine(slots=1)
    engine.models = (MODEL, NEW_MODEL)
    lanes = (LanePolicy(name=LANE), LanePolicy(name=OTHER_LANE, models=(MODEL,)))
    policy = {"models": (MODEL, NEW_MODEL), "lanes": lanes}
    async with a_cluster(tmp_path, workers=0, policy=policy) as cluster, cluster.client() as client:
        await cluster.start_worker("w1", engine=engine, models=MODELS)
        member = cluster.members[0]
        runs, waits = await _waits_and_runs(client, engine)
        await reloaded(member, with_policy(cluster.config, models=(MODEL,)))
        assert await ended(waits) == (Kind.REJECTED, Reason.UNKNOWN_MODEL)
        await until(lambda: len(member.leader.retiring.leaving) == 1)
        assert await consumers(cluster, f"JOBS_{LANE}") == [
            *("b0-tiny", "b1-tiny", "b2-large", "b2-tiny")
        ]
        with pytest.raises(UnknownModel):
            await client.submit({**a_chat(), "model": NEW_MODEL}, band=2)
        engine.say("runs", an_answer())
        assert await ended(runs) == (Kind.COMPLETED, None)
        await until(lambda: not member.leader.retiring.leaving)
        assert "b2-large" not in await consumers(cluster, f"JOBS_{LANE}")
        await cluster.until_empty()


async def test_the_next_leader_finishes_what_the_last_one_began(tmp_path: Path) -> None:
    """A queue on its way out is found by its messages, whoever leads."""
    engine = ScriptedEngine(slots=1)
    engine.models = (MODEL, NEW_MODEL)
    policy = {"models": (MODEL, NEW_MODEL)}
    async with a_cluster(tmp_path, workers=0, policy=policy) as cluster, cluster.client() as client:
        await cluster.start_worker("w1", engine=engine, models=MODELS)
        first, narrow = cluster.members[0], with_policy(cluster.config, models=(MODEL,))
        runs, waits = await _waits_and_runs(client, engine)
        second = await cluster.start_broker("b2")
        second.broker.reload(narrow)
        await first.kill()
        await second.ready()
        assert await ended(waits) == (Kind.REJECTED, Reason.UNKNOWN_MODEL)
        engine.say("runs", an_answer())
        assert await ended(runs) == (Kind.COMPLETED, None)
        await until(lambda: not second.leader.retiring.leaving)
        assert "b2-large" not in await consumers(cluster, f"JOBS_{LANE}")


async def test_a_removed_lane_that_comes_back_keeps_its_jobs(tmp_path: Path) -> None:
    """Taken back before its streams were gone."""
    engine = ScriptedEngine(slots=1)
    async with a_cluster(tmp_path, engine=engine) as cluster, cluster.client() as client:
        member = cluster.members[0]
        runs = await client.submit(a_chat(), band=2, job_id="runs")
        await until(lambda: "runs" in engine.running)
        await reloaded(member, with_policy(cluster.config, lanes=(LanePolicy(name=OTHER_LANE),)))
        gone = await offered(cluster, LANE)
        assert gone is not None
        assert gone.models == ()
        await reloaded(member, cluster.config)
        assert not member.leader.retiring.leaving
        later = await client.submit(a_chat(), band=2, job_id="later")
        for job_id in ("runs", "later"):
            engine.say(job_id, an_answer())
        assert await ended(runs) == await ended(later) == (Kind.COMPLETED, None)


async def test_a_configuration_that_the_server_refuses_changes_nothing(tmp_path: Path) -> None:
    """It is told in the log, and the next try counts."""
    refusing = Failing("ensure_consumer", BusError("no room"))
    async with a_cluster(tmp_path, brokers=0) as cluster:
        member = await cluster.start_broker("b1")
        await member.ready()
        leader = member.leader
        leader._bus = faulty(leader._bus, refusing)
        more = with_policy(cluster.config, lanes=(*BOTH, LanePolicy(name=NEW_LANE)))
        member.broker.reload(more)
        await until(lambda: refusing.raised == 1)
        await asyncio.sleep(0)
        assert member.broker._config.policy == cluster.config.policy
        await reloaded(member, more)
        assert JobAddress(NEW_LANE, 2, MODEL) in leader.pulls.queues


async def test_a_reload_that_a_lost_leadership_cuts_short_is_finished_by_the_next(
    tmp_path: Path,
) -> None:
    """It was asked for, and nobody asks twice."""
    async with a_cluster(tmp_path, workers=0) as cluster:
        member = cluster.members[0]
        leader = member.leader
        more = with_policy(cluster.config, lanes=(*BOTH, LanePolicy(name=NEW_LANE)))
        async with leader.retiring.still:
            member.broker.reload(more)
            member.link.disconnect()
            await until(lambda: member.broker.leadership is not leader)
        member.link.reconnect()
        await member.ready()
        assert JobAddress(NEW_LANE, 2, MODEL) in member.leader.pulls.queues
        assert (await offered(cluster, NEW_LANE)) is not None


async def test_a_standby_takes_what_it_will_lead_with(tmp_path: Path) -> None:
    """It touches nothing at the server until then."""
    async with a_cluster(tmp_path, brokers=2, workers=0) as cluster:
        first, second = cluster.members
        lanes = (*BOTH, LanePolicy(name=NEW_LANE))
        second.broker.reload(with_policy(cluster.config, lanes=lanes))
        assert f"JOBS_{NEW_LANE}" not in cluster.bus.server.streams
        await first.kill()
        await second.ready()
        assert (await offered(cluster, NEW_LANE)) is not None
        assert JobAddress(NEW_LANE, 0, MODEL) in second.leader.pulls.queues


async def test_a_standby_with_another_file_shuts_no_door(tmp_path: Path) -> None:
    """Started by mistake with one lane less: the leader's lanes are served as before."""
    async with a_cluster(tmp_path) as cluster:
        less = with_policy(cluster.config, lanes=(LanePolicy(name=OTHER_LANE),))
        await cluster.start_broker("b2", config=less)
        gone = await offered(cluster, LANE)
        assert gone is not None
        assert gone.models == (MODEL,)
        async with cluster.client() as client:
            ticket = await client.submit(a_chat(), band=2)
            assert await ended(ticket) == (Kind.COMPLETED, None)


async def test_a_broker_started_with_another_file_refuses_nobodys_jobs(tmp_path: Path) -> None:
    """It leads now, and lacks a lane and a model: what waits there waits, until it is told."""
    policy = {"models": (MODEL, NEW_MODEL)}
    async with a_cluster(tmp_path, workers=0, policy=policy) as cluster, cluster.client() as client:
        waits = await client.submit(a_chat(), band=2)
        async with cluster.client(lane=OTHER_LANE) as other:
            large = await other.submit(a_chat(model=NEW_MODEL), band=2)
        less = with_policy(cluster.config, lanes=(LanePolicy(name=OTHER_LANE),), models=(MODEL,))
        second = await cluster.start_broker("b2", config=less)
        await cluster.members[0].kill()
        await second.ready()
        retiring = second.leader.retiring
        large_queues = tuple(f"{OTHER_LANE}.{band}.{NEW_MODEL}" for band in BANDS)
        assert retiring.lacking == (LANE, *large_queues)
        unserved = {JobAddress(LANE, 2, MODEL), JobAddress(OTHER_LANE, 2, NEW_MODEL)}
        assert set(await retiring.find()) == unserved
        assert await retiring.look()
        assert retiring.leaving == ()
        watch = second.broker.watchdogs
        watch.look()
        trouble = {view.name: view.trouble for view in watch.views()}["file"]
        assert f"{LANE}, {OTHER_LANE}.0.{NEW_MODEL}" in trouble
        assert (await offered(cluster, LANE)) is not None
        assert waits.record is None
        second.broker.reload(less)
        assert await ended(waits) == (Kind.REJECTED, Reason.UNKNOWN_MODEL)
        async with asyncio.timeout(15), cluster.client(lane=OTHER_LANE) as other:
            record = await other.find_record(large.job_id)
            while record is None:
                await asyncio.sleep(0.01)
                record = await other.find_record(large.job_id)
        assert record.reason is Reason.UNKNOWN_MODEL
        await until(lambda: f"JOBS_{LANE}" not in cluster.bus.server.streams)


async def test_a_standby_with_another_file_changes_nothing_and_says_so(tmp_path: Path) -> None:
    """It lacks a model, and keeps results for a minute: the leader's clients notice nothing."""
    policy = {"models": (MODEL, NEW_MODEL)}
    async with a_cluster(tmp_path, policy=policy) as cluster:
        results = subjects.results_stream(LANE)
        before = (await cluster.bus.stream_state(results)).age_s_max
        less = with_policy(cluster.config, models=(MODEL,), quotas=(QuotaRow(queued_jobs_max=1),))
        less = replace(less, streams=replace(less.streams, results_age_s_max=60.0))
        second = await cluster.start_broker("b2", config=less)
        watch = second.broker.watchdogs
        await second.broker.file_watch.look()
        await second.broker.file_watch.look()
        watch.look()
        trouble = {view.name: view.trouble for view in watch.views()}["file"]
        assert "policy.models, policy.quotas, streams.results_age_s_max" in trouble
        offer = await offered(cluster, LANE)
        assert offer is not None
        assert offer.models == (MODEL, NEW_MODEL)
        assert (await cluster.bus.stream_state(results)).age_s_max == before
        async with cluster.client() as client:
            assert (await client.submit(a_chat(model=NEW_MODEL), band=2)).job_id
        # Told to go, they go when it leads.
        second.broker.reload(less)
        await cluster.members[0].kill()
        await second.ready()
        assert (await cluster.bus.stream_state(results)).age_s_max == 60.0
        await second.broker.file_watch.look()
        assert second.broker.file_watch.different == ()
        offer = await offered(cluster, LANE)
        assert offer is not None
        assert offer.models == (MODEL,)


async def test_a_leader_started_with_another_file_closes_no_empty_queue(tmp_path: Path) -> None:
    """What it lacks may hold nothing just now: jobs are taken as before, and wait."""
    policy = {"models": (MODEL, NEW_MODEL)}
    async with a_cluster(tmp_path, policy=policy) as cluster:
        less = with_policy(
            cluster.config, models=(MODEL,), lanes=(LanePolicy(name=LANE, bands=(1, 2)),)
        )
        await cluster.members[0].kill()
        second = await cluster.start_broker("b2", config=less)
        await second.ready()
        unserved = {f"{LANE}.{band}.{MODEL}" for band in (0, 3)}
        unserved |= {f"{LANE}.{band}.{NEW_MODEL}" for band in BANDS}
        assert set(second.leader.retiring.lacking) == {OTHER_LANE, *unserved}
        async with cluster.client() as client:
            large = await client.submit(a_chat(model=NEW_MODEL), band=3)
            served = await client.submit(a_chat(), band=2)
            assert await ended(served) == (Kind.COMPLETED, None)
            assert await cluster.queued() == 1
            await reloaded(second, cluster.config)
            assert second.leader.retiring.lacking == ()
            assert large.record is None
            assert JobAddress(LANE, 3, NEW_MODEL) in second.leader.pulls.queues


async def test_a_takeover_with_the_same_file_declares_nothing_anew(tmp_path: Path) -> None:
    """A hundred queues would hold it up for a second; the mark says that they stand."""
    async with a_cluster(tmp_path, workers=0) as cluster:
        writing = Failing("kv_put", BusError("not to be written"), times=99, prefix=CONFIG_BUCKET)
        second = await cluster.start_broker("b2", fault=writing)
        await cluster.members[0].kill()
        await second.ready()
        assert writing.raised == 0


async def test_a_leader_whose_file_the_server_refuses_gives_way(tmp_path: Path) -> None:
    """It would hold the key for ever and serve nobody: another broker gets its chance."""
    async with a_cluster(tmp_path, workers=0) as cluster:
        refusing = Failing("ensure_consumer", NoStore("no room for it"), times=99)
        more = with_policy(cluster.config, lanes=(*BOTH, LanePolicy(name=NEW_LANE)))
        await cluster.start_broker("b2", fault=refusing, config=more)
        await cluster.members[0].stop()
        await until(lambda: refusing.raised > 0)
        third = await cluster.start_broker("b3")
        await third.ready()


async def test_quota_rows_count_from_the_reload_on(tmp_path: Path) -> None:
    """The mind takes the whole policy."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        member = cluster.members[0]
        row = QuotaRow(band=2, queued_jobs_max=0)
        await reloaded(member, with_policy(cluster.config, quotas=(row,)))
        ticket = await client.submit(a_chat(), band=2)
        kind, reason = await ended(ticket)
        assert (kind, reason) == (Kind.REJECTED, Reason.QUEUE_FULL)


def test_every_table_of_the_file_is_reloaded_or_needs_a_restart() -> None:
    """But for those of other programs, which a broker does not read."""
    others = ("worker", "producer", "gateway")
    assert sorted((*RELOADED, *RESTARTED, *others)) == sorted(Config.__struct_fields__)


def test_what_needs_a_restart_is_named_and_left() -> None:
    """Of `[nats]` and `[broker]` nothing is taken."""
    running = a_config()
    given = replace(
        a_config(http_port=1, leader_ttl_s=9.0),
        policy=Policy(models=("m",), lanes=(LanePolicy(name="l"),)),
        nats=replace(running.nats, replicas=3),
    )
    config, late = merged(running, given)
    assert late == ("nats.replicas", "broker.http_port", "broker.leader_ttl_s")
    assert (config.policy, config.broker, config.nats) == (
        given.policy,
        running.broker,
        running.nats,
    )


async def test_reconcile_takes_up_messages_that_have_no_consumer() -> None:
    """Counted as `orphaned`; each gets its record, and its queue is removed."""
    lanes = (LanePolicy(name=LANE), LanePolicy(name=OTHER_LANE))
    async with a_desk("closer", lanes=lanes, policy={"models": (MODEL,)}) as desk:
        stream = desk.bus.server.streams[f"JOBS_{LANE}"]
        names = (*stream.spec.subjects, subjects.jobs(LANE, 2, "old"))
        stream.change(changed(stream.spec, subjects=names))
        await desk.bus.append(
            subjects.jobs(LANE, 2, "old"), encode(a_job(id="orphan", model="old"))
        )
        desk.allow()
        assert kinds(await reconcile(desk)) == [("orphaned", f"{LANE}.2.old")]
        assert desk.seen.differences == {"orphaned": 1}
        await until(lambda: _turned(desk) and bool(desk.seen.ended))
        ((record, _),) = desk.seen.ended
        assert (record.job, record.reason) == ("orphan", Reason.UNKNOWN_MODEL)
        assert await desk.leader.retiring.look()
        assert sorted(stream.consumers) == ["b0-tiny", "b1-tiny", "b2-tiny"]
        assert kinds(await reconcile(desk)) == []


def _turned(desk: Desk) -> bool:
    desk.turn()
    return True


async def test_more_streams_than_are_looked_into_at_once_are_all_looked_into() -> None:
    """STREAMS_AT_ONCE_MAX bounds the burst; one trouble is told as itself, for who tries again."""
    lanes = tuple(
        LanePolicy(name=f"l{number}") for number in range(retiring_module.STREAMS_AT_ONCE_MAX)
    )
    async with a_desk(lanes=lanes) as desk:
        for lane in lanes:
            stream = desk.bus.server.streams[f"BATCH_{lane.name}"]
            subject = subjects.jobs(lane.name, 3, "old")
            stream.change(changed(stream.spec, subjects=(*stream.spec.subjects, subject)))
            await desk.bus.append(subject, b"job")
        found = await former_queues(desk.bus, desk.config)
        assert list(found) == [JobAddress(lane.name, 3, "old") for lane in lanes]
        desk.link.disconnect()
        with pytest.raises(LinkDown):
            await former_queues(desk.link, desk.config)
