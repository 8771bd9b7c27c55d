"""Streams, consumers and stored messages by JetStream's JSON API, spoken directly.

Directly, because the client's data classes drop settings that they don't know (`allow_msg_ttl`,
`allow_atomic`), as silently as an old server does. What was asked for is therefore read back and
compared.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import orjson
import structlog
from msgspec import DecodeError

from broker.bus.base import (
    BusError,
    ConsumerSpec,
    ConsumerState,
    LinkDown,
    NoRoom,
    NoStore,
    NoStream,
    NotFound,
    NotTaken,
    PayloadTooLarge,
    StoredMessage,
    StreamFull,
    StreamSpec,
    StreamState,
    Timeout,
    WrongSequence,
)
from broker.bus.nats_codec import (
    NANOSECONDS,
    Answer,
    ApiError,
    decode_answer,
    decode_headers,
    decode_status,
    decode_time,
    is_no_responders,
)
from broker.bus.nats_link import Link
from broker.bus.nats_replies import Replies, Reply

API_TIMEOUT_S = 5.0
"""Management answers in milliseconds; a cluster in election takes seconds."""

ASK_AGAIN_S = 1.0
"""A stream or consumer in election leaves questions unanswered, for good: those that change nothing
are put again after this."""

WALK_BATCH_MAX = 256
WALK_BYTES_MAX = 4 * 1024 * 1024
"""Messages and bytes asked for at once when a stream is walked."""

RESET_VERSION_MIN = (2, 14)

CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, MESSAGE_NOT_FOUND = 10014, 10059, 10037
DELETE_FAILED, STREAM_EXISTS, MESSAGE_TOO_LARGE, TOO_MANY_REQUESTS = 10057, 10058, 10054, 10167
SEQUENCE_NOT_FOUND = 10043
"""Two deleted the same message at once, and this one came second."""
WRONG_SEQUENCE = frozenset({10071, 10164})
"""Compare-and-set lost; the second is the wording without a number."""

NOT_NOW = frozenset({10039, 10076, 10008, 10009})
"""JetStream is not enabled for this account or server, or the cluster has no leader yet."""

NO_ROOM = frozenset({10047, 10028, 10023, 10002})
"""Storage, memory or the account's resources are used up."""

NO_PLACE = NO_ROOM | {10005}
"""No room for a stream's bound; the last is the word of a cluster, also where servers are down."""

FULL = NO_ROOM | {10077, 10122}
"""As above, or a bound of the stream itself is reached."""

_log = structlog.get_logger(__name__)


def error_of(error: ApiError, *, what: str) -> BusError:
    """Turn the server's error into ours."""
    message = f"{what}: {error.description or error.code} (error {error.err_code})"
    match error.err_code:
        case code if code in WRONG_SEQUENCE:
            return WrongSequence(message)
        case code if code in NOT_NOW:
            return NoStream(message)
        case code if code in FULL:
            return StreamFull(message)
        case code if code in (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND, MESSAGE_NOT_FOUND):
            return NotFound(message)
        case code if code == MESSAGE_TOO_LARGE:
            return PayloadTooLarge(message)
        case _:
            return BusError(message)


class Streams:
    """The management side of a bus."""

    def __init__(self, link: Link, replies: Replies) -> None:
        self._link = link
        self._replies = replies

    async def ask(self, verb: str, question: Mapping[str, object] | None = None) -> Answer:
        """Put a question to `$JS.API.<verb>`. Raises what `error_of` makes of a refusal."""
        answer = await self._ask(verb, question)
        if answer.error is not None:
            raise error_of(answer.error, what=verb)
        return answer

    async def _ask(self, verb: str, question: Mapping[str, object] | None = None) -> Answer:
        data = orjson.dumps(question) if question is not None else b""
        reply = await self._reply(verb, data)
        if is_no_responders(reply.data, reply.headers):
            message = f"{verb}: JetStream is not enabled here, or its election is under way"
            raise NoStream(message)
        try:
            return decode_answer(reply.data)
        except DecodeError as error:
            message = f"{verb}: unreadable answer"
            raise BusError(message) from error

    async def _reply(self, verb: str, data: bytes) -> Reply:
        """Put a question, and one that changes nothing again and again. Raises Timeout."""
        again = ".INFO." in verb
        left_s = API_TIMEOUT_S
        while True:
            wait_s = min(ASK_AGAIN_S, left_s) if again else left_s
            left_s -= wait_s
            try:
                return await self._replies.ask(f"$JS.API.{verb}", data, timeout_s=wait_s)
            except Timeout:
                if left_s <= 0:
                    raise

    # streams
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create or update a stream and read it back."""
        for max_bytes in sizes(spec):
            stands = await self._ensure(replace(spec, max_bytes=max_bytes))
            if stands is not None:
                break
        else:
            message = "the last size is tried without a smaller one"
            raise AssertionError(message)
        if stands != spec.max_bytes:
            _log.warning("stream.small", stream=spec.name, bytes=stands, wanted=spec.max_bytes)

    async def _ensure(self, spec: StreamSpec) -> int | None:
        """Create or update a stream; return its `max_bytes`, None where a smaller one may fit.

        One that stands is not made smaller for want of room.
        """
        wanted = stream_config(spec)
        smaller = max(spec.max_bytes_least, spec.max_bytes // 2) if spec.max_bytes_least else 0
        answer = await self._ask(f"STREAM.CREATE.{spec.name}", wanted)
        # A server without room for another of this size says that first, though this one stands.
        if _has_no_room(answer) or _exists(answer):
            present = await self._present(spec.name)
            if present is not None:
                wanted = {**wanted, **_raised(present, wanted)}
                answer = await self._ask(f"STREAM.UPDATE.{spec.name}", {**present, **wanted})
                stands = present.get("max_bytes", -1)
                assert isinstance(stands, int), "a number, by the server's own schema"
                if _has_no_room(answer) and smaller and smaller <= stands:
                    wanted["max_bytes"] = stands
                    answer = await self._ask(f"STREAM.UPDATE.{spec.name}", {**present, **wanted})
        if _has_no_room(answer) and 0 < smaller < spec.max_bytes:
            return None
        if answer.error is not None:
            raise _not_taken(answer.error, spec)
        check_taken(await self.ask(f"STREAM.INFO.{spec.name}"), wanted, what=f"stream {spec.name}")
        bound = wanted["max_bytes"]
        assert isinstance(bound, int), "as spelled above"
        return max(0, bound)

    async def _present(self, stream: str) -> Mapping[str, object] | None:
        """Settings of a stream; None where there is none."""
        try:
            return (await self.ask(f"STREAM.INFO.{stream}")).config
        except NotFound:
            return None

    async def delete_stream(self, stream: str) -> None:
        """Delete a stream, if it is there."""
        answer = await self._ask(f"STREAM.DELETE.{stream}")
        if answer.error is not None and answer.error.err_code != STREAM_NOT_FOUND:
            raise error_of(answer.error, what=f"stream {stream}")

    async def stream_state(self, stream: str, *, subject: str = "") -> StreamState:
        """State of a stream, or with `subject` that subject's count in it."""
        answer = await self.ask(f"STREAM.INFO.{stream}")
        state, bytes_max = answer.state, answer.config.get("max_bytes", -1)
        age_ns_max = answer.config.get("max_age", 0)
        assert isinstance(bytes_max, int), "a number, by the server's own schema"
        assert isinstance(age_ns_max, int), "a number, by the server's own schema"
        messages = state.messages
        if subject:
            messages = sum((await self.subject_counts(stream, subject=subject)).values())
        return StreamState(
            messages,
            state.bytes,
            state.first_seq,
            state.last_seq,
            bytes_max=max(0, bytes_max),
            age_s_max=age_ns_max / NANOSECONDS,
        )

    async def subject_counts(self, stream: str, *, subject: str) -> dict[str, int]:
        """Messages per subject, page by page (the server tells of 100,000 at once)."""
        counts: dict[str, int] = {}
        while True:
            question = {"subjects_filter": subject, "offset": len(counts)}
            answer = await self.ask(f"STREAM.INFO.{stream}", question)
            page = answer.state.subjects or {}
            counts.update(page)
            if len(page) == 0 or len(counts) >= answer.total:
                return dict(sorted(counts.items()))

    # consumers
    async def ensure_consumer(self, spec: ConsumerSpec, *, recreate: bool) -> None:
        """Create, update or recreate a consumer and read it back."""
        if recreate:
            await self.delete_consumer(spec.stream, spec.name)
        config = consumer_config(spec)
        verb = f"CONSUMER.CREATE.{spec.stream}.{spec.name}.{spec.filter_subject}"
        answer = await self.ask(verb, {"stream_name": spec.stream, "config": config})
        check_taken(answer, config, what=f"consumer {spec.stream}/{spec.name}")

    async def delete_consumer(self, stream: str, consumer: str) -> None:
        """Delete a consumer, if it is there."""
        answer = await self._ask(f"CONSUMER.DELETE.{stream}.{consumer}")
        gone = (CONSUMER_NOT_FOUND, STREAM_NOT_FOUND)
        if answer.error is not None and answer.error.err_code not in gone:
            raise error_of(answer.error, what=f"consumer {stream}/{consumer}")

    async def reset_consumer(self, stream: str, consumer: str) -> None:
        """Deliver everything again in stream order."""
        # Asked first, because a reset of a consumer that isn't there is not answered.
        config = (await self.ask(f"CONSUMER.INFO.{stream}.{consumer}")).config
        if self._link.version >= RESET_VERSION_MIN:
            # From the first message on, wherever the consumer believes its ack floor to be.
            await self.ask(f"CONSUMER.RESET.{stream}.{consumer}", {"seq": 1})
            return
        await self.delete_consumer(stream, consumer)
        await self.ask(
            f"CONSUMER.CREATE.{stream}.{consumer}.{config['filter_subject']}",
            {"stream_name": stream, "config": config},
        )

    async def consumer_state(self, stream: str, consumer: str) -> ConsumerState:
        """State of a consumer."""
        answer = await self.ask(f"CONSUMER.INFO.{stream}.{consumer}")
        return ConsumerState(
            delivered_sequence=answer.delivered.stream_seq,
            ack_pending=answer.num_ack_pending,
            pending=answer.num_pending,
            waiting=answer.num_waiting,
        )

    async def deliverable(self, stream: str, consumer: str) -> int:
        """Count messages that the consumer could deliver now; 0 while it waits for acks."""
        answer = await self.ask(f"CONSUMER.INFO.{stream}.{consumer}")
        bound = answer.config.get("max_ack_pending", 0)
        assert isinstance(bound, int)
        waits_for_acks = 0 < bound <= answer.num_ack_pending
        return 0 if waits_for_acks else answer.num_pending

    # messages
    async def get(
        self, stream: str, question: Mapping[str, object], *, what: str, timeout_s: float
    ) -> StoredMessage:
        """Read one message by direct get."""
        reply = await self._replies.ask(
            f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(question), timeout_s=timeout_s
        )
        return _stored(reply, stream=stream, what=what)

    async def count_from(self, stream: str, *, subject: str, sequence: int) -> int:
        """Count messages of a subject from a sequence on, by what the first says of the rest."""
        question = {"seq": max(1, sequence), "next_by_subj": subject, "batch": 1}
        reply = await self._replies.ask(
            f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(question), timeout_s=API_TIMEOUT_S
        )
        try:
            _stored(reply, stream=stream, what="message")
        except NotFound:
            return 0
        return 1 + int(decode_headers(reply.headers)["Nats-Num-Pending"])

    async def last(self, stream: str, subject: str, *, timeout_s: float) -> StoredMessage:
        """Read the newest message of a subject by direct get.

        The subject stands in the request's own, so that an account may be given some of a stream.
        """
        reply = await self._replies.ask(
            f"$JS.API.DIRECT.GET.{stream}.{subject}", b"", timeout_s=timeout_s
        )
        return _stored(reply, stream=stream, what=f"message on {subject}")

    async def delete_message(self, stream: str, sequence: int, *, erase: bool) -> bool:
        """Remove one message."""
        # Erasing costs a write of random bytes for each byte of it.
        question = {"seq": sequence, "no_erase": not erase}
        answer = await self._ask(f"STREAM.MSG.DELETE.{stream}", question)
        if answer.error is None:
            return answer.success
        if answer.error.err_code in (DELETE_FAILED, MESSAGE_NOT_FOUND, SEQUENCE_NOT_FOUND):
            return False
        raise error_of(answer.error, what=f"stream {stream}")

    async def purge(self, stream: str, *, subject: str) -> int:
        """Remove all messages of a subject."""
        return (await self.ask(f"STREAM.PURGE.{stream}", {"filter": subject})).purged

    async def walk(
        self, stream: str, *, subject: str, first_sequence: int
    ) -> AsyncIterator[StoredMessage]:
        """Read what a stream holds now, in order."""
        last = (await self.ask(f"STREAM.INFO.{stream}")).state.last_seq
        sequence = max(1, first_sequence)
        while sequence <= last:
            batch = await self._batch(stream, subject=subject, sequence=sequence)
            for message in batch:
                if message.sequence > last:
                    return
                yield message
            if not batch:
                return
            sequence = batch[-1].sequence + 1

    async def _batch(self, stream: str, *, subject: str, sequence: int) -> list[StoredMessage]:
        question = {
            "seq": sequence,
            "next_by_subj": subject,
            "batch": WALK_BATCH_MAX,
            "max_bytes": WALK_BYTES_MAX,
        }
        found: list[StoredMessage] = []
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def collect(reply: Reply | None) -> None:
            if ended.done():
                return
            if reply is None:
                ended.set_exception(LinkDown("the link was lost while reading a stream"))
                return
            status = decode_status(reply.headers)
            if status is None:
                found.append(_stored(reply, stream=stream, what="message"))
            elif status.code in (_END_OF_BATCH, _NOT_FOUND):
                ended.set_result(None)
            else:
                ended.set_exception(NoStream(f"stream {stream} does not answer: {status}"))

        stop = self._replies.collect(
            f"$JS.API.DIRECT.GET.{stream}", orjson.dumps(question), collect
        )
        try:
            async with asyncio.timeout(API_TIMEOUT_S):
                await ended
        except TimeoutError as error:
            message = f"stream {stream} did not answer in time"
            raise Timeout(message) from error
        finally:
            stop()
        return found


_END_OF_BATCH, _NOT_FOUND, _NO_RESPONDERS = 204, 404, 503


def _stored(reply: Reply, *, stream: str, what: str) -> StoredMessage:
    """Read a direct get's answer. Raises NotFound, NoStream, BusError."""
    status = decode_status(reply.headers)
    if status is not None:
        if status.code == _NOT_FOUND:
            message = f"no {what} in stream {stream}"
            raise NotFound(message)
        if status.code == _NO_RESPONDERS:
            message = f"no stream {stream} answers"
            raise NoStream(message)
        message = f"stream {stream}: {status.text} ({status.code})"
        raise BusError(message)
    headers = decode_headers(reply.headers)
    headers.pop("Nats-Stream", None)
    headers.pop("Nats-Num-Pending", None)
    headers.pop("Nats-Last-Sequence", None)
    return StoredMessage(
        subject=headers.pop("Nats-Subject"),
        sequence=int(headers.pop("Nats-Sequence")),
        data=reply.data,
        at_s=decode_time(headers.pop("Nats-Time-Stamp")),
        headers=headers,
    )


def sizes(spec: StreamSpec) -> list[int]:
    """What `max_bytes` to try in turn: each half of the one before, down to the least."""
    found = [spec.max_bytes]
    while 0 < spec.max_bytes_least < found[-1]:
        found.append(max(spec.max_bytes_least, found[-1] // 2))
    return found


def _exists(answer: Answer) -> bool:
    return answer.error is not None and answer.error.err_code == STREAM_EXISTS


def _has_no_room(answer: Answer) -> bool:
    return answer.error is not None and answer.error.err_code in NO_PLACE


def stream_config(spec: StreamSpec) -> dict[str, object]:
    """Spell a stream's settings as the server does."""
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": "workqueue" if spec.work_queue else "limits",
        "storage": "file" if spec.file_storage else "memory",
        "discard": "new" if spec.discard_new else "old",
        "discard_new_per_subject": spec.discard_new_per_subject,
        "max_consumers": -1,
        "max_msgs": -1,
        "max_msg_size": -1,
        "max_msgs_per_subject": spec.max_msgs_per_subject or -1,
        "max_bytes": spec.max_bytes or -1,
        "max_age": int(spec.max_age_s * NANOSECONDS),
        "duplicate_window": int(spec.duplicate_window_s * NANOSECONDS),
        "num_replicas": spec.replicas,
        "allow_direct": spec.allow_direct,
        "allow_msg_ttl": spec.allow_msg_ttl,
        "allow_atomic": spec.allow_atomic,
    }


def consumer_config(spec: ConsumerSpec) -> dict[str, object]:
    """Spell a consumer's settings as the server does."""
    return {
        "durable_name": spec.name,
        "name": spec.name,
        "filter_subject": spec.filter_subject,
        "deliver_policy": "all",
        "replay_policy": "instant",
        "ack_policy": "explicit",
        "ack_wait": int(spec.ack_wait_s * NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": spec.max_ack_pending,
    }


NO_STORE = 10049
"""The server could not make a stream's files. It does not say why: its disk is full, or not its."""


def _not_taken(error: ApiError, spec: StreamSpec) -> BusError:
    if error.err_code == NO_STORE:
        message = (
            f"the NATS server can't make the files of stream {spec.name} ({error.description}): the"
            " disk of its store_dir is full, or it may not write there; its log names the folder."
            " Make room, then start the server anew"
        )
        return NoStore(message)
    if error.err_code in NO_PLACE:
        # The server sets a stream's whole `max_bytes` aside at once.
        message = (
            f"stream {spec.name} wants {spec.max_bytes} bytes set aside, and the server has not "
            f"that much left ({error.description}): raise `max_file` in its jetstream block, or "
            "lower the bounds of [streams]: batch_bytes_max, results_bytes_max, lane_bytes_max"
        )
        return NoRoom(message)
    return error_of(error, what=f"stream {spec.name}")


def _raised(present: Mapping[str, object], wanted: Mapping[str, object]) -> dict[str, object]:
    """A per-subject bound that stands is never lowered: the server would delete the oldest."""
    name = "max_msgs_per_subject"
    now, then = present.get(name, -1), wanted[name]
    assert isinstance(now, int)
    assert isinstance(then, int)
    return {name: -1 if min(now, then) <= 0 else max(now, then)}


def check_taken(answer: Answer, wanted: Mapping[str, object], *, what: str) -> None:
    """Raise NotTaken naming the first setting that doesn't stand as wanted."""
    for name, value in wanted.items():
        # The server leaves out what is false or zero.
        given = answer.config.get(name, type(value)())
        if given != value:
            message = (
                f"{what}: the server did not take {name} = {value!r}, it has {given!r}; "
                "is it older than 2.12?"
            )
            raise NotTaken(message)
