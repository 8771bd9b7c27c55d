"""Durations as people write them."""

import re

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+|\d+(?:\.\d+)?")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")


DURATION_S_MAX = 10 * 365 * 86400.0
"""Ten years: whoever writes more mistook the unit. Every clock here can be moved so far."""


def parse_duration_s(text: str) -> float:
    """Read `90`, `30s`, `24h`, `1d12h` as seconds; 0 of what is no duration, or over ten years."""
    if not _DURATION.fullmatch(text):
        return 0.0
    total_s = sum(float(number) * _UNITS_S[unit or "s"] for number, unit in _PART.findall(text))
    return total_s if total_s <= DURATION_S_MAX else 0.0
