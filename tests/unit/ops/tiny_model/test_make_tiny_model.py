"""The shipped model file is the one that the script makes."""

from pathlib import Path

import gguf

from ops.tiny_model.make_tiny_model import (
    CONTEXT_TOKENS,
    SEED,
    SHIPPED_FILE,
    Random,
    vocabulary,
    write_tiny_model,
)

SHIPPED_BYTES_MAX = 1_000_000


def test_script_reproduces_the_shipped_file(tmp_path: Path) -> None:
    """A run of the script gives the shipped file, byte for byte."""
    write_tiny_model(tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == SHIPPED_FILE.read_bytes()


def test_shipped_file_is_small_enough_for_git() -> None:
    """The file stays under a megabyte."""
    assert SHIPPED_FILE.stat().st_size < SHIPPED_BYTES_MAX


def test_shipped_file_holds_long_prompts() -> None:
    """Its own header says how long a context it was made for."""
    field = gguf.GGUFReader(SHIPPED_FILE).get_field("llama.context_length")
    assert field is not None
    assert field.contents() == CONTEXT_TOKENS


def test_vocabulary_spells_every_byte_once() -> None:
    """Any text can be written: each of the 256 byte tokens is there, and no token twice."""
    tokens, kinds = vocabulary()
    assert len(set(tokens)) == len(tokens) == len(kinds)
    assert kinds.count(gguf.TokenType.BYTE) == 256


def test_weights_depend_on_the_seed_only() -> None:
    """The same seed draws the same matrix, another seed another one, of the stated variance."""
    first, again, other = (Random(seed).matrix(64, 64) for seed in (SEED, SEED, SEED + 1))
    assert (first == again).all()
    assert not (first == other).all()
    assert abs(float(first.var()) * 64 - 1) < 0.1
