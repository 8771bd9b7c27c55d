"""What a foreign producer leaves out, the broker computes as ours would have."""

import asyncio
import json
import threading
from typing import Any

import msgspec
import orjson
import pytest

from broker.bus.base import Delivery, NotFound, StoredMessage
from broker.bus.memory import MemoryBus
from broker.service import reading
from broker.service.learned import Learned
from broker.service.reading import INLINE_BYTES_MAX, Reader, Whole, completed
from broker.wire.codec import MalformedMessage, decode
from broker.wire.messages import Job
from broker.wire.prefix import BLOCK_BYTES, BLOCKS_MAX, CLUSTER_SCOPE, HASH_BYTES
from broker.wire.subjects import JobAddress
from producers.request import Wish, build_job
from tests.builders import LANE, MODEL, a_job
from tests.json_callers import CONTENT_TYPE, a_body, a_json_job, base64_of, packed
from tests.leaders import ADDRESS, a_delivery, a_desk
from tests.turns import until

LONG = "tell me a story. " * 40
"""A prompt of two blocks and a half."""

VERY_LONG = "x" * INLINE_BYTES_MAX


def a_reader(bus: MemoryBus | None = None) -> Reader:
    """A reader that learned nothing, and tells at once."""
    return Reader(bus or MemoryBus(), Learned(), call=lambda work: work())


class Told:
    """What a reader read aside, in order."""

    def __init__(self) -> None:
        self.found: list[Whole | Exception] = []
        self._more = asyncio.Event()

    def hear(self, delivery: Delivery, found: Whole | Exception) -> None:
        assert delivery.data
        self.found.append(found)
        self._more.set()

    def lose(self, delivery: Delivery, found: Whole | Exception) -> None:
        """As `hear`, of a message that could not be had again."""
        assert not delivery.data
        self.found.append(found)
        self._more.set()

    async def all(self, reader: Reader, count: int) -> list[Whole | Exception]:
        """Let the reader run until so many were told."""
        running = asyncio.create_task(reader.run())
        while len(self.found) < count:
            self._more.clear()
            await self._more.wait()
        running.cancel()
        return self.found


def ours(body: dict[str, Any], **wish: Any) -> Job:
    """The job that our own producers would make of a body."""
    return build_job(body, Wish(job_id="job-1", **wish), lane=LANE, client="js")


def read(**fields: Any) -> Whole:
    """A JSON job as the broker reads it."""
    whole = a_reader().read_soon(
        a_delivery(packed(a_json_job(**fields)), headers=CONTENT_TYPE), ADDRESS
    )
    assert whole is not None
    return whole


BODIES: dict[str, dict[str, Any]] = {
    "a chat": a_body(LONG),
    "a short chat": a_body("hi"),
    "a streamed chat": a_body(LONG, stream=True),
    "no limit named": {"model": MODEL, "messages": [{"role": "user", "content": LONG}]},
    "tools": a_body(LONG, tools=[{"type": "function", "function": {"name": "f"}}]),
    "parts": a_body("", messages=[{"role": "user", "content": [{"type": "text", "text": LONG}]}]),
    "a completion": {"model": MODEL, "prompt": LONG, "max_tokens": 3},
    "other letters": a_body("讲一个故事吧 " * 40),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_foreign_job_is_made_what_our_own_producer_makes(body: dict[str, Any]) -> None:
    """Hashes, estimate, longest answer and stream, all from the body, by the same functions."""
    whole, wanted = read(body=body), ours(body)
    for name in ("blocks", "prompt_tokens", "output_tokens_max", "stream"):
        assert getattr(whole.job, name) == getattr(wanted, name), name
    assert json.loads(whole.job.body) == body
    assert whole.speaks_json


def test_a_body_may_come_as_base64() -> None:
    """The same job."""
    body = orjson.dumps(a_body(LONG))
    assert read(body=base64_of(body)).job == read(body=a_body(LONG)).job


def test_what_a_foreign_job_says_stands() -> None:
    """Computed is only what is missing, even where a default is meant."""
    blocks = bytes(range(HASH_BYTES))
    job = read(
        body=a_body(LONG, stream=True),
        blocks=base64_of(blocks),
        prompt_tokens=7,
        output_tokens_max=256,
        stream=False,
        submitted_at_s=5.0,
    ).job
    assert (job.blocks, job.prompt_tokens, job.output_tokens_max) == (blocks, 7, 256)
    assert (job.stream, job.submitted_at_s) == (False, 5.0)


def test_a_foreign_job_was_submitted_when_it_was_stored() -> None:
    """Unless it says when."""
    assert read().job.submitted_at_s == 1000.0


def test_an_adapters_prompts_share_no_hashes_with_the_models() -> None:
    """The seed has the adapter, as ours has."""
    assert read(body=a_body(LONG), adapter="a").job.blocks != read(body=a_body(LONG)).job.blocks


def test_a_foreign_job_may_share_its_prefix_with_the_other_lanes() -> None:
    """In JSON or without hashes in msgpack: the same hashes as ours has with that wish."""
    wanted = ours(a_body(LONG), cache_scope=CLUSTER_SCOPE)
    assert wanted.cluster_scope
    assert wanted.blocks != ours(a_body(LONG)).blocks
    assert read(body=a_body(LONG), cluster_scope=True).job.blocks == wanted.blocks
    bare = msgspec.structs.replace(wanted, blocks=b"", prompt_tokens=1)
    whole = a_reader().read_soon(a_delivery(bare), ADDRESS)
    assert whole is not None
    assert whole.job.blocks == wanted.blocks


def test_the_estimate_uses_what_was_learned_of_the_model() -> None:
    """Bytes per token, as the offer tells our producers."""
    job, missing = a_job(body=orjson.dumps(a_body(LONG))), frozenset(("prompt_tokens",))
    few = completed(job, missing, bytes_per_token=8.0).prompt_tokens
    many = completed(job, missing, bytes_per_token=2.0).prompt_tokens
    assert many == pytest.approx(4 * few, rel=0.02)


NO_PROMPTS = {
    "no JSON": b"x" * 600,
    "a list": b"[" + b"1," * 300 + b"1]",
    "no messages": orjson.dumps({"model": MODEL, "other": "x" * 600}),
    "content deeper than can be written": b'{"messages":[{"role":"user","content":'
    + b'{"a":' * 300
    + b"1"
    + b"}" * 300
    + b"}]}",
}


@pytest.mark.parametrize("body", NO_PROMPTS.values(), ids=NO_PROMPTS)
def test_a_body_with_no_prompt_in_it_is_the_engines_to_refuse(body: bytes) -> None:
    """It is a job all the same, routed by load alone."""
    job = read(body=base64_of(body)).job
    assert (job.body, job.blocks, job.prompt_tokens) == (body, b"", 1)


def test_a_worker_gets_a_foreign_job_whole_and_in_msgpack() -> None:
    """Agents know one form, and get hashes and estimate with it."""
    whole = read(body=a_body(LONG))
    assert whole.message[:1] != b"{"
    assert decode(whole.message, Job) == whole.job
    assert whole.job.blocks


def test_a_job_in_msgpack_without_hashes_is_filled_in_too() -> None:
    """A foreign producer may have a msgpack library and no xxh3."""
    wanted = ours(a_body(LONG))
    bare = msgspec.structs.replace(wanted, blocks=b"", prompt_tokens=1)
    whole = a_reader().read_soon(a_delivery(bare), ADDRESS)
    assert whole is not None
    assert whole.job == wanted
    assert decode(whole.message, Job) == wanted
    assert not whole.speaks_json


@pytest.mark.parametrize(
    "job",
    [
        a_job(),
        a_job(body=orjson.dumps(a_body(LONG))),
        msgspec.structs.replace(a_job(), body=b"x" * 999, prompt_tokens=2),
    ],
)
def test_a_job_of_our_own_producers_goes_on_byte_for_byte(job: Job) -> None:
    """Not parsed, not packed again."""
    delivery = a_delivery(job)
    whole = a_reader().read_soon(delivery, ADDRESS)
    assert whole is not None
    assert whole.message is delivery.data
    assert whole.job == job


BAD = {
    "half a hash": {"blocks": base64_of(b"x" * 7)},
    "too many hashes": {"blocks": base64_of(bytes(HASH_BYTES * (BLOCKS_MAX + 1)))},
    "another lane": {"lane": "beta"},
    "another band": {"band": 1},
    "another model": {"model": "other"},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_a_job_in_json_is_checked_as_one_in_msgpack(fields: dict[str, Any]) -> None:
    """Against its subject, and its hashes; long or short."""
    for body in (a_body(), a_body(VERY_LONG)):
        message = a_delivery(packed(a_json_job(**{"body": body, **fields})), headers=CONTENT_TYPE)
        with pytest.raises(MalformedMessage):
            a_reader().read(message, ADDRESS)


def a_long_message(form: str) -> Any:
    """A foreign job over INLINE_BYTES_MAX, in either form."""
    body = a_body(VERY_LONG)
    if form == "json":
        return a_delivery(packed(a_json_job(body=body)), headers=CONTENT_TYPE)
    return a_delivery(msgspec.structs.replace(ours(body), blocks=b"", prompt_tokens=1))


@pytest.mark.parametrize("form", ["json", "msgpack"])
async def test_a_long_foreign_job_is_read_in_a_thread(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INLINE_BYTES_MAX: beyond it the loop only hears what came of it."""
    threads: list[int] = []
    blocks_of = reading.block_hashes

    def noted(text: bytes, *, seed: int) -> list[int]:
        threads.append(threading.get_ident())
        return blocks_of(text, seed=seed)

    monkeypatch.setattr(reading, "block_hashes", noted)
    told, reader = Told(), a_reader()
    message = a_long_message(form)
    assert reader.read_soon(message, ADDRESS) is None
    reader.read_aside(message, ADDRESS, then=told.hear)
    (found,) = await told.all(reader, 1)
    assert isinstance(found, Whole)
    assert found.job.blocks == ours(a_body(VERY_LONG)).blocks
    assert threads
    assert threading.get_ident() not in threads


async def test_long_messages_are_told_in_order_and_one_that_is_broken_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Malformed or a fault of ours: the next one is read all the same."""
    told, reader = Told(), a_reader()
    good, bad = a_long_message("json"), a_delivery(b"{" * 50_000)
    real = reading.read_json_job
    faults = iter((None, None, ZeroDivisionError("ours"), None))

    def faulty(data: bytes) -> Any:
        if (fault := next(faults)) is not None:
            raise fault
        return real(data)

    monkeypatch.setattr(reading, "read_json_job", faulty)
    for message in (good, bad, good, good):
        reader.read_aside(message, ADDRESS, then=told.hear)
    kinds = [type(one) for one in await told.all(reader, 4)]
    assert kinds == [Whole, MalformedMessage, ZeroDivisionError, Whole]
    assert reader.aside_bytes == 0


async def test_lanes_take_turns_at_being_read() -> None:
    """One lane's flood of long messages holds up another's for one of them, not for all."""
    told, reader = Told(), a_reader()
    beta = JobAddress("beta", 2, MODEL)
    for lane, address in ((LANE, ADDRESS), (LANE, ADDRESS), (LANE, ADDRESS), ("beta", beta)):
        data = packed(a_json_job(lane=lane, body=a_body(VERY_LONG)))
        reader.read_aside(a_delivery(data, headers=CONTENT_TYPE), address, then=told.hear)
    found = await told.all(reader, 4)
    assert [one.job.lane for one in found if isinstance(one, Whole)] == [LANE, "beta", LANE, LANE]


async def test_of_too_many_bytes_the_rest_is_read_from_the_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ASIDE_BYTES_MAX: the message keeps its place, its bytes wait where they are."""
    async with a_desk() as desk:
        message = a_long_message("json")
        monkeypatch.setattr(reading, "ASIDE_BYTES_MAX", 2 * len(message.data))
        await desk.bus.append(message.subject, message.data, headers=CONTENT_TYPE)
        told, reader = Told(), a_reader(desk.bus)
        for _ in range(4):
            reader.read_aside(message, ADDRESS, then=told.hear)
        assert reader.aside_bytes == reading.ASIDE_BYTES_MAX
        first, *others = await told.all(reader, 4)
        assert others == [first] * 3
        assert reader.aside_bytes == 0


async def test_a_message_that_is_gone_when_its_turn_comes_is_told_as_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended meanwhile, or the server can't be asked: nothing is known of the job."""
    async with a_desk() as desk:
        monkeypatch.setattr(reading, "ASIDE_BYTES_MAX", 0)
        told, reader = Told(), a_reader(desk.bus)
        reader.read_aside(a_long_message("json"), ADDRESS, then=told.lose)
        assert [type(one) for one in await told.all(reader, 1)] == [NotFound]


async def test_what_could_not_be_had_again_is_no_malformed_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its place in the window is given back, and nothing is written: it may come again."""
    monkeypatch.setattr(reading, "ASIDE_BYTES_MAX", 0)
    async with a_desk("reader") as desk:
        desk.take(a_long_message("json"))
        await until(lambda: desk.leader.loop.backlog > 0)
        desk.turn()
        assert desk.window.released == 1
        assert not desk.seen.bad
        assert desk.leader.closer._work.empty()


@pytest.mark.parametrize("user", [LONG, VERY_LONG])
async def test_a_job_that_is_read_again_from_its_stream_is_made_whole_again(user: str) -> None:
    """Its body was dropped for want of memory: the worker must not get less than at first."""
    data = packed(a_json_job(body=a_body(user)))
    stored = StoredMessage("jobs.acme.2.tiny", 1, data, 1000.0, CONTENT_TYPE)
    again = await a_reader().message_of(stored, ADDRESS)
    assert again == a_reader().read(a_delivery(data, headers=CONTENT_TYPE), ADDRESS).message


@pytest.mark.parametrize(("body_bytes", "is_looked_into"), [(BLOCK_BYTES, True), (255, False)])
def test_a_body_in_msgpack_shorter_than_a_block_is_not_looked_into(
    body_bytes: int, is_looked_into: bool
) -> None:
    """It has no hash, whoever made it: our own short jobs are not parsed for nothing."""
    body = orjson.dumps({"prompt": "x" * (body_bytes - len(b'{"prompt":""}'))})
    assert len(body) == body_bytes
    whole = a_reader().read_soon(a_delivery(a_job(body=body, blocks=b"")), ADDRESS)
    assert whole is not None
    assert (whole.job.prompt_tokens > 1) == is_looked_into
