"""What `doctor` says: one finding a line."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARN = "warn"
    """Works, and may not be what was meant."""
    FAIL = "FAIL"
    """Does not work, or will not."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    about: str
    """A word: nats, streams, workers, ..."""
    found: str
    to_do: str = ""
    unreachable: bool = False


def ok(about: str, found: str) -> Finding:
    """All is well."""
    return Finding(Level.OK, about, found)


def warn(about: str, found: str, to_do: str) -> Finding:
    """Worth a look."""
    return Finding(Level.WARN, about, found, to_do)


def fail(about: str, found: str, to_do: str) -> Finding:
    """To be put right."""
    return Finding(Level.FAIL, about, found, to_do)
