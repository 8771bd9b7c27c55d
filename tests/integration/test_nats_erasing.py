"""What the server's files hold of a message that was removed."""

from pathlib import Path

import pytest

from broker.bus.base import StreamSpec
from broker.bus.nats import connect
from ops.nats.server import NatsServer

TEXT = b"a secret that somebody wants to be gone"


def times_in_files(folder: Path) -> int:
    """How often the text stands in the server's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.read_bytes().count(TEXT) for path in files)


@pytest.mark.parametrize(("erase", "left"), [(True, 1), (False, 5)])
async def test_erased_text_is_overwritten_and_deleted_text_is_not(erase: bool, left: int) -> None:
    """`inferlane erase` relies on the one, and ops/docs/retention.md warns of the other."""
    with NatsServer() as server:
        bus = await connect(server.url, name="eraser")
        await bus.ensure_stream(StreamSpec(name="TEXTS", subjects=("texts.*",)))
        for number in range(5):
            await bus.append(f"texts.{number}", TEXT + b"%d" % number)
        for sequence in range(1, 5):
            assert await bus.delete_message("TEXTS", sequence, erase=erase)
        await bus.close()
        assert times_in_files(server.folder) == left
