"""How many of a prompt's tokens lie before the end of each of its prefix blocks. Pure.

Prefix blocks are bytes of our canonical text, the engine's blocks are tokens of the prompt as its
chat template renders it. Where the engine gives each token's string, the longer pieces of the text
(messages' contents) are found in the rendered prompt, and inside them the count is exact. Elsewhere
it is drawn in proportion between the nearest known places: without strings, between begin and end.

The count is floored, so a token that reaches over a block's end is not counted. In proportion it is
off by what a template adds and by how unevenly the text is tokenized: some tens of tokens for
prose, more where one part is far denser than the rest. A count that is too low credits a block that
is half gone; one that is too high forgets a block early; neither lasts longer than the chain.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from broker.wire.prefix import BLOCK_BYTES

ANCHOR_BYTES_MIN = 16
"""Shorter pieces (roles, single words) may be found in the wrong place."""

_SEPARATORS = re.compile(rb"[\x01\x02\x03]")
"""What the canonical text has between roles and contents."""

_SPACE, _BYTE = "\u2581", re.compile(r"<0x([0-9A-F]{2})>")
"""How SentencePiece writes a space, and a byte that is no token of its own."""


def token_edges(
    text: bytes, *, blocks: int, tokens: int, strings: Sequence[str] = ()
) -> tuple[int, ...]:
    """Count the tokens that end at or before the end of each of `blocks` blocks of `text`.

    `strings` has one for each token, or nothing. Counts never fall and never exceed `tokens`.
    """
    places = [(0, 0), *_anchors(text, strings if len(strings) == tokens else ())]
    places.append((len(text), tokens))
    offsets = [offset for offset, _ in places]
    edges: list[int] = []
    for block in range(1, blocks + 1):
        end = block * BLOCK_BYTES
        after = min(max(1, bisect_left(offsets, end)), len(places) - 1)
        (start, low), (stop, high) = places[after - 1], places[after]
        share = (end - start) / (stop - start) if stop > start else 1.0
        edge = low + int(min(1.0, share) * (high - low))
        edges.append(max(edge, edges[-1] if edges else 0))
    return tuple(edges)


def _anchors(text: bytes, strings: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield (offset in the text, tokens before it) where both are known, in order."""
    if not strings:
        return
    pieces = token_bytes(strings)
    rendered = b"".join(pieces)
    ends = list(accumulate(len(piece) for piece in pieces))
    cursor = 0
    for start, content in _contents(text):
        found = rendered.find(content, cursor)
        if found < 0:
            continue
        cursor = found + len(content)
        yield start, bisect_right(ends, found)
        # Each block's end inside, so that the count there is the engine's, not a proportion.
        first = (start // BLOCK_BYTES + 1) * BLOCK_BYTES
        for offset in range(first, start + len(content), BLOCK_BYTES):
            yield offset, bisect_right(ends, found + offset - start)
        yield start + len(content), bisect_right(ends, cursor)


def _contents(text: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, bytes) of the pieces that are long enough to be found again."""
    cuts = [-1, *(match.start() for match in _SEPARATORS.finditer(text)), len(text)]
    for before, after in pairwise(cuts):
        whole = text[before + 1 : after]
        content = whole.strip()  # Templates strip, too.
        if len(content) >= ANCHOR_BYTES_MIN:
            yield before + 1 + len(whole) - len(whole.lstrip()), content


def token_bytes(strings: Sequence[str]) -> list[bytes]:
    """Return the bytes that token strings stand for, whichever way their tokenizer writes them.

    Byte-level BPE (GPT-2 and most since) writes each byte as one printable character; SentencePiece
    writes text, with marks for spaces and lone bytes; others write text.
    """
    if any("\u0120" in string or "\u010a" in string for string in strings):
        return [_from_byte_level(string) for string in strings]
    return [_from_text(string) for string in strings]


def _from_byte_level(string: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in string)
    except KeyError:
        return string.encode(errors="surrogatepass")  # A special token with a name of its own.


def _from_text(string: str) -> bytes:
    if byte := _BYTE.fullmatch(string):
        return bytes([int(byte[1], 16)])
    return string.replace(_SPACE, " ").encode(errors="surrogatepass")


def _byte_level_alphabet() -> dict[str, int]:
    """Characters of byte-level BPE: printable Latin-1 as itself, the other bytes from U+0100 on.

    Source: Radford et al. 2019 (GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
