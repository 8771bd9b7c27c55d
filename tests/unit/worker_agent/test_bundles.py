"""Tokens of one turn leave together, in order, within bounds, and never behind an end."""

import asyncio

import pytest

from broker.bus.base import Message
from broker.wire.codec import decode_out, encode
from broker.wire.messages import Bundle, End, Job, OutEvent, Tokens
from tests.agents import ScriptedEngine, an_agent, an_answer
from tests.builders import a_job, an_attempt
from tests.turns import until
from worker_agent.bundles import BUNDLE_BYTES_MAX, OVERHEAD_BYTES, Bundles
from worker_agent.engine.base import Chunk


class Sent:
    """What was published."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, OutEvent]] = []

    async def __call__(self, subject: str, data: bytes) -> None:
        """Take one."""
        self.messages.append((subject, decode_out(data)))


def a_piece(job: Job, index: int, data: bytes = b"{}") -> Tokens:
    """Some of an answer."""
    return Tokens(job=job.id, attempt=an_attempt(1), index=index, data=data)


async def added(*pieces: tuple[Job, Tokens]) -> list[tuple[str, OutEvent]]:
    """What is sent of pieces that all come in one turn."""
    sent = Sent()
    bundles = Bundles(sent)
    async with asyncio.TaskGroup() as group:
        for job, tokens in pieces:
            group.create_task(bundles.add(job, tokens))
    return sent.messages


async def test_tokens_of_one_turn_are_one_message() -> None:
    """In the order in which they came."""
    one, two = a_job(id="one"), a_job(id="two")
    pieces = [(one, a_piece(one, 4)), (two, a_piece(two, 9)), (one, a_piece(one, 5))]
    ((subject, bundle),) = await added(*pieces)
    assert subject == "out.acme.client-1.:tokens"
    assert bundle == Bundle(tokens=tuple(tokens for _, tokens in pieces))


async def test_one_that_comes_alone_goes_on_its_jobs_subject() -> None:
    """As it does for a caller who reads no bundles."""
    job = a_job()
    assert await added((job, a_piece(job, 3))) == [("out.acme.client-1.job-1", a_piece(job, 3))]


async def test_each_caller_gets_its_own() -> None:
    """By lane and client: a client's name may be the same in two lanes."""
    jobs = [a_job(lane=lane, client=client) for lane in "ab" for client in "xy"]
    sent = await added(*((job, a_piece(job, index)) for job in jobs for index in (1, 2)))
    assert [subject for subject, _ in sent] == [
        "out.a.x.:tokens",
        "out.a.y.:tokens",
        "out.b.x.:tokens",
        "out.b.y.:tokens",
    ]


async def test_first_tokens_go_in_front() -> None:
    """Somebody waits for them. What follows one in the same turn stays behind it."""
    old, new = a_job(id="old"), a_job(id="new")
    ((_, bundle),) = await added(
        (old, a_piece(old, 7)), (new, a_piece(new, 0)), (new, a_piece(new, 1))
    )
    assert isinstance(bundle, Bundle)
    assert [(tokens.job, tokens.index) for tokens in bundle.tokens] == [
        ("new", 0),
        ("old", 7),
        ("new", 1),
    ]


async def test_a_bundle_has_at_most_so_many_bytes() -> None:
    """BUNDLE_BYTES_MAX: the rest goes in the next one, a piece beyond it by itself."""
    job = a_job()
    half = b"x" * (BUNDLE_BYTES_MAX // 2 - OVERHEAD_BYTES)
    sizes = [half, half, b"x" * 2 * BUNDLE_BYTES_MAX, half, half + b"x"]
    sent = await added(*((job, a_piece(job, index, data)) for index, data in enumerate(sizes, 1)))
    counts = [len(event.tokens) if isinstance(event, Bundle) else 0 for _, event in sent]
    assert counts == [2, 0, 0, 0]
    (_, bundle) = sent[0]
    assert len(encode(bundle)) <= BUNDLE_BYTES_MAX


async def test_whoever_waits_for_the_turns_end_is_cancelled() -> None:
    """It sends for all others too, so it sends all the same."""
    sent = Sent()
    bundles = Bundles(sent)
    job = a_job()
    first = asyncio.create_task(bundles.add(job, a_piece(job, 1)))
    await asyncio.sleep(0)
    await bundles.add(job, a_piece(job, 2))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    ((_, bundle),) = sent.messages
    assert bundle == Bundle(tokens=(a_piece(job, 1), a_piece(job, 2)))


@pytest.mark.parametrize("reads_bundles", [True, False])
async def test_an_agents_tokens_come_before_the_end(reads_bundles: bool) -> None:
    """In order, whether they come in bundles or, for who reads none, one by one."""
    engine = ScriptedEngine()
    async with an_agent(engine=engine) as stage:
        heard: list[Message] = []
        await stage.bus.subscribe("out.>", heard.append)
        jobs = [
            a_job(id=f"job-{number}", stream=True, reads_bundles=reads_bundles)
            for number in range(3)
        ]
        for job in jobs:
            await stage.dispatch(job)
        for job in jobs:
            pieces = [Chunk(data=b"%d" % n, output_tokens=n) for n in range(1, 6)]
            engine.say(job.id, *pieces, an_answer())
        for job in jobs:
            await stage.end_of(job.id)
        await until(lambda: sum(isinstance(decode_out(m.data), End) for m in heard) == len(jobs))
    assert any(m.subject.endswith(".:tokens") for m in heard) == reads_bundles
    for job in jobs:
        assert _of(job, heard) == [b"1", b"2", b"3", b"4", b"5", b"end"]


def _of(job: Job, heard: list[Message]) -> list[bytes]:
    """A job's pieces and its end, as they came."""
    found: list[bytes] = []
    for message in heard:
        event = decode_out(message.data)
        pieces = event.tokens if isinstance(event, Bundle) else (event,)
        for piece in pieces:
            if isinstance(piece, Tokens) and piece.job == job.id:
                assert piece.index == len(found)
                found.append(piece.data)
            elif isinstance(piece, End) and piece.job == job.id:
                found.append(b"end")
    return found
