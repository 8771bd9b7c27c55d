"""`inferlane drain`: asks, and waits until the worker has finished, or can't any more."""

import pytest

from broker.bus.memory import MemoryBus
from broker.service.snapshot import WorkerView
from broker.wire.control import ControlReply, DrainRequest
from ops.cli import drain
from ops.cli.errors import CommandError
from tests.operators import Operator
from tests.views import a_worker_view


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting looks again at once."""
    monkeypatch.setattr(drain, "POLL_S", 0)


async def test_order_and_its_undoing(capsys: pytest.CaptureFixture[str]) -> None:
    """The broker is asked, and what happens now is told."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        await drain.order(bus, "gpu-1", draining=True)
        await drain.order(bus, "gpu-1", draining=False)
    assert operator.drained == [
        DrainRequest(worker="gpu-1"),
        DrainRequest(worker="gpu-1", draining=False),
    ]
    assert capsys.readouterr().out == "gpu-1 is draining\ngpu-1 takes jobs again\n"


async def test_worker_that_is_not_known() -> None:
    """The broker's words, code 1."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.drain_reply = ControlReply(ok=False, message="No worker gpu-9.")
        with pytest.raises(CommandError, match=r"^No worker gpu-9.$"):
            await drain.order(bus, "gpu-9", draining=True)


async def test_waiting(capsys: pytest.CaptureFixture[str]) -> None:
    """Each change of what is left is told once; then that it is drained."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.tell_workers(
            [a_worker_view(inflight_jobs=2)],
            [a_worker_view(draining=True, inflight_jobs=2)],
            [a_worker_view(draining=True, inflight_jobs=2)],
            [a_worker_view(draining=True, inflight_jobs=1)],
            [a_worker_view(draining=True, inflight_jobs=0)],
            [a_worker_view(draining=True, drained=True, inflight_jobs=0)],
        )
        await drain.until_drained(bus, "gpu-1", wait_s=60)
    out, err = capsys.readouterr()
    assert out == "gpu-1 is drained\n"
    assert err == "2 jobs left\n1 job left\n0 jobs left\n"


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([[a_worker_view(draining=True, phase="gone")]], "was lost before it was drained"),
        ([[a_worker_view(draining=True)], [a_worker_view()]], "taken back to work by somebody"),
        ([[a_worker_view(worker="other")]], "the broker knows no worker gpu-1 any more"),
    ],
)
async def test_waiting_that_can_not_end_well(seen: list[list[WorkerView]], told: str) -> None:
    """Code 1, and what became of it."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.tell_workers(*seen)
        with pytest.raises(CommandError, match=told):
            await drain.until_drained(bus, "gpu-1", wait_s=60)


async def test_waiting_too_long() -> None:
    """It goes on draining, and how to wait on is told."""
    bus = MemoryBus()
    async with Operator(bus) as operator:
        operator.tell_workers([a_worker_view(draining=True, inflight_jobs=2)])
        with pytest.raises(CommandError, match=r"still runs 2 jobs after 0 s and goes on draining"):
            await drain.until_drained(bus, "gpu-1", wait_s=0)
