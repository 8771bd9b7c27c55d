"""How commands end: every kind of trouble has its code, and is told without a traceback."""

import pytest

from broker.bus.base import BusError, LinkDown, NoResponders, StreamFull, Timeout
from broker.service.config import ConfigError
from broker.service.status import PageUnavailable
from broker.wire.settings import Problem
from ops.cli.errors import CommandError, ExitCode, Misused, Unreachable, explain, masked
from producers.gateway.connections import AddressUnavailable


@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (CommandError("no such lane"), "no such lane", ExitCode.FAILED),
        (Misused("both can't be"), "both can't be", ExitCode.USAGE),
        (Unreachable("nobody there"), "nobody there", ExitCode.UNREACHABLE),
        (
            ConfigError("f.toml", (Problem(line=3, key="a.b", message="is wrong"),)),
            "f.toml:3: a.b: is wrong",
            ExitCode.USAGE,
        ),
        (LinkDown("x"), "the message server does not answer: x", ExitCode.UNREACHABLE),
        (Timeout("x"), "the message server does not answer: x", ExitCode.UNREACHABLE),
        (NoResponders("x"), "the message server does not answer: x", ExitCode.UNREACHABLE),
        (StreamFull("JOBS_a is full"), "JOBS_a is full", ExitCode.FAILED),
        (BusError("too old"), "too old", ExitCode.FAILED),
        (PageUnavailable("port taken"), "port taken", ExitCode.FAILED),
        (AddressUnavailable("port taken"), "port taken", ExitCode.FAILED),
        (KeyboardInterrupt(), "interrupted", ExitCode.INTERRUPTED),
        (
            FileNotFoundError(2, "No such file or directory", "in.jsonl"),
            "in.jsonl: no such file or directory",
            ExitCode.FAILED,
        ),
        (OSError("odd"), "odd", ExitCode.FAILED),
        (
            ZeroDivisionError("division by zero"),
            "this should not happen (ZeroDivisionError: division by zero); --debug shows where",
            ExitCode.FAILED,
        ),
        (ExceptionGroup("many", [ExceptionGroup("x", [LinkDown("y")])]), None, 3),
    ],
)
def test_trouble(error: BaseException, text: str | None, code: ExitCode) -> None:
    """A sentence and a code for each; of a group, the first trouble's."""
    told = explain(error)
    assert told[1] == code
    assert text is None or told[0] == text


def test_codes_are_the_documented_ones() -> None:
    """Scripts depend on the numbers."""
    assert [code.value for code in ExitCode] == [0, 1, 2, 3, 130]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at nats://bob:s3cret@host:4222 x", "at nats://bob:***@host:4222 x"),
        ("nats://a:b@h:1,nats://c:d@h:2", "nats://a:***@h:1,nats://c:***@h:2"),
        ("nats://host:4222", "nats://host:4222"),
        ("nats://token@host", "nats://***@host"),
    ],
)
def test_passwords_are_not_told(text: str, shown: str) -> None:
    """Errors name the URL, and logs are read by others."""
    assert masked(text) == shown


def test_password_in_an_error_of_the_bus() -> None:
    """Wherever the URL came from, its password is hidden."""
    assert explain(BusError("refused by nats://u:pw@h:1"))[0] == "refused by nats://u:***@h:1"
