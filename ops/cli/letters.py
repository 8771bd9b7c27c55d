"""Dead letters as the stream holds them: found, walked, and put back into their queue."""

import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from broker.bus.base import Bus, NoStream, NotFound, StoredMessage, StreamFull
from broker.wire import subjects
from broker.wire.codec import JSON_HEADERS, MalformedMessage, decode, encode, read_json_job
from broker.wire.ids import TOKEN_CHARS_MAX, is_token, job_key, split_job_key
from broker.wire.json_form import JobRead, begins_json, encode_job
from broker.wire.messages import DeadLetter, Job, TerminalRecord
from ops.cli.errors import CommandError, Misused
from ops.cli.output import note

_REPLAYED = re.compile(r"-r\d+$")


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    lane: str
    sequence: int
    """In the lane's stream of dead letters."""
    at_s: float
    subject: str
    """Of the queue that the job stood in."""
    record: TerminalRecord
    job: bytes
    """The job message as it was published."""

    @property
    def key(self) -> str:
        """What people call it: LANE.JOB."""
        return job_key(self.lane, self.record.job)

    @property
    def job_bytes(self) -> int:
        """Size of the job message."""
        return len(self.job)

    @property
    def replay_id(self) -> str:
        """Id of the job that a replay makes: the same each time, so that none is made twice."""
        suffix = f"-r{self.sequence}"
        return _REPLAYED.sub("", self.record.job)[: TOKEN_CHARS_MAX - len(suffix)] + suffix


async def known_lanes(bus: Bus) -> list[str]:
    """Find the lanes that a broker has published in CONFIG. Raises CommandError without any."""
    prefix = subjects.lane_offer_key("")
    try:
        keys = await bus.kv_keys(subjects.CONFIG_BUCKET)
    except (NotFound, NoStream) as error:
        message = "no inferlane cluster on this NATS server: no broker has run here yet"
        raise CommandError(message) from error
    return [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]


async def newest(bus: Bus, lane: str, *, count_max: int | None) -> AsyncIterator[Letter]:
    """Walk a lane's letters, oldest first; with `count_max`, the newest so many.

    One that can't be read is told on standard error and passed over.
    """
    stream = subjects.dead_letters_stream(lane)
    first = 1
    if count_max is not None:
        first = max(1, (await bus.stream_state(stream)).last_sequence - count_max + 1)
    async for stored in bus.messages(stream, first_sequence=first):
        try:
            yield _read(lane, stored)
        except MalformedMessage as error:
            note(f"message {stored.sequence} of {stream} can't be read: {error}")


async def find(bus: Bus, key: str) -> Letter:
    """Find a letter by LANE.JOB. Raises Misused, CommandError."""
    lane, job_id = split_job_key(key)
    if not (is_token(lane) and is_token(job_id)):
        message = f"{key!r} is not LANE.JOB, as `inferlane dlq list` shows it"
        raise Misused(message)
    stream = subjects.dead_letters_stream(lane)
    try:
        return _read(lane, await bus.last_message(stream, subjects.dead_letter(lane, job_id)))
    except (NotFound, NoStream) as error:
        message = f"no dead letter {key}; see `inferlane dlq list`"
        raise CommandError(message) from error
    except MalformedMessage as error:
        message = f"the dead letter {key} can't be read: {error}"
        raise CommandError(message) from error


async def replay(bus: Bus, letter: Letter, *, keep: bool) -> str:
    """Put a job back into its queue under a new id; return its LANE.JOB. Raises CommandError."""
    new_key = job_key(letter.lane, letter.replay_id)
    if await _has_ended(bus, letter):
        message = f"{letter.key} was replayed before, and ended: its result is under {new_key}"
        raise CommandError(message)
    again = _again(letter)
    job = again.job
    is_json = begins_json(letter.job)
    try:
        await bus.append(
            letter.subject,
            encode_job(again) if is_json else encode(job),
            message_id=f"{job.id}.{job.submission}",
            headers=JSON_HEADERS if is_json else None,
        )
    except StreamFull as error:
        message = f"the queue of {letter.key} is full; try again when it has room"
        raise CommandError(message) from error
    except NoStream as error:
        message = f"no queue takes {letter.subject} any more: was the model taken from the lane?"
        raise CommandError(message) from error
    if not keep:
        stream = subjects.dead_letters_stream(letter.lane)
        await bus.delete_message(stream, letter.sequence)
    return new_key


async def _has_ended(bus: Bus, letter: Letter) -> bool:
    subject = subjects.result(letter.lane, letter.replay_id)
    try:
        await bus.last_message(subjects.results_stream(letter.lane), subject)
    except NotFound:
        return False
    return True


def _again(letter: Letter) -> JobRead:
    try:
        job, missing = _job_of(letter.job)
    except MalformedMessage as error:
        message = f"the job of {letter.key} can't be read, so it can't be replayed: {error}"
        raise CommandError(message) from error
    deadline_at_s = job.deadline_at_s
    if deadline_at_s is not None and deadline_at_s <= time.time():
        deadline_at_s = None
    again = msgspec.structs.replace(
        job, id=letter.replay_id, submission=0, deadline_at_s=deadline_at_s
    )
    return JobRead(again, missing)


def _job_of(data: bytes) -> JobRead:
    """Read a job in either form; what a foreign producer left out is left to the broker again."""
    return read_json_job(data) if begins_json(data) else JobRead(decode(data, Job), frozenset())


def _read(lane: str, stored: StoredMessage) -> Letter:
    found = decode(stored.data, DeadLetter)
    return Letter(lane, stored.sequence, stored.at_s, found.subject, found.record, found.job)
