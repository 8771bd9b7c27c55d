"""Data-parallel ranks: each a cache of its own, and one prefix held where any of them has it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.worker_agent.test_engine_blocks import SIZE, TOKENS, a_prompt, remove, store
from worker_agent.engine_ranks import EngineRanks
from worker_agent.kv_events import endpoint_of

PROMPT = a_prompt(TOKENS)


def ranks_that_know(count: int) -> EngineRanks:
    """Ranks that hold nothing yet, and know a prompt's tokens once one has told of its blocks."""
    ranks = EngineRanks(count)
    ranks.learn(PROMPT, at_s=0.0)
    return ranks


def test_a_prefix_counts_that_any_rank_holds() -> None:
    """It is told once, however many hold it, and gone with the last."""
    ranks = ranks_that_know(3)
    ranks.apply(store(TOKENS), rank=1)
    assert ranks.take() == (list(PROMPT.chain), [])
    ranks.apply(store(TOKENS), rank=2)
    assert ranks.take() == ([], [])
    ranks.apply(remove(TOKENS[:SIZE]), rank=1)
    assert ranks.take() == ([], [])
    assert ranks.depth(PROMPT.chain) == len(PROMPT.chain)
    ranks.apply(remove(TOKENS[:SIZE]), rank=2)
    assert ranks.take() == ([], list(reversed(PROMPT.chain)))
    assert ranks.depth(PROMPT.chain) == 0


def test_halves_in_two_ranks_make_no_whole() -> None:
    """A request runs in one rank: what another has is of no use to it."""
    ranks = ranks_that_know(2)
    ranks.apply(store(TOKENS[:16]), rank=0)
    ranks.apply(store(TOKENS, after=16), rank=1)
    assert ranks.depth(PROMPT.chain) == 2


def test_a_rank_that_is_lost_takes_its_own_credit_alone() -> None:
    """The others' stays; its prompts' tokens are asked again."""
    ranks = ranks_that_know(2)
    ranks.apply(store(TOKENS), rank=0)
    ranks.apply(store(TOKENS[:16]), rank=1)
    ranks.take()
    assert ranks.knows(PROMPT.chain)
    ranks.lost(0)
    assert ranks.take() == ([], list(reversed(PROMPT.chain[2:])))
    assert not ranks.knows(PROMPT.chain)


def test_what_moves_from_rank_to_rank_between_two_looks_is_no_change() -> None:
    """Gone here and stored there: it is held before and after."""
    ranks = ranks_that_know(2)
    ranks.apply(store(TOKENS), rank=0)
    ranks.apply(store(TOKENS[:SIZE]), rank=1)
    ranks.take()
    ranks.apply(remove(TOKENS[:SIZE]), rank=0)
    ranks.apply(store(TOKENS, after=SIZE), rank=1)
    assert ranks.take() == ([], [])


@pytest.mark.parametrize(
    ("endpoint", "rank", "is_at"),
    [
        ("tcp://10.0.0.1:5557", 0, "tcp://10.0.0.1:5557"),
        ("tcp://10.0.0.1:5557", 3, "tcp://10.0.0.1:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("ipc:///run/kv", 0, "ipc:///run/kv"),
        ("", 2, ""),
    ],
)
def test_each_rank_has_a_port_of_its_own(endpoint: str, rank: int, is_at: str) -> None:
    """The first one's, and those that follow."""
    assert endpoint_of(endpoint, rank) == is_at


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4))
def test_what_is_told_adds_up_to_what_any_rank_holds(seed: int, count: int) -> None:
    """Whatever comes and goes where: the sum of all that was told is what some rank holds now."""
    rng = random.Random(seed)
    ranks = ranks_that_know(count)
    prompts = [PROMPT, a_prompt([*TOKENS[:16], *range(200, 216)])]
    for prompt in prompts:
        ranks.learn(prompt, at_s=0.0)
    told: set[int] = set()
    for _ in range(60):
        rank, prompt = rng.randrange(count), rng.choice(prompts)
        cut = SIZE * rng.randint(1, len(prompt.tokens) // SIZE)
        if rng.random() < 0.6:
            ranks.apply(store(list(prompt.tokens[:cut])), rank=rank)
        elif rng.random() < 0.9:
            ranks.apply(remove(list(prompt.tokens[:cut])), rank=rank)
        else:
            ranks.lost(rank)
            for one in prompts:
                ranks.learn(one, at_s=0.0)
        if rng.random() < 0.5:
            stored, gone = ranks.take()
            told.difference_update(gone)
            told.update(stored)
            held = {block for one in prompts for block in one.chain if ranks.holds(block)}
            assert told == held
