"""Which of our blocks the engine holds, by its own events."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_agent.engine.kv_event_wire import AllBlocksCleared, BlockRemoved, BlockStored
from worker_agent.engine_blocks import UNPLACED_MAX, EngineBlocks, TokenizedPrompt

SIZE = 4


def a_prompt(
    tokens: Sequence[int], *, every: int = 8, start: int = 1, **fields: Any
) -> TokenizedPrompt:
    """A prompt with a block of ours after each `every` tokens; blocks name what is before them."""
    edges = list(range(every, len(tokens) + 1, every))
    chain = [hash((start, *tokens[:edge])) & 0xFFFFFFFF for edge in edges]
    return TokenizedPrompt(chain=chain, edges=edges, tokens=tokens, **fields)


def store(tokens: Sequence[int], *, after: int = 0, **fields: Any) -> BlockStored:
    """Store a prompt's blocks from the token `after` on; names say what is before them."""
    names = [hash(tuple(tokens[:end])) for end in range(after + SIZE, len(tokens) + 1, SIZE)]
    defaults: dict[str, Any] = {
        "names": tuple(names),
        "parent": hash(tuple(tokens[:after])) if after else None,
        "tokens": tuple(tokens[after : after + SIZE * len(names)]),
        "block_size": SIZE,
        "medium": "GPU",
    }
    return BlockStored(**{**defaults, **fields})


def remove(tokens: Sequence[int], **fields: Any) -> BlockRemoved:
    """Remove the block that ends where `tokens` end."""
    return BlockRemoved(names=(hash(tuple(tokens)),), **fields)


def known(*prompts: TokenizedPrompt, **fields: int) -> EngineBlocks:
    """A cache that has heard of nothing but these prompts."""
    blocks = EngineBlocks(**fields)
    for prompt in prompts:
        blocks.learn(prompt, at_s=0.0)
    return blocks


TOKENS = list(range(100, 132))


@pytest.mark.parametrize("tokens_first", [True, False])
def test_a_prompt_is_credited_once_tokens_and_events_are_there(tokens_first: bool) -> None:
    """In either order, and told once, parents first."""
    prompt = a_prompt(TOKENS)
    blocks = EngineBlocks()
    for turn in (tokens_first, not tokens_first):
        assert blocks.depth(prompt.chain) == 0
        if turn:
            blocks.learn(prompt, at_s=0.0)
        else:
            blocks.apply(store(TOKENS))
    assert blocks.depth(prompt.chain) == 4
    assert blocks.take() == (list(prompt.chain), [])
    assert blocks.take() == ([], [])


def test_a_removed_block_takes_all_that_need_it_and_no_more() -> None:
    """Children first; stored again, they are back."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.take()
    blocks.apply(remove(TOKENS[:20]))
    assert blocks.depth(prompt.chain) == 2
    assert blocks.take() == ([], [prompt.chain[3], prompt.chain[2]])
    blocks.apply(store(TOKENS[:20], after=16))
    assert blocks.take() == (list(prompt.chain[2:]), [])


def test_what_comes_back_before_it_was_told_is_not_gone() -> None:
    """Only the difference since the last report counts."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.take()
    blocks.apply(remove(TOKENS))
    blocks.apply(store(TOKENS, after=28))
    stored, gone = blocks.take()
    assert (stored, gone) == ([prompt.chain[3]], [])


def test_prompts_share_blocks() -> None:
    """What goes at the fork takes one; what goes before it takes both."""
    fork = [*TOKENS[:16], *range(200, 216)]
    one, other = a_prompt(TOKENS), a_prompt(fork)
    assert one.chain[:2] == other.chain[:2]
    blocks = known(one, other)
    blocks.apply(store(TOKENS))
    blocks.apply(store(fork, after=16))
    assert (blocks.depth(one.chain), blocks.depth(other.chain)) == (4, 4)
    blocks.apply(remove(fork[:20]))
    assert (blocks.depth(one.chain), blocks.depth(other.chain)) == (4, 2)
    blocks.apply(remove(TOKENS[:12]))
    assert (blocks.depth(one.chain), blocks.depth(other.chain)) == (1, 1)


def test_a_reset_takes_all_and_keeps_the_prompts() -> None:
    """Their tokens need not be asked again."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.take()
    blocks.apply(AllBlocksCleared())
    assert blocks.take() == ([], list(reversed(prompt.chain)))
    assert blocks.knows(prompt.chain)
    blocks.apply(store(TOKENS))
    assert blocks.depth(prompt.chain) == 4


def test_a_block_that_ends_inside_an_engine_block_needs_what_lies_wholly_before() -> None:
    """6 tokens: one engine block of 4. One shorter than an engine block counts with the first."""
    prompt = TokenizedPrompt(chain=[1, 2, 3], edges=[3, 6, 8], tokens=TOKENS[:8])
    blocks = known(prompt)
    blocks.apply(store(TOKENS[:4]))
    assert blocks.depth([1, 2, 3]) == 2
    blocks.apply(store(TOKENS[:8], after=4))
    assert blocks.depth([1, 2, 3]) == 3


def test_blocks_elsewhere_do_not_count() -> None:
    """Moved to the host's memory, a prompt is gone; what leaves there takes nothing."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.apply(store(TOKENS, medium="CPU"))
    blocks.apply(remove(TOKENS[:8], medium="CPU"))
    assert blocks.depth(prompt.chain) == 4
    blocks.apply(remove(TOKENS[:8], medium="GPU"))
    blocks.apply(store(TOKENS[:8], after=4, medium="CPU_PINNED"))
    assert blocks.depth(prompt.chain) == 0


def test_adapters_and_salts_are_caches_of_their_own() -> None:
    """Equal tokens under another adapter or salt are other blocks."""
    plain = a_prompt(TOKENS)
    law = a_prompt(TOKENS, start=2, adapter="law")
    by_model = a_prompt(TOKENS, start=3, model="law")
    salted = a_prompt(TOKENS, start=4, extra="['s']")
    blocks = EngineBlocks()
    blocks.apply(store(TOKENS, adapter="law"))
    for prompt in (plain, law, by_model, salted):
        blocks.learn(prompt, at_s=0.0)
    depths = [blocks.depth(one.chain) for one in (plain, law, by_model, salted)]
    assert depths == [0, 4, 4, 0]
    salted_names = tuple(range(8))
    blocks.apply(store(TOKENS, names=salted_names, extras=("['s']", *[""] * 7)))
    assert blocks.depth(salted.chain) == 4
    assert blocks.depth(plain.chain) == 0


def test_one_group_of_layers_stands_for_all() -> None:
    """The first that attends to the whole prefix; windows and others are passed over."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS, group=0, kind="sliding_window"))
    assert blocks.depth(prompt.chain) == 0
    blocks.apply(store(TOKENS, group=1, kind="full_attention"))
    assert blocks.depth(prompt.chain) == 4
    blocks.apply(remove(TOKENS[:4], group=0))
    assert blocks.depth(prompt.chain) == 4
    blocks.apply(remove(TOKENS[:4], group=1))
    assert blocks.depth(prompt.chain) == 0


def test_a_name_that_stands_for_several_blocks_takes_all_of_them() -> None:
    """Older SGLang named blocks by their own tokens: too little credit is safe."""
    one, other = [*range(4), *range(50, 54)], [*range(10, 14), *range(50, 54)]
    blocks = known(a_prompt(one), a_prompt(other))
    for tokens in (one, other):
        blocks.apply(store(tokens, names=(tokens[0], 99)))
    assert blocks.depth(a_prompt(one).chain) == blocks.depth(a_prompt(other).chain) == 1
    blocks.apply(BlockRemoved(names=(99,)))
    assert blocks.depth(a_prompt(one).chain) == blocks.depth(a_prompt(other).chain) == 0


def test_a_parent_that_is_not_known_earns_no_credit() -> None:
    """It was stored before we listened; counted, and removing it is nothing."""
    blocks = known(a_prompt(TOKENS))
    blocks.apply(store(TOKENS, after=16))
    blocks.apply(remove(TOKENS[:16]))
    assert blocks.orphans == 4
    assert blocks.depth(a_prompt(TOKENS).chain) == 0


def test_engine_blocks_beyond_the_bound_earn_no_credit() -> None:
    """And no harm: what is known stays right."""
    prompt = a_prompt(TOKENS)
    blocks = EngineBlocks(nodes_max=6)
    blocks.apply(store(TOKENS))
    assert (blocks.nodes_count, blocks.beyond) == (6, 2)
    blocks.learn(prompt, at_s=0.0)
    assert blocks.depth(prompt.chain) == 3


def test_places_beyond_the_bound_go_from_the_least_recently_used() -> None:
    """From the end of its chain; a forgotten prompt is asked about again."""
    old, new = a_prompt(TOKENS), a_prompt(list(range(500, 532)))
    blocks = known(places_max=6)
    blocks.apply(store(TOKENS))
    blocks.learn(old, at_s=0.0)
    blocks.learn(new, at_s=1.0)
    assert (blocks.depth(old.chain), blocks.knows(old.chain), blocks.knows(new.chain)) == (
        2,
        False,
        True,
    )


def test_prompts_that_came_before_the_first_event_wait_for_it() -> None:
    """Only so many; the oldest are asked about again."""
    prompts = [a_prompt([number, *TOKENS[1:]]) for number in range(UNPLACED_MAX + 1)]
    blocks = known(*prompts)
    assert [blocks.knows(prompt.chain) for prompt in prompts] == [False, *[True] * UNPLACED_MAX]
    blocks.apply(store(prompts[-1].tokens))
    assert blocks.depth(prompts[-1].chain) == 4


def test_what_is_not_used_for_long_is_forgotten() -> None:
    """And nothing is left of it, once the engine has removed it too."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.use(prompt.chain, at_s=5.0)
    blocks.expire(5.0)
    assert blocks.depth(prompt.chain) == 4
    blocks.expire(5.1)
    assert (blocks.depth(prompt.chain), blocks.knows(prompt.chain)) == (0, False)
    for end in range(4, 33, 4):
        blocks.apply(remove(TOKENS[:end]))
    assert blocks.nodes_count == 0


def test_another_engine_is_another_cache() -> None:
    """Cleared, it takes blocks of any length again."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.take()
    blocks.clear()
    assert blocks.take()[1] == list(reversed(prompt.chain))
    blocks.apply(BlockStored(names=(1,), parent=None, tokens=tuple(TOKENS), block_size=32))
    blocks.learn(prompt, at_s=0.0)
    assert blocks.depth(prompt.chain) == 4


TREE = [
    [first, *([second] * 3), *([third] * 4), 9, 9, 9, 9]
    for first in (1, 2)
    for second in (3, 4)
    for third in (5, 6)
]
"""Eight prompts of three engine blocks that share beginnings."""

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["store", "remove", "learn", "clear", "expire", "use"]),
        st.integers(0, 7),
        st.integers(1, 3),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(ACTIONS)
def test_credit_is_what_the_engine_holds_from_the_front(
    actions: list[tuple[str, int, int]],
) -> None:
    """Against a plain model, for any order; and a reader of the changes ends with the same set."""
    blocks = EngineBlocks()
    blocks.apply(store([0] * SIZE))
    held: set[tuple[int, ...]] = set()
    learned: set[int] = set()
    told: set[int] = set()
    prompts = [a_prompt(tokens, every=4) for tokens in TREE]
    parent_of = {
        block: before
        for one in prompts
        for before, block in zip(one.chain, one.chain[1:], strict=False)
    }
    for at_s, (action, number, depth) in enumerate(actions):
        tokens, prompt = TREE[number], prompts[number]
        path = tuple(tokens[: depth * SIZE])
        match action:
            case "store":
                # An engine stores a block only behind those it holds.
                start = 0
                while tuple(tokens[: start + SIZE]) in held and start + SIZE < len(path):
                    start += SIZE
                blocks.apply(store(path, after=start))
                held |= {path[:end] for end in range(start + SIZE, len(path) + 1, SIZE)}
            case "remove":
                blocks.apply(remove(path))
                held.discard(path)
            case "learn":
                blocks.learn(prompt, at_s=float(at_s))
                learned |= set(prompt.chain)
            case "use":
                blocks.use(prompt.chain, at_s=float(at_s))
            case "expire":
                blocks.expire(at_s - 10.0)
                learned = {block for block in learned if block in blocks._places}
            case _:
                blocks.apply(AllBlocksCleared())
                held.clear()
        stored, gone = blocks.take()
        told.difference_update(gone)
        for block in stored:
            assert parent_of.get(block) is None or parent_of[block] in told
            told.add(block)
        expected = {
            block
            for one, its in zip(prompts, TREE, strict=True)
            for index, block in enumerate(one.chain)
            if block in learned
            and all(tuple(its[: end * SIZE]) in held for end in range(1, index + 2))
        }
        assert told == expected
        assert all(
            set(one.chain[: blocks.depth(one.chain)]) == set(one.chain) & told for one in prompts
        )


def test_blocks_of_another_length_are_passed_over() -> None:
    """The first event's length is the engine's; a stray one can't be placed."""
    prompt = a_prompt(TOKENS)
    blocks = known(prompt)
    blocks.apply(store(TOKENS[:16]))
    blocks.apply(BlockStored(names=(1,), parent=None, tokens=tuple(TOKENS[:8]), block_size=8))
    blocks.apply(BlockRemoved(names=(1,)))
    assert blocks.depth(prompt.chain) == 2


def test_equal_text_may_make_other_tokens() -> None:
    """By another template: the newest path of the shared blocks counts, and holes hide the rest."""
    prompt = a_prompt(TOKENS)
    other = TokenizedPrompt(chain=prompt.chain[:2], edges=[8, 16], tokens=list(range(900, 916)))
    blocks = known(prompt)
    blocks.apply(store(TOKENS))
    blocks.take()
    blocks.learn(other, at_s=1.0)
    assert blocks.depth(prompt.chain) == 0
    assert blocks.take() == ([], list(reversed(prompt.chain)))
    blocks.apply(store(other.tokens))
    assert blocks.take() == (list(prompt.chain), [])


def test_a_path_that_found_no_room_leaves_nothing_behind() -> None:
    """Its end carries none of our blocks, and is forgotten at once."""
    prompt = a_prompt(TOKENS)
    blocks = EngineBlocks(nodes_max=4)
    blocks.apply(store([0] * SIZE))
    blocks.learn(prompt, at_s=0.0)
    assert blocks.nodes_count == 3
    blocks.expire(1.0)
    assert blocks.nodes_count == 1
