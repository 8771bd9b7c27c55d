"""What jobs that ran teach, and what clients are told of it, across restarts."""

import pytest

from broker.bus.base import NotFound, Timeout
from broker.core.policy import LanePolicy
from broker.service import learned as module
from broker.service.learned import BLOCKS_MIN, Learned
from broker.service.offer import publish_offers, told_bytes_per_token
from broker.wire.codec import decode, encode
from broker.wire.messages import LaneOffer, Usage
from broker.wire.prefix import BLOCK_BYTES
from broker.wire.subjects import CONFIG_BUCKET, lane_offer_key
from tests.builders import LANE, MODEL
from tests.crashing import Failing
from tests.leaders import OTHER_LANE, Desk, a_desk

PROMPT = 10 * BLOCK_BYTES + BLOCK_BYTES // 2
"""Bytes that ten whole blocks stand for."""


def taught(bytes_per_token: float = 4.0) -> Learned:
    """One prompt of model `tiny` measured."""
    learned = Learned()
    tokens = round(PROMPT / bytes_per_token)
    learned.measured(MODEL, prompt_blocks=10, prompt_tokens=tokens)
    return learned


def test_the_cached_share_of_a_worker_is_that_of_its_jobs() -> None:
    """Over all its prompts; 0 before the first."""
    learned = Learned()
    assert learned.cached_token_ratio("w1") == 0.0
    learned.ran("w1", Usage(prompt_tokens=100, cached_tokens=50))
    learned.ran("w1", Usage(prompt_tokens=300, cached_tokens=50))
    assert learned.cached_token_ratio("w1") == 0.25


def test_workers_beyond_the_bound_are_forgotten_by_age(monkeypatch: pytest.MonkeyPatch) -> None:
    """WORKERS_MAX: the one that ended a job longest ago goes."""
    monkeypatch.setattr(module, "WORKERS_MAX", 2)
    learned = Learned()
    for worker in ("a", "b", "a", "c"):
        learned.ran(worker, Usage(prompt_tokens=2, cached_tokens=1))
    assert [learned.cached_token_ratio(worker) for worker in "abc"] == [0.5, 0.0, 0.5]


def test_a_short_or_empty_prompt_teaches_nothing() -> None:
    """Templates weigh too much in it."""
    learned = Learned()
    learned.measured(MODEL, prompt_blocks=BLOCKS_MIN - 1, prompt_tokens=10)
    learned.measured(MODEL, prompt_blocks=BLOCKS_MIN, prompt_tokens=0)
    assert learned.prompt_tokens(MODEL, prompt_blocks=10, told=7) == 7
    assert learned.news() is None


def test_an_estimate_is_never_below_one_token() -> None:
    """Whoever told zero."""
    assert Learned().prompt_tokens(MODEL, prompt_blocks=0, told=0) == 1
    assert taught().prompt_tokens(MODEL, prompt_blocks=0, told=0) == 1
    assert taught(1e6).prompt_tokens(MODEL, prompt_blocks=1, told=0) == 1


@pytest.mark.parametrize(
    ("prompt_blocks", "told", "estimated"),
    [
        (0, 5000, 5000),  # Nobody knows its text.
        (3, 191, 224),
        (3, 192, 192),
        (3, 256, 256),
        (3, 257, 224),
        (3, 900, 224),
        (4, 300, 288),
    ],
)
def test_of_a_short_prompt_what_is_told_is_taken_if_it_can_be(
    prompt_blocks: int, told: int, estimated: int
) -> None:
    """Three blocks and less than a fourth, at 64 tokens each: 192 to 256 tokens."""
    learned = taught()
    assert learned.prompt_tokens(MODEL, prompt_blocks=prompt_blocks, told=told) == estimated


def test_news_is_what_differs_enough_from_what_was_told() -> None:
    """CHANGE_MIN; what could not be told is news again."""
    learned = taught()
    news = learned.news()
    assert news == {MODEL: pytest.approx(4.0, rel=0.01)}
    assert learned.news() == news
    learned.told(news or {})
    assert learned.news() is None
    for _ in range(40):
        learned.measured(MODEL, prompt_blocks=10, prompt_tokens=round(PROMPT / 2))
    assert learned.news() is not None


def test_a_new_leader_goes_on_from_what_clients_know() -> None:
    """Its first sample moves the average; what it measured itself is not overwritten."""
    learned = Learned()
    learned.resume({MODEL: 4.0})
    assert learned.news() is None
    learned.measured(MODEL, prompt_blocks=10, prompt_tokens=round(PROMPT / 2))
    assert learned.bytes_per_token[MODEL] == pytest.approx(3.9, rel=0.01)
    learned.resume({MODEL: 9.0})
    assert learned.bytes_per_token[MODEL] == pytest.approx(3.9, rel=0.01)


# ---- the offers in CONFIG ----


async def offer(desk: Desk, lane: str = LANE) -> LaneOffer:
    """What clients read."""
    entry = await desk.bus.kv_get(CONFIG_BUCKET, lane_offer_key(lane))
    return decode(entry.value, LaneOffer)


async def revision(desk: Desk) -> int:
    """How often the offer was written."""
    return (await desk.bus.kv_get(CONFIG_BUCKET, lane_offer_key(LANE))).revision


async def test_an_offer_is_written_where_it_says_something_new() -> None:
    """A restart with the same configuration disturbs no client."""
    async with a_desk() as desk:
        await publish_offers(desk.bus, desk.config, bytes_per_token={MODEL: 4.0, "elsewhere": 2.0})
        written = await offer(desk)
        assert (written.models, written.bytes_per_token) == ((MODEL,), {MODEL: 4.0})
        before = await revision(desk)
        await publish_offers(desk.bus, desk.config, bytes_per_token={MODEL: 4.0})
        assert await revision(desk) == before


async def test_an_offer_tells_what_names_stand_for() -> None:
    """All aliases, so that a client can say what one means; adapters of the lane's own models."""
    policy = {
        "models": (MODEL, "big"),
        "aliases": {"mini": MODEL, "maxi": "big", "german": "de"},
        "adapters": {MODEL: ("de",), "big": ("fr",)},
    }
    lanes = (LanePolicy(name=LANE, models=(MODEL,)),)
    async with a_desk(lanes=lanes, policy=policy) as desk:
        await publish_offers(desk.bus, desk.config, bytes_per_token={})
        written = await offer(desk)
        assert written.aliases == {"mini": MODEL, "maxi": "big", "german": "de"}
        assert written.adapters == {MODEL: ("de",)}


async def test_what_was_told_survives_a_restart() -> None:
    """Garbage and absence are no word; a rate of nothing is none either."""
    async with a_desk() as desk:
        assert await told_bytes_per_token(desk.bus, desk.config) == {}
        await publish_offers(desk.bus, desk.config, bytes_per_token={MODEL: 4.0})
        await desk.bus.kv_put(CONFIG_BUCKET, lane_offer_key(OTHER_LANE), b"\xc1")
        assert await told_bytes_per_token(desk.bus, desk.config) == {MODEL: 4.0}
        bad = LaneOffer(lane=LANE, models=(MODEL,), bytes_per_token={MODEL: 0.0})
        await desk.bus.kv_put(CONFIG_BUCKET, lane_offer_key(LANE), encode(bad))
        assert await told_bytes_per_token(desk.bus, desk.config) == {}


async def test_what_was_learned_is_told_and_told_again_if_that_failed() -> None:
    """The server was away: the news is kept."""
    async with a_desk(fault=Failing("kv_put", Timeout(""))) as desk:
        desk.learned.measured(MODEL, prompt_blocks=10, prompt_tokens=round(PROMPT / 4))
        announcements = desk.leader.announcements
        await announcements.publish_learned_once()
        with pytest.raises(NotFound):
            await offer(desk)
        await announcements.publish_learned_once()
        assert (await offer(desk)).bytes_per_token[MODEL] == pytest.approx(4.0, rel=0.01)
        before = await revision(desk)
        await announcements.publish_learned_once()
        assert await revision(desk) == before
