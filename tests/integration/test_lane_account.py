"""Our own client in a lane's account, as the protocol's page sets it up."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from broker.bus import topology
from broker.bus.base import BusError
from broker.bus.nats import Credentials, NatsBus, connect
from broker.wire import subjects
from broker.wire.codec import encode
from broker.wire.messages import End, Kind, LaneOffer, TerminalRecord
from ops.nats.server import NatsServer
from producers.client import Client
from producers.config import NatsLink
from producers.errors import UnknownModel
from tests.builders import LANE, MODEL
from tests.clusters import a_chat, until
from tests.lane_accounts import PASSWORD, USER, a_server_of

OTHER = "beta"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncGenerator[NatsServer]:
    """Two lanes, one of them with an account."""
    with a_server_of(LANE, tmp_path) as running:
        yield running


@pytest.fixture
async def core(server: NatsServer) -> AsyncGenerator[NatsBus]:
    """The broker's side."""
    bus = await connect(server.url, name="core")
    plans = [topology.LanePlan(lane, (MODEL,), (1, 2, 3)) for lane in (LANE, OTHER)]
    await topology.apply(bus, topology.of(plans))
    for lane in (LANE, OTHER):
        offer = encode(LaneOffer(lane=lane, models=(MODEL,)))
        await bus.kv_put(subjects.CONFIG_BUCKET, subjects.lane_offer_key(lane), offer)
    yield bus
    await bus.close()


async def test_our_client_lives_in_a_lanes_account(server: NatsServer, core: NatsBus) -> None:
    """It reads its offer, submits, looks for its job, hears its end and reads its record."""
    link = NatsLink(url=server.url, user=USER, password=PASSWORD)
    record = TerminalRecord(job="j", lane=LANE, kind=Kind.COMPLETED, ended_at_s=1.0)
    async with Client.connect(lane=LANE, client_id="c", link=link) as client:
        assert client.offer is not None
        assert client.offer.models == (MODEL,)
        ticket = await client.submit(a_chat(), job_id="j")
        assert await client._watchdog.is_stored(ticket)
        assert await client.find_record("j") is None
        await core.append(subjects.result(LANE, "j"), encode(record))
        assert await client.find_record("j") == record
        end = encode(End(job="j", record=encode(record)))
        await core.publish(subjects.out(LANE, "c", "j"), end)
        assert await ticket.result(10) == record
        with pytest.raises(UnknownModel):
            await client.submit(a_chat(model="huge"))


async def test_a_lanes_account_reaches_nothing_of_another(
    server: NatsServer, core: NatsBus
) -> None:
    """Neither jobs, records, offers nor what is told there; nor may it write its own records."""
    credentials = Credentials(user=USER, password=PASSWORD)
    bus = await connect(server.url, name="tenant", credentials=credentials)
    heard: list[str] = []
    try:
        await core.append(subjects.result(OTHER, "j"), b"x")
        with pytest.raises(BusError):
            await bus.last_message(f"RESULTS_{OTHER}", subjects.result(OTHER, "j"))
        with pytest.raises(BusError):
            await bus.kv_get(subjects.CONFIG_BUCKET, subjects.lane_offer_key(OTHER))
        for subject in (subjects.jobs(OTHER, 1, MODEL), subjects.result(LANE, "forged")):
            with pytest.raises(BusError):
                await bus.append(subject, b"x", timeout_s=1.0)
        with pytest.raises(BusError):
            await bus.delete_message(f"JOBS_{LANE}", 1)
        for subject in ("out.>", "q.>", "results.>", "jobs.>", "dlq.>", "ctl.>", "$JS.>"):
            await bus.subscribe(subject, lambda message: heard.append(message.subject))
        await bus.rtt_s()
        for lane in (OTHER, LANE):
            await core.append(subjects.result(lane, "k"), b"x")
            await core.publish(subjects.out(lane, "c", "j"), b"x")
            await core.publish(subjects.queue_state(lane), b"x")
        await until(lambda: len(heard) == 2)
        assert heard == [subjects.out(LANE, "c", "j"), subjects.queue_state(LANE)]
    finally:
        await bus.close()
