"""The one prefix hash: canonical prompt text, cut into blocks, chained.

Equal hash = equal whole prefix, so a block hash names everything before it too. The producer
library
computes the hashes; the broker and the agents only compare them. Blocks are bytes, not tokens: no
tokenizer is needed outside the engine, and how many bytes make a token is learned per model.
Chaining follows vLLM's prefix caching (hash of parent, then content); xxh3 is not cryptographic, so
the
seed carries a scope that keeps one lane from probing another lane's cache.
"""

import struct
from array import array
from collections.abc import Iterable, Sequence

import xxhash

BLOCK_BYTES = 256
"""Bytes of canonical text in a block: about 64 tokens of English, the block size vLLM users pick
for routing."""

BLOCKS_MAX = 8192
"""Longest prefix that is hashed (2 MiB of text); what follows it adds nothing to routing."""

HASH_BYTES = 8
CLUSTER_SCOPE = "cluster"

_CHAIN = struct.Struct("<QQ")


def seed(*, model: str, adapter: str = "", scope: str) -> int:
    """Hash that a chain starts from. `scope` is the lane's name, or CLUSTER_SCOPE by opt-in."""
    parts = (part.encode() for part in (model, adapter, scope))
    return xxhash.xxh3_64_intdigest(b"".join(struct.pack("<I", len(p)) + p for p in parts))


def block_hashes(text: bytes, *, seed: int) -> list[int]:
    """Hash each whole block of `text` together with all before it.

    Returns one 64-bit int per full block of BLOCK_BYTES, at most BLOCKS_MAX; a last partial block
    has none.
    """
    blocks = min(len(text) // BLOCK_BYTES, BLOCKS_MAX)
    view = memoryview(text)
    hashes: list[int] = []
    parent = seed
    for index in range(blocks):
        start = index * BLOCK_BYTES
        content = xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES])
        parent = xxhash.xxh3_64_intdigest(_CHAIN.pack(parent, content))
        hashes.append(parent)
    return hashes


def canonical_text(messages: Iterable[tuple[str, Sequence[bytes]]], *, tools: bytes = b"") -> bytes:
    """Lay out a prompt so that equal prefixes of the conversation are equal prefixes of bytes.

    `messages` are (role, content parts) in order; a part that isn't text is given by its digest.
    Tools come
    first, as chat templates put them. Lengths are not written before contents: a longer last
    message
    must not change the bytes of its own beginning.
    """
    pieces = [b"\x01tools\x02", tools] if tools else []
    for role, parts in messages:
        pieces.extend((b"\x01", role.encode(), b"\x02"))
        for part in parts:
            pieces.extend((part, b"\x03"))
    return b"".join(pieces)


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Pack hashes for the wire: little-endian, HASH_BYTES each."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpack_hashes(packed: bytes) -> "array[int]":
    """Undo `pack_hashes`. Raises ValueError when the length isn't a whole number of hashes."""
    if len(packed) % HASH_BYTES:
        message = f"{len(packed)} bytes are not a whole number of {HASH_BYTES}-byte hashes"
        raise ValueError(message)
    hashes: array[int] = array("Q")
    hashes.frombytes(packed)
    if struct.pack("=H", 1) != struct.pack("<H", 1):
        hashes.byteswap()
    return hashes
