"""Appends on a real server: each one settles, and what is outstanding is bounded."""

import asyncio
from pathlib import Path

import pytest

from broker.bus import nats_replies
from broker.bus.base import (
    BusError,
    LinkDown,
    NoStream,
    StreamFull,
    Timeout,
)
from broker.bus.nats import NatsBus, connect
from ops.chaos.proxy import Proxy
from ops.nats.server import NatsServer, ServerOptions
from tests.buses import (
    STREAM,
    SUBJECT,
    a_stream,
    listening,
    until,
)


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
        await until(lambda: bus.outstanding > 4000)
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
        await until(lambda: bus.outstanding > 4000)
        for append in appends:
            append.cancel()
        await asyncio.gather(*appends, return_exceptions=True)
        assert bus.outstanding == 0
        proxy.thaw()
        await bus.append(SUBJECT, b"")


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
