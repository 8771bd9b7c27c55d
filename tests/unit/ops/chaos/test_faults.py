"""Faults that need no cluster: commands of a cluster's owner."""

import asyncio
from pathlib import Path

import pytest

from ops.chaos import faults
from ops.chaos.checker import Strike
from ops.chaos.joined import JoinedStage
from ops.chaos.plan import Fault, Kind
from ops.chaos.setting import Hit, Load
from ops.cluster import ClusterError


async def hit(folder: Path, *commands: str, pick: float = 0.0) -> Strike:
    """Strike once with one of these commands."""
    hits = tuple(Hit(f"hit-{number}", command) for number, command in enumerate(commands))
    stage = JoinedStage(folder, url="nats://there", load=Load(), hits=hits)
    return await faults.strike(stage, Fault(3, Kind.HIT_YOURS, pick=pick))


async def test_one_of_the_owners_commands_is_run(tmp_path: Path) -> None:
    """The plan picks which; it is told by its name."""
    struck = await hit(tmp_path, "exit 1", f"touch {tmp_path}/done", pick=0.9)
    assert (struck.number, struck.kind, struck.member) == (3, Kind.HIT_YOURS, "hit-1")
    assert (tmp_path / "done").exists()


async def test_a_command_that_fails_ends_the_run_in_its_own_words(tmp_path: Path) -> None:
    """Nothing was hit, so that nothing can be said."""
    with pytest.raises(ClusterError, match="ended with code 3: no such pod"):
        await hit(tmp_path, "echo no such pod >&2; exit 3")


async def test_a_command_may_not_take_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is ended with all that it started."""
    monkeypatch.setattr(faults, "HIT_S_MAX", 0.2)
    with pytest.raises(ClusterError, match=r"took more than 0.2 s"):
        await hit(tmp_path, f"(while true; do :; done) & echo $! > {tmp_path}/pid; wait")
    child = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    async with asyncio.timeout(10):
        while _lives(child):
            await asyncio.sleep(0.01)


def _lives(stat: Path) -> bool:
    """Say whether a process is neither gone nor waiting to be taken note of."""
    try:
        return " Z " not in stat.read_text()
    except OSError:
        return False
