"""How a command ends: its exit code, and for a failure one sentence that says what to do.

0: done. 1: the thing itself failed. 2: wrong usage or configuration, nothing was begun. 3: the
cluster can't be reached. 130: interrupted (Ctrl-C); as a program it dies of the signal, for which
shells have that code.
"""

import re
from enum import IntEnum


class ExitCode(IntEnum):
    """What scripts may branch on."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 cluster not reachable,"
    " 130 interrupted."
)

_PASSWORD = re.compile(r"(://[^/@:\s]*:)[^/@\s]*(@)")
_TOKEN = re.compile(r"://[^/@:\s]+@")


class CommandError(Exception):
    """A command can't do what it was asked. The message is told as it is."""

    code = ExitCode.FAILED


class Misused(CommandError):
    """Wrong arguments or configuration."""

    code = ExitCode.USAGE


class Unreachable(CommandError):
    """No server, or no broker behind it."""

    code = ExitCode.UNREACHABLE


def explain(error: BaseException) -> tuple[str, ExitCode]:
    """Turn whatever ended a command into a sentence and an exit code."""
    from broker.bus.base import BadLink, BusError, LinkDown, NoResponders, Timeout
    from broker.service.status import PageUnavailable
    from broker.wire.settings import SettingsError
    from producers.gateway.connections import AddressUnavailable

    match error:
        case BaseExceptionGroup():
            # Parallel parts of one command: the first trouble is as good as any.
            return explain(error.exceptions[0])
        case CommandError():
            text, code = str(error), error.code
        case SettingsError() | BadLink():
            text, code = str(error), ExitCode.USAGE
        case LinkDown() | Timeout() | NoResponders():
            text, code = f"the message server does not answer: {error}", ExitCode.UNREACHABLE
        case BusError() | PageUnavailable() | AddressUnavailable():
            text, code = str(error), ExitCode.FAILED
        case KeyboardInterrupt():
            text, code = "interrupted", ExitCode.INTERRUPTED
        case OSError():
            where = f"{error.filename}: " if error.filename else ""
            text, code = f"{where}{(error.strerror or str(error)).lower()}", ExitCode.FAILED
        case _:
            kind = type(error).__name__
            text = f"this should not happen ({kind}: {error}); --debug shows where"
            code = ExitCode.FAILED
    return masked(text), code


def masked(text: str) -> str:
    """Hide the passwords and tokens of URLs."""
    return _TOKEN.sub("://***@", _PASSWORD.sub(r"\1***\2", text))
