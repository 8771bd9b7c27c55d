"""People's chats with time to think between turns, and a batch sweep that fills what they leave.

Each of a number of users holds a chat of some turns, thinks before each one, and then begins
another chat. A turn's prompt is all that was said before and something new, so its prefix lies
where the turn before was answered, unless that was pushed out while the user thought. The sweep is
lines of band 3 that share nothing, each of which comes as soon as the one before it in its strand
has ended: what a batch runner does that keeps so many lines in the cluster.
"""

import random
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from broker.sim.request import Request, Workload
from broker.sim.workload.arrivals import around
from broker.sim.workload.assembly import output_limit
from broker.sim.workload.prefixes import BLOCK_TOKENS, Prefix
from broker.wire.ids import BATCH_BAND

SWEEP_LANE = "sweep"


class Habits(Struct, frozen=True, kw_only=True):
    """How people chat. Lengths are means, uniform within half of them around; so are all here."""

    users: int = 200
    turns: int = 10
    """Of each chat."""
    think_s: float = 30.0
    """Before each turn: exponential."""
    opening_tokens: int = 6000
    turn_tokens: int = 500
    output_tokens: int = 200


class Sweep(Struct, frozen=True, kw_only=True):
    """A batch."""

    strands: int = 256
    """Lines in the cluster at once."""
    lines: int = 10_000
    prompt_tokens: int = 8000
    output_tokens: int = 100


def chats(
    rng: random.Random, habits: Habits, sweep: Sweep | None = None, *, duration_s: float = 300.0
) -> Workload:
    """Return users' turns for about `duration_s`, and the lines of a sweep."""
    root = Prefix()
    threads = [
        list(_user(rng, root, habits, name=f"user-{user}", until_s=duration_s))
        for user in range(habits.users)
    ]
    limit = habits.output_tokens
    if sweep is not None:
        limit = max(limit, sweep.output_tokens)
        for strand in range(sweep.strands):
            lines = range(strand, sweep.lines, sweep.strands)
            threads.append([_line(rng, root, sweep) for _ in lines])
    requests = _threaded(threads, limit=output_limit(2 * limit))
    return Workload(name="chats", requests=requests, source="generated")


def _user(
    rng: random.Random, root: Prefix, habits: Habits, *, name: str, until_s: float
) -> Iterator[Request]:
    """Yield a user's turns, each `at_s` after the end of the one before.

    The first chat is under way already, so that all users are somewhere in theirs.
    """
    thought_s, left, chat = 0.0, rng.randint(1, habits.turns), 0
    turn_tokens = habits.turn_tokens + habits.output_tokens
    said_tokens = habits.opening_tokens + (habits.turns - left) * turn_tokens
    said = root.alone(around(rng, said_tokens))
    while True:
        gap_s = rng.expovariate(1 / habits.think_s)
        thought_s += gap_s
        if thought_s > until_s:
            return
        answer_tokens = around(rng, habits.output_tokens)
        yield _request(said, at_s=gap_s, output_tokens=answer_tokens, session=f"{name}.{chat}")
        said, left = said.alone(answer_tokens + around(rng, habits.turn_tokens)), left - 1
        if not left:
            said, left = root.alone(around(rng, habits.opening_tokens)), habits.turns
            chat += 1


def _line(rng: random.Random, root: Prefix, sweep: Sweep) -> Request:
    prompt = root.alone(around(rng, sweep.prompt_tokens))
    line = _request(prompt, at_s=0.0, output_tokens=around(rng, sweep.output_tokens))
    return replace(line, lane=SWEEP_LANE, band=BATCH_BAND)


def _request(prompt: Prefix, *, at_s: float, output_tokens: int, session: str = "") -> Request:
    return Request(
        index=0,
        at_s=at_s,
        prompt_tokens=prompt.tokens,
        output_tokens=output_tokens,
        output_tokens_max=output_tokens,
        blocks=prompt.blocks,
        block_tokens=BLOCK_TOKENS,
        session=session,
    )


def _threaded(threads: Iterable[Sequence[Request]], *, limit: int) -> list[Request]:
    """Number the requests, and let each come after the one before it in its thread."""
    requests: list[Request] = []
    for thread in sorted((one for one in threads if one), key=lambda one: one[0].at_s):
        first = len(requests)
        for turn, request in enumerate(thread):
            index, after = first + turn, first + turn - 1 if turn else None
            requests.append(replace(request, index=index, after=after, output_tokens_max=limit))
    return requests
