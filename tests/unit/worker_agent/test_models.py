"""Served names and the engine's own."""

import pytest
from msgspec.structs import replace

from tests.builders import a_chat_body, a_job
from worker_agent.models import ModelNames


def test_configured_names_are_served_whatever_the_engine_lists() -> None:
    """An operator's names win."""
    names = ModelNames({"big": "meta/big"})
    names.learn(("meta/big", "other"))
    assert names.served == ("big",)


def test_without_names_the_engines_are_served() -> None:
    """As it lists them, as soon as it does."""
    names = ModelNames({})
    assert names.served == ()
    names.learn(("a", "b"))
    assert names.served == ("a", "b")


def test_an_equal_name_leaves_the_body_untouched() -> None:
    """Byte for byte."""
    job = a_job(body=b'{ "model" : "tiny" }', blocks=b"")
    assert ModelNames({"tiny": "tiny"}).body(job) is job.body
    assert ModelNames({}).body(job) is job.body


@pytest.mark.parametrize("body", [b'{"model":"big"}', b"{}", b'{"model":["tiny"]}'])
def test_a_body_that_asks_for_another_model_gets_the_jobs(body: bytes) -> None:
    """A lane that may use one model can't reach another beside it."""
    job = a_job(body=body, blocks=b"")
    assert ModelNames({}).body(job) == b'{"model":"tiny"}'


def test_an_adapter_goes_by_its_own_name() -> None:
    """VLLM takes the adapter's name as the model."""
    job = a_job(body=b'{"model":"tiny-de"}', blocks=b"", adapter="tiny-de")
    assert ModelNames({}).body(job) is job.body


@pytest.mark.parametrize(
    ("names", "asked"), [({}, "tiny-de"), ({"tiny": "own", "tiny-de": "own:de"}, "own:de")]
)
def test_a_body_that_asks_for_the_base_model_gets_the_adapter(
    names: dict[str, str], asked: str
) -> None:
    """The job is for the adapter, and so are its prefix blocks: the base would answer otherwise."""
    job = a_job(body=b'{"model":"tiny"}', blocks=b"", adapter="tiny-de")
    assert ModelNames(names).body(job) == b'{"model":"%s"}' % asked.encode()


def test_an_alias_in_the_body_becomes_the_model() -> None:
    """The engine knows no alias."""
    job = a_job(body=b'{"model":"gpt-4o-mini"}', blocks=b"")
    assert ModelNames({"tiny": "own/tiny"}).body(job) == b'{"model":"own/tiny"}'


def test_another_name_is_put_in_and_all_else_kept() -> None:
    """Unknown fields reach the engine."""
    job = a_job(body=a_chat_body(cache_salt="x"))
    body = ModelNames({"tiny": "own/tiny"}).body(job)
    assert body == job.body.replace(b'"tiny"', b'"own/tiny"')


@pytest.mark.parametrize("body", [b"not json", b"[1]", b"\xff"])
def test_a_body_that_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    """The engine refuses it in its own words."""
    job = replace(a_job(), body=body)
    assert ModelNames({"tiny": "own"}).body(job) == body


def test_a_body_nested_too_deeply_for_its_name_goes_to_the_engine_as_it_is() -> None:
    """It can be read and not be written again: refused as that, and no fault of the agent."""
    body = b'{"model":"gpt-4o-mini","x":%s}' % (b"[" * 990 + b"]" * 990)
    asked = ModelNames({"tiny": "own"}).body(replace(a_job(), body=body))
    assert asked in (body, body.replace(b"gpt-4o-mini", b"own"))
