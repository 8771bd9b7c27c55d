"""Messages that are out for harm, on every subject where the broker hears strangers."""

import random
import time
from pathlib import Path

import pytest

from broker.bus.base import Message
from broker.wire import subjects
from broker.wire.codec import MESSAGE_BYTES_MAX, decode, encode
from broker.wire.control import ControlReply
from broker.wire.messages import Kind, Reason, TerminalRecord
from tests.builders import LANE, MODEL, a_job
from tests.clusters import a_chat, a_cluster
from tests.leaders import Desk, a_desk
from tests.turns import until
from tests.unit.service.test_control import ask, ask_cluster

HELD_S_MAX = 0.050
"""Longest the loop's thread may work on one message."""

JSON = {"Content-Type": "application/json"}

BOMBS: dict[str, bytes] = {
    "an array of four thousand million": b"\xdd\xff\xff\xff\xff" + b"\x01" * 100,
    "a map of four thousand million": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "text of four gigabytes": b"\xdb\xff\xff\xff\xff" + b"a" * 100,
    "bytes of four gigabytes": b"\x81\xa3job\xc6\xff\xff\xff\xff" + b"a",
    "a deep array": b"\x91" * 200_000,
    "a deep map": b"\x81\xa1a" * 200_000,
    "a deep map under a name": b"\x81\xa3job" + b"\x81\xa1a" * 200_000 + b"\x01",
    "an extension": b"\x81\xa3job\xc9\x00\x00\xff\xff\x01" + bytes(0xFFFF),
    "a name of no text": b"\x81\xa3job\xa2\xff\xfe",
    "a name twice": b"\x82\xa3job\xa1a\xa3job\xa1b",
    "a huge name": b"\x81\xa3job\xdb\x00\x10\x00\x00" + b"a" * 2**20,
    "a number as a name": b"\x81\xa3job\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00",
    "deep JSON": b"[" * 200_000,
    "deep JSON in an object": b'{"job":' * 100_000 + b"1" + b"}" * 100_000,
    "deep JSON that is left out": b'{"job":"x","more":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "1e999": b'{"job":"x","stream_sequence":1e999,"band":1e999}',
    "a huge number": b'{"job":"x","stream_sequence":' + b"9" * 100_000 + b"}",
    "half a rune": b'{"job":"\\ud800"}',
    "NUL": b'{"job":"a\\u0000b"}',
    "a name of another alphabet": '{"job":"ключ"}'.encode(),
    "a name with dots": b'{"job":"a.b.>","model":"*"}',
    "more than a message": b"x" * (MESSAGE_BYTES_MAX + 1),
    "blanks": b" " * 1_000_000,
    "a list of JSON": b"[1, 2]",
}

VERBS = ("cancel", "cancel_lane", "job", "result", "estimate", "why")


@pytest.mark.parametrize("case", BOMBS)
async def test_what_is_asked_with_a_bomb_is_refused(case: str) -> None:
    """Each verb in a sentence, as no fault of ours, and the loop is not held."""
    async with a_desk("control") as desk:
        for verb in VERBS:
            began_s = time.thread_time()
            reply = await ask(desk, subjects.lane_control(LANE, verb), BOMBS[case])
            assert time.thread_time() - began_s < 4 * HELD_S_MAX, "the whole question"
            assert "see its log" not in reply.message
        assert not (await ask_cluster(desk, "drain", BOMBS[case])).ok
        assert (await ask_cluster(desk, "status")).ok


@pytest.mark.parametrize("seed", range(3))
async def test_random_questions(seed: int) -> None:
    """Cut, spoiled and mixed: an answer to each."""
    draw = random.Random(seed)
    whole = [*BOMBS.values(), encode(a_job()), b'{"job":"job-1","bands":[1],"model":"tiny"}']
    async with a_desk("control") as desk:
        for _ in range(150):
            data = bytearray(draw.choice(whole)[: draw.choice((10, 100, 10**6))])
            for _ in range(draw.randrange(4)):
                if data:
                    data[draw.randrange(len(data))] = draw.randrange(256)
            subject = subjects.lane_control(draw.choice((LANE, "none")), draw.choice(VERBS))
            reply = await ask(desk, subject, bytes(data))
            assert "see its log" not in reply.message, (subject, bytes(data)[:100])
        assert (await ask_cluster(desk, "status")).ok


@pytest.mark.parametrize("form", ["msgpack", "json"])
async def test_jobs_that_are_bombs_end_as_malformed(tmp_path: Path, form: str) -> None:
    """Each with a record of its own; a good job behind them runs."""
    headers = JSON if form == "json" else None
    bombs = [bomb for bomb in BOMBS.values() if len(bomb) <= MESSAGE_BYTES_MAX]
    async with a_cluster(tmp_path) as cluster:
        stranger = cluster.bus.connection()
        subject = subjects.jobs(LANE, 2, MODEL)
        for bomb in bombs:
            await stranger.append(subject, bomb, headers=headers)
        async with cluster.client() as client:
            record = await (await client.submit(a_chat())).result(20)
        assert record.kind is Kind.COMPLETED
        await cluster.until_empty()
        stream = subjects.results_stream(LANE)
        found = [decode(one.data, TerminalRecord) async for one in stranger.messages(stream)]
        refused = [one for one in found if one.job.startswith("bad-")]
        assert len(refused) == len(bombs)
        assert {one.reason for one in refused} == {Reason.MALFORMED}
        await stranger.close()


@pytest.mark.parametrize(
    "reply",
    [
        subjects.result(LANE, "job-1"),
        subjects.jobs(LANE, 2, MODEL),
        subjects.out(LANE, "client-1", "job-1"),
        subjects.work("worker-1"),
        subjects.heartbeat("worker-1"),
        subjects.cluster_control("drain"),
        "$JS.API.STREAM.DELETE.JOBS_acme",
        "$KV.CONFIG.lane.acme",
    ],
)
async def test_an_answer_goes_to_no_subject_of_ours(reply: str) -> None:
    """Or an asker would have the broker say it, to a stream or to a program of ours."""
    async with a_desk("control") as desk:
        heard: list[Message] = []
        stranger = desk.bus.connection()
        await stranger.subscribe(reply, heard.append)
        await desk.leader.control._take(
            desk.leader.control._of_owners, Message(f"ctl.lane.{LANE}.why", b"", reply=reply)
        )
        assert (await ask_cluster(desk, "status")).ok
        await until(desk.leader.control._of_owners.empty)
        # Its own answer comes behind the one that was refused.
        assert not (await _asked(desk)).ok
        assert heard == []
        await stranger.close()


async def _asked(desk: Desk) -> ControlReply:
    return await ask(desk, subjects.lane_control(LANE, "why"), b"\xc1")


async def test_a_client_survives_bombs_on_its_subject(tmp_path: Path) -> None:
    """They are counted as garbage, and its answer comes."""
    async with a_cluster(tmp_path) as cluster, cluster.client() as client:
        stranger = cluster.bus.connection()
        ticket = await client.submit(a_chat())
        subject = subjects.out(LANE, client.client_id, ticket.job_id)
        for bomb in BOMBS.values():
            if len(bomb) <= MESSAGE_BYTES_MAX:
                await stranger.publish(subject, bomb)
        assert (await ticket.result(20)).kind is Kind.COMPLETED
        assert client.open_tickets == 0
        await stranger.close()
        assert client.counts.garbage + client.counts.strays > 0
