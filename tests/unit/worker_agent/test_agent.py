"""The whole agent on the in-process bus: a job's way from order to ack."""

from broker.wire.messages import Answer, AttemptEnded, End, FirstToken, Kind, Tokens
from tests.agents import an_agent
from tests.builders import a_job


async def test_a_dispatched_job_ends_with_record_end_and_ack() -> None:
    """Accepted, run, recorded, told, acknowledged: each once, in this order."""
    async with an_agent() as stage:
        reply = await stage.dispatch(a_job(stream=True))
        assert reply.answer is Answer.ACCEPTED
        await stage.end_of("job-1")
        await stage.acknowledged()
        record = await stage.record("job-1")
        assert (record.kind, record.status_code) == (Kind.COMPLETED, 200)
        assert record.usage.output_tokens == 16
        assert await stage.queued() == 0
        kinds = [type(event) for event in stage.out]
        assert kinds.count(End) == 1
        assert kinds[-1] is End
        assert kinds.count(Tokens) > 0
        assert [type(note) for note in stage.notes] == [FirstToken, AttemptEnded]
