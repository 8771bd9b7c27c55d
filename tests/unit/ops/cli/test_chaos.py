"""`inferlane chaos`: what it refuses before it starts anything."""

from pathlib import Path

import pytest

from ops.chaos.plan import Kind
from ops.chaos.run import Options
from ops.chaos.setting import Hit, Load
from ops.cli.chaos_joined import Joining, announced
from ops.cli.errors import ExitCode
from ops.cli.main import main

THERE = "nats://127.0.0.1:1"
"""Where nobody listens: it is not asked before the rest is in order."""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kind", "kill_leder"), "kill_leader"),
        (("--kind", "kill_meta_nats"), "--nats-nodes 3"),
        (("--kind", "hit_yours"), "--url and --hit"),
        (("--hit", "w=true"), "say --url"),
        (("--lane", "online"), "say --url"),
        (("--url", "tls://there", "--yes"), "nats://host:port"),
        (("--url", THERE, "--plant", "lose"), "not with --url"),
        (("--url", THERE, "--hit", "true", "--yes"), "NAME=COMMAND"),
        (("--url", THERE, "--hit", "w=kill 1"), "For w it runs `kill 1`. Say --yes"),
        (("--url", THERE, "--lane", "online"), "twice"),
        (("--faults", "-1"), "--faults"),
        (("--workers", "0"), "--workers"),
        (("--plant", "rose"), "overshoot"),
    ],
)
def test_wrong_usage_starts_nothing(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what there is."""
    assert main(["chaos", *flags]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_a_cluster_that_is_not_there_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was started."""
    assert main(["chaos", "--url", THERE]) == ExitCode.UNREACHABLE
    assert THERE in capsys.readouterr().err


def test_what_is_done_to_a_cluster_of_yours_is_said_first() -> None:
    """How often which fault comes, and which commands are run; no password."""
    kinds = Joining(Load(), (Hit("gpu1", "ssh gpu1 reboot"),)).kinds
    options = Options(
        folder=Path("unused"),
        url="nats://me:secret@there:4222",
        faults=2 * len(kinds),
        kinds=kinds,
        hits=(Hit("gpu1", "ssh gpu1 reboot"),),
    )
    said = announced(options)
    assert "2 × kill_producer" in said
    assert "2 times, one of these. For gpu1 it runs `ssh gpu1 reboot`." in said
    assert "secret" not in said
    assert "Nothing of yours" not in said


def test_without_commands_nothing_of_yours_is_touched() -> None:
    """The producers of the run itself are, and garbage is stored."""
    kinds = Joining(Load(), ()).kinds
    said = announced(Options(folder=Path("unused"), url=THERE, faults=10, kinds=kinds))
    assert "Nothing of yours is killed" in said
    assert {Kind.HIT_YOURS, Kind.KILL_WORKER, Kind.KILL_NATS}.isdisjoint(kinds)
