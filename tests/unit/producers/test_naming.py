"""Aliases and adapters: which model a name means, and whose prefix it shares."""

from typing import Any

import pytest

from broker.wire.messages import Job, LaneOffer
from broker.wire.prefix import unpack_hashes
from producers.naming import other_names, resolve
from producers.request import Wish, build_job
from tests.builders import LANE, a_chat_body

OFFER = LaneOffer(
    lane=LANE,
    models=("llama-3-8b", "big"),
    aliases={
        "gpt-4o-mini": "llama-3-8b",
        "gpt-4o": "big",
        "small": "llama-3-8b",
        "german": "de",
        "lost": "away",
    },
    adapters={"llama-3-8b": ("de", "fr"), "big": ("it",)},
)


def a_job(model: str, *, offer: LaneOffer | None = OFFER, **wish: Any) -> Job:
    """A long chat that names a model."""
    body = a_chat_body(model=model, messages=[{"role": "user", "content": "word " * 400}])
    return build_job(body, Wish(**wish), lane=LANE, client="c", offer=offer)


@pytest.mark.parametrize(
    ("name", "adapter", "means"),
    [
        ("llama-3-8b", "", ("llama-3-8b", "")),
        ("gpt-4o-mini", "", ("llama-3-8b", "")),
        ("de", "", ("llama-3-8b", "de")),
        ("it", "", ("big", "it")),
        ("gpt-4o-mini", "de", ("llama-3-8b", "de")),
        ("german", "", ("llama-3-8b", "de")),
        ("german", "de", ("llama-3-8b", "de")),
        ("german", "fr", ("de", "fr")),
        ("lost", "", ("away", "")),
        ("unheard", "", ("unheard", "")),
        ("llama-3-8b", "unheard", ("llama-3-8b", "unheard")),
    ],
)
def test_what_a_name_means(name: str, adapter: str, means: tuple[str, str]) -> None:
    """An alias its model or adapter, an adapter's name that adapter; any other name itself."""
    assert resolve(name, adapter, OFFER) == means
    assert resolve(name, adapter, None) == (name, adapter)


def test_the_other_names_of_a_model() -> None:
    """For people: sorted."""
    assert other_names("llama-3-8b", OFFER) == ["gpt-4o-mini", "small"]
    assert other_names("de", OFFER) == ["german"]
    assert other_names("fr", OFFER) == []


def test_an_alias_is_the_model_itself() -> None:
    """The same queue and the same prefix; the body is the caller's own."""
    alias, model = a_job("gpt-4o-mini"), a_job("llama-3-8b")
    assert (alias.model, alias.adapter) == ("llama-3-8b", "")
    assert alias.blocks == model.blocks
    assert len(alias.blocks) > 0
    assert b'"gpt-4o-mini"' in alias.body


def test_adapters_of_one_model_share_no_prefix() -> None:
    """The same text under two adapters, and under none: no block of one is a block of another."""
    chains = [
        unpack_hashes(a_job(name).blocks) for name in ("llama-3-8b", "de", "fr", "gpt-4o", "it")
    ]
    assert all(len(chain) > 1 for chain in chains)
    assert len({block for chain in chains for block in chain}) == sum(map(len, chains))


def test_an_adapter_by_name_and_by_wish_is_the_same() -> None:
    """As a model, by another name, or beside one: the same job."""
    by_name, by_wish = a_job("de"), a_job("gpt-4o-mini", adapter="de")
    by_alias = a_job("german")
    for other in (by_wish, by_alias):
        assert (by_name.model, by_name.adapter) == (other.model, other.adapter)
        assert by_name.blocks == other.blocks


def test_before_the_offer_is_known_a_name_means_itself() -> None:
    """The door looks again when no stream takes it."""
    job = a_job("gpt-4o-mini", offer=None)
    assert (job.model, job.adapter) == ("gpt-4o-mini", "")
