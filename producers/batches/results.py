"""The two result files of a batch: each grows chunk by chunk, and says itself what stands in it.

A runner begins by putting an empty chunk behind each file's last one, by compare-and-set: whoever
wrote there before can write no more, so what is read back afterwards is all there will ever be from
him. That, and not the lease, is why no line stands twice.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec

from broker.bus.base import StoredMessage, WrongSequence
from broker.bus.files import FileExists, Files, Tail
from broker.wire.files import FileInfo
from broker.wire.messages import Usage
from producers.batch.outcome import Ended
from producers.batches.errors import LeaseLost
from producers.batches.journal import (
    ENTRY_HEADER,
    Entry,
    Standing,
    decode_entry,
    encode_entry,
    numbers_of,
    ranges_of,
)
from producers.batches.records import Batch, Counts

RESULT_PURPOSE = "batch_output"

NOTHING = Usage()
"""Of lines that no engine saw."""

FENCE_TRIES_MAX = 16
"""A writer that isn't fenced off after so many of his chunks came first is writing all the time:
this runner leaves him the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A line's end, and what it cost."""

    ended: Ended
    custom_id: str | None = None
    usage: Usage = NOTHING
    unrun: bool = False
    """The window left no time for it."""
    job_id: str = ""
    """Of the record that may leave RESULTS once this stands; empty without one."""
    sequence: int = 0
    """Of the job's message; 0 where it is known to have left its stream, or never was there."""


class ResultFile:
    """One of the two."""

    def __init__(self, files: Files, info: FileInfo) -> None:
        self.info = info
        self.last = Entry()
        self._files = files
        self._tail = Tail(files.bus, files.lane, info.id)
        self._known = False

    async def fence(self) -> None:
        """End whoever writes here. Raises LeaseLost, BusError."""
        for _ in range(FENCE_TRIES_MAX):
            last = await self._files.last_chunk(self.info.id)
            if last is not None:
                self.last = entry_of(last)
            after = last.sequence if last is not None else 0
            self._tail = Tail(self._files.bus, self._files.lane, self.info.id, after_sequence=after)
            try:
                mark = msgspec.structs.replace(self.last, lines="")
                await self._append(b"", mark)
            except LeaseLost:
                continue
            return
        message = f"another runner writes {self.info.id}"
        raise LeaseLost(message)

    async def entries(self, *, after_sequence: int = 0) -> AsyncIterator[tuple[int, Entry]]:
        """What its chunks brought, each with its sequence."""
        async for chunk in self._files.chunks(self.info.id, after_sequence=after_sequence):
            yield chunk.sequence, entry_of(chunk)

    async def add(self, results: Sequence[Result], *, patience_s: float) -> int:
        """Append lines in one chunk; return its sequence. Raises LeaseLost, BusError."""
        text = b"".join(result.ended.text for result in results)
        entry = Entry(
            lines=ranges_of(result.ended.number for result in results),
            count=self.last.count + len(results),
            bytes=self.last.bytes + len(text),
            usage=_sum([self.last.usage, *(result.usage for result in results)]),
            unrun=self.last.unrun + sum(result.unrun for result in results),
        )
        sequence = await self._append(text, entry, patience_s=patience_s)
        self.last = entry
        await self.show()
        return sequence

    async def show(self) -> None:
        """Make the file known, once something stands in it. Raises BusError."""
        if self._known or not self.last.count:
            return
        found = await self._files.find(self.info.id)
        if found is not None:
            self.info = found
        else:
            try:
                await self._files.create(self.info)
            except FileExists as error:
                message = f"another runner made {self.info.id}"
                raise LeaseLost(message) from error
        self._known = True

    async def settle(self, *, life_s: float) -> None:
        """Say that it is whole, and stands for `life_s` from now. Raises BusError."""
        if not self.last.count:
            return
        whole = msgspec.structs.replace(
            self.info,
            bytes=self.last.bytes,
            lines=self.last.count,
            expires_at_s=time.time() + life_s,
            growing=False,
        )
        await self._files.settle(whole)

    async def _append(self, data: bytes, entry: Entry, *, patience_s: float = 60.0) -> int:
        try:
            return await self._tail.append(
                data, {ENTRY_HEADER: encode_entry(entry)}, patience_s=patience_s
            )
        except WrongSequence as error:
            message = f"another runner writes {self.info.id} now"
            raise LeaseLost(message) from error


class ResultFiles:
    """Both, and which lines stand in them."""

    def __init__(self, files: Files, batch: Batch) -> None:
        self.standing = Standing()
        self.output = ResultFile(files, _begun(batch, batch.output_id, "output"))
        self.errors = ResultFile(files, _begun(batch, batch.errors_id, "error"))

    async def take_over(self) -> None:
        """End whoever wrote before, then read back what stands. Raises LeaseLost, BusError."""
        await self.output.fence()
        await self.errors.fence()
        for file in (self.output, self.errors):
            async for _, entry in file.entries():
                for number in numbers_of(entry.lines):
                    self.standing.add(number)
            await file.show()

    async def finish(self, *, life_s: float) -> None:
        """Say that both are whole, and how long they stand. Raises NotFound, BusError."""
        for file in (self.output, self.errors):
            await file.settle(life_s=life_s)

    async def add(self, file: ResultFile, part: Sequence[Result], *, patience_s: float) -> int:
        """Append lines to the file they belong to; return the chunk's sequence.

        Raises LeaseLost, StreamFull, PayloadTooLarge, BusError.
        """
        for result in part:
            assert result.ended.number not in self.standing, f"line {result.ended.number} again"
        sequence = await file.add(part, patience_s=patience_s)
        for result in part:
            self.standing.add(result.ended.number)
        return sequence

    def counted(self, batch: Batch) -> Batch:
        """Put into a batch's record what stands in its files."""
        output, errors = self.output.last, self.errors.last
        return msgspec.structs.replace(
            batch,
            counts=Counts(total=batch.counts.total, completed=output.count, failed=errors.count),
            usage=_sum([output.usage, errors.usage]),
            output_file_id=batch.output_id if output.count else "",
            error_file_id=batch.errors_id if errors.count else "",
        )

    @property
    def unrun(self) -> int:
        """Lines that the window left no time for."""
        return self.errors.last.unrun


def _begun(batch: Batch, file_id: str, name: str) -> FileInfo:
    return FileInfo(
        id=file_id,
        lane=batch.lane,
        filename=f"{batch.id}_{name}.jsonl",
        purpose=RESULT_PURPOSE,
        created_at_s=time.time(),
        growing=True,
    )


def entry_of(chunk: StoredMessage) -> Entry:
    """What a chunk of a result file brought. Raises MalformedMessage."""
    return decode_entry(chunk.headers.get(ENTRY_HEADER, ""))


def _sum(parts: Sequence[Usage]) -> Usage:
    return Usage(
        prompt_tokens=sum(part.prompt_tokens for part in parts),
        cached_tokens=sum(part.cached_tokens for part in parts),
        output_tokens=sum(part.output_tokens for part in parts),
    )
