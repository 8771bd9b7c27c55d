"""What commands print: tables for people, JSON for scripts, on standard output alone."""

import sys
from collections.abc import Iterable, Sequence

import orjson
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_PIPED = 4_000
"""Columns when standard output is no terminal: no reader of a pipe wants lines cut short."""

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


class _Piped(Console):
    """One whose reader may have had enough: the command's end is then as after any other line."""

    def on_broken_pipe(self) -> None:
        """Leave it to the command: rich would end the process with 1, and say nothing."""
        raise BrokenPipeError


def console() -> Console:
    """Make the console for standard output."""
    if sys.stdout.isatty():
        return _Piped(highlight=False)
    return _Piped(highlight=False, width=WIDTH_PIPED)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table; a head that ends in `>` is of a column of numbers, aligned right.

    Title and cells are text: what looks like markup in a name stays as it is.
    """
    name = Text(printable(title), style="bold")
    made = Table(title=name, title_justify="left", box=box.SIMPLE_HEAD)
    for head in heads:
        made.add_column(head.removesuffix(">"), justify="right" if head.endswith(">") else "left")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def printable(text: str) -> str:
    """Replace what a terminal would obey or hide: names and details come from elsewhere."""
    return "".join(char if char.isprintable() else "�" for char in text)


def plain(text: str) -> str:
    """Replace the same in text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def note(text: str) -> None:
    """Tell the person at the terminal something that is no part of the output."""
    sys.stderr.write(f"{plain(text)}\n")


def json_line(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


def json_text(data: bytes) -> None:
    """Print JSON that came as bytes, indented."""
    pretty = orjson.dumps(orjson.loads(data), option=orjson.OPT_INDENT_2)
    sys.stdout.write(pretty.decode() + "\n")


def duration(seconds: float) -> str:
    """Write a duration: `0.4 ms`, `40 ms`, `3.2 s`, `4 min 5 s`, `2 h 3 min`."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.01:  # noqa: PLR2004  # Below, a tenth of a millisecond matters.
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:  # noqa: PLR2004  # Seconds of a minute.
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = (f"{hours} h", f"{minutes} min") if hours else (f"{minutes} min", f"{rest} s")
    return parts[0] if parts[1].startswith("0 ") else " ".join(parts)


def size(amount: float) -> str:
    """Write a number of bytes: `512 bytes`, `1.5 GiB`."""
    for unit in UNITS[:-1]:
        if amount < 1024:  # noqa: PLR2004  # Bytes of a KiB.
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} {UNITS[-1]}"
