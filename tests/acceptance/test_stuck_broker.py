"""A broker whose loop stands still for ever: another leads, and the process ends itself."""

import asyncio
import sys

from broker.service.loop_watch import EXIT_STUCK
from broker.wire.messages import Kind
from producers.client import Client
from tests.acceptance.audit import Audit, all_completed
from tests.acceptance.conftest import StartCluster

LANE = "online"
JOBS = 8
STUCK_S_MAX = 6.0
"""More than the leader's key lives, so that the standby leads before the end."""


async def test_a_stuck_broker_is_followed_and_ends_itself(start_cluster: StartCluster) -> None:
    """Its key runs out, its jobs are served by the standby; its log says what held it, and a
    supervisor sees exit code 5 instead of a process that never ends.
    """
    cluster, bus = await start_cluster()
    file = cluster.folder / "inferlane.toml"
    text = file.read_text()
    assert "leader_ttl_s = 2.0" in text
    file.write_text(text.replace("[policy]", f"loop_stuck_s_max = {STUCK_S_MAX}\n\n[policy]", 1))
    audit = await Audit(bus).begin()
    place = "request:1:after:work."
    command = (sys.executable, "-m", "tests.crashing_broker", place, str(file), "stuck")
    stuck = cluster.add("broker-stuck", command)
    await stuck.start()
    await cluster.members["broker-1"].stop()
    standby = cluster.add_broker("broker-2", file)
    await standby.start()
    async with Client(bus, lane=LANE) as client, asyncio.timeout(40):
        request = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        tickets = [await client.submit({**request, "max_tokens": 20}, band=2) for _ in range(JOBS)]
        kinds = {(await ticket.result()).kind for ticket in tickets}
        assert await stuck.ended() == EXIT_STUCK
    assert kinds == {Kind.COMPLETED}
    await audit.until_empty(LANE)
    all_completed(await audit.records(LANE), [ticket.job_id for ticket in tickets])
    assert audit.reruns == 0
    log = stuck.log.read_text()
    assert "loop.stalled" in log
    assert "tests/crashing" in log  # In the stack of what held it.
