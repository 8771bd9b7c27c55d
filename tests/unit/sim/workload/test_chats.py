"""Chats with time to think, and a sweep beside them."""

import random
from collections import defaultdict
from itertools import pairwise
from statistics import fmean

import pytest

from broker.sim.request import Request
from broker.sim.workload.chats import SWEEP_LANE, Habits, Sweep, chats
from broker.wire.ids import BATCH_BAND


def made(*, users: int = 20, strands: int = 4, duration_s: float = 300.0) -> list[Request]:
    """Return a small load."""
    sweep = Sweep(strands=strands, lines=42) if strands else None
    workload = chats(random.Random(1), Habits(users=users), sweep, duration_s=duration_s)
    return list(workload.requests)


def chats_of(requests: list[Request]) -> dict[str, list[Request]]:
    """Return the turns of each chat."""
    found: dict[str, list[Request]] = defaultdict(list)
    for request in requests:
        if request.session:
            found[request.session].append(request)
    return found


def test_it_is_well_formed() -> None:
    """Indexed, roots in the order of their arrivals, whole blocks, a later turn after its own."""
    requests = made()
    assert [request.index for request in requests] == list(range(len(requests)))
    roots = [request.at_s for request in requests if request.after is None]
    assert roots == sorted(roots)
    assert len(roots) <= 24, "a user and a strand are one thread each"
    assert all(r.after in (None, r.index - 1) for r in requests)
    assert all(len(r.blocks) <= r.prompt_tokens // r.block_tokens for r in requests)
    assert len({request.output_tokens_max for request in requests}) == 1
    assert all(r.output_tokens <= r.output_tokens_max for r in requests)
    assert requests == made()


def test_a_turn_builds_on_all_that_was_said_before() -> None:
    """Its blocks begin with those of the turn before, and no chat shares any with another."""
    found = chats_of(made())
    for turns in found.values():
        for earlier, later in pairwise(turns):
            assert later.blocks[: len(earlier.blocks)] == earlier.blocks
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
    firsts = [turns[0].blocks[0] for turns in found.values()]
    assert len(set(firsts)) == len(firsts)


def test_a_chat_has_its_turns_and_its_user_thinks_between_them() -> None:
    """Whole chats have ten turns; gaps are 30 s on average; users stop with the time."""
    requests = made(users=100, duration_s=600)
    lengths = [len(turns) for name, turns in chats_of(requests).items() if name.endswith(".1")]
    assert max(lengths) == 10
    gaps = [request.at_s for request in requests if request.session]
    assert fmean(gaps) == pytest.approx(30.0, rel=0.1)


def test_a_sweep_is_lines_that_share_nothing() -> None:
    """As many as asked, of the batch band, in strands of their own."""
    requests = made()
    lines = [request for request in requests if request.lane == SWEEP_LANE]
    assert len(lines) == 42
    assert all(line.band == BATCH_BAND for line in lines)
    assert sum(line.after is None for line in lines) == 4
    blocks = [block for line in lines for block in line.blocks]
    assert len(set(blocks)) == len(blocks)
    assert not any(request.lane == SWEEP_LANE for request in made(strands=0))
