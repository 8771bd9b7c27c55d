"""Reads the input window by window: checks each line, and knows it again on a later run.

Within a window, lines that share a prefix are put together, so that they reach the same worker's
cache one after another; and so many such strands are taken in turns that idle workers find
different ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from broker.wire.messages import Job
from producers.batch.errors import InputUnusable
from producers.batch.lines import BadLine, Code, Request, bad, parse_line
from producers.batch.source import LINE_BYTES_MAX, Line
from producers.batch.state import Identity, Known, LineState, State, id_hash
from producers.errors import Refused

STRANDS = 32
"""Of a sorted window, taken in turns. In one strand all workers that are free would begin with the
same prefix, and each would compute it; the broker's order looks at the first 64 jobs of a queue,
which so belong to 32 prefixes. In the simulator 8 to 64 differ by 2 %."""


@dataclass(frozen=True, slots=True)
class Work:
    """A line to be run."""

    number: int
    custom_id: str
    job: Job
    known: bool
    """An earlier run may have submitted it."""
    sequence: int
    """Where that run's message was stored; 0 when not known."""


@dataclass(frozen=True, slots=True)
class Window:
    """What one stretch of the input asks for."""

    work: list[Work]
    bad: list[BadLine]
    last_number: int
    """Lines up to here have been read."""


class Reader:
    """Reads one batch's input. Used by one thread."""

    def __init__(
        self,
        state: State,
        identity: Identity,
        *,
        build: Callable[[Request, str], Job],
        models: frozenset[str] | None,
        has_ended: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """`build` makes the job (of this id) of a request; `models` None: the offer isn't known.

        `has_ended` says of a line's number whether it needs no second look, beside what `state`
        knows of an earlier run.
        """
        self._state = state
        self._identity = identity
        self._build = build
        self._models = models
        self._has_ended = has_ended
        self._known_last = state.last_number()
        self._read_last = 0

    def read(self, lines: list[Line]) -> Window:
        """Check the next lines. Raises InputUnusable, OutputUnusable."""
        first, self._read_last = self._read_last + 1, lines[-1].number
        known = self._known(first, lines)
        work: list[Work] = []
        faults: list[BadLine] = []
        with self._state.transaction():
            for line in lines:
                before = known.get(line.number)
                if before is None or before.state is LineState.OPEN:
                    match self._check(line, before):
                        case BadLine() as fault:
                            faults.append(fault)
                        case Work() as item:
                            work.append(item)
                        case None:
                            pass
        # Equal leading hashes are an equal prefix, so the order of the packed hashes is that of a
        # trie.
        work.sort(key=lambda item: item.job.blocks)
        return Window(_woven(work), faults, self._read_last)

    def skim(self, lines: list[Line]) -> tuple[list[Request], list[BadLine]]:
        """Check the next lines as `read` does, of a new batch, and make no jobs of them."""
        self._read_last = lines[-1].number
        requests: list[Request] = []
        faults: list[BadLine] = []
        with self._state.transaction():
            for line in lines:
                parsed = self._parse(line, None)
                if self._has_ended(line.number):
                    continue
                if isinstance(parsed, BadLine):
                    faults.append(parsed)
                else:
                    requests.append(parsed)
        return requests, faults

    def _known(self, first: int, lines: list[Line]) -> dict[int, Known]:
        """Lines of this stretch that an earlier run read. Raises InputUnusable if they differ."""
        if first > self._known_last:
            return {}
        known = self._state.known(first, self._read_last)
        digests = {line.number: line.digest for line in lines}
        for number, before in known.items():
            if digests.get(number) != before.digest:
                raise InputUnusable(self._changed(f"line {number} differs"))
        for line in lines:
            if line.number <= self._known_last and line.number not in known:
                raise InputUnusable(self._changed(f"line {line.number} was not there"))
        return known

    def end(self) -> None:
        """Take note that there are no more lines. Raises InputUnusable when some are missing."""
        if self._read_last == 0 and self._known_last == 0:
            message = f"{Code.EMPTY_FILE}: the input has no lines; nothing was run"
            raise InputUnusable(message)
        if self._read_last < self._known_last:
            raise InputUnusable(self._changed(f"line {self._known_last} is gone"))

    def _changed(self, how: str) -> str:
        return changed(self._state, how)

    def _check(self, line: Line, before: Known | None) -> Work | BadLine | None:
        """Check one line and register it, if it is new; None when it has ended."""
        parsed = self._parse(line, before)
        if self._has_ended(line.number):
            return None
        return parsed if isinstance(parsed, BadLine) else self._work(parsed, before)

    def _parse(self, line: Line, before: Known | None) -> Request | BadLine:
        """Read one line and register it, if it is new."""
        number = line.number
        if line.too_long:
            told = f"the line is longer than {LINE_BYTES_MAX} bytes, so its custom_id was not read"
            parsed: Request | BadLine = bad(number, None, Code.INVALID_REQUEST, told)
        else:
            parsed = parse_line(line.text, number, endpoint=self._identity.endpoint)
        first = self._register(line, parsed.custom_id, before)
        if first != number:
            told = f"custom_id {parsed.custom_id!r} was used in line {first} already"
            return bad(number, None, Code.DUPLICATE_CUSTOM_ID, told)
        if isinstance(parsed, BadLine):
            return parsed
        if not self._identity.endpoint:
            self._identity = msgspec.structs.replace(self._identity, endpoint=parsed.url)
            self._state.identity = self._identity
        return parsed

    def _register(self, line: Line, custom_id: str | None, before: Known | None) -> int:
        """Return the number of the line that this custom id belongs to: another's, of a double."""
        hashed = None if custom_id is None else id_hash(custom_id)
        if before is None and self._state.add(line.number, line.digest, hashed):
            return line.number
        return line.number if hashed is None else self._state.number_of(hashed)

    def _work(self, request: Request, before: Known | None) -> Work | BadLine:
        number = request.number
        again = before.again if before else 0
        try:
            job = self._build(request, self._identity.job_id(number, again))
        except Refused as error:
            return bad(number, request.custom_id, Code.INVALID_REQUEST, str(error))
        if job.stream:
            told = 'a batch has no reader to stream to; take "stream" out'
            return bad(number, request.custom_id, Code.INVALID_REQUEST, told)
        if self._models is not None and job.model not in self._models:
            offered = ", ".join(sorted(self._models)) or "none"
            told = f"the lane offers no model {job.model!r}; it offers: {offered}"
            return bad(number, request.custom_id, Code.MODEL_NOT_FOUND, told)
        if before is None:
            return Work(number, request.custom_id, job, known=False, sequence=0)
        job = msgspec.structs.replace(job, submission=before.submission)
        return Work(number, request.custom_id, job, known=True, sequence=before.sequence)


def _woven(work: list[Work]) -> list[Work]:
    """Cut a list into STRANDS stretches and take one of each in turns."""
    length = -(-len(work) // STRANDS)
    return [item for start in range(length) for item in work[start::length]]


def changed(state: State, how: str) -> str:
    """Say that the input is another one, and how to begin anew."""
    output = str(state.path).removesuffix(".state")
    return (
        f"the input is not the one that {output} was begun with ({how}); give the old one, or "
        f"begin anew with another --output (or remove {output}, its error file and {state.path})"
    )
