"""The server is killed under load: nothing acknowledged is lost, and all goes on by itself."""

import asyncio
from dataclasses import dataclass, field

import pytest

from broker.bus import nats_pull
from broker.bus.base import (
    BusError,
    Delivery,
    LinkDown,
    NoStream,
    StreamSpec,
    Timeout,
    WrongSequence,
)
from broker.bus.nats import NatsBus, connect
from ops.chaos.proxy import Proxy
from ops.nats.server import NatsServer
from tests.buses import CONSUMER, STREAM, SUBJECT, a_consumer, a_stream, pulling, until
from tests.servers import Connections

KILLS = 3


@dataclass
class Work:
    """Appends jobs, and ends each that arrives: record first, then ack."""

    bus: NatsBus
    stored: dict[str, int] = field(default_factory=dict[str, int])
    acked: set[int] = field(default_factory=set[int])
    arrived: asyncio.Queue[Delivery] = field(default_factory=asyncio.Queue[Delivery])
    deliveries: int = 0

    async def produce(self, stop: asyncio.Event) -> None:
        """Append under ids, each again until its word came."""
        number = 0
        while not stop.is_set():
            number += 1
            name = f"job-{number}"
            while name not in self.stored:
                try:
                    appended = await self.bus.append(
                        SUBJECT, name.encode(), message_id=name, timeout_s=2
                    )
                    self.stored[name] = appended.sequence
                except (LinkDown, NoStream, Timeout):
                    await asyncio.sleep(0.02)

    def take(self, batch: list[Delivery]) -> None:
        """Hear of deliveries."""
        self.deliveries += len(batch)
        for delivery in batch:
            self.arrived.put_nowait(delivery)

    async def finish(self, pull: nats_pull.NatsPull) -> None:
        """Record and acknowledge, as an agent does; what fails comes again."""
        while True:
            delivery = await self.arrived.get()
            subject = f"results.acme.{delivery.data.decode()}"
            try:
                await self.bus.append(
                    subject, delivery.data, expected_last_subject_sequence=0, timeout_s=2
                )
            except WrongSequence:
                pass
            except BusError:
                pull.release()
                continue
            try:
                await self.bus.ack(delivery.ack_subject, timeout_s=2)
                self.acked.add(delivery.sequence)
            except BusError:
                pass
            pull.release()


@pytest.mark.timeout(60)
async def test_kill_under_load_loses_nothing(nats_server: NatsServer, nats_bus: NatsBus) -> None:
    """Every job whose append was answered has exactly one record in the end, kill -9 or not."""
    await nats_bus.ensure_stream(a_stream(max_msgs_per_subject=100_000))
    await nats_bus.ensure_stream(
        StreamSpec("RESULTS_acme", ("results.acme.*",), max_msgs_per_subject=1, allow_msg_ttl=True)
    )
    # A message whose ack was cut off is not answered for as long as the ack-wait.
    await nats_bus.ensure_consumer(a_consumer(ack_wait_s=1.0))
    work, stop = Work(nats_bus), asyncio.Event()
    pull = await nats_bus.pull(STREAM, CONSUMER, work.take, window=200)
    async with asyncio.TaskGroup() as group:
        producer = group.create_task(work.produce(stop))
        finishers = [group.create_task(work.finish(pull)) for _ in range(32)]
        for kill in range(KILLS):
            before = len(work.acked)
            await until(lambda before=before: len(work.acked) >= before + 300)
            nats_server.kill()
            await until(lambda: not nats_bus.connected)
            nats_server.start()
            await until(lambda kill=kill: nats_bus.counts["links_rebuilt"] == kill + 1)
        stop.set()
        await producer
        await until(lambda: _empty(nats_bus))
        for finisher in finishers:
            finisher.cancel()
    assert len(set(work.stored.values())) == len(work.stored)
    records = {
        message.subject.removeprefix("results.acme."): message.data.decode()
        async for message in nats_bus.messages("RESULTS_acme")
    }
    assert records == {name: name for name in work.stored}
    assert nats_bus.outstanding == 0


async def test_acknowledged_before_the_kill_stays_acknowledged(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """An ack that was answered survives a kill -9 in the same instant."""
    await nats_bus.ensure_stream(a_stream())
    await nats_bus.ensure_consumer(a_consumer(ack_wait_s=1.0))
    for number in range(50):
        await nats_bus.append(SUBJECT, b"%d" % number)
    puller = await pulling(nats_bus, hold=True)
    await puller.heard.count(50)
    for delivery in puller.heard.items[:25]:
        await nats_bus.ack(delivery.ack_subject)
    nats_server.kill()
    await until(lambda: not nats_bus.connected)
    nats_server.start()
    await until(lambda: nats_bus.connected)
    assert puller.pull is not None
    puller.pull.release(50)
    await puller.heard.count(75)
    again = sorted(delivery.sequence for delivery in puller.heard.items[50:])
    assert again == list(range(26, 51))
    assert (await nats_bus.stream_state(STREAM)).messages == 25


async def test_append_answered_before_the_kill_is_there(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """Of a burst cut off by a kill -9: answered means stored, and no id is stored twice."""
    await nats_bus.ensure_stream(a_stream(max_msgs_per_subject=100_000))
    burst = [
        asyncio.ensure_future(nats_bus.append(SUBJECT, b"", message_id=f"j{number}"))
        for number in range(3000)
    ]
    await asyncio.wait(burst, return_when=asyncio.FIRST_COMPLETED)
    nats_server.kill()
    outcomes = await asyncio.gather(*burst, return_exceptions=True)
    answered = [index for index, one in enumerate(outcomes) if not isinstance(one, BaseException)]
    lost = [one for one in outcomes if isinstance(one, BaseException)]
    assert {type(one) for one in lost} <= {LinkDown}
    nats_server.start()
    await until(lambda: nats_bus.connected)
    for index in range(3000):
        appended = await nats_bus.append(SUBJECT, b"", message_id=f"j{index}")
        if index in answered:
            assert appended.duplicate
    assert (await nats_bus.stream_state(STREAM)).messages == 3000


async def test_pull_handed_from_one_to_the_next_hides_nothing(
    nats_bus: NatsBus, connections: Connections
) -> None:
    """Stopped again and again under load, a pull leaves no message to its ack-wait (60 s)."""
    await nats_bus.ensure_stream(a_stream(max_msgs_per_subject=100_000))
    await nats_bus.ensure_consumer(a_consumer(max_ack_pending=100_000))
    peer = await connections()
    seen: list[int] = []
    feeding = asyncio.ensure_future(_feed(nats_bus, 4000))
    async with asyncio.timeout(20):
        while len(seen) < 4000:
            puller = await pulling(peer, window=64)
            await asyncio.sleep(0.005)
            assert puller.pull is not None
            seen += [one.sequence for one in await puller.pull.stop()]
            seen += puller.sequences
    await feeding
    assert sorted(seen) == list(range(1, 4001))


async def test_stop_that_is_cancelled_gives_its_messages_at_the_next_call(
    nats_server: NatsServer, nats_bus: NatsBus
) -> None:
    """Case 33: cancel in stop loses nothing. What came meanwhile is returned by the next stop."""
    await nats_bus.ensure_stream(a_stream())
    await nats_bus.ensure_consumer(a_consumer())
    async with Proxy(nats_server.port) as proxy:
        bus = await connect(proxy.url, name="stops")
        puller = await pulling(bus)
        pull = puller.pull
        assert pull is not None
        await until(lambda: _waiting(nats_bus, 1))
        # The server does not hear of the stop, and delivers on the standing pull.
        proxy.freeze()
        stopping = asyncio.ensure_future(pull.stop())
        for _ in range(5):
            await nats_bus.append(SUBJECT, b"")
        await until(lambda: _ack_pending(nats_bus, 5))
        stopping.cancel()
        await asyncio.wait([stopping])
        assert stopping.cancelled()
        proxy.thaw()
        left = await pull.stop()
        assert (len(left), len(puller.sequences)) == (5, 0)
        assert await _waiting(nats_bus, 0)
        await bus.close()


async def _feed(bus: NatsBus, count: int) -> None:
    for _ in range(count // 20):
        await asyncio.gather(*(bus.append(SUBJECT, b"") for _ in range(20)))


async def _waiting(bus: NatsBus, pulls: int) -> bool:
    return (await bus.consumer_state(STREAM, CONSUMER)).waiting == pulls


async def _ack_pending(bus: NatsBus, messages: int) -> bool:
    return (await bus.consumer_state(STREAM, CONSUMER)).ack_pending == messages


async def _empty(bus: NatsBus) -> bool:
    try:
        return (await bus.stream_state(STREAM)).messages == 0
    except BusError:
        return False
