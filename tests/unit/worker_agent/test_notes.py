"""What is said at once: to the right subject, bounded, and never in anybody's way."""

from broker.bus.base import LinkDown, Message
from broker.bus.memory import MemoryBus
from broker.wire.codec import MESSAGE_BYTES_MAX, decode_out
from broker.wire.messages import End, StoredEnd
from tests.builders import a_job
from tests.crashing import Failing, faulty
from tests.turns import until
from worker_agent.notes import Notes


async def heard_of(record: bytes) -> list[Message]:
    """What a client hears of an end with this record."""
    bus = MemoryBus()
    heard: list[Message] = []
    await bus.subscribe("out.>", heard.append)
    await Notes(bus, worker="w", incarnation=1).end(a_job(), record)
    await until(lambda: bool(heard))
    return heard


async def test_a_record_that_fits_is_told_whole() -> None:
    """Up to what a reader takes."""
    (message,) = await heard_of(b"x" * (MESSAGE_BYTES_MAX - 100))
    assert isinstance(decode_out(message.data), End)
    assert message.subject == "out.acme.client-1.job-1"


async def test_a_record_too_large_to_repeat_is_told_as_stored() -> None:
    """The caller reads it from RESULTS."""
    (message,) = await heard_of(b"x" * MESSAGE_BYTES_MAX)
    assert decode_out(message.data) == StoredEnd(job="job-1")


async def test_what_can_not_be_sent_is_counted_and_forgotten() -> None:
    """A caller's watchdog and the broker's heartbeats make up for it."""
    bus = faulty(MemoryBus(), Failing("publish", LinkDown("cut")))
    notes = Notes(bus, worker="w", incarnation=1)
    await notes.end(a_job(), b"record")
    assert notes.counts == {"end_unsent": 1}
