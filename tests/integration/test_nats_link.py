"""The link on a real server: each trap of client and network that it was built around."""

import asyncio

import pytest

from broker.bus import nats_link, nats_wire
from broker.bus.base import (
    BusError,
    LinkDown,
    Timeout,
)
from broker.bus.nats import NatsBus, connect
from ops.chaos.proxy import Proxy
from tests.buses import (
    listening,
    until,
)
from tests.servers import Connections, publish_until_down, relinked


class TestReaderDies:
    """An error callback that raises kills the client's reader while `is_connected` stays true."""

    async def test_dead_reader_is_a_lost_link(self, nats_bus: NatsBus) -> None:
        """When the reading task ends, whatever ended it, the link is made anew."""
        reading = nats_bus._link.wire._reading_task
        assert reading is not None
        reading.cancel()
        await relinked(nats_bus)
        await nats_bus.rtt_s()

    async def test_garbage_from_the_server(self, bus: NatsBus, proxy: Proxy) -> None:
        """Bytes that are no NATS protocol end the wire, not the bus."""
        heard = await listening(bus, "news")
        proxy.inject(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await relinked(bus)
        await bus.publish("news", b"still here")
        await heard.count(1)

    async def test_what_is_sent_as_the_link_is_cut_is_no_fault_of_ours(
        self, nats_bus: NatsBus
    ) -> None:
        """It goes down with the link; no handler failed (chaos: a traceback for every cut)."""
        writer = getattr(nats_bus._link.wire._transport, "_io_writer")  # noqa: B009 - the client's own
        writer.transport.abort()
        await nats_bus.publish("news", b"lost")
        await relinked(nats_bus)
        assert nats_bus.counts["handler_errors"] == 0
        await nats_bus.rtt_s()

    async def test_trouble_that_cannot_even_be_printed(self, nats_bus: NatsBus) -> None:
        """The client's error callback never raises."""

        class Awkward(Exception):
            def __str__(self) -> str:
                raise RuntimeError

        await nats_bus._link.wire._note_trouble(Awkward())
        await nats_bus.rtt_s()

    async def test_late_pong(self, bus: NatsBus, proxy: Proxy) -> None:
        """A PONG whose waiter gave up is ignored; the stock client's reader dies of it."""
        proxy.freeze()
        with pytest.raises(Timeout):
            await bus.rtt_s(timeout_s=0.05)
        proxy.thaw()
        await bus.rtt_s()
        assert bus.counts["links_lost"] == 0

    async def test_silent_server_is_a_lost_link(
        self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A link that stands while the server says nothing is given up, and made anew."""
        monkeypatch.setattr(nats_link, "WATCH_INTERVAL_S", 0.1)
        bus = await connect(proxy.url, name="watched")
        told: list[bool] = []
        bus.on_link(told.append)
        proxy.freeze()
        await until(lambda: not bus.connected)
        proxy.thaw()
        await relinked(bus)
        assert told == [False, True]
        await bus.close()

    async def test_one_late_answer_is_no_lost_link(
        self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Half a silence, as of a busy moment, is no reason to give a link up."""
        monkeypatch.setattr(nats_link, "WATCH_INTERVAL_S", 0.2)
        bus = await connect(proxy.url, name="watched")
        for _ in range(4):
            proxy.freeze()
            await asyncio.sleep(0.1)
            proxy.thaw()
            await bus.rtt_s()
        assert bus.counts["links_lost"] == 0
        await bus.close()


class TestClosedForGood:
    """Headers over `max_payload` close the client for good; so does any protocol error."""

    async def test_oversize_that_slips_through(self, nats_bus: NatsBus) -> None:
        """A connection that the server closed on an error is made anew."""
        heard = await listening(nats_bus, "news")
        nats_bus._link.wire.put(b"PUB news 99999999\r\n")
        await relinked(nats_bus)
        await nats_bus.publish("news", b"")
        await heard.count(1)

    async def test_oversize_headers_are_refused_before_sending(self, nats_bus: NatsBus) -> None:
        """The server never sees them."""
        with pytest.raises(BusError):
            await nats_bus.publish("news", b"", headers={"Long": "x" * 9_000_000})
        await nats_bus.rtt_s()
        assert nats_bus.counts["links_lost"] == 0

    @pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a..b", ".a", "a.", "x" * 2000])
    async def test_subject_cannot_break_the_protocol(self, nats_bus: NatsBus, subject: str) -> None:
        """A subject that would break its line is refused, and the link stands."""
        with pytest.raises(BusError):
            await nats_bus.publish(subject, b"")
        with pytest.raises(BusError):
            await nats_bus.subscribe(subject, lambda _: None)
        await nats_bus.rtt_s()
        assert nats_bus.counts["links_lost"] == 0

    @pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A\n": "b"}, {"": "b"}, {"A:B": "c"}])
    async def test_header_cannot_break_the_protocol(
        self, nats_bus: NatsBus, headers: dict[str, str]
    ) -> None:
        """Nor can a header."""
        with pytest.raises(BusError):
            await nats_bus.publish("news", b"", headers=headers)


class TestNothingStale:
    """Orders buffered while the link is down go out late after a reconnect; ours never do."""

    async def test_what_was_under_way_at_the_loss(
        self, bus: NatsBus, proxy: Proxy, connections: Connections
    ) -> None:
        """Orders caught in a dying link never arrive; orders given after its return do."""
        worker = await connections()
        heard = await listening(worker, "work.w1")
        proxy.freeze()
        for _ in range(100):
            await bus.publish("work.w1", b"stale")
        proxy.cut()
        proxy.thaw()
        with pytest.raises(LinkDown):
            await publish_until_down(bus, "work.nobody", b"")
        await relinked(bus)
        await bus.publish("work.w1", b"fresh")
        await heard.count(1)
        assert [item.data for item in heard.items] == [b"fresh"]

    async def test_slow_server_is_noticed(
        self, bus: NatsBus, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What waits for a server that doesn't read is bounded by SEND_BYTES_MAX."""
        monkeypatch.setattr(nats_wire, "SEND_BYTES_MAX", 1_000_000)
        proxy.freeze()
        with pytest.raises(LinkDown, match="reads too slowly"):
            await publish_until_down(bus, "big", bytes(100_000))
        assert bus._link.wire.waiting_bytes <= 1_000_000
        proxy.thaw()
        await bus.rtt_s()
        await bus.publish("big", b"")


class TestFairness:
    """A busy publisher lets others run."""

    async def test_publisher_that_never_waits(self, nats_bus: NatsBus) -> None:
        """A loop of publishes and nothing else lets the loop run before a megabyte or two wait."""
        ran: list[int] = []
        asyncio.get_running_loop().call_soon(lambda: ran.append(nats_bus._link.wire._out_bytes))
        for _ in range(30):
            await nats_bus.publish("big", bytes(100_000))
        assert ran
        assert ran[0] < 1_500_000
