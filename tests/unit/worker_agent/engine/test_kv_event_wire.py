"""Events of both forms and both engines are read; what is none is told, never raised otherwise."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kv_publisher import CLEARED, a_payload, removed, stored
from worker_agent.engine.kv_event_wire import (
    PAYLOAD_BYTES_MAX,
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    MalformedEvents,
    pieces,
    read_batch,
    read_frames,
)

TOKENS = list(range(32))


def only(event: Any) -> Any:
    """The event that a batch of one is read as."""
    (read,) = read_batch(a_payload(event)).events
    return read


def test_both_forms_say_the_same() -> None:
    """A map with `type`, or an array with the tag first."""
    expected = BlockStored(
        names=(7, -8), parent=6, tokens=tuple(TOKENS), block_size=16, medium="GPU"
    )
    assert only(stored([7, -8], TOKENS, parent=6)) == expected
    array = ["BlockStored", [7, -8], 6, TOKENS, 16, None, "GPU", None]
    assert only(array) == expected
    assert (
        only(removed(7))
        == only(["BlockRemoved", [7], "GPU"])
        == BlockRemoved(names=(7,), medium="GPU")
    )
    assert only(CLEARED) == only(["AllBlocksCleared"]) == AllBlocksCleared()


def test_the_oldest_arrays_end_early() -> None:
    """SGLang's first events had no medium; what is left out is not known."""
    assert only(["BlockRemoved", [7]]) == BlockRemoved(names=(7,))
    event = only(["BlockStored", [7], None, TOKENS[:16], 16, None])
    assert (event.parent, event.medium, event.adapter, event.group) == (None, "", "", None)


def test_a_batch_may_be_a_map() -> None:
    """As vLLM's newest is."""
    payload = msgspec.msgpack.encode({"ts": 5.5, "events": [CLEARED], "data_parallel_rank": 0})
    batch = read_batch(payload)
    assert (batch.at_s, batch.events) == (5.5, (AllBlocksCleared(),))


def test_names_may_be_bytes() -> None:
    """SHA-256 as it is; equal names stay equal."""
    name = bytes(range(32))
    assert only(stored([name], TOKENS[:16], parent=name)).parent == only(removed(name)).names[0]


def test_tokens_may_be_pairs() -> None:
    """Under EAGLE, SGLang's tokens each come with the next one: the first ones are the prompt."""
    pairs = [[token, token + 1] for token in TOKENS[:16]]
    assert only(stored([1], pairs)).tokens == tuple(TOKENS[:16])


def test_adapters_and_other_keys_are_told_apart() -> None:
    """A named adapter, a numbered one, and a salt that stands beside an adapter's name."""
    assert only(stored([1], TOKENS[:16], lora_name="law")).adapter == "law"
    assert only(stored([1], TOKENS[:16], lora_id=3)).adapter == "#3"
    keys = [["law", "salt"], ["law"], None]
    event = only(stored([1, 2, 3], list(range(48)), lora_name="law", extra_keys=keys))
    assert event.extras == ("['salt']", "", "")


def test_what_is_not_known_is_passed_over_and_counted() -> None:
    """A later version's event and its fields."""
    batch = read_batch(a_payload({"type": "BlockMoved", "x": 1}, {**CLEARED, "y": 2}, ["Other"]))
    assert (batch.events, batch.unknown) == ((AllBlocksCleared(),), 2)


@pytest.mark.parametrize(
    "event",
    [
        7,
        [],
        {},
        [3],
        ["BlockRemoved"],
        removed("name"),
        removed(True),
        removed(b"x" * 65),
        stored([1], TOKENS),
        stored([1], TOKENS[:16], block_size=0),
        stored([1], ["a"] * 16),
        stored([1], [-1] * 16),
        stored([1], [2**32] * 16),
        stored([1], [[]] * 16),
        stored([1], TOKENS[:16], parent="x"),
        {"type": "BlockStored", "block_hashes": [1]},
    ],
)
def test_a_known_event_that_cannot_be_read_spoils_its_batch(event: Any) -> None:
    """What it said of the cache is lost, and that must be noticed."""
    with pytest.raises(MalformedEvents):
        read_batch(a_payload(CLEARED, event))


def test_a_batch_beyond_its_bound_is_not_read() -> None:
    """Not even decoded."""
    with pytest.raises(MalformedEvents, match="at most"):
        read_batch(bytes(PAYLOAD_BYTES_MAX + 1))


@given(st.binary(max_size=64) | st.builds(a_payload, st.lists(st.integers(0, 99) | st.text())))
def test_garbage_is_malformed_and_nothing_else(payload: bytes) -> None:
    """No other exception for any bytes."""
    with suppress(MalformedEvents):
        read_batch(payload)


@given(st.lists(st.binary(max_size=9), max_size=6))
def test_frames_are_read_or_malformed(frames: list[bytes]) -> None:
    """Sequence and payload are the last two frames, or it is no message."""
    try:
        sequence, payload = read_frames(frames)
    except MalformedEvents:
        return
    assert sequence.to_bytes(8, "big") == frames[-2]
    assert payload is frames[-1]


@pytest.mark.parametrize("blocks_max", [1, 2, 3, 100])
def test_pieces_of_a_batch_say_what_it_says(blocks_max: int) -> None:
    """In order, so many blocks each at most, a block's parent the one before it."""
    whole = read_batch(
        a_payload(
            stored(range(7), list(range(7 * 16)), parent=99, extra_keys=[[n] for n in range(7)]),
            CLEARED,
            removed(1, 2, 3, 4, 5),
            removed(6),
        )
    )
    told: list[tuple[Any, ...]] = []
    for piece in pieces(whole, blocks_max=blocks_max):
        blocks = 0
        for event in piece.events:
            match event:
                case AllBlocksCleared():
                    told.append(("cleared",))
                    blocks += 1
                case BlockRemoved():
                    told += [("gone", name) for name in event.names]
                    blocks += len(event.names)
                case BlockStored():
                    parent = event.parent
                    for n, name in enumerate(event.names):
                        own = event.tokens[n * 16 : n * 16 + 16]
                        told.append(("held", parent, name, own, event.extras[n]))
                        parent = name
                    blocks += len(event.names)
        assert blocks <= blocks_max
    assert told == [
        *(
            ("held", n - 1 if n else 99, n, tuple(range(n * 16, n * 16 + 16)), f"[{n}]")
            for n in range(7)
        ),
        ("cleared",),
        *(("gone", n) for n in range(1, 7)),
    ]


def test_an_empty_batch_is_one_piece() -> None:
    """That nothing happened is word of the engine, too."""
    assert list(pieces(Batch(1.0, ()), blocks_max=8)) == [Batch(1.0, ())]
