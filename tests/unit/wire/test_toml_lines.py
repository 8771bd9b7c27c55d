"""Lines of keys: whatever way a TOML file is written, each key is found where it stands."""

import random
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.wire.toml_lines import KeyPath, key_lines, line_of

WRITTEN = """\
# a comment with a = 1 and [table]
top = "x"  # another = 2
[policy]
models = [  # [not a table]
  "tiny",   # "
  'big]',
]
"quo.ted key" = 1
a.b.c = '''
d = 1
'''
e = \"\"\"
f = "1" \\
\"\"\"\"
[[policy.lanes]]
name = "acme"
inline = { x = 1, "y z" = [ { deep = true } ], k.l = "}" }

[[policy.lanes]]
name = "bolt"
  [policy.lanes.sub]
  key = 1979-05-27T07:32:00Z
[last.table]
empty = []
none = {}
end = "\\"]"
"""


def _paths(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    match value:
        case dict():
            for key, item in value.items():
                yield (*path, key)
                yield from _paths(item, (*path, key))
        case list():
            for index, item in enumerate(value):
                yield (*path, index)
                yield from _paths(item, (*path, index))
        case _:
            pass


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("top",), 2),
        (("policy",), 3),
        (("policy", "models"), 4),
        (("policy", "models", 1), 6),
        (("policy", "quo.ted key"), 8),
        (("policy", "a", "b", "c"), 9),
        (("policy", "e"), 12),
        (("policy", "lanes", 0), 15),
        (("policy", "lanes", 0, "inline", "y z", 0, "deep"), 17),
        (("policy", "lanes", 0, "inline", "k", "l"), 17),
        (("policy", "lanes", 1, "name"), 20),
        (("policy", "lanes", 1, "sub", "key"), 22),
        (("last", "table", "empty"), 24),
        (("last", "table", "end"), 26),
    ],
)
def test_key_in_a_file_of_all_styles(path: KeyPath, line: int) -> None:
    """Tables, arrays of tables, dotted, quoted and inline keys, strings over several lines."""
    assert key_lines(WRITTEN)[path] == line


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_every_key_that_tomllib_reads_has_a_line(newline: str) -> None:
    """The scanner and tomllib agree on what the keys are, and no key is missed."""
    text = WRITTEN.replace("\n", newline)
    assert set(_paths(tomllib.loads(text))) <= set(key_lines(text))


def test_key_that_is_not_written_has_the_line_of_its_table() -> None:
    """An absent key is told at the table around it; with no table there is no line."""
    lines = key_lines("[broker]\nname = 'x'\n")
    assert line_of(lines, ("broker", "renew_s")) == 1
    assert line_of(lines, ("streams", "ack_wait_s")) == 0


_KEYS = st.text(st.sampled_from("ab-_9 .\"'#=]é"), min_size=1, max_size=4)
_SCALARS = st.one_of(
    st.integers(-5, 5), st.booleans(), st.text(st.sampled_from("ab'\"#]}=,\n\\"), max_size=6)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(data=st.dictionaries(_KEYS, _VALUES, max_size=4), seed=st.integers(0, 1000))
def test_keys_of_any_file(data: dict[str, Any], seed: int) -> None:
    """For any content in any style, each key's line is the one it was written on."""
    writer = _Writer(random.Random(seed))
    writer.table((), data)
    text = "\n".join(writer.rows) + "\n"
    assert tomllib.loads(text) == data
    found = key_lines(text)
    assert {path: found[path] for path in writer.at} == writer.at


class _Writer:
    """Writes TOML in styles chosen at random, and notes the line of each key."""

    def __init__(self, rng: random.Random) -> None:
        self.rows: list[str] = []
        self.at: dict[KeyPath, int] = {}
        self._rng = rng

    def table(self, path: KeyPath, data: dict[str, Any]) -> None:
        later: list[tuple[str, Any]] = []
        for key, value in data.items():
            if self._is_table(value) and self._rng.random() < 0.5:
                later.append((key, value))
            else:
                self._comment()
                self.at[*path, key] = len(self.rows) + 1
                self.rows.append(f"{self._key(key)} = ")
                self._value((*path, key), value)
        for key, value in later:
            self._comment()
            self.at[*path, key] = len(self.rows) + 1
            header = ".".join(self._key(str(part)) for part in (*path, key))
            self.rows.append(f"[ {header} ]")
            self.table((*path, key), value)

    def _is_table(self, value: object) -> bool:
        return isinstance(value, dict)

    def _comment(self) -> None:
        if self._rng.random() < 0.3:
            self.rows.append("  # x = [ { '")

    def _value(self, path: KeyPath, value: object) -> None:
        match value:
            case dict():
                self._add("{ ")
                for index, (key, item) in enumerate(value.items()):
                    self.at[*path, key] = len(self.rows)
                    self._add(f"{', ' if index else ''}{self._key(key)} = ")
                    self._value((*path, key), item)
                self._add(" }")
            case list():
                self._add("[")
                for index, item in enumerate(value):
                    self._add(", " if index else "")
                    if self._rng.random() < 0.3:
                        self.rows += ["  # ]", ""]
                    self.at[*path, index] = len(self.rows)
                    self._value((*path, index), item)
                self._add("]")
            case bool():
                self._add("true" if value else "false")
            case int():
                self._add(str(value))
            case _:
                self._text(str(value))

    def _text(self, value: str) -> None:
        if "\n" in value and self._rng.random() < 0.5:
            # A line break right after the opening quotes is none of the text's.
            lines = ('"""\n' + value.replace("\\", "\\\\").replace('"', '\\"') + '"""').split("\n")
            self._add(lines[0])
            self.rows += lines[1:]
        elif not set(value) & {"'", "\n"} and self._rng.random() < 0.5:
            self._add(f"'{value}'")
        else:
            self._add(self._quoted(value))

    def _key(self, key: str) -> str:
        bare = set(key) <= set("ab-_9")
        return key if bare and self._rng.random() < 0.7 else self._quoted(key)

    def _quoted(self, value: str) -> str:
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'

    def _add(self, text: str) -> None:
        self.rows[-1] += text
