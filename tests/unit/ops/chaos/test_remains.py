"""What a run reads of streams and batches when it is over: of those that are its own."""

from pathlib import Path

import orjson
import pytest

from broker.bus import topology
from broker.bus.memory import MemoryBus
from broker.wire import codec, subjects
from broker.wire.messages import Job, Kind, TerminalRecord
from ops.chaos.history import Pen, Submitted, Told
from ops.chaos.joined import JoinedStage, addresses_of
from ops.chaos.remains import lines, remains
from ops.chaos.setting import Load
from ops.chaos.stage import place_of
from producers.batch.plan import Plan, default_errors
from producers.batch.state import State, new_identity, read_identity
from tests.builders import LANE, MODEL


def a_batch(folder: Path, *, names: str = "abc", results: str = "", errors: str = "") -> Plan:
    """A batch that was begun, with lines and results of these names."""
    source, output = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(named(names))
    plan = Plan(input=str(source), output=output, errors=default_errors(output), lane="offline")
    with State(plan.state) as state, state.transaction():
        state.identity = new_identity(input_name=plan.input, lane=plan.lane, band=3, window_s=60.0)
    output.write_bytes(named(results))
    plan.errors.write_bytes(named(errors))
    return plan


def named(names: str) -> bytes:
    """A line for each letter."""
    return b"".join(orjson.dumps({"custom_id": name}) + b"\n" for name in names)


def test_each_line_has_one_result_wherever_it_stands(tmp_path: Path) -> None:
    """In the output or among the errors."""
    assert lines([a_batch(tmp_path, results="ca", errors="b")]) == ((), ())


def test_a_line_without_result_is_lost(tmp_path: Path) -> None:
    """The batch's user has no answer."""
    assert lines([a_batch(tmp_path, results="ca")]) == (("b",), ())


def test_a_line_with_two_results_is_doubled(tmp_path: Path) -> None:
    """Also with one in each file."""
    assert lines([a_batch(tmp_path, results="abb", errors="ac")]) == ((), ("a", "b"))


def test_a_line_whose_job_is_stuck_is_not_lost(tmp_path: Path) -> None:
    """It is told of where stuck jobs are."""
    plan = a_batch(tmp_path, results="ca")
    stuck = f"offline.{read_identity(plan.output).job_id(2, 0)}"
    assert lines([plan], {stuck}) == ((), ())


def test_a_batch_without_files_of_results_has_lost_all(tmp_path: Path) -> None:
    """It was killed before it began."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(named("ab"))
    plan = Plan(input=str(source), output=output, errors=default_errors(output), lane="offline")
    assert lines([plan]) == (("a", "b"), ())


async def test_in_a_cluster_of_others_only_our_own_remains_count(tmp_path: Path) -> None:
    """What others queue and record is theirs; a record that has run out there was told to us."""
    bus = MemoryBus()
    load = Load(online=LANE, offline="other", model=MODEL)
    lanes = [topology.LanePlan(lane, (MODEL,)) for lane in (LANE, "other")]
    await topology.apply(bus, topology.of(lanes))
    stage = JoinedStage(tmp_path, url="nats://there", load=load)
    stage._bus = bus
    pen = Pen(tmp_path, "chats")
    for name in ("stuck", "recorded", "told"):
        pen.write(Submitted(at_s=1.0, job=f"{LANE}.{name}", by="chats"))
    pen.write(Told(at_s=2.0, job=f"{LANE}.told", by="chats", kind="completed"))
    for name in ("stuck", "theirs"):
        await bus.append(subjects.jobs(LANE, 1, MODEL), codec.encode(a_job(name)))
    garbage = [await bus.append(subjects.jobs(LANE, 1, MODEL), b"?") for _ in range(2)]
    stage.garbage.add(place_of(garbage[0].stream, garbage[0].sequence))
    for name in ("recorded", "theirs-too"):
        record = TerminalRecord(job=name, lane=LANE, kind=Kind.COMPLETED, ended_at_s=1.0)
        await bus.append(subjects.result(LANE, name), codec.encode(record))
    found = await remains(stage)
    assert found.queued == {f"{LANE}.stuck", *stage.garbage}
    assert found.recorded == {f"{LANE}.recorded": 1, f"{LANE}.told": 1}
    await bus.close()


def a_job(job_id: str) -> Job:
    """A job."""
    return Job(id=job_id, lane=LANE, band=1, model=MODEL, client="client-1", body=b"{}")


def test_addresses_of_a_cluster_are_taken_apart_for_the_links() -> None:
    """A login goes with the link; NATS's own port where none is named."""
    url = "nats://me:word@one:4000,two,nats://three"
    assert addresses_of(url) == ([("one", 4000), ("two", 4222), ("three", 4222)], "me:word@")
    assert addresses_of("one") == ([("one", 4222)], "")


@pytest.mark.parametrize("url", ["tls://one", "ws://one:80", "nats://"])
def test_what_no_link_can_be_put_before_is_refused(url: str) -> None:
    """Encrypted names would not match."""
    with pytest.raises(ValueError, match="a link can be put only before"):
        addresses_of(url)
