"""Each trap of the nats client and server that the bus was built around, on a real server."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from broker.bus import nats_link, nats_pull, nats_replies, nats_wire
from broker.bus.base import (
    BusError,
    ConsumerSpec,
    LinkDown,
    Message,
    NoStream,
    StreamFull,
    StreamSpec,
    Timeout,
)
from broker.bus.nats import NatsBus, connect
from broker.bus.nats_wire import Credentials, RefusedCredentials, Wire
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import (
    CONSUMER,
    PATIENCE_S,
    STREAM,
    SUBJECT,
    Heard,
    a_consumer,
    a_stream,
    listening,
    pulling,
    until,
)
from tests.proxy import Proxy
from tests.servers import Connections


@pytest.fixture
async def proxy(nats_server: NatsServer) -> AsyncIterator[Proxy]:
    """A breakable way to `nats_server`."""
    async with Proxy(nats_server.port) as one:
        yield one


@pytest.fixture
async def bus(proxy: Proxy) -> AsyncIterator[NatsBus]:
    """A bus that goes through the proxy."""
    one = await connect(proxy.url, name="through-proxy")
    yield one
    await one.close()


async def relinked(bus: NatsBus, times: int = 1) -> None:
    """Wait until the link was lost and made anew so many times."""
    await until(lambda: _holds(bus.counts["links_rebuilt"] >= times and bus.connected))


class TestFuturesSettle:
    """`publish_async` leaves its futures pending on errors; every append of ours ends."""

    async def test_on_refusal(self, nats_bus: NatsBus) -> None:
        """Of 50 concurrent appends to a stream with room for 20, each is answered."""
        await nats_bus.ensure_stream(a_stream(max_msgs_per_subject=20))
        outcomes = await asyncio.gather(
            *(nats_bus.append(SUBJECT, b"") for _ in range(50)), return_exceptions=True
        )
        refused = [one for one in outcomes if isinstance(one, StreamFull)]
        assert (len(outcomes), len(refused)) == (50, 30)
        assert nats_bus.outstanding == 0

    async def test_without_stream(self, nats_bus: NatsBus) -> None:
        """Nobody takes the subject: the caller hears it at once."""
        async with asyncio.timeout(1):
            with pytest.raises(NoStream):
                await nats_bus.append("jobs.none", b"", timeout_s=60)

    async def test_on_loss_of_the_link(self, bus: NatsBus, proxy: Proxy) -> None:
        """Appends under way when the link is lost end as LinkDown, those behind them too."""
        await bus.ensure_stream(a_stream())
        proxy.freeze()
        appends = [
            asyncio.ensure_future(bus.append(SUBJECT, b"", timeout_s=600)) for _ in range(5000)
        ]
        await until(lambda: _holds(bus.outstanding > 4000))
        proxy.cut()
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert {type(one) for one in outcomes} == {LinkDown}
        assert bus.outstanding == 0

    async def test_on_silence(self, bus: NatsBus, proxy: Proxy) -> None:
        """A server that says nothing costs the caller its time-out, no more."""
        await bus.ensure_stream(a_stream())
        proxy.freeze()
        with pytest.raises(Timeout):
            await bus.append(SUBJECT, b"", timeout_s=0.1)
        assert bus.outstanding == 0

    async def test_on_cancel(self, bus: NatsBus, proxy: Proxy) -> None:
        """A caller that is cancelled leaves nothing behind, inside the window or before it."""
        await bus.ensure_stream(a_stream(max_msgs_per_subject=5001))
        proxy.freeze()
        appends = [asyncio.ensure_future(bus.append(SUBJECT, b"")) for _ in range(5000)]
        await until(lambda: _holds(bus.outstanding > 4000))
        for append in appends:
            append.cancel()
        await asyncio.gather(*appends, return_exceptions=True)
        assert bus.outstanding == 0
        proxy.thaw()
        await bus.append(SUBJECT, b"")


class TestPullNeverStalls:
    """`fetch(n)` waits for n or for its time-out; the pump hands over what there is."""

    async def test_every_gap_costs_a_round_trip_not_an_expiry(self, nats_bus: NatsBus) -> None:
        """100 messages, each sent when the one before was seen, take less than one pull's life."""
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus, window=500)
        start_s = time.monotonic()
        for number in range(100):
            await nats_bus.append(SUBJECT, b"")
            await puller.heard.count(number + 1)
        assert time.monotonic() - start_s < nats_pull.PULL_EXPIRES_S

    async def test_single_releases_are_gathered(self, nats_bus: NatsBus) -> None:
        """Releases one by one, as a busy broker makes them, don't cost a request each."""
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        await asyncio.gather(*(nats_bus.append(SUBJECT, b"") for _ in range(1000)))
        puller = await pulling(nats_bus, window=200, hold=True)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        for number in range(800):
            await puller.heard.count(number + 1)
            puller.pull.release()
            await asyncio.sleep(0)
        await puller.heard.count(1000)
        assert puller.pull.pulls_sent < 100

    async def test_expired_pull_is_renewed(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A pull that ran out (408) is followed by the next at once."""
        monkeypatch.setattr(nats_pull, "PULL_EXPIRES_S", 0.05)
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        pull = puller.pull
        await until(lambda: _holds(pull.pulls_sent >= 5))
        await nats_bus.append(SUBJECT, b"")
        await puller.heard.count(1)
        assert nats_bus.counts["pulls_refused"] == 0

    async def test_deleted_consumer_is_asked_again(self, nats_bus: NatsBus) -> None:
        """A pull that ends with 409, then 503, backs off and goes on when the consumer is back."""
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus)
        await until(lambda: _waiting(nats_bus, 1))
        await nats_bus._streams._delete_consumer(STREAM, CONSUMER)
        # The first refusal is the standing pull's (409), the next are of pulls to nobody (503).
        await until(lambda: _holds(nats_bus.counts["pulls_refused"] >= 3))
        await nats_bus.ensure_consumer(a_consumer())
        await nats_bus.append(SUBJECT, b"")
        await puller.heard.count(1)

    async def test_back_off_grows_to_its_bound(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Asking for a consumer that isn't there gets rarer, up to BACK_OFF_S_MAX."""
        monkeypatch.setattr(nats_pull, "BACK_OFF_S", 0.001)
        monkeypatch.setattr(nats_pull, "BACK_OFF_S_MAX", 0.03)
        puller = await pulling(nats_bus)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        await until(lambda: _holds(nats_bus.counts["pulls_refused"] >= 10))
        assert puller.pull._back_off_s == 0.03

    async def test_pull_that_the_server_forgot_is_written_off(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No word on a pull, long after its end: it is asked for again."""
        monkeypatch.setattr(nats_pull, "PULL_GRACE_S", -nats_pull.PULL_EXPIRES_S)
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        assert not puller.pull.check()
        assert nats_bus.counts["pulls_lost"] == 1
        assert puller.pull.pulls_sent == 2

    async def test_stuck_deliveries_are_noticed_and_asked_for_anew(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pending, a pull standing, nothing delivered: an alarm, a new inbox, and they come."""
        monkeypatch.setattr(nats_pull, "STALL_S", 0.2)
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        # The server forgets our inbox without our knowing, as in a fault of its own.
        nats_bus._link.wire.leave(puller.pull._route.number, deaf=False)
        await nats_bus.append(SUBJECT, b"")
        await puller.heard.count(1)
        assert nats_bus.counts["pulls_stalled"] == 1

    async def test_a_full_consumer_is_no_stall(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A consumer that waits for acks is not alarmed about, however long."""
        monkeypatch.setattr(nats_pull, "STALL_S", 0.0)
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer(max_ack_pending=1))
        for _ in range(3):
            await nats_bus.append(SUBJECT, b"")
        puller = await pulling(nats_bus)
        await puller.heard.count(1)
        assert isinstance(puller.pull, nats_pull.NatsPull)
        assert puller.pull.check()
        await nats_bus._unstick(puller.pull)
        assert nats_bus.counts["pulls_stalled"] == 0


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
        await until(lambda: _holds(not bus.connected))
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


class TestConnecting:
    """Connecting with a wrong password and infinite reconnects never returns."""

    async def test_wrong_password(self) -> None:
        """It is a clear error, at once."""
        with NatsServer(options=ServerOptions(user="lane", password="right")) as server:
            async with asyncio.timeout(2):
                with pytest.raises(RefusedCredentials, match="refused our credentials"):
                    await connect(
                        server.url,
                        name="t",
                        credentials=Credentials(user="lane", password="wrong"),
                    )
                with pytest.raises(RefusedCredentials):
                    await connect(server.url, name="t")
            url = server.url.replace("//", "//lane:right@")
            bus = await connect(url, name="t")
            await bus.rtt_s()
            await bus.close()

    async def test_password_that_changed(self) -> None:
        """A link whose credentials are refused later keeps trying, and is back when they hold."""
        options = ServerOptions(user="lane", password="right")
        with NatsServer(options=options) as server:
            url = server.url.replace("//", "//lane:right@")
            bus = await connect(url, name="t")
            server.kill()
            server.options = ServerOptions(user="lane", password="other")
            server.start()
            await until(lambda: _holds(bus.counts["dials_failed"] >= 3))
            assert not bus.connected
            server.kill()
            server.options = options
            server.start()
            await relinked(bus)
            await bus.close()

    async def test_nobody_there(self, nats_server: NatsServer) -> None:
        """An unreachable server is an error that names it, in bounded time."""
        nats_server.stop()
        async with asyncio.timeout(2):
            with pytest.raises(LinkDown, match=nats_server.url):
                await connect(nats_server.url, name="t", connect_timeout_s=0.5)

    async def test_server_that_comes_up_meanwhile(self, nats_server: NatsServer) -> None:
        """A client that starts before its server waits for it, within its time-out."""
        nats_server.stop()
        connecting = asyncio.ensure_future(
            connect(nats_server.url, name="t", connect_timeout_s=5.0)
        )
        await asyncio.to_thread(nats_server.start)
        bus = await connecting
        assert bus.connected
        await bus.close()

    async def test_something_that_is_no_nats(self) -> None:
        """A port that says nothing, or something else, is an error in bounded time."""

        async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)

        async def talking(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        writers: list[asyncio.StreamWriter] = []
        for handler in (silent, talking):
            async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
                port = server.sockets[0].getsockname()[1]
                async with asyncio.timeout(3):
                    with pytest.raises(LinkDown):
                        await connect(f"127.0.0.1:{port}", name="t", connect_timeout_s=0.5)
                for writer in writers:
                    writer.transport.abort()

    async def test_old_server(self) -> None:
        """A server that would silently ignore our stream settings is refused."""

        async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b'INFO {"version":"2.10.4","max_payload":1048576,"headers":true}\r\n')
            while line := await reader.readline():
                if line.startswith(b"PING"):
                    writer.write(b"PONG\r\n")
            writer.close()

        async with await asyncio.start_server(old, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(BusError, match=r"2\.10\.4 is too old: 2\.12"):
                await connect(f"nats://127.0.0.1:{port}", name="t")

    async def test_url_that_is_none(self) -> None:
        """A URL of another kind is named."""
        with pytest.raises(BusError, match="not a NATS URL"):
            await connect("http://127.0.0.1:4222", name="t")

    async def test_credentials_file_that_is_not_there(
        self, nats_server: NatsServer, tmp_path: Path
    ) -> None:
        """A missing file is named, and not taken for a missing server."""
        credentials = Credentials(creds_file=tmp_path / "none.creds")
        with pytest.raises(BusError, match=r"no credentials file .*none\.creds"):
            await connect(nats_server.url, name="t", credentials=credentials)

    async def test_credentials_file_without_its_package(
        self, nats_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A package that only credentials files need is named when it is missing."""
        file = tmp_path / "lane.creds"
        file.touch()
        monkeypatch.setitem(sys.modules, "nkeys", None)
        with pytest.raises(BusError, match="pip install nkeys"):
            await connect(nats_server.url, name="t", credentials=Credentials(creds_file=file))

    async def test_close_is_bounded(self, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
        """A server that reads nothing more does not hold up a close."""
        monkeypatch.setattr(nats_wire, "FLUSH_S_MAX", 0.1)
        bus = await connect(proxy.url, name="t")
        proxy.freeze()
        for _ in range(100):
            await bus.publish("big", bytes(100_000))
        async with asyncio.timeout(2):
            await bus.close()

    async def test_second_server_is_tried(self, nats_server: NatsServer) -> None:
        """Of several URLs, one that answers is enough."""
        bus = await connect(f"127.0.0.1:1, {nats_server.url}", name="t")
        assert bus.connected
        await bus.close()

    async def test_failed_dial_leaves_nothing(self, nats_server: NatsServer) -> None:
        """A dial that is cancelled closes its socket."""
        async with Proxy(nats_server.port) as proxy:
            proxy.freeze()
            wire = Wire(counts=Counter(), lost=lambda *_: None)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await wire.dial(proxy.url, name="t", credentials=Credentials())
            assert wire.is_closed


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
            await _publish_until_down(bus, "work.nobody", b"")
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
            await _publish_until_down(bus, "big", bytes(100_000))
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


class TestWindow:
    """Appends outstanding are bounded."""

    async def test_bound_on_number(self, bus: NatsBus, proxy: Proxy) -> None:
        """No more than the bound are under way; the others follow, in order."""
        await bus.ensure_stream(a_stream())
        bus._window._outstanding_max = 4
        proxy.freeze()
        appends = [asyncio.ensure_future(bus.append(SUBJECT, b"%d" % n)) for n in range(10)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bus.outstanding == 4
        proxy.thaw()
        sequences = [appended.sequence for appended in await asyncio.gather(*appends)]
        assert sequences == list(range(1, 11))

    async def test_bound_on_bytes(self, bus: NatsBus, proxy: Proxy) -> None:
        """Nor more bytes; but one message alone always may go."""
        await bus.ensure_stream(a_stream())
        bus._window._bytes_max = 10_000
        proxy.freeze()
        appends = [asyncio.ensure_future(bus.append(SUBJECT, bytes(4000))) for _ in range(5)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert bus.outstanding == 2
        proxy.thaw()
        await asyncio.gather(*appends)
        await bus.append(SUBJECT, bytes(20_000))

    async def test_server_without_room_is_asked_again(self, tmp_path: Path) -> None:
        """A burst that the server has no room to look at (429) is sent again, and all is stored."""
        narrow = f'jetstream {{ store_dir: "{tmp_path}", max_buffered_msgs: 10 }}'
        with NatsServer(tmp_path, options=ServerOptions(extra=narrow)) as server:
            bus = await connect(server.url, name="t")
            await bus.ensure_stream(a_stream(max_msgs_per_subject=5000))
            await asyncio.gather(*(bus.append(SUBJECT, bytes(2000)) for _ in range(3000)))
            assert (await bus.stream_state(STREAM)).messages == 3000
            assert bus.counts["appends_repeated"] > 0
            await bus.close()

    async def test_bound_on_requests(
        self, nats_bus: NatsBus, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More requests than WAITING_MAX can't be under way: the next is refused at once."""
        monkeypatch.setattr(nats_replies, "WAITING_MAX", 3)
        await listening(nats_bus, "work.w1")
        requests = [
            asyncio.ensure_future(nats_bus.request("work.w1", b"", timeout_s=60)) for _ in range(4)
        ]
        done, pending = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(pending)) == (1, 3)
        assert isinstance(done.pop().exception(), BusError)
        for request in pending:
            request.cancel()
        await asyncio.wait(pending)
        assert nats_bus._replies.waiting == 0

    async def test_waiting_for_room_times_out(self, bus: NatsBus, proxy: Proxy) -> None:
        """Who finds no room in time is told, and was not sent."""
        await bus.ensure_stream(a_stream())
        bus._window._outstanding_max = 1
        proxy.freeze()
        first = asyncio.ensure_future(bus.append(SUBJECT, b"first"))
        await asyncio.sleep(0)
        with pytest.raises(Timeout):
            await bus.append(SUBJECT, b"second", timeout_s=0.05)
        proxy.thaw()
        await first
        assert (await bus.stream_state(STREAM)).messages == 1


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


async def _publish_until_down(bus: NatsBus, subject: str, data: bytes) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            await bus.publish(subject, data)
            await asyncio.sleep(0)


async def _holds(outcome: bool) -> bool:
    return outcome


async def _waiting(bus: NatsBus, pulls: int) -> bool:
    return (await bus.consumer_state(STREAM, CONSUMER)).waiting == pulls
