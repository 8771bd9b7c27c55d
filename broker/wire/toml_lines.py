"""Where each key of a TOML text stands: `tomllib` gives values, people need the line to look at.

The text has been read by `tomllib` already, so it is valid, and this scanner only has to follow it:
tables, arrays of tables, dotted and quoted keys, inline tables, values that run over several lines.
"""

import re
import tomllib
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]
"""A key from the root: names of keys, numbers of list entries from 0."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_INLINE_BLANK = re.compile(r"[ \t]*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'[^'\n]*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}\n#]+")


def key_lines(text: str) -> Mapping[KeyPath, int]:
    """Map each key, table and list entry of a valid TOML text to its line, from 1."""
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    return scanner.lines


def line_of(lines: Mapping[KeyPath, int], path: KeyPath) -> int:
    """Find the line of a key, or of the nearest table around it that is written; 0 if none is."""
    for length in range(len(path), 0, -1):
        line = lines.get(path[:length])
        if line is not None:
            return line
    return 0


class _Scanner:
    """Walks the text once."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._at = 0
        self._line = 1
        self._counted_to = 0
        self._table_counts: dict[KeyPath, int] = {}

    def document(self) -> None:
        table: KeyPath = ()
        self._skip(_BLANK)
        while self._at < len(self._text):
            if self._text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_BLANK)

    def _header(self) -> KeyPath:
        is_array = self._text.startswith("[[", self._at)
        line = self._line_now()
        self._at += 2 if is_array else 1
        path = self._in_arrays(self._key(), line)
        self._at = self._text.index("]", self._at) + (2 if is_array else 1)
        self._note(path, line)
        if not is_array:
            return path
        index = self._table_counts.get(path, 0)
        self._table_counts[path] = index + 1
        self._note((*path, index), line)
        return (*path, index)

    def _in_arrays(self, key: KeyPath, line: int) -> KeyPath:
        """Resolve a header's key: a table inside an array of tables belongs to its latest entry."""
        path: KeyPath = ()
        for part in key[:-1]:
            path = (*path, part)
            self._note(path, line)
            count = self._table_counts.get(path)
            path = path if count is None else (*path, count - 1)
        return (*path, key[-1])

    def _pair(self, table: KeyPath) -> None:
        line = self._line_now()
        key = self._key()
        for length in range(1, len(key) + 1):
            self._note((*table, *key[:length]), line)
        self._at = self._text.index("=", self._at) + 1
        self._skip(_INLINE_BLANK)
        self._value((*table, *key))

    def _key(self) -> KeyPath:
        parts: list[str] = []
        while True:
            self._skip(_INLINE_BLANK)
            parts.append(self._key_part())
            self._skip(_INLINE_BLANK)
            if not self._text.startswith(".", self._at):
                return tuple(parts)
            self._at += 1

    def _key_part(self) -> str:
        hit = _BARE_KEY.match(self._text, self._at) or _STRING.match(self._text, self._at)
        assert hit is not None, "the text was read by tomllib, so a key stands here"
        self._at = hit.end()
        part = hit[0]
        return part if part[0] not in "\"'" else str(tomllib.loads(f"key = {part}")["key"])

    def _value(self, path: KeyPath) -> None:
        match self._text[self._at]:
            case "[":
                self._entries(path)
            case "{":
                self._inline_table(path)
            case '"' | "'":
                self._skip(_STRING)
            case _:
                self._skip(_SCALAR)

    def _entries(self, path: KeyPath) -> None:
        self._at += 1
        index = 0
        while not self._closed("]"):
            self._note((*path, index), self._line_now())
            self._value((*path, index))
            index += 1

    def _inline_table(self, path: KeyPath) -> None:
        self._at += 1
        while not self._closed("}"):
            self._pair(path)

    def _closed(self, bracket: str) -> bool:
        """Step over blanks and one comma; step over the closing bracket and say so."""
        self._skip(_BLANK)
        if self._text.startswith(",", self._at):
            self._at += 1
            self._skip(_BLANK)
        if not self._text.startswith(bracket, self._at):
            return False
        self._at += 1
        return True

    def _skip(self, pattern: re.Pattern[str]) -> None:
        hit = pattern.match(self._text, self._at)
        assert hit is not None, "the text was read by tomllib, so the value ends"
        self._at = hit.end()

    def _note(self, path: KeyPath, line: int) -> None:
        self.lines.setdefault(path, line)

    def _line_now(self) -> int:
        self._line += self._text.count("\n", self._counted_to, self._at)
        self._counted_to = self._at
        return self._line
