"""Durations as people write them."""

import re

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


def parse_duration_s(text: str) -> float:
    """Read `90`, `30s`, `24h`, `1d12h` as seconds; 0 of what is no duration."""
    if not _DURATION.fullmatch(text):
        return 0.0
    return sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(text))
