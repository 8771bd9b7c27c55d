"""What somebody deleted at the server, under the feet of a broker that leads."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from broker.bus.base import BucketSpec, Message
from broker.bus.memory import MemoryBus
from broker.bus.memory_clock import ManualClock
from broker.service.election import Election
from broker.wire.codec import encode
from broker.wire.messages import Kind
from broker.wire.subjects import LEADER_BUCKET
from tests.builders import LANE
from tests.clusters import Cluster, a_chat, a_cluster, until
from tests.turns import until as until_turned

TTL_S = 5.0

STREAMS = ("JOBS", "BATCH", "RESULTS", "DLQ", "FILES")
BUCKETS = ("CONFIG", "ATTEMPTS", "USAGE", "BATCHES", "FILES")


async def lives(cluster: Cluster, *, band: int = 1) -> None:
    """A job is taken and ends."""
    async with cluster.client("later") as client, asyncio.timeout(15):
        record = await (await client.submit(a_chat(), band=band)).result()
    assert record.kind is Kind.COMPLETED
    await cluster.until_empty()


@pytest.mark.parametrize(
    "stream", [*(f"{kind}_{LANE}" for kind in STREAMS), *(f"KV_{name}" for name in BUCKETS)]
)
async def test_a_deleted_stream_is_made_anew_and_told(tmp_path: Path, stream: str) -> None:
    """At the next reconcile; it ended there with an error, for this lane and all others."""
    async with a_cluster(tmp_path) as cluster:
        reconciler = cluster.members[0].leader.reconciler
        await cluster.bus.delete_stream(stream)
        report = await reconciler.reconcile()
        assert ("stream_gone", stream) in [(one.kind, one.key) for one in report.differences]
        await lives(cluster)
        await lives(cluster, band=3)
        assert not (await reconciler.reconcile()).differences


@pytest.mark.parametrize("known_epoch", [0, 57])
async def test_a_server_that_lost_its_store_is_served_again(
    tmp_path: Path, known_epoch: int
) -> None:
    """All streams are gone, the leader's key first of all, and its revisions begin with 1 again:
    workers that know a later epoch would take no order.
    """
    async with a_cluster(tmp_path) as cluster:
        member, hand = cluster.members[0], cluster.hands[0]
        hand.agent.fence.learn(known_epoch)
        epoch = max(known_epoch, member.leader.term.epoch)
        cluster.bus.server.streams.clear()
        await until(lambda: not member.is_ready)
        await member.ready()
        assert member.leader.term.epoch > epoch
        await lives(cluster)


async def test_a_broker_that_knows_no_worker_yet_leads_with_a_later_epoch(tmp_path: Path) -> None:
    """It was started anew with the server: that its epoch is too low it hears only as it leads."""
    async with a_cluster(tmp_path) as cluster:
        cluster.hands[0].agent.fence.learn(57)
        await cluster.members[0].kill()
        cluster.bus.server.streams.clear()
        second = await cluster.start_broker("b2")
        second.broker.fleet._heard.clear()
        await until(lambda: second.is_ready and second.leader.term.epoch > 57)
        await lives(cluster)


async def test_the_keys_bucket_is_made_only_after_a_life_without_one() -> None:
    """A server that chooses a leader for it says the same, and for a moment only."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    made: list[float] = []

    async def make() -> None:
        made.append(clock.now_s())
        await bus.ensure_bucket(BucketSpec(name=LEADER_BUCKET))

    election = Election(bus, broker="b1", ttl_s=TTL_S, now=clock.now_s, make_bucket=make)
    winning = asyncio.create_task(election.win())
    await until_turned(lambda: election._no_bucket_since_s is not None)
    began_s = clock.now_s()
    while not winning.done():
        clock.advance(TTL_S / 10)
        await asyncio.sleep(0)
    assert made[0] >= began_s + TTL_S
    assert (await winning).epoch == 1


async def test_a_worker_that_comes_later_is_led_too(tmp_path: Path) -> None:
    """It was silent when the leader began, and would refuse all of its orders."""
    async with a_cluster(tmp_path) as cluster:
        member = cluster.members[0]
        later = member.leader.term.epoch + 56
        cluster.hands[0].agent.fence.learn(later)
        await until(lambda: member.is_ready and member.leader.term.epoch > later)
        await lives(cluster)


async def test_an_epoch_that_is_nonsense_unseats_nobody(tmp_path: Path) -> None:
    """One worker says what no leader can come after: that costs its own orders, no leadership."""
    async with a_cluster(tmp_path) as cluster:
        fleet = cluster.members[0].broker.fleet
        term = cluster.members[0].leader.term
        await until(lambda: bool(fleet._heard))
        heard = next(iter(fleet._heard.values())).heartbeat
        odd = encode(replace(heard, worker="odd", epoch=2**53))
        fleet._on_heartbeat(Message("", odd))
        assert fleet.newest_epoch <= term.epoch
        await lives(cluster)
        assert cluster.members[0].leader.term == term


@pytest.mark.parametrize(("known", "epoch"), [(0, 1), (1, 2), (57, 58)], ids=str)
async def test_an_epoch_is_beyond_what_workers_know(known: int, epoch: int) -> None:
    """Whatever the key's revision is."""
    clock = ManualClock()
    bus = MemoryBus(clock=clock)
    await bus.ensure_bucket(BucketSpec(name=LEADER_BUCKET))
    election = Election(bus, broker="b1", ttl_s=TTL_S, now=clock.now_s, known_epoch=lambda: known)
    assert (await election.win()).epoch == epoch
