"""Pulls on a real server: never stalled, never too many, and noticed when stuck."""

import asyncio
import time

import pytest

from broker.bus import nats_pull
from broker.bus.nats import NatsBus
from tests.buses import (
    CONSUMER,
    STREAM,
    SUBJECT,
    a_consumer,
    a_stream,
    pulling,
    until,
)
from tests.servers import pulls_waiting


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
        await until(lambda: pull.pulls_sent >= 5)
        await nats_bus.append(SUBJECT, b"")
        await puller.heard.count(1)
        assert nats_bus.counts["pulls_refused"] == 0

    async def test_deleted_consumer_is_asked_again(self, nats_bus: NatsBus) -> None:
        """A pull that ends with 409, then 503, backs off and goes on when the consumer is back."""
        await nats_bus.ensure_stream(a_stream())
        await nats_bus.ensure_consumer(a_consumer())
        puller = await pulling(nats_bus)
        await until(lambda: pulls_waiting(nats_bus, 1))
        await nats_bus.delete_consumer(STREAM, CONSUMER)
        # The first refusal is the standing pull's (409), the next are of pulls to nobody (503).
        await until(lambda: nats_bus.counts["pulls_refused"] >= 3)
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
        await until(lambda: nats_bus.counts["pulls_refused"] >= 10)
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
        """Case 34: pending, a pull standing, none delivered: an alarm, a new inbox, they come."""
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
