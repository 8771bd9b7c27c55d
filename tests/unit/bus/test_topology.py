"""What a deployment declares."""

import pytest

from broker.bus import topology
from broker.bus.base import Bus, LinkDown, NoStream, NotTaken, StreamFull, StreamSpec, WrongSequence
from broker.bus.memory import MemoryBus
from broker.bus.topology import Bounds, LanePlan
from broker.wire import subjects
from broker.wire.ids import MalformedName
from tests.buses import pulling
from tests.crashing import Failing, faulty

LANE = LanePlan("acme", ("tiny", "meta/llama"))


async def a_deployment(bounds: Bounds = topology.DEFAULTS) -> Bus:
    """A bus with the lane's topology."""
    bus = MemoryBus()
    await topology.apply(bus, topology.of([LANE], bounds))
    return bus


@pytest.mark.parametrize("others", range(topology.TAKEN_TRIES_MAX + 1))
async def test_what_another_broker_set_meanwhile_is_looked_at_again(others: int) -> None:
    """Two that started at once ended one of them; an old server is still told after a few tries."""
    failing = Failing("ensure_consumer", NotTaken("the server has another"), times=others)
    bus, wanted = faulty(MemoryBus(), failing), topology.of([LanePlan("acme", ("tiny",), (2,))])
    if others < topology.TAKEN_TRIES_MAX:
        await topology.apply(bus, wanted)
    else:
        with pytest.raises(NotTaken):
            await topology.apply(bus, wanted)
    assert failing.raised == min(others, topology.TAKEN_TRIES_MAX)


def test_streams_of_a_lane() -> None:
    """Online and batch apart, each queue by name, records and dead letters with their own rules."""
    jobs, batch, results, letters, files = topology.lane_streams(LANE)
    assert [spec.name for spec in (jobs, batch, results, letters, files)] == [
        "JOBS_acme",
        "BATCH_acme",
        "RESULTS_acme",
        "DLQ_acme",
        "FILES_acme",
    ]
    assert jobs.subjects == tuple(
        subjects.jobs("acme", band, model) for band in (0, 1, 2) for model in LANE.models
    )
    assert batch.subjects == tuple(subjects.jobs("acme", 3, model) for model in LANE.models)
    for queue in (jobs, batch):
        assert (queue.work_queue, queue.discard_new, queue.discard_new_per_subject) == (
            True,
            True,
            True,
        )
        assert (queue.duplicate_window_s, queue.allow_direct, queue.allow_atomic) == (
            120.0,
            True,
            True,
        )
        assert queue.max_bytes > 0
        assert queue.file_storage
    assert batch.max_msgs_per_subject > jobs.max_msgs_per_subject > 0
    assert (results.max_msgs_per_subject, results.discard_new_per_subject) == (1, True)
    assert (results.allow_msg_ttl, results.discard_new, results.work_queue) == (True, True, False)
    assert results.max_age_s > 24 * 3600
    assert (letters.work_queue, letters.discard_new) == (False, False)
    assert (files.work_queue, files.discard_new, files.max_msgs_per_subject) == (False, True, 0)
    assert files.max_bytes > 2 * 1e6 * 2e3  # An input of a million lines of 2 KB, and its results.


def test_lane_without_some_bands() -> None:
    """A lane that may not batch has no batch stream; one without models only keeps records."""
    names = [spec.name for spec in topology.lane_streams(LanePlan("a", ("m",), bands=(1, 2)))]
    assert names == ["JOBS_a", "RESULTS_a", "DLQ_a"]
    names = [spec.name for spec in topology.lane_streams(LanePlan("a", ("m",), bands=(3,)))]
    assert names == ["BATCH_a", "RESULTS_a", "DLQ_a", "FILES_a"]
    assert [spec.name for spec in topology.lane_streams(LanePlan("a", ()))] == [
        "RESULTS_a",
        "DLQ_a",
    ]


def test_one_consumer_for_each_queue() -> None:
    """Each allowed (band, model) has its own."""
    consumers = topology.of([LANE]).consumers
    assert len(consumers) == len({(spec.stream, spec.name) for spec in consumers}) == 8
    assert {spec.filter_subject for spec in consumers} == {
        subjects.jobs("acme", band, model) for band in range(4) for model in LANE.models
    }
    assert {(spec.ack_wait_s, spec.max_ack_pending) for spec in consumers} == {(60.0, 10_000)}


def test_bad_lane_name() -> None:
    """A lane that can't stand in a subject is refused before anything is made."""
    with pytest.raises(MalformedName):
        topology.of([LanePlan("a.b", ("m",))])


def test_replicas_reach_everything() -> None:
    """On a cluster every stream and bucket has its copies."""
    laid_out = topology.of([LANE], Bounds(replicas=3))
    assert {spec.replicas for spec in (*laid_out.streams, *laid_out.buckets)} == {3}


def test_short_lives_keep_short_windows() -> None:
    """A stream never remembers an id for longer than it keeps a message: servers refuse that."""
    bounds = Bounds(results_age_s_max=60.0, dead_letters_age_s_max=60.0)
    _, _, results, letters, _ = topology.lane_streams(LANE, bounds)
    assert results.duplicate_window_s <= results.max_age_s
    assert letters.duplicate_window_s <= letters.max_age_s


async def test_applied_twice_changes_nothing() -> None:
    """A restart finds everything as it left it."""
    bus = await a_deployment()
    await bus.append(subjects.jobs("acme", 1, "tiny"), b"job")
    await topology.apply(bus, topology.of([LANE]))
    assert (await bus.stream_state("JOBS_acme")).messages == 1


async def test_only_known_queues_take_jobs() -> None:
    """An unknown model, band or lane finds no stream."""
    bus = await a_deployment()
    await bus.append(subjects.jobs("acme", 3, "meta/llama"), b"job")
    for subject in (
        subjects.jobs("acme", 1, "unknown"),
        subjects.jobs("other", 1, "tiny"),
        "jobs.acme.4.tiny",
    ):
        with pytest.raises(NoStream):
            await bus.append(subject, b"job")


async def test_batch_does_not_close_the_door_to_people() -> None:
    """A full batch queue leaves the online ones open."""
    bus = await a_deployment(Bounds(batch_per_subject_max=1))
    await bus.append(subjects.jobs("acme", 3, "tiny"), b"")
    with pytest.raises(StreamFull):
        await bus.append(subjects.jobs("acme", 3, "tiny"), b"")
    await bus.append(subjects.jobs("acme", 1, "tiny"), b"")


async def test_first_record_wins_against_a_careless_writer() -> None:
    """A second record is refused, with an expectation and without."""
    bus = await a_deployment()
    record = subjects.result("acme", "j1")
    await bus.append(record, b"first", expected_last_subject_sequence=0)
    with pytest.raises(WrongSequence):
        await bus.append(record, b"second", expected_last_subject_sequence=0)
    with pytest.raises(StreamFull):
        await bus.append(record, b"second")


async def test_queue_made_when_first_needed() -> None:
    """`ensure_queue` makes one queue's consumer, again and again without harm."""
    bus = MemoryBus()
    laid_out = topology.of([LANE])
    await topology.apply(bus, topology.Topology(laid_out.streams, laid_out.buckets))
    await bus.append(subjects.jobs("acme", 2, "meta/llama"), b"job")
    await topology.ensure_queue(bus, "acme", 2, "meta/llama")
    spec = await topology.ensure_queue(bus, "acme", 2, "meta/llama")
    puller = await pulling(bus, stream=spec.stream, consumer=spec.name)
    assert (await puller.heard.count(1))[0].data == b"job"


async def test_set_up_side_by_side_but_bounded() -> None:
    """However many lanes there are, no more than ENSURE_AT_ONCE_MAX requests are under way."""
    peaks: list[int] = []

    class Counting(MemoryBus):
        at_work = 0

        async def ensure_stream(self, spec: StreamSpec) -> None:
            self.at_work += 1
            peaks.append(self.at_work)
            await super().ensure_stream(spec)
            self.at_work -= 1

    lanes = [LanePlan(f"lane-{number}", ("tiny",)) for number in range(20)]
    await topology.apply(Counting(), topology.of(lanes))
    assert max(peaks) == topology.ENSURE_AT_ONCE_MAX


async def test_first_trouble_is_a_bus_error() -> None:
    """What fails is told as the bus tells it, not as a group of errors."""
    bus = MemoryBus()
    bus.disconnect()
    with pytest.raises(LinkDown):
        await topology.apply(bus, topology.of([LANE]))
