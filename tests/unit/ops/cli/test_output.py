"""What is printed: durations and sizes that read well, tables that lose nothing in a pipe."""

import io

import pytest
from rich.console import Console

from ops.cli.output import console, duration, json_text, printable, size, table


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0004, "0.4 ms"),
        (0.0099, "9.9 ms"),
        (0.25, "250 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (60, "1 min"),
        (7200, "2 h"),
        (3599, "59 min 59 s"),
        (7380, "2 h 3 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    """The two units that matter."""
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1024, "1.0 KiB"),
        (16 * 1024**3, "16.0 GiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_size(amount: float, text: str) -> None:
    """Binary units, one digit."""
    assert size(amount) == text


def test_what_a_terminal_would_obey() -> None:
    """Escape sequences, line breaks and direction marks in names are shown, not obeyed."""
    assert printable("a\x1b[31mb\n\u202ec") == "a�[31mb��c"
    assert printable("Modell Übergröße 模型") == "Modell Übergröße 模型"


def test_piped_table_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """A name of 300 characters reaches `grep` whole, and is no markup."""
    name = "[bold]" + "x" * 300
    console().print(table("", ("A", "B>"), [(name, "1")]))
    assert name in capsys.readouterr().out


def test_numbers_are_aligned_right() -> None:
    """Digits under digits, so that the large ones stand out."""
    out = io.StringIO()
    Console(file=out, width=40).print(table("", ("A", "N>"), [("x", "1"), ("y", "1,000")]))
    lines = out.getvalue().splitlines()
    first = next(line for line in lines if " x " in line)
    second = next(line for line in lines if " y " in line)
    assert len(first.rstrip()) == len(second.rstrip())


def test_json_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    """A broker's answer is indented for people, and JSON for scripts."""
    json_text(b'{"a":[1]}')
    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'
