"""Streams and consumers on a real server: what it ignores, refuses or has no room for."""

import asyncio
from pathlib import Path

import pytest

from broker.bus.base import (
    BusError,
    ConsumerSpec,
    LinkDown,
    Message,
    NoStore,
    NoStream,
    StreamSpec,
)
from broker.bus.nats import NatsBus, connect
from broker.bus.nats_wire import Credentials
from broker.service.config import default_config
from broker.service.reload import declare
from ops.chaos.proxy import Proxy
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import (
    CONSUMER,
    STREAM,
    SUBJECT,
    Heard,
    a_consumer,
    a_stream,
    listening,
    pulling,
)


class TestTopologyTraps:
    """Servers that ignore, and consumers that forget."""

    async def test_reset_without_the_command(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On a server before 2.14 a reset is a recreation under the same name, settings kept."""
        monkeypatch.setattr("broker.bus.nats_streams.RESET_VERSION_MIN", (99,))
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer(ack_wait_s=33.0, max_ack_pending=7))
        await nats_bus.append(SUBJECT, b"")
        puller = await pulling(nats_bus)
        await puller.heard.count(1)
        await nats_bus.reset_consumer(STREAM, CONSUMER)
        await puller.heard.count(2)
        config = (await nats_bus._streams.ask(f"CONSUMER.INFO.{STREAM}.{CONSUMER}")).config
        assert (config["ack_wait"], config["max_ack_pending"]) == (33_000_000_000, 7)

    async def test_setting_that_cannot_change_is_named(self, nats_bus: NatsBus) -> None:
        """A stream that stands with another retention is an error, not a surprise."""
        await nats_bus.ensure_stream(a_stream(work_queue=False))
        with pytest.raises(BusError, match=STREAM):
            await nats_bus.ensure_stream(a_stream())

    async def test_stream_without_room_on_disk(self) -> None:
        """A bound that the server can't set aside is an error that says what to do."""
        with NatsServer(options=ServerOptions(max_file="1MB")) as server:
            bus = await connect(server.url, name="t")
            with pytest.raises(BusError, match="max_file"):
                await bus.ensure_stream(a_stream(max_bytes=2_000_000))
            await bus.close()

    async def test_account_without_streams(self) -> None:
        """Where JetStream is not enabled, that is what is said, and `server_info` still answers."""
        accounts = "accounts { A { users: [{user: a, password: b}] } }"
        with NatsServer(options=ServerOptions(extra=accounts)) as server:
            bus = await connect(server.url, name="t", credentials=Credentials("a", "b"))
            with pytest.raises(NoStream):
                await bus.ensure_stream(a_stream())
            assert not (await bus.server_info()).jetstream
            await bus.close()

    async def test_forbidden_subject_is_counted_and_the_link_stands(self) -> None:
        """A refusal by permission ends nothing."""
        users = (
            "authorization { users: [{user: a, password: b, permissions: "
            '{ publish: ["ok", "_INBOX.>"], subscribe: ["ok", "_INBOX.>"] }}] }'
        )
        with NatsServer(options=ServerOptions(extra=users)) as server:
            bus = await connect(server.url, name="t", credentials=Credentials("a", "b"))
            heard = await listening(bus, "ok")
            await listening(bus, "secret")
            await bus.publish("secret", b"")
            await bus.publish("ok", b"")
            await heard.count(1)
            assert (bus.counts["link_errors"], bus.counts["links_lost"]) == (2, 0)
            await bus.close()

    async def test_walk_over_large_messages(self, nats_bus: NatsBus) -> None:
        """More bytes than the server sends at once are read in several goes."""
        await nats_bus.ensure_stream(a_stream())
        for number in range(20):
            await nats_bus.append(SUBJECT, bytes([number]) * 700_000)
        seen = [item.data[0] async for item in nats_bus.messages(STREAM)]
        assert seen == list(range(20))

    async def test_walk_over_a_lost_link(self, bus: NatsBus, proxy: Proxy) -> None:
        """A walk that is cut off says so; nothing waits for ever."""
        await bus.ensure_stream(a_stream())
        for _ in range(300):
            await bus.append(SUBJECT, b"")
        walk = aiter(bus.messages(STREAM))
        for _ in range(256):
            await anext(walk)
        proxy.freeze()
        more = asyncio.ensure_future(anext(walk))
        await asyncio.sleep(0.01)
        proxy.cut()
        with pytest.raises(LinkDown):
            await more

    async def test_all_settings_stand_on_the_server(self, nats_bus: NatsBus) -> None:
        """New settings reach the server, whatever the client's classes know of."""
        spec = StreamSpec(
            "FULL", ("full.>",), allow_msg_ttl=True, allow_atomic=True, max_msgs_per_subject=1
        )
        await nats_bus.ensure_stream(spec)
        config = (await nats_bus._streams.ask("STREAM.INFO.FULL")).config
        assert (config["allow_msg_ttl"], config["allow_atomic"]) == (True, True)
        with pytest.raises(BusError):
            await nats_bus.ensure_consumer(ConsumerSpec("FULL", "bad name", "full.x"))

    async def test_subjects_beyond_one_page(self, nats_bus: NatsBus) -> None:
        """Counts per subject are complete beyond the 100,000 that the server tells at once."""
        subjects = 100_050
        await nats_bus.ensure_stream(StreamSpec("R", ("r.*",), file_storage=False))
        for number in range(subjects):
            await nats_bus.publish(f"r.{number}", b"")
        await nats_bus.append("r.0", b"", timeout_s=30)
        counts = await nats_bus.subject_counts("R")
        assert (len(counts), counts["r.0"]) == (subjects, 2)

    async def test_handler_slower_than_its_messages(self, nats_bus: NatsBus) -> None:
        """What waits behind a handler is bounded: the newest beyond it is dropped and counted."""
        gate = asyncio.Event()
        seen: Heard[bytes] = Heard()

        async def handler(message: Message) -> None:
            await gate.wait()
            seen(message.data)

        await nats_bus.subscribe("slow", handler)
        (subscriber,) = nats_bus._subscribers
        subscriber._pending_messages_max = 5
        for number in range(10):
            await nats_bus.publish("slow", b"%d" % number)
        await nats_bus.rtt_s()
        gate.set()
        assert await seen.count(6) == [b"%d" % number for number in range(6)]
        assert nats_bus.counts["messages_dropped"] == 4


async def test_a_server_that_can_make_no_files_says_what_to_look_at(tmp_path: Path) -> None:
    """A full disk, told by the server as "error creating store" and no more (here: no folder)."""
    with NatsServer(tmp_path / "server") as server:
        bus = await connect(server.url, name="test")
        try:
            # Where the server would put its streams stands a file: no folder can be made there.
            place = tmp_path / "server" / "jetstream" / "$G"
            place.mkdir(parents=True)
            (place / "streams").write_bytes(b"")
            with pytest.raises(NoStore) as caught:
                await declare(bus, default_config(lanes=["acme"], models=["tiny"]))
        finally:
            await bus.close()
    told = str(caught.value)
    assert "the disk of its store_dir is full, or it may not write there; its log names" in told
    assert "All streams of this configuration may grow to 29.25 GiB" in told
