"""What the bus promises (`broker.bus.base`), held on both: streams and buckets."""

import asyncio

import pytest

from broker.bus.base import (
    BucketSpec,
    BusError,
    NoStream,
    NotFound,
    StreamFull,
    StreamSpec,
    WrongSequence,
)
from tests.buses import STREAM, SUBJECT, Heard, World, a_consumer, a_stream


class TestStreams:
    """Stored messages."""

    async def test_append_stores(self, world: World) -> None:
        """What was appended can be read back by subject and by sequence, as it was."""
        await world.bus.ensure_stream(a_stream())
        first = await world.bus.append(SUBJECT, b"one", headers={"Kind": "job"})
        second = await world.bus.append(SUBJECT, b"two")
        assert (first.stream, first.sequence, second.sequence) == (STREAM, 1, 2)
        message = await world.peer.message_at(STREAM, 1)
        assert (message.data, message.headers, message.subject) == (
            b"one",
            {"Kind": "job"},
            SUBJECT,
        )
        last = await world.peer.last_message(STREAM, SUBJECT)
        assert (last.sequence, last.data) == (2, b"two")
        assert last.at_s >= message.at_s > 1_600_000_000

    async def test_concurrent_appends_are_each_answered(self, world: World) -> None:
        """Many at once on one connection: each gets its own sequence."""
        await world.bus.ensure_stream(a_stream())
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(world.bus.append(SUBJECT, b"%d" % number))
                for number in range(500)
            ]
        assert {task.result().sequence for task in tasks} == set(range(1, 501))
        for task in tasks[::50]:
            stored = await world.bus.message_at(STREAM, task.result().sequence)
            assert stored.data == b"%d" % tasks.index(task)

    async def test_same_id_is_stored_once(self, world: World) -> None:
        """A message id is known for the window, even when its message is gone, then free again."""
        await world.bus.ensure_stream(a_stream(duplicate_window_s=1.0))
        first = await world.bus.append(SUBJECT, b"", message_id="j1.0")
        again = await world.bus.append(SUBJECT, b"", message_id="j1.0")
        assert (again.sequence, again.duplicate) == (first.sequence, True)
        assert await world.bus.delete_message(STREAM, first.sequence)
        assert (await world.bus.append(SUBJECT, b"", message_id="j1.0")).duplicate
        await world.pass_time(2.1)
        assert not (await world.bus.append(SUBJECT, b"", message_id="j1.0")).duplicate

    async def test_a_subject_is_purged(self, world: World) -> None:
        """All of its messages and no others; again, there is nothing."""
        await world.bus.ensure_stream(StreamSpec("FILES_a", ("files.a.*",)))
        for number in range(5):
            await world.bus.append("files.a.one", b"%d" % number)
        await world.bus.append("files.a.two", b"")
        assert await world.peer.purge("FILES_a", "files.a.one") == 5
        assert await world.peer.purge("FILES_a", "files.a.one") == 0
        assert [held.subject async for held in world.bus.messages("FILES_a")] == ["files.a.two"]
        assert await world.bus.purge("FILES_a", "files.a.*") == 1
        with pytest.raises(NotFound):
            await world.bus.purge("FILES_none", "files.a.*")

    async def test_first_record_wins(self, world: World) -> None:
        """Compare-and-set against "nothing there": one of many rivals wins, others are told."""
        await world.bus.ensure_stream(
            StreamSpec("RESULTS_a", ("results.a.*",), max_msgs_per_subject=1)
        )

        async def write(bus: object, number: int) -> bool:
            rival = world.bus if number % 2 else world.peer
            try:
                await rival.append("results.a.j1", b"%d" % number, expected_last_subject_sequence=0)
            except WrongSequence:
                return False
            return True

        won = await asyncio.gather(*(write(world.bus, number) for number in range(10)))
        assert won.count(True) == 1
        record = await world.bus.last_message("RESULTS_a", "results.a.j1")
        assert int(record.data) == won.index(True)

    async def test_careless_writer_cannot_replace_a_record(self, world: World) -> None:
        """Without an expectation the second record is refused by the stream's own bound."""
        spec = StreamSpec(
            "RESULTS_a", ("results.a.*",), max_msgs_per_subject=1, discard_new_per_subject=True
        )
        await world.bus.ensure_stream(spec)
        await world.bus.append("results.a.j1", b"first")
        with pytest.raises(StreamFull):
            await world.bus.append("results.a.j1", b"second")
        assert (await world.bus.last_message("RESULTS_a", "results.a.j1")).data == b"first"

    async def test_full_queue_refuses_and_leaves_no_trace(self, world: World) -> None:
        """A refused message is not stored, and its id stays free for the next try."""
        await world.bus.ensure_stream(a_stream(max_msgs_per_subject=2))
        await world.bus.append(SUBJECT, b"1")
        await world.bus.append(SUBJECT, b"2")
        with pytest.raises(StreamFull):
            await world.bus.append(SUBJECT, b"3", message_id="j3.0")
        assert (await world.bus.stream_state(STREAM)).messages == 2
        await world.bus.delete_message(STREAM, 1)
        assert not (await world.bus.append(SUBJECT, b"3", message_id="j3.0")).duplicate

    async def test_bound_is_per_subject(self, world: World) -> None:
        """One full queue of a stream does not close the others."""
        await world.bus.ensure_stream(
            a_stream(subjects=("jobs.a.1.m", "jobs.a.2.m"), max_msgs_per_subject=1)
        )
        await world.bus.append("jobs.a.1.m", b"")
        with pytest.raises(StreamFull):
            await world.bus.append("jobs.a.1.m", b"")
        await world.bus.append("jobs.a.2.m", b"")

    async def test_bound_on_bytes_refuses(self, world: World) -> None:
        """A stream that is full in bytes refuses new messages."""
        await world.bus.ensure_stream(a_stream(max_bytes=4096))
        await world.bus.append(SUBJECT, bytes(3000))
        with pytest.raises(StreamFull):
            await world.bus.append(SUBJECT, bytes(3000))

    async def test_discard_old_drops_the_oldest(self, world: World) -> None:
        """A stream of dead letters loses its oldest, not its newest."""
        spec = StreamSpec("DLQ_a", ("dlq.a.*",), max_bytes=4096, discard_new=False)
        await world.bus.ensure_stream(spec)
        for number in range(5):
            await world.bus.append(f"dlq.a.j{number}", bytes(1500))
        held = [message.subject async for message in world.bus.messages("DLQ_a")]
        assert held == ["dlq.a.j3", "dlq.a.j4"]

    async def test_unknown_subject_finds_no_stream(self, world: World) -> None:
        """A model or band that no stream lists fails at the door."""
        await world.bus.ensure_stream(a_stream())
        with pytest.raises(NoStream):
            await world.bus.append("jobs.acme.2.unknown", b"")

    async def test_message_with_lifetime_leaves(self, world: World) -> None:
        """A record with a lifetime is gone when it is over, and its subject is free again."""
        await world.bus.ensure_stream(
            StreamSpec("RESULTS_a", ("results.a.*",), max_msgs_per_subject=1, allow_msg_ttl=True)
        )
        await world.bus.append("results.a.j1", b"", expected_last_subject_sequence=0, ttl_s=1.0)
        await world.pass_time(2.1)
        with pytest.raises(NotFound):
            await world.bus.last_message("RESULTS_a", "results.a.j1")
        await world.bus.append("results.a.j1", b"", expected_last_subject_sequence=0)

    async def test_lifetime_needs_a_stream_that_takes_it(self, world: World) -> None:
        """A lifetime on a stream without `allow_msg_ttl` is refused, not ignored."""
        await world.bus.ensure_stream(a_stream())
        with pytest.raises(BusError):
            await world.bus.append(SUBJECT, b"", ttl_s=1.0)

    async def test_reading_what_is_not_there(self, world: World) -> None:
        """An absent message is NotFound; an absent stream is NoStream, as in an election."""
        await world.bus.ensure_stream(a_stream())
        with pytest.raises(NotFound):
            await world.bus.last_message(STREAM, SUBJECT)
        with pytest.raises(NotFound):
            await world.bus.message_at(STREAM, 7)
        with pytest.raises(NoStream):
            await world.bus.last_message("NONE", SUBJECT)
        with pytest.raises(NoStream):
            await world.bus.message_at("NONE", 1)
        with pytest.raises(NotFound):
            await world.bus.stream_state("NONE")
        with pytest.raises(NotFound):
            await anext(aiter(world.bus.messages("NONE")))
        with pytest.raises(NotFound):
            await world.bus.consumer_state(STREAM, "none")
        with pytest.raises(NotFound):
            await world.bus.ensure_consumer(a_consumer(stream="NONE"))
        with pytest.raises(NotFound):
            await world.bus.reset_consumer(STREAM, "none")

    async def test_delete_says_whether_it_was_there(self, world: World) -> None:
        """Deleting twice is no error."""
        await world.bus.ensure_stream(a_stream())
        await world.bus.append(SUBJECT, b"")
        assert await world.bus.delete_message(STREAM, 1)
        assert not await world.bus.delete_message(STREAM, 1)
        assert not await world.bus.delete_message(STREAM, 99)

    async def test_walk_reads_what_is_there_in_order(self, world: World) -> None:
        """A walk sees each message under the subject once, and ends after the newest."""
        await world.bus.ensure_stream(a_stream(subjects=("jobs.a.>",)))
        for number in range(700):
            await world.bus.append(f"jobs.a.{number % 2}.m", b"%d" % number)
        await world.bus.delete_message(STREAM, 3)
        held = [int(item.data) async for item in world.bus.messages(STREAM, subject="jobs.a.0.m")]
        assert held == [number for number in range(0, 700, 2) if number != 2]
        tail = [item.sequence async for item in world.bus.messages(STREAM, first_sequence=698)]
        assert tail == [698, 699, 700]
        assert [item async for item in world.bus.messages(STREAM, subject="jobs.b.>")] == []

    async def test_walk_of_an_empty_stream(self, world: World) -> None:
        """Nothing there is an empty walk."""
        await world.bus.ensure_stream(a_stream())
        assert [item async for item in world.bus.messages(STREAM)] == []

    async def test_bounds_are_told_as_they_stand(self, world: World) -> None:
        """Whoever stores something can ask how much, and for how long."""
        await world.bus.ensure_stream(a_stream(max_bytes=10**6, max_age_s=200.5))
        state = await world.bus.stream_state(STREAM)
        assert (state.bytes_max, state.age_s_max) == (10**6, 200.5)

    async def test_counts(self, world: World) -> None:
        """State and counts tell what is stored, in all and per subject."""
        await world.bus.ensure_stream(a_stream(subjects=("jobs.a.1.m", "jobs.a.2.m")))
        for subject in ("jobs.a.1.m", "jobs.a.1.m", "jobs.a.2.m"):
            await world.bus.append(subject, b"x")
        await world.bus.delete_message(STREAM, 1)
        state = await world.bus.stream_state(STREAM)
        assert (state.bytes_max, state.age_s_max) == (0, 0.0)
        assert (state.messages, state.first_sequence, state.last_sequence) == (2, 2, 3)
        assert state.bytes > 0
        assert (await world.bus.stream_state(STREAM, subject="jobs.a.1.m")).messages == 1
        assert await world.bus.subject_counts(STREAM) == {"jobs.a.1.m": 1, "jobs.a.2.m": 1}
        assert await world.bus.subject_counts(STREAM, subject="jobs.a.2.*") == {"jobs.a.2.m": 1}
        assert await world.bus.subject_counts(STREAM, subject="jobs.b.>") == {}

    async def test_count_from_a_sequence_on(self, world: World) -> None:
        """Of one subject, gaps and the end of the stream included."""
        await world.bus.ensure_stream(a_stream(subjects=("jobs.a.1.m", "jobs.a.2.m")))
        for number in range(10):
            await world.bus.append(f"jobs.a.{1 + number % 2}.m", b"x")
        await world.bus.delete_message(STREAM, 5)

        async def counted(subject: str, sequence: int) -> int:
            return await world.bus.count_from(STREAM, subject=subject, sequence=sequence)

        assert [await counted("jobs.a.1.m", at) for at in (0, 1, 2, 5, 9, 10, 99)] == [
            *(4, 4, 3, 2, 1, 0, 0)
        ]
        assert await counted("jobs.a.*.m", 1) == 9
        assert await counted("jobs.b.>", 1) == 0
        with pytest.raises((NotFound, NoStream)):
            await world.bus.count_from("NONE", subject=SUBJECT, sequence=1)

    async def test_ceiling_is_raised_but_never_lowered(self, world: World) -> None:
        """A lower per-subject bound deletes nothing: the higher one stands."""
        await world.bus.ensure_stream(a_stream(max_msgs_per_subject=4))
        for _ in range(4):
            await world.bus.append(SUBJECT, b"")
        await world.bus.ensure_stream(a_stream(max_msgs_per_subject=2))
        assert (await world.bus.stream_state(STREAM)).messages == 4
        await world.bus.ensure_stream(a_stream(max_msgs_per_subject=5))
        await world.bus.append(SUBJECT, b"")
        with pytest.raises(StreamFull):
            await world.bus.append(SUBJECT, b"")

    async def test_stream_learns_a_new_subject(self, world: World) -> None:
        """A model that is added to a lane is served by the stream that stands."""
        await world.bus.ensure_stream(a_stream())
        await world.bus.append(SUBJECT, b"")
        await world.bus.ensure_stream(a_stream(subjects=(SUBJECT, "jobs.acme.2.new")))
        await world.bus.append("jobs.acme.2.new", b"")
        assert (await world.bus.stream_state(STREAM)).messages == 2

    async def test_a_subject_belongs_to_one_stream(self, world: World) -> None:
        """A second stream that wants the same subject is refused."""
        await world.bus.ensure_stream(a_stream())
        with pytest.raises(BusError):
            await world.bus.ensure_stream(a_stream(name="OTHER", subjects=("jobs.acme.*.tiny",)))


class TestBuckets:
    """Keys and values."""

    async def test_create_wins_once(self, world: World) -> None:
        """Of many that create a key, one wins; the revision is the epoch."""
        await world.bus.ensure_bucket(BucketSpec("LEADER"))
        await world.bus.ensure_bucket(BucketSpec("LEADER"))
        outcomes = await asyncio.gather(
            *(
                bus.kv_create("LEADER", "leader", b"me", ttl_s=5)
                for bus in (world.bus, world.peer, world.bus, world.peer)
            ),
            return_exceptions=True,
        )
        won = [one for one in outcomes if isinstance(one, int)]
        assert len(won) == 1
        assert [type(one) for one in outcomes if not isinstance(one, int)] == [WrongSequence] * 3
        assert (await world.bus.kv_get("LEADER", "leader")).revision == won[0]

    async def test_update_needs_the_revision(self, world: World) -> None:
        """Who holds an old revision can't write; revisions rise."""
        await world.bus.ensure_bucket(BucketSpec("CONFIG"))
        first = await world.bus.kv_create("CONFIG", "k", b"1")
        second = await world.bus.kv_update("CONFIG", "k", b"2", revision=first)
        assert second > first
        with pytest.raises(WrongSequence):
            await world.bus.kv_update("CONFIG", "k", b"3", revision=first)
        assert (await world.peer.kv_get("CONFIG", "k")).value == b"2"

    async def test_key_with_lifetime_is_renewed_or_freed(self, world: World) -> None:
        """A renewed key lives on; one that is not renewed is free to be created by another."""
        await world.bus.ensure_bucket(BucketSpec("LEADER"))
        revision = await world.bus.kv_create("LEADER", "leader", b"a", ttl_s=2)
        await world.pass_time(1.2)
        await world.bus.kv_update("LEADER", "leader", b"a", revision=revision, ttl_s=2)
        await world.pass_time(1.2)
        assert (await world.bus.kv_get("LEADER", "leader")).value == b"a"
        with pytest.raises(WrongSequence):
            await world.peer.kv_create("LEADER", "leader", b"b", ttl_s=2)
        await world.pass_time(2.1)
        with pytest.raises(NotFound):
            await world.bus.kv_get("LEADER", "leader")
        epoch = await world.peer.kv_create("LEADER", "leader", b"b", ttl_s=2)
        assert epoch > revision

    async def test_deleted_key_is_gone_and_can_be_created(self, world: World) -> None:
        """Delete leaves no key; delete at a wrong revision leaves it alone."""
        await world.bus.ensure_bucket(BucketSpec("ATTEMPTS"))
        first = await world.bus.kv_put("ATTEMPTS", "acme.j1", b"1")
        second = await world.bus.kv_put("ATTEMPTS", "acme.j1", b"2")
        await world.bus.kv_put("ATTEMPTS", "acme.j2", b"1")
        with pytest.raises(WrongSequence):
            await world.bus.kv_delete("ATTEMPTS", "acme.j1", revision=first)
        assert await world.bus.kv_keys("ATTEMPTS") == ["acme.j1", "acme.j2"]
        await world.bus.kv_delete("ATTEMPTS", "acme.j1", revision=second)
        with pytest.raises(NotFound):
            await world.bus.kv_get("ATTEMPTS", "acme.j1")
        assert await world.bus.kv_keys("ATTEMPTS") == ["acme.j2"]
        await world.bus.kv_create("ATTEMPTS", "acme.j1", b"3")
        assert (await world.bus.kv_get("ATTEMPTS", "acme.j1")).value == b"3"
        await world.bus.kv_delete("ATTEMPTS", "acme.j1")
        assert await world.bus.kv_keys("ATTEMPTS") == ["acme.j2"]

    async def test_entries_are_walked_by_pattern(self, world: World) -> None:
        """Those that match, as last written, without what was deleted."""
        await world.bus.ensure_bucket(BucketSpec("BATCHES"))
        for key in ("batch.a.1", "batch.a.2", "batch.b.1", "request.a.1"):
            await world.bus.kv_put("BATCHES", key, key.encode())
        await world.bus.kv_put("BATCHES", "batch.a.1", b"newer", ttl_s=60.0)
        await world.bus.kv_delete("BATCHES", "batch.a.2")
        found = [entry async for entry in world.peer.kv_entries("BATCHES", "batch.*.*")]
        assert [(entry.key, entry.value) for entry in found] == [
            ("batch.b.1", b"batch.b.1"),
            ("batch.a.1", b"newer"),
        ]
        revision = await world.peer.kv_update(
            "BATCHES", "batch.b.1", b"", revision=found[0].revision
        )
        assert revision > found[1].revision

    async def test_writes_are_heard(self, world: World) -> None:
        """By whoever listens to such keys, until it no longer does."""
        await world.bus.ensure_bucket(BucketSpec("BATCHES"))
        heard: Heard[str] = Heard()
        subscription = await world.peer.kv_listen("BATCHES", "batch.*.*", heard)
        await world.peer.rtt_s()
        await world.bus.kv_create("BATCHES", "request.a.1", b"")
        revision = await world.bus.kv_create("BATCHES", "batch.a.1", b"")
        await world.bus.kv_update("BATCHES", "batch.a.1", b"", revision=revision)
        await world.bus.kv_delete("BATCHES", "batch.a.1")
        assert await heard.count(3) == ["batch.a.1"] * 3
        await subscription.unsubscribe()

    async def test_absent_bucket(self, world: World) -> None:
        """No bucket and no key are told apart."""
        await world.bus.ensure_bucket(BucketSpec("CONFIG"))
        with pytest.raises(NotFound):
            await world.bus.kv_get("CONFIG", "none")
        with pytest.raises(NoStream):
            await world.bus.kv_get("NONE", "none")
        with pytest.raises(NoStream):
            await world.bus.kv_put("NONE", "none", b"")
