"""`inferlane chaos`: what it refuses before it starts anything."""

import pytest

from ops.cli.errors import ExitCode
from ops.cli.main import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--kind", "kill_leder"), "kill_leader"),
        (("--kind", "kill_meta_nats"), "--nats-nodes 3"),
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
