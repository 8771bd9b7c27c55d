"""Generated loads, one function each: what production has and no public trace shows alone.

Arrivals are those of many independent senders (Poisson) unless said otherwise; questions' and
outputs' lengths are uniform within half of their mean around it. Blocks are of 64 tokens. The
defaults are a few minutes of work for eight workers; a scenario sets what it needs.
"""

import random
from collections.abc import Iterable, Iterator
from heapq import merge
from itertools import chain, count, islice, repeat, takewhile

from msgspec.structs import replace

from broker.sim.request import Request, Workload
from broker.sim.workload.arrivals import Popularity, around, poisson
from broker.sim.workload.assembly import UNKNOWN_OUTPUT_MAX, assembled, output_limit
from broker.sim.workload.prefixes import BLOCK_TOKENS, Prefix
from broker.sim.workload.stream import Stream

PROMPT_TOKENS = 2000
"""A system prompt that is worth caching, where a load doesn't say."""
SYSTEM_TOKENS = 500
"""A system prompt that stands before something longer."""
QUESTION_TOKENS = 60
"""A short question, where a load doesn't say."""
OUTPUT_TOKENS = 50
"""A short answer, where a load doesn't say."""


def shared_prompts(
    rng: random.Random,
    *,
    prompts: int = 20,
    prompt_tokens: int = 2000,
    question_tokens: int = 50,
    output_tokens: int = 50,
    requests: int = 4000,
    requests_per_s: float = 20.0,
    zipf: float = 0.0,
) -> Workload:
    """Short questions behind one of a few long system prompts; uniform, or Zipf by `zipf`."""
    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    prefixes = _popular(rng, prompts=prompts, prompt_tokens=prompt_tokens, zipf=zipf)
    return _workload(
        "shared_prompts", _asked(rng, arrivals, prefixes, question_tokens, output_tokens)
    )


def few_shot(
    rng: random.Random,
    *,
    tasks: int = 40,
    examples_max: int = 8,
    example_tokens: int = 250,
    output_tokens: int = 30,
    requests: int = 4000,
    requests_per_s: float = 20.0,
    zipf: float = 1.0,
) -> Workload:
    """One system prompt, then the first 1 to `examples_max` examples of a task, then a question."""
    system, popular = Prefix().then(0, SYSTEM_TOKENS), Popularity(tasks, zipf=zipf)

    def prefixes() -> Iterator[Prefix]:
        while True:
            prefix = system.then(popular.one(rng), example_tokens)
            for example in range(rng.randrange(examples_max)):
                prefix = prefix.then(example, example_tokens)
            yield prefix

    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    return _workload("few_shot", _asked(rng, arrivals, prefixes(), QUESTION_TOKENS, output_tokens))


def rag(
    rng: random.Random,
    *,
    documents: int = 200,
    document_tokens: int = 1000,
    documents_per_prompt: int = 3,
    output_tokens: int = 150,
    requests: int = 4000,
    requests_per_s: float = 10.0,
    zipf: float = 1.0,
) -> Workload:
    """One system prompt, then retrieved documents in the order of relevance, then a question.

    The same document behind another one is another prefix: only equal beginnings are shared.
    """
    system, popular = Prefix().then(0, SYSTEM_TOKENS), Popularity(documents, zipf=zipf)

    def prefixes() -> Iterator[Prefix]:
        while True:
            prefix = system
            for document in popular.several(rng, documents_per_prompt):
                prefix = prefix.then(document, document_tokens)
            yield prefix

    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    return _workload("rag", _asked(rng, arrivals, prefixes(), QUESTION_TOKENS, output_tokens))


def hot_group(
    rng: random.Random,
    *,
    hot_share: float = 0.6,
    prompts: int = 40,
    prompt_tokens: int = 2000,
    question_tokens: int = 100,
    output_tokens: int = 50,
    requests: int = 4000,
    requests_per_s: float = 20.0,
) -> Workload:
    """One prompt gets `hot_share` (0..1) of all requests, the other `prompts` share the rest."""
    root = Prefix()

    def prefixes() -> Iterator[Prefix]:
        while True:
            cold = 1 + rng.randrange(prompts)
            yield root.then(0 if rng.random() < hot_share else cold, prompt_tokens)

    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    return _workload("hot_group", _asked(rng, arrivals, prefixes(), question_tokens, output_tokens))


def alternating(
    rng: random.Random,
    *,
    prompts: int = 2,
    prompt_tokens: int = 2000,
    question_tokens: int = 50,
    output_tokens: int = 50,
    requests: int = 4000,
    requests_per_s: float = 10.0,
) -> Workload:
    """Hot prompts in strict turns: equal loads, so that nothing but a tie ever moves a prefix."""
    root = Prefix()
    prefixes = (root.then(turn % prompts, prompt_tokens) for turn in count())
    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    return _workload("alternating", _asked(rng, arrivals, prefixes, question_tokens, output_tokens))


def bursts(
    rng: random.Random,
    *,
    prompts: int = 20,
    output_tokens: int = 50,
    requests: int = 4000,
    requests_per_s: float = 10.0,
    burst_requests_per_s: float = 100.0,
    burst_s: float = 5.0,
    period_s: float = 60.0,
) -> Workload:
    """A steady load, and on top, in the last `burst_s` of each period, a burst."""
    steady = poisson(rng, requests_per_s=requests_per_s)
    own = random.Random(rng.getrandbits(64))
    burst = _bursts(own, requests_per_s=burst_requests_per_s, burst_s=burst_s, period_s=period_s)
    prefixes = _popular(rng, prompts=prompts, prompt_tokens=PROMPT_TOKENS, zipf=1.0)
    arrivals = islice(merge(steady, burst), requests)
    return _workload("bursts", _asked(rng, arrivals, prefixes, QUESTION_TOKENS, output_tokens))


def retry_storm(
    rng: random.Random,
    *,
    prompts: int = 20,
    requests: int = 4000,
    requests_per_s: float = 10.0,
    storm_at_s: float = 60.0,
    storm_s: float = 30.0,
    retries: int = 3,
    timeout_s: float = 5.0,
) -> Workload:
    """A steady load whose impatient senders ask again, the same, `retries` times in a storm.

    What was sent in the `storm_s` from `storm_at_s` on comes again each `timeout_s`, whether it was
    answered or not, beyond the number of `requests`: clients without backoff or jitter.
    """
    arrivals = islice(poisson(rng, requests_per_s=requests_per_s), requests)
    prefixes = _popular(rng, prompts=prompts, prompt_tokens=PROMPT_TOKENS, zipf=1.0)
    sent = list(_asked(rng, arrivals, prefixes, QUESTION_TOKENS, OUTPUT_TOKENS))
    again = (
        replace(request, at_s=request.at_s + retry * timeout_s)
        for request in sent
        if storm_at_s <= request.at_s < storm_at_s + storm_s
        for retry in range(1, retries + 1)
    )
    return _workload("retry_storm", chain(sent, again))


def short_long_lanes(
    rng: random.Random,
    *,
    short_prompt_tokens: int = 500,
    short_output_tokens: int = 50,
    short_requests_per_s: float = 20.0,
    long_prompt_tokens: int = 16_000,
    long_output_tokens: int = 400,
    long_requests_per_s: float = 1.5,
    duration_s: float = 200.0,
) -> Workload:
    """Lane `short` asks small things often, lane `long` large things now and then; no prefixes."""
    nothing = repeat(Prefix())
    lanes = (
        ("short", short_requests_per_s, short_prompt_tokens, short_output_tokens),
        ("long", long_requests_per_s, long_prompt_tokens, long_output_tokens),
    )
    return _workload(
        "short_long_lanes",
        (
            replace(request, lane=lane)
            for lane, requests_per_s, prompt_tokens, output_tokens in lanes
            for request in _asked(
                rng,
                takewhile(duration_s.__gt__, poisson(rng, requests_per_s=requests_per_s)),
                nothing,
                prompt_tokens,
                output_tokens,
            )
        ),
    )


def scale_out(
    rng: random.Random,
    *,
    prompts: int = 60,
    prompt_tokens: int = 2000,
    question_tokens: int = 200,
    output_tokens: int = 100,
    requests_per_s: float = 30.0,
    duration_s: float = 300.0,
    zipf: float = 1.0,
) -> Workload:
    """A steady load of shared prompts, for a fleet that workers with cold caches join."""
    arrivals = takewhile(duration_s.__gt__, poisson(rng, requests_per_s=requests_per_s))
    prefixes = _popular(rng, prompts=prompts, prompt_tokens=prompt_tokens, zipf=zipf)
    return _workload("scale_out", _asked(rng, arrivals, prefixes, question_tokens, output_tokens))


def many(
    rng: random.Random,
    *,
    prompts: int = 2000,
    prompt_tokens: int = 1024,
    output_tokens: int = 16,
    requests: int = 1_000_000,
    requests_per_s: float = 2000.0,
    zipf: float = 1.0,
    lanes: int = 8,
) -> Workload:
    """A large stream of small requests, made as it is read: its memory doesn't grow with it.

    Questions have no blocks, prompts have one per 512 tokens: little to do for each request.
    """
    seed, block_tokens = rng.getrandbits(64), 512
    prompt_blocks = prompt_tokens // block_tokens
    limit = output_limit(2 * output_tokens)

    def make() -> Iterator[Request]:
        again, popular = random.Random(seed), Popularity(prompts, zipf=zipf)
        for index, at_s in enumerate(poisson(again, requests_per_s=requests_per_s)):
            first_block = popular.one(again) * prompt_blocks
            yield Request(
                index=index,
                at_s=at_s,
                prompt_tokens=prompt_tokens + around(again, QUESTION_TOKENS),
                output_tokens=around(again, output_tokens),
                output_tokens_max=limit,
                blocks=range(first_block, first_block + prompt_blocks),
                block_tokens=block_tokens,
                lane=f"lane-{index % lanes}",
            )

    return Workload(name="many", source="generated", requests=Stream(requests, make))


def _popular(
    rng: random.Random, *, prompts: int, prompt_tokens: int, zipf: float
) -> Iterator[Prefix]:
    """Yield endlessly one of the prompts, by popularity."""
    root, popular = Prefix(), Popularity(prompts, zipf=zipf)
    while True:
        yield root.then(popular.one(rng), prompt_tokens)


def _bursts(
    rng: random.Random, *, requests_per_s: float, burst_s: float, period_s: float
) -> Iterator[float]:
    """Yield endlessly the arrivals of the bursts alone."""
    for period in count(1):
        end_s = period * period_s
        start_s = end_s - burst_s
        yield from takewhile(
            end_s.__gt__, poisson(rng, requests_per_s=requests_per_s, start_s=start_s)
        )


def _asked(
    rng: random.Random,
    arrivals: Iterable[float],
    prefixes: Iterable[Prefix],
    question_tokens: int,
    output_tokens: int,
) -> Iterator[Request]:
    """Yield at each arrival a question of its own behind the next prefix."""
    for at_s, prefix in zip(arrivals, prefixes, strict=False):
        prompt = prefix.alone(around(rng, question_tokens))
        yield Request(
            index=0,
            at_s=at_s,
            prompt_tokens=prompt.tokens,
            output_tokens=around(rng, output_tokens),
            output_tokens_max=UNKNOWN_OUTPUT_MAX,
            blocks=prompt.blocks,
            block_tokens=BLOCK_TOKENS,
        )


def _workload(name: str, requests: Iterable[Request]) -> Workload:
    return assembled(requests, name=name, source="generated")
