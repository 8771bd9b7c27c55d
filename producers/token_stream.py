"""Chunks of one streamed answer, put in order, for one reader who may be slow. Pure: knows no bus.

Chunks carry (attempt, index). Within an attempt the index counts from 0, so a missing one is seen.
Core messages may be lost (a reconnect, a slow reader), so the stream never pretends: when chunks
are missing for good it says nothing more until the job ends, and then gives the record's whole
answer, marked `whole`.
"""

from collections import deque

from msgspec import Struct

from broker.wire.messages import Attempt, Kind, TerminalRecord, Tokens


class Chunk(Struct, frozen=True, gc=False):
    """A piece of an answer: a Struct, because one is made for each token."""

    data: bytes
    """One server-sent event's data (JSON) of the endpoint; of a `whole` chunk the endpoint's whole
    answer."""
    attempt: Attempt | None = None
    index: int = 0
    restart: bool = False
    """First chunk of another attempt: what was read before it is void."""
    whole: bool = False
    """Chunks were lost (or the job didn't stream): this replaces all that was read."""


class TokenStream:
    """Puts chunks in order and holds them for the reader, within bounds."""

    __slots__ = (
        "_attempt",
        "_bytes",
        "_bytes_max",
        "_chunks_max",
        "_doubtful",
        "_early",
        "_given",
        "_lost",
        "_next_index",
        "_ready",
        "_reorder_max",
        "_restart",
    )

    def __init__(self, *, chunks_max: int, bytes_max: int, reorder_max: int) -> None:
        self._chunks_max = chunks_max
        self._bytes_max = bytes_max
        self._reorder_max = reorder_max
        self._ready: deque[Chunk] = deque()
        self._bytes = 0
        self._early: dict[int, bytes] = {}
        self._attempt: Attempt | None = None
        self._next_index = 0
        self._given = False
        self._restart = False
        self._lost = False
        self._doubtful = False

    @property
    def lost(self) -> bool:
        """Whether chunks of the current attempt are missing for good."""
        return self._lost

    @property
    def is_ready(self) -> bool:
        """Whether the reader has something to read."""
        return bool(self._ready)

    def add(self, tokens: Tokens) -> bool:
        """Take a chunk from the bus; say whether the reader has something new to read."""
        if self._attempt is None or tokens.attempt > self._attempt:
            self._begin(tokens.attempt)
        if tokens.attempt != self._attempt or self._lost or tokens.index < self._next_index:
            return False
        if tokens.index > self._next_index:
            self._keep(tokens)
            return False
        self._append(tokens.data)
        while not self._lost and (early := self._early.pop(self._next_index, None)) is not None:
            self._bytes -= len(early)
            self._append(early)
        return True

    def pop(self, *, plain: bool = False) -> Chunk | None:
        """Give the reader the next chunk; None when there is none now.

        `plain`: only one that goes on where the last one ended, no restart and no whole answer.
        """
        if not self._ready or (plain and (self._ready[0].restart or self._ready[0].whole)):
            return None
        chunk = self._ready.popleft()
        self._bytes -= len(chunk.data)
        self._given = True
        return chunk

    def doubt(self) -> None:
        """The link was lost or the end was not heard: the last chunks may be missing unseen."""
        self._doubtful = True

    def finish(self, record: TerminalRecord) -> None:
        """Take the end of the job: what is missing comes as the whole answer.

        On an unbroken link an end overtakes nothing, so without doubt the chunks before it are all
        here.
        """
        if record.kind is not Kind.COMPLETED:
            return
        other_run = record.attempt is not None and record.attempt != self._attempt
        if self._lost or self._early or self._doubtful or other_run or self._attempt is None:
            self._ready.append(Chunk(record.body, attempt=record.attempt, whole=True))

    def _keep(self, tokens: Tokens) -> None:
        """Hold a chunk that came before its turn."""
        if tokens.index in self._early:
            return
        room = self._bytes + len(tokens.data) <= self._bytes_max
        if not room or len(self._early) >= self._reorder_max:
            self._lose()
            return
        self._early[tokens.index] = tokens.data
        self._bytes += len(tokens.data)

    def _lose(self) -> None:
        self._lost = True
        self._bytes -= sum(map(len, self._early.values()))
        self._early.clear()

    def _begin(self, attempt: Attempt) -> None:
        """Start over with a newer attempt; what was not read of the older one is dropped."""
        self._restart = self._given
        self._attempt = attempt
        self._ready.clear()
        self._bytes = 0
        self._early.clear()
        self._next_index = 0
        self._lost = False
        self._doubtful = False

    def _append(self, data: bytes) -> None:
        if len(self._ready) >= self._chunks_max or self._bytes + len(data) > self._bytes_max:
            self._lose()
            return
        self._ready.append(
            Chunk(data, attempt=self._attempt, index=self._next_index, restart=self._restart)
        )
        self._restart = False
        self._bytes += len(data)
        self._next_index += 1
