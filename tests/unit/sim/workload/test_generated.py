"""Generated loads: each has the property it is named for."""

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable
from itertools import islice, pairwise

import pytest

from broker.sim.errors import TraceError
from broker.sim.request import Request, Workload
from broker.sim.workload import generated
from broker.sim.workload.arrivals import Popularity
from broker.sim.workload.loading import load
from broker.sim.workload.named import GENERATED
from broker.sim.workload.prefixes import BLOCK_TOKENS, Prefix
from broker.sim.workload.shaping import scaled


def a_rng() -> random.Random:
    """Return a random source."""
    return random.Random(7)


def prompts_of(workload: Workload) -> Counter[int]:
    """Return how often each shared prompt is asked for, by its first block."""
    return Counter(request.blocks[0] for request in workload.requests)


def shared_blocks(one: Request, other: Request) -> int:
    """Return how many leading blocks two requests have in common."""
    pairs = zip(one.blocks, other.blocks, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(one.blocks))


def rate(requests: Iterable[Request], start_s: float, end_s: float) -> float:
    """Return requests per second in a stretch of time."""
    return sum(start_s <= request.at_s < end_s for request in requests) / (end_s - start_s)


@pytest.mark.parametrize("name", GENERATED)
def test_every_load_is_well_formed(name: str) -> None:
    """Ordered, indexed, whole blocks only, an equal id at one depth only, the seed decides."""
    parameters = "?requests=500" if name not in ("short_long_lanes", "scale_out") else ""
    workload = load(f"generated:{name}{parameters}", seed=5)
    requests = list(workload.requests)
    assert (workload.name, workload.source.split("(")[0]) == (name, f"generated: {name}")
    assert [request.index for request in requests] == list(range(len(requests)))
    assert all(earlier.at_s <= later.at_s for earlier, later in pairwise(requests))
    assert all(len(r.blocks) <= r.prompt_tokens // r.block_tokens for r in requests)
    assert all(1 <= r.output_tokens <= r.output_tokens_max for r in requests)
    assert len({request.output_tokens_max for request in requests}) == 1
    depths = {(block, depth) for r in requests for depth, block in enumerate(r.blocks)}
    assert len({block for block, _ in depths}) == len(depths)
    assert requests == list(load(f"generated:{name}{parameters}", seed=5).requests)
    assert requests != list(load(f"generated:{name}{parameters}", seed=6).requests)


def test_prefix_shares_whole_blocks_of_equal_beginnings() -> None:
    """100 shared tokens are one whole block of 64; what crosses the border belongs to one alone."""
    prompt = Prefix().then(0, 100)
    assert Prefix().then(0, 63).blocks == ()
    assert len(prompt.blocks) == 1
    one, other = prompt.alone(100), prompt.alone(100)
    assert (one.tokens, len(one.blocks)) == (200, 3)
    assert one.blocks[0] == other.blocks[0]
    assert not set(one.blocks[1:]) & set(other.blocks[1:])
    assert prompt.then(1, 50) is prompt.then(1, 50)


def test_shared_prompts_are_equally_popular_unless_asked() -> None:
    """20 prompts of 2,000 tokens, each near one in twenty; by Zipf the first leads the second."""
    uniform = generated.shared_prompts(a_rng())
    counts = prompts_of(uniform)
    assert len(counts) == 20
    assert max(counts.values()) < 1.4 * min(counts.values())
    assert 2000 < min(request.prompt_tokens for request in uniform.requests) <= 2050
    zipf = prompts_of(generated.shared_prompts(a_rng(), zipf=1.0)).most_common(2)
    assert zipf[0][1] == pytest.approx(2 * zipf[1][1], rel=0.15)


def test_shared_prompts_arrive_at_the_rate() -> None:
    """4,000 requests at 20 a second take about 200 s."""
    requests = generated.shared_prompts(a_rng()).requests
    assert requests[-1].at_s == pytest.approx(200, rel=0.05)


def test_few_shot_prompts_are_beginnings_of_one_another() -> None:
    """Two prompts of one task share all examples of the shorter one."""
    requests = generated.few_shot(a_rng(), tasks=1, example_tokens=640, requests=50).requests
    whole_system = generated.SYSTEM_TOKENS // BLOCK_TOKENS
    assert all(shared_blocks(requests[0], other) > whole_system for other in requests)


def test_rag_shares_documents_only_behind_equal_beginnings() -> None:
    """With two documents in two orders: the system prompt is shared by all, the rest by order."""
    requests = generated.rag(
        a_rng(), documents=2, documents_per_prompt=2, requests=60, zipf=0
    ).requests
    depths = {shared_blocks(requests[0], other) for other in requests[1:]}
    assert depths == {generated.SYSTEM_TOKENS // BLOCK_TOKENS, 2500 // BLOCK_TOKENS}


def test_hot_group_gets_its_share() -> None:
    """One prompt gets 60 %, no other more than a tenth of that."""
    (_, hot), (_, next_), *_ = prompts_of(generated.hot_group(a_rng())).most_common()
    assert hot / 4000 == pytest.approx(0.6, abs=0.02)
    assert next_ < hot / 10


def test_alternating_prompts_take_turns() -> None:
    """No two requests in a row have the same prompt, and both are asked for equally."""
    workload = generated.alternating(a_rng(), requests=100)
    assert all(a.blocks[0] != b.blocks[0] for a, b in pairwise(workload.requests))
    assert sorted(prompts_of(workload).values()) == [50, 50]


def test_bursts_end_each_period() -> None:
    """The last five seconds of each minute carry ten times the load on top."""
    requests = generated.bursts(a_rng()).requests
    assert rate(requests, 0, 54) == pytest.approx(10, rel=0.15)
    assert rate(requests, 55, 60) == pytest.approx(110, rel=0.15)
    assert rate(requests, 60, 114) == pytest.approx(10, rel=0.15)


def test_retry_storm_repeats_requests() -> None:
    """What came in the storm comes as often again as asked, the same, after each timeout."""
    requests = generated.retry_storm(a_rng(), retries=2, timeout_s=1000.0).requests
    rounds = [
        [
            (round(r.at_s - start_s, 6), r.prompt_tokens, r.blocks)
            for r in requests
            if start_s <= r.at_s < start_s + 1000
        ]
        for start_s in (0, 1000, 2000)
    ]
    assert len(rounds[0]) == 4000
    assert [row for row in rounds[0] if row in rounds[1]] == rounds[1] == rounds[2]
    assert rounds[1][0][0] >= 59.8
    assert rounds[1][-1][0] <= 90
    assert len(rounds[1]) == pytest.approx(300, rel=0.15)


def test_retry_storm_multiplies_the_load() -> None:
    """With three retries five seconds apart, four times the load while it lasts."""
    requests = generated.retry_storm(a_rng()).requests
    assert rate(requests, 0, 59) == pytest.approx(10, rel=0.2)
    assert rate(requests, 76, 89) == pytest.approx(40, rel=0.2)


def test_lanes_are_short_and_long() -> None:
    """The long lane asks less often, and for more tokens in all."""
    requests = generated.short_long_lanes(a_rng()).requests
    by_lane = {lane: [r for r in requests if r.lane == lane] for lane in ("short", "long")}
    assert len(by_lane["short"]) > 10 * len(by_lane["long"])
    short, long = (sum(r.prompt_tokens for r in by_lane[lane]) for lane in ("short", "long"))
    assert long > 2 * short


def test_scale_out_is_steady() -> None:
    """Each minute carries the same load."""
    requests = generated.scale_out(a_rng()).requests
    for minute in range(5):
        assert rate(requests, minute * 60, minute * 60 + 60) == pytest.approx(30, rel=0.12)


def test_many_are_never_held() -> None:
    """Reading a million requests, jittered too, takes no memory to speak of."""
    workload = scaled(generated.many(a_rng()), jitter=0.1, rng=a_rng())
    assert len(workload.requests) == 1_000_000
    tracemalloc.start()
    try:
        last = max(request.index for request in islice(workload.requests, 30_000))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert last == 29_999
    assert peak_bytes < 1_000_000


def test_several_are_different_and_by_popularity() -> None:
    """However steep, the draw ends, repeats nothing, and gives at most what there is."""
    steep, flat = Popularity(5, zipf=500), Popularity(5, zipf=0)
    assert sorted(steep.several(a_rng(), 9)) == [0, 1, 2, 3, 4]
    assert steep.several(a_rng(), 2)[0] == 0
    rng = a_rng()
    firsts = Counter(flat.several(rng, 1)[0] for _ in range(5000))
    assert min(firsts.values()) > 900


def test_parameters_are_read_from_the_name() -> None:
    """Numbers take the type of the parameter; the source tells what was set."""
    workload = load("generated:shared_prompts?prompts=3&requests=50&zipf=0.5")
    assert len(workload.requests) == 50
    assert len(prompts_of(workload)) == 3
    assert workload.source == "generated: shared_prompts(prompts=3, requests=50, zipf=0.5)"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nothing", "no such workload; known: shared_prompts"),
        ("rag?colour=red", "no parameter 'colour'; known: documents"),
        ("rag?rng=3", "no parameter 'rng'"),
        ("rag?requests=many", "requests=many: not of type int"),
        ("rag?requests", "requests=: not of type int"),
        ("rag?requests=0", "over 0"),
        ("rag?zipf=-1", "over 0"),
        ("rag?requests_per_s=nan", "over 0"),
        ("rag?requests=9" + 400 * "9", "at most"),
        ("rag?requests=10000001", "at most 10,000,000"),
        ("hot_group?hot_share=1.1", "at most 1"),
    ],
    ids=range(11),
)
def test_bad_name_says_what_is_known(*, name: str, problem: str) -> None:
    """An unknown name, key or number is refused, with what was written."""
    with pytest.raises(TraceError, match=problem) as caught:
        load(f"generated:{name}")
    assert caught.value.where == f"generated:{name}"
