"""Where our blocks end among the engine's tokens."""

from hypothesis import given
from hypothesis import strategies as st

from broker.wire.prefix import BLOCK_BYTES, canonical_text
from worker_agent.token_edges import ANCHOR_BYTES_MIN, token_bytes, token_edges

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "so", "on")


def a_content(words: int, *, seed: int = 0) -> bytes:
    """Prose."""
    return " ".join(WORDS[(seed + 7 * index) % len(WORDS)] for index in range(words)).encode()


def byte_level(text: str) -> str:
    """As byte-level BPE writes it."""
    return text.replace(" ", "\u0120").replace("\n", "\u010a")


def test_without_strings_it_is_a_proportion() -> None:
    """Floored, and never more than there are."""
    assert token_edges(bytes(1024), blocks=4, tokens=10) == (2, 5, 7, 10)
    assert token_edges(bytes(1100), blocks=4, tokens=0) == (0, 0, 0, 0)


def test_inside_a_content_the_count_is_exact() -> None:
    """A long template before it, and a part that is tokenized byte by byte, move nothing."""
    prose = " ".join(f"word{index}" for index in range(400)).encode()
    text = canonical_text([("system", [a_content(400)]), ("user", [b"\xc3\xa9" * 400, prose])])
    strings = [byte_level(f"<|header {index}|>") for index in range(200)]
    strings += [byte_level(f"{word} ") for word in a_content(400).decode().split(" ")]
    strings += ["<|x|>", *["\u00c3", "\u00a9"] * 400, "<|x|>"]
    before_prose = len(strings)
    strings += [byte_level(f"{word} ") for word in prose.decode().split(" ")]
    blocks = len(text) // BLOCK_BYTES
    edges = token_edges(text, blocks=blocks, tokens=len(strings), strings=strings)
    first = text.index(prose)
    for index, edge in enumerate(edges):
        end = (index + 1) * BLOCK_BYTES
        if end > first:
            assert edge == before_prose + text[first:end].count(b" ")
    assert edges[0] == 200 + text[:BLOCK_BYTES].count(b" ")
    assert blocks * BLOCK_BYTES > first


def test_a_content_that_was_changed_is_passed_over() -> None:
    """The template left it out: the places around it still count, and nothing falls."""
    text = canonical_text(
        [("user", [a_content(100)]), ("user", [b"?" * 600]), ("user", [a_content(100)])]
    )
    strings = [byte_level(f"{word} ") for word in a_content(100).decode().split(" ")] * 2
    edges = token_edges(text, blocks=len(text) // BLOCK_BYTES, tokens=len(strings), strings=strings)
    assert list(edges) == sorted(edges)
    assert edges[0] == text[:BLOCK_BYTES].count(b" ")


def test_strings_of_another_number_are_not_believed() -> None:
    """Garbage falls back to the proportion."""
    assert token_edges(bytes(512), blocks=2, tokens=10, strings=["a"]) == (5, 10)


def test_each_way_of_writing_tokens() -> None:
    """Byte-level BPE, SentencePiece with lone bytes, and plain text."""
    assert token_bytes(["\u0120caf", "\u00c3\u00a9", "<\u4e16>"]) == [
        b" caf",
        b"\xc3\xa9",
        "<\u4e16>".encode(),
    ]
    assert token_bytes(["\u2581caf", "<0xC3>", "<0xA9>"]) == [b" caf", b"\xc3", b"\xa9"]
    assert token_bytes(["caf\u00e9"]) == ["caf\u00e9".encode()]


@given(
    contents=st.lists(st.text(min_size=ANCHOR_BYTES_MIN, max_size=900), max_size=5),
    strings=st.lists(st.text(max_size=40), max_size=60),
    tokens=st.integers(0, 60),
)
def test_counts_never_fall_and_never_exceed_the_tokens(
    contents: list[str], strings: list[str], tokens: int
) -> None:
    """Whatever text and strings."""
    text = canonical_text([("user", [content.encode()]) for content in contents])
    blocks = len(text) // BLOCK_BYTES
    edges = token_edges(text, blocks=blocks, tokens=tokens, strings=strings)
    assert len(edges) == blocks
    assert list(edges) == sorted(edges)
    assert all(0 <= edge <= tokens for edge in edges)


def test_a_template_may_strip_a_content() -> None:
    """What is left of it is found."""
    words = a_content(200)
    text = canonical_text([("user", [b"\n" * 300 + words + b" \n"])])
    strings = [byte_level(f"{word} ") for word in words.decode().split(" ")]
    edges = token_edges(text, blocks=4, tokens=len(strings), strings=strings)
    first = text.index(words)
    assert edges[0] == 0
    assert edges[1:] == tuple(text[first : 256 * end].count(b" ") for end in (2, 3, 4))
