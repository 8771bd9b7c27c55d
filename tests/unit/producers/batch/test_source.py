"""Lines from plain, gzip and zstd files: numbers, ends, damage, bounds."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from producers.batch import source
from producers.batch.errors import InputUnusable
from producers.batch.source import Line, read_lines, survey


def a_file(folder: Path, data: bytes, *, name: str = "in.jsonl") -> str:
    """A file of this content."""
    path = folder / name
    path.write_bytes(data)
    return str(path)


def texts(path: str) -> dict[int, bytes]:
    """Texts by line number."""
    return {line.number: line.text for line in read_lines(path)}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"a\nb\n", {1: b"a", 2: b"b"}),
        (b"a\nb", {1: b"a", 2: b"b"}),
        (b"a\r\nb\r\n", {1: b"a", 2: b"b"}),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", {1: b"a", 2: b"b"}),
        (b"\n\na\n \t\nb\n\n", {3: b"a", 5: b"b"}),
        (b"", {}),
        (b"\xef\xbb\xbf", {}),
        (b"\x00\n", {1: b"\x00"}),
    ],
)
def test_lines_are_numbered_as_an_editor_shows_them(
    tmp_path: Path, data: bytes, expected: dict[int, bytes]
) -> None:
    """Blank lines count and are left out; line ends and a byte order mark are no text."""
    assert texts(a_file(tmp_path, data)) == expected


def test_compressed_files_are_known_by_their_first_bytes(tmp_path: Path) -> None:
    """Whatever they are called, and with any number of members or frames."""
    packed = gzip.compress(b"a\nb\n") + gzip.compress(b"c\n")
    assert list(texts(a_file(tmp_path, packed, name="x")).values()) == [b"a", b"b", b"c"]
    pack = zstandard.ZstdCompressor().compress
    packed = pack(b"a\nb") + pack(b"c\n") + pack(b"d")
    assert list(texts(a_file(tmp_path, packed, name="y")).values()) == [b"a", b"bc", b"d"]


def test_a_large_zstd_file_streams(tmp_path: Path) -> None:
    """Frames larger than the read buffer come whole."""
    data = b"".join(b"%d\n" % number for number in range(200_000))
    packed = zstandard.ZstdCompressor().compress(data)
    assert len(texts(a_file(tmp_path, packed))) == 200_000


@pytest.mark.parametrize("name", ["in.jsonl.gz", "in.jsonl.zst"])
def test_a_plain_file_under_a_compressed_name_is_told(tmp_path: Path, name: str) -> None:
    """Rather than a million invalid lines."""
    with pytest.raises(InputUnusable, match="though it is named so"):
        texts(a_file(tmp_path, b"{}\n", name=name))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{}\n".encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b"\xfe\xff\x00{\x00}", "is UTF-16; save it as UTF-8"),
        (b"PK\x03\x04...", "is a zip archive"),
        (bz2.compress(b"{}\n"), "is bzip2"),
        (lzma.compress(b"{}\n"), "is xz"),
    ],
)
def test_a_file_in_another_form_is_one_error(tmp_path: Path, data: bytes, said: str) -> None:
    """What no line of JSON begins with is told of the file, not of each of its lines."""
    path = a_file(tmp_path, data)
    for look in (survey, texts):
        with pytest.raises(InputUnusable, match=said):
            look(path)


@pytest.mark.parametrize(
    "pack", [gzip.compress, lambda data: zstandard.ZstdCompressor().compress(data)]
)
@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_damage_is_told_not_taken_for_the_end(
    tmp_path: Path, pack: Callable[[bytes], bytes], damage: str
) -> None:
    """A cut-off or corrupt file is an error of the input, by `survey` and by `read_lines`."""
    packed = bytearray(pack(b"".join(b"%d\n" % (number**3) for number in range(50_000))))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    else:
        packed[len(packed) // 2] ^= 0xFF
        packed[len(packed) // 2 + 1] ^= 0xFF
    path = a_file(tmp_path, bytes(packed))
    with pytest.raises(InputUnusable, match="can't be read"):
        survey(path)
    with pytest.raises(InputUnusable, match="can't be read"):
        texts(path)


def test_absent_and_unreadable_files_are_told(tmp_path: Path) -> None:
    """No such file; a folder."""
    with pytest.raises(InputUnusable, match="there is no file"):
        survey(str(tmp_path / "absent"))
    with pytest.raises(InputUnusable, match="can't be read"):
        survey(str(tmp_path))


def test_a_line_beyond_the_bound_is_skipped_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LINE_BYTES_MAX: the line keeps its number and digest, not its text; the next one is whole."""
    monkeypatch.setattr(source, "LINE_BYTES_MAX", 10)
    monkeypatch.setattr(source, "READ_BYTES", 8)
    found = list(read_lines(a_file(tmp_path, b"123456789\n" + b"x" * 100 + b"\nlast")))
    assert [(line.number, line.text, line.too_long) for line in found] == [
        (1, b"123456789", False),
        (2, b"", True),
        (3, b"last", False),
    ]
    (other,) = [line for line in read_lines(a_file(tmp_path, b"x" * 99 + b"\n")) if line.too_long]
    assert other.digest != found[1].digest


def test_a_line_without_an_end_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LINE_SKIPPED_BYTES_MAX: an endless device on standard input is told, not read for ever."""
    monkeypatch.setattr(source, "LINE_BYTES_MAX", 10)
    monkeypatch.setattr(source, "READ_BYTES", 8)
    monkeypatch.setattr(source, "LINE_SKIPPED_BYTES_MAX", 100)
    lines = read_lines(a_file(tmp_path, b"first\n" + b"x" * 200 + b"\nlast"))
    assert next(lines).text == b"first"
    with pytest.raises(InputUnusable, match="line 2 has no end within 100 bytes"):
        next(lines)


def test_digests_tell_texts_apart_and_fit_sqlite() -> None:
    """64 bits, signed."""
    one = Line(1, b"a", source._signed(2**64 - 1))
    assert one.digest == -1
    assert source._signed(5) == 5


def test_a_survey_counts_and_identifies(tmp_path: Path) -> None:
    """Lines with or without a last line end; the same content compressed is the same input."""
    plain = survey(a_file(tmp_path, b"a\nb\nc"))
    assert (plain.lines, plain.bytes) == (3, 5)
    packed = survey(a_file(tmp_path, gzip.compress(b"a\nb\nc"), name="in.gz"))
    assert packed == plain
    assert survey(a_file(tmp_path, b"a\nb\nC")).digest != plain.digest
    assert survey(a_file(tmp_path, b"a\nb\n")).lines == 2
    assert survey(a_file(tmp_path, b" \n\n")).lines == 0
