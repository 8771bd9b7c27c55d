"""How large a lane's files may be on a real server: as configured, or what it has room for."""

from dataclasses import replace

import pytest

from broker.bus import topology
from broker.bus.base import NoRoom, StreamSpec
from broker.bus.nats import NatsBus, connect
from broker.bus.topology import GIB, Bounds, LanePlan
from broker.wire import subjects
from ops.nats.server import NatsServer, ServerOptions
from producers.batches.config import BatchesConfig
from tests.builders import LANE, MODEL

OTHER = "bolt"


async def files_max(bus: NatsBus, lane: str = LANE) -> int:
    """What a lane's files may take, as the server says."""
    return (await bus.stream_state(subjects.files_stream(lane))).bytes_max


async def apply(bus: NatsBus, *lanes: str) -> None:
    """Set up lanes as they ship."""
    plans = [LanePlan(lane, (MODEL,)) for lane in lanes]
    await topology.apply(bus, topology.of(plans, Bounds()))


@pytest.mark.parametrize(
    ("max_file", "bytes_max"),
    [("32GB", 20 * GIB), ("24GB", 10 * GIB), ("14GB", 4 * GIB), ("10GB", 5 * GIB // 8)],
)
async def test_files_get_what_is_left(max_file: str, bytes_max: int) -> None:
    """An input of 8 GB and its output fit where there is room, and a small disk starts, again too.

    Nothing of it is written: the server sets it aside by number.
    """
    with NatsServer(options=ServerOptions(max_file=max_file)) as server:
        bus = await connect(server.url, name="t")
        for _ in range(2):  # The second is a broker that is started again.
            await apply(bus, LANE)
            assert await files_max(bus) == bytes_max
        await bus.close()
    assert Bounds().files_bytes_max > 2 * BatchesConfig().file_bytes_max


async def test_no_room_at_all_is_told() -> None:
    """A lane without its least files is none, and the setting is named."""
    with NatsServer(options=ServerOptions(max_file="9500MB")) as server:
        bus = await connect(server.url, name="t")
        with pytest.raises(NoRoom, match="max_file"):
            await apply(bus, LANE)
        await bus.close()


async def test_files_give_back_what_a_new_lane_needs() -> None:
    """Down to what they hold; before any gets more, each gets what all may have at first."""
    with NatsServer(options=ServerOptions(max_file="32GB")) as server:
        bus = await connect(server.url, name="t")
        await apply(bus, LANE)
        assert await files_max(bus) == 20 * GIB
        subject = subjects.file_chunks(LANE, "file-1")
        await bus.append(subject, b"x" * 100_000)
        await apply(bus, LANE, OTHER)
        assert (await bus.last_message(subjects.files_stream(LANE), subject)).data
        shared = await files_max(bus), await files_max(bus, OTHER)
        assert min(shared) >= 4 * GIB
        await apply(bus, LANE, OTHER)
        assert (await files_max(bus), await files_max(bus, OTHER)) == shared
        await bus.close()


async def test_a_stream_of_before_gets_its_new_subjects_on_a_full_server() -> None:
    """An upgrade finds files of 4 GiB and no room for more: they stay, and take copies of lines."""
    with NatsServer(options=ServerOptions(max_file="14GB")) as server:
        bus = await connect(server.url, name="t")
        old = [
            spec if spec.name != subjects.files_stream(LANE) else _as_before(spec)
            for spec in topology.of([LanePlan(LANE, (MODEL,))]).streams
        ]
        for spec in old:
            await bus.ensure_stream(spec)
        await apply(bus, LANE)
        assert await files_max(bus) == 4 * GIB
        await bus.append(subjects.line_copy(LANE, "batch_1", 1), b"record")
        await bus.close()


def _as_before(spec: StreamSpec) -> StreamSpec:
    return replace(
        spec,
        subjects=(subjects.file_chunks(LANE, "*"),),
        max_bytes=4 * GIB,
        max_bytes_least=0,
    )
