"""A configuration text: read into a record, or refused in a sentence that a person can act on."""

from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, Struct

from broker.wire.settings import NUMBER_MAX, SETTINGS_BYTES_MAX, SettingsError, parse


class Row(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry of a list of tables."""

    name: Annotated[str, Meta(pattern="^[a-z]+$")]
    weight: Annotated[float, Meta(gt=0)] = 1.0
    limit: Annotated[int, Meta(ge=0, le=9)] | None = None


class Table(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A configuration of every kind of value."""

    rows: tuple[Row, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    mode: Literal["fast", "safe"] = "fast"
    short: Annotated[str, Meta(min_length=1, max_length=5)] = "abc"
    on: bool = True
    free: dict[str, int] = {}


def _told(text: str) -> str:
    with pytest.raises(SettingsError) as caught:
        parse(text.encode(), source="f.toml").read(Table)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("rows = 3", ":1: rows: 3 is not allowed; it must be a list, each entry a table"),
        (
            "\n[[rows]]\nnam = 'a'",
            (':3: rows[0].nam: no such key. Did you mean "name"? Known here: name, weight, limit'),
        ),
        ("[[rows]]", ":1: rows[0]: name is missing; it must be given here"),
        (
            "rows = [{name = 'a'},\n {name = 'b', weight = 0}]",
            ":2: rows[1].weight: 0 is not allowed; it must be a number, above 0",
        ),
        (
            "rows = [{name = 'a', limit = 10}]",
            (
                ":1: rows[0].limit: 10 is not allowed; it must be a whole number, at least 0 and"
                " at most 9"
            ),
        ),
        (
            "rows = [{name = 'a', limit = 1.5}]",
            (
                ":1: rows[0].limit: 1.5 is not allowed; it must be a whole number, at least 0"
                " and at most 9"
            ),
        ),
        (
            "pair = [1]",
            (":1: pair: a list of 1 is not allowed; it must be a list of exactly 2, each a number"),
        ),
        ("pair = [1, 'x']", ':1: pair[1]: "x" is not allowed; it must be a number'),
        (
            "mode = 'slow'",
            ':1: mode: "slow" is not allowed; it must be one of "fast", "safe"',
        ),
        (
            "short = ''",
            ':1: short: "" is not allowed; it must be a text of 1 to 5 characters',
        ),
        ("on = 1", ":1: on: 1 is not allowed; it must be true or false"),
        ("on = 'yes'", ':1: on: "yes" is not allowed; it must be true or false'),
        ("free = 1979-05-27", ":1: free: 1979-05-27 is not allowed; it must be a table"),
        ("mode = {}", ':1: mode: a table is not allowed; it must be one of "fast", "safe"'),
        ("a = 1\nb", ":2: not valid TOML: expected '=' after a key in a key/value pair"),
        (
            "on = true\non = true",
            ":2: this key or table was given before; keep one of the two",
        ),
        ("[free]\n[free]", ":2: this key or table was given before; keep one of the two"),
        ("pair = [inf, 0]", ":1: pair[0]: inf is not allowed; it must be a finite number"),
        ("pair = [0, nan]", ":1: pair[1]: nan is not allowed; it must be a finite number"),
        (
            "free = {x = 9007199254740993}",
            (
                ":1: free.x: a number this large is not allowed; it must be at most"
                " 9,007,199,254,740,992"
            ),
        ),
        ("x = " + "9" * 5000, ": a number has too many digits"),
        ("x = " + "[" * 4000 + "]" * 4000, ": tables are nested too deeply"),
    ],
)
def test_mistake(text: str, told: str) -> None:
    """A mistake is told with its line, its key, and what to write instead."""
    assert _told(text) == f"f.toml{told}"


def test_wrong_value_in_a_free_table() -> None:
    """Where the keys are free, the table that holds the wrong value is told."""
    assert _told("[free]\na = 1\nb = 'x'").startswith("f.toml:1: free: ")


def test_unknown_key_with_odd_characters() -> None:
    """A key that would need quotes is still told as it stands."""
    assert _told('"a`b c" = 1').startswith("f.toml:1: a`b c: no such key.")


def test_all_numbers_out_of_range_are_told_at_once() -> None:
    """Two wrong numbers are two lines of one error."""
    assert len(_told("pair = [nan, inf]").splitlines()) == 2


def test_byte_order_mark_is_skipped() -> None:
    """Editors on Windows write one; the file means the same with it."""
    settings = parse(b"\xef\xbb\xbfon = false\r\n", source="f.toml")
    assert settings.read(Table) == Table(on=False)


def test_line_that_is_not_utf8() -> None:
    """The line with the foreign bytes is told."""
    with pytest.raises(SettingsError, match=r"^f.toml:2: this line is not UTF-8"):
        parse(b"on = true\nshort = '\xe9'\n", source="f.toml")


def test_text_over_the_bound() -> None:
    """A file past the bound is refused unread."""
    with pytest.raises(SettingsError, match="larger than 1,000,000 bytes"):
        parse(b"#" * (SETTINGS_BYTES_MAX + 1), source="f.toml")
    assert parse(b"#" * SETTINGS_BYTES_MAX, source="f.toml").data == {}


def test_number_at_the_bound() -> None:
    """The largest number that every reader takes is taken."""
    text = f"free = {{x = {NUMBER_MAX}, y = -{NUMBER_MAX}}}"
    assert parse(text.encode(), source="f").read(Table).free["x"] == NUMBER_MAX


def test_table_of_the_file() -> None:
    """A program reads its own table: mistakes have the whole path, an absent table defaults."""
    settings = parse(b"other = 1\n[mine]\nmode = 'fsat'\n", source="f.toml")
    with pytest.raises(SettingsError, match=r"^f.toml:3: mine.mode: "):
        settings.read(Table, ("mine",))
    assert settings.read(Table, ("absent",)) == Table()


def test_table_that_is_a_value() -> None:
    """Where a table is expected and a value stands, that is the mistake."""
    settings = parse(b"mine = 3\n", source="f.toml")
    with pytest.raises(SettingsError, match=r"^f.toml:1: mine: 3 is not allowed; .* a table$"):
        settings.read(Table, ("mine",))


def _read_or_refused(data: bytes) -> str:
    try:
        parse(data, source="f.toml").read(Table)
    except SettingsError as error:
        return str(error)
    return "f.toml"


@given(st.binary(max_size=60))
def test_any_bytes(data: bytes) -> None:
    """Whatever is read is TOML or refused: no other surprise."""
    assert _read_or_refused(data).startswith("f.toml")


@given(st.text(st.sampled_from("=[]{}\"'.,#\n abon1"), max_size=40))
def test_near_toml(text: str) -> None:
    """The same for texts that are nearly TOML."""
    assert _read_or_refused(text.encode()).startswith("f.toml")
