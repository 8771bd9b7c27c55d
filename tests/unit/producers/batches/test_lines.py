"""The lines of an input, cut out of its chunks, and what is seen at a first look."""

from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.messages import LaneOffer
from producers.batch.source import Line
from producers.batches.life import FAULTS_MAX
from producers.batches.lines import Splitter, windows
from producers.batches.survey import Survey
from tests.batches import a_line
from tests.builders import LANE, MODEL
from tests.stored_batches import ENDPOINT, pieces


def split(data: bytes, size: int, *, line_bytes_max: int = 1000) -> list[Line]:
    """Lines of data that comes in chunks of so many bytes."""
    splitter = Splitter(line_bytes_max=line_bytes_max)
    found: list[Line] = []
    for start in range(0, len(data), size):
        found += splitter.feed(data[start : start + size])
    return found + splitter.end()


@given(
    st.lists(st.sampled_from([b"", b"a", b" ", b"bc\r", b"def"]), max_size=12), st.integers(1, 9)
)
def test_any_cut_gives_the_same_lines(parts: list[bytes], size: int) -> None:
    """Numbered as an editor does, blank ones left out, their ends and spaces taken off."""
    expected = [
        (number, part.strip()) for number, part in enumerate(parts, start=1) if part.strip()
    ]
    assert [(line.number, line.text) for line in split(b"\n".join(parts), size)] == expected


@pytest.mark.parametrize("size", [1, 7, 100])
def test_a_line_that_is_too_long_is_not_held(size: int) -> None:
    """It becomes a mark with its number; its neighbours are whole."""
    data = b"one\n" + b"x" * 11 + b"\n" + b"y" * 10 + b"\nlast"
    found = split(data, size, line_bytes_max=10)
    assert [(line.number, line.text, line.too_long) for line in found] == [
        (1, b"one", False),
        (2, b"", True),
        (3, b"y" * 10, False),
        (4, b"last", False),
    ]


def test_a_mark_of_byte_order_is_no_part_of_a_line() -> None:
    """Editors on Windows put one first; it is in the midst where such files were joined."""
    assert split(b"\xef\xbb\xbf{}\n", 2)[0].text == b"{}"
    assert split(b"{}\n\xef\xbb\xbf{}\r\n", 2)[1].text == b"{}"


async def test_windows_are_bounded_in_lines_and_bytes() -> None:
    """Whichever comes first; the rest is the last window, and an empty input has none."""

    async def sizes(data: bytes, **bounds: int) -> list[int]:
        given = pieces(*[data[at : at + 3] for at in range(0, len(data), 3)])
        return [len(window) async for window in windows(given, **bounds)]

    assert await sizes(b"a\n" * 7, lines_max=3, bytes_max=1000) == [3, 3, 1]
    assert await sizes(b"aaaa\n" * 5, lines_max=100, bytes_max=8) == [2, 2, 1]
    assert await sizes(b"", lines_max=3, bytes_max=8) == []


async def surveyed(*given: bytes, offer: LaneOffer | None = None) -> Survey:
    """What a first look finds."""
    survey = Survey(ENDPOINT, offer)

    async def content() -> AsyncIterator[bytes]:
        yield b"\n".join(given)

    async for window in windows(content(), lines_max=2, bytes_max=10**6):
        survey.take(window)
    return survey


async def test_one_good_line_makes_an_input_usable() -> None:
    """However many bad ones stand beside it; all are counted."""
    survey = await surveyed(b"{", b"", a_line("a"), b"[]")
    assert (survey.total, survey.good, survey.verdict()) == (3, 1, ())


async def test_a_model_that_the_lane_does_not_offer() -> None:
    """Of every line: the input is unusable, and the fault says what there is."""
    offer = LaneOffer(lane=LANE, models=("big",), aliases={"good": "big"})
    survey = await surveyed(a_line("a"), a_line("b"), offer=offer)
    fault = survey.verdict()[0]
    assert (fault.code, fault.line) == ("model_not_found", 1)
    assert MODEL in fault.message
    assert "big" in fault.message
    named = a_line("c", body={"model": "good", "messages": []})
    assert (await surveyed(a_line("a"), named, offer=offer)).good == 1


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": 5}, [], "x"])
async def test_a_body_that_names_no_model(body: object) -> None:
    """Is no request."""
    survey = await surveyed(a_line("a", body=body))
    assert [fault.code for fault in survey.verdict()] == ["invalid_request"]


async def test_faults_are_bounded() -> None:
    """The first hundred."""
    survey = await surveyed(*[b"{"] * (FAULTS_MAX + 5))
    assert (survey.total, len(survey.verdict())) == (FAULTS_MAX + 5, FAULTS_MAX)
