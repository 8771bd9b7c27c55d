"""Workers that come and go all the time, and a leader that knows what their caches hold at once."""

import asyncio
import random
from collections import Counter
from pathlib import Path

from msgspec.structs import replace

from broker.core.cache_router import CacheAwareRouter
from broker.service.leadership import Leadership
from broker.wire.messages import Kind
from tests.clusters import Cluster, Hand, a_chat, a_cluster, until
from tests.leaders import QUICK_LEASES

CHANGES = 150
"""Joins, and as many leaves."""

WORKERS_MAX = 4
PRODUCERS = 8

BLOCKS_MIN = 20
"""Of 256 bytes, in the prompt of case 9."""


async def left(hand: Hand) -> None:
    """Let a worker leave as on SIGTERM: what runs ends, its last heartbeat goes out."""
    hand.agent.leave()
    await asyncio.wait([hand.task])
    await hand.stop()


async def keep_busy(cluster: Cluster, kinds: Counter[Kind], stopping: asyncio.Event) -> None:
    """Submit jobs one after the other; each must end."""
    async with cluster.client(client_id=f"c{random.random()}".replace(".", "")) as client:
        while not stopping.is_set():
            ticket = await client.submit(a_chat(), band=2)
            kinds[(await ticket.result(raise_for_kind=False)).kind] += 1


async def changed(cluster: Cluster, kinds: Counter[Kind], rng: random.Random) -> None:
    """Let workers join and leave, or die, one after the other, while jobs end in between."""
    live: list[Hand] = []
    for number in range(CHANGES):
        if len(live) == WORKERS_MAX:
            hand = live.pop(rng.randrange(WORKERS_MAX))
            cluster.hands.remove(hand)
            await (hand.kill() if rng.random() < 1 / 3 else left(hand))
        live.append(await cluster.start_worker(f"w{number % (2 * WORKERS_MAX)}"))
        ended = kinds.total()
        await until(lambda ended=ended: kinds.total() > ended)


async def test_case_27_every_job_ends_while_workers_come_and_go(tmp_path: Path) -> None:
    """150 joins and leaves, a third of them deaths, some under names that were there before."""
    rng, kinds, stopping = random.Random(27), Counter[Kind](), asyncio.Event()
    leases = replace(QUICK_LEASES, failures_max=1000)
    async with a_cluster(
        tmp_path, workers=0, policy={"leases": leases}, leader_ttl_s=30.0
    ) as cluster:
        async with asyncio.TaskGroup() as group:
            for _ in range(PRODUCERS):
                group.create_task(keep_busy(cluster, kinds, stopping))
            await changed(cluster, kinds, rng)
            stopping.set()
        await cluster.until_empty()
        assert set(kinds) == {Kind.COMPLETED}
        assert len(await cluster.records()) == kinds.total()
        leader = cluster.members[0].leader
        await until(lambda: not len(leader.shelf))
        assert not leader.scheduler.leases()


async def test_case_9_a_new_leader_knows_what_the_caches_hold_with_the_first_reports(
    tmp_path: Path,
) -> None:
    """Its announcement asks each agent for a full summary, which comes at once."""
    async with a_cluster(tmp_path, workers=0) as cluster, cluster.client() as client:
        await cluster.start_worker("w1", heartbeat_s=60.0)
        prompt = "once upon a time " * 400
        ticket = await client.submit(a_chat(prompt), band=2)
        assert (await ticket.result()).kind is Kind.COMPLETED
        first = cluster.members[0]
        await until(lambda: _blocks(first.leader) > BLOCKS_MIN)
        blocks = _blocks(first.leader)
        await first.kill()
        second = await cluster.start_broker("b2")
        await second.ready()
        await until(lambda: _blocks(second.leader) >= blocks)


def _blocks(leader: Leadership) -> int:
    """Prefix blocks that a leader's index knows to be held."""
    router = leader.scheduler._mind.router
    assert isinstance(router, CacheAwareRouter)
    return router.index.entries_count
