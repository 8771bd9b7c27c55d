"""The one prefix hash: golden vectors, and what chaining promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.wire.prefix import (
    BLOCK_BYTES,
    BLOCKS_MAX,
    CLUSTER_SCOPE,
    block_hashes,
    canonical_text,
    pack_hashes,
    seed,
    unpack_hashes,
)
from broker.wire.prompt import (
    OUTPUT_TOKENS_DEFAULT,
    OUTPUT_TOKENS_MAX,
    output_tokens_max,
    prompt_text,
    prompt_tokens_estimate,
)

TEXT = bytes(range(256)) * 3


def test_golden_vectors() -> None:
    """Another implementation is right if it gets these (xxh3-64, little-endian chaining)."""
    start = seed(model="tiny", scope="acme")
    assert start == 0x61A6D7FF92558573
    assert block_hashes(TEXT, seed=start) == [
        0xA3B9BCE2CE5DB2A2,
        0x9BB5C0CEEFC7443C,
        0x534ABA93292A608D,
    ]


def test_equal_prefixes_have_equal_hashes_and_nothing_after_a_difference() -> None:
    """Equal hash = equal whole prefix: from the first different block on, all differ."""
    start = seed(model="m", scope="lane")
    first = block_hashes(TEXT, seed=start)
    changed = bytearray(TEXT)
    changed[BLOCK_BYTES] ^= 1
    second = block_hashes(bytes(changed), seed=start)
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_equal_blocks_at_different_places_differ() -> None:
    """A block's hash names all before it, so repeated content doesn't repeat a hash."""
    hashes = block_hashes(b"x" * BLOCK_BYTES * 5, seed=1)
    assert len(set(hashes)) == 5


def test_scope_model_and_adapter_keep_caches_apart() -> None:
    """One lane can't probe another's cache; no field can pose as another."""
    seeds = {
        seed(model="m", scope="a"),
        seed(model="m", scope="b"),
        seed(model="m", scope=CLUSTER_SCOPE),
        seed(model="m", adapter="x", scope="a"),
        seed(model="mx", scope="a"),
        seed(model="m", adapter="xa", scope=""),
    }
    assert len(seeds) == 6


def test_a_partial_block_has_no_hash_and_the_count_is_bounded() -> None:
    """BLOCKS_MAX blocks are hashed at most."""
    assert block_hashes(b"x" * (BLOCK_BYTES - 1), seed=1) == []
    assert len(block_hashes(b"x" * (BLOCK_BYTES + 1), seed=1)) == 1
    assert len(block_hashes(bytes(BLOCK_BYTES * (BLOCKS_MAX + 2)), seed=1)) == BLOCKS_MAX


@given(st.lists(st.integers(0, 2**64 - 1), max_size=50))
def test_packing_is_reversible(hashes: list[int]) -> None:
    """Packed hashes come back in order."""
    assert list(unpack_hashes(pack_hashes(hashes))) == hashes


def test_half_a_hash_is_refused() -> None:
    """A length that is no multiple of eight is no list of hashes."""
    with pytest.raises(ValueError, match="whole number"):
        unpack_hashes(b"123456789")


@given(st.text(max_size=300), st.text(max_size=300))
def test_a_longer_last_message_keeps_the_bytes_before_it(head: str, tail: str) -> None:
    """Growing a conversation never changes the bytes of its beginning."""
    begun = [("system", [head.encode(errors="replace")])]
    grown = [*begun, ("user", [tail.encode(errors="replace")])]
    assert canonical_text(grown).startswith(canonical_text(begun))


def test_prompt_of_each_endpoint() -> None:
    """Chat, completions, responses and embeddings all have a prefix; others route by load."""
    chat = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}
    parts = {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "S"}]},
            {"role": "user", "content": "U"},
        ]
    }
    assert prompt_text(chat) == prompt_text(parts) != b""
    assert prompt_text({**chat, "tools": [{"type": "function"}]}).startswith(b"\x01tools")
    assert b"P" in prompt_text({"prompt": "P"})
    assert b"I" in prompt_text({"instructions": "I", "input": "U"})
    listed = {"input": [{"role": "user", "content": "U"}]}
    assert prompt_text(listed) == prompt_text({"messages": listed["input"]})
    assert prompt_text({"n": 1}) == b""


def test_content_that_is_not_text_stands_by_its_digest() -> None:
    """Images differ by what they are, and take 16 bytes each."""

    def picture(url: str) -> dict[str, object]:
        content = [{"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": content}]}

    assert prompt_text(picture("a")) != prompt_text(picture("b"))
    assert len(prompt_text(picture("a" * 5000))) < 40


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [None, 3, {"role": 4, "content": {"x": 1}}]},
        {"messages": "text"},
        {"prompt": None},
        {"prompt": [1, 2, 3]},
        {"input": {"a": 1}},
        {"messages": [{"content": "\ud800"}]},
    ],
)
def test_odd_bodies_have_a_prefix_all_the_same(body: dict[str, object]) -> None:
    """A body that an engine would refuse is no reason to fail before it."""
    assert isinstance(prompt_text(body), bytes)


def test_output_limit_of_a_body() -> None:
    """The newest name wins; nonsense counts as not given."""
    assert output_tokens_max({"max_tokens": 5, "max_completion_tokens": 7}) == 7
    assert output_tokens_max({"max_output_tokens": 9}) == 9
    assert output_tokens_max({"max_tokens": 2**63}) == OUTPUT_TOKENS_MAX
    for value in (0, -1, True, "8", None, 1.5):
        assert output_tokens_max({"max_tokens": value}) == OUTPUT_TOKENS_DEFAULT


def test_token_estimate_is_at_least_one() -> None:
    """Even an empty prompt costs something."""
    assert prompt_tokens_estimate(b"") == 1
    assert prompt_tokens_estimate(b"x" * 400) == 100
    assert prompt_tokens_estimate(b"x" * 400, bytes_per_token=2.0) == 200
