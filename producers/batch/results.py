"""The two result files: appended to as lines end, locked, and repaired after a crash.

Between two checkpoints results are only appended. A checkpoint brings them to disk and then notes,
in one transaction, how long the files are and which lines have ended. So what stands beyond the
noted length was written by a run that died: whole lines of it are taken over, and a torn end is cut
off. Nothing before the noted length is ever changed, but by a retry, which writes the error file
anew and swaps it in.
"""

import fcntl
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from producers.batch.errors import OutputUnusable
from producers.batch.lines import FINAL
from producers.batch.outcome import Ended
from producers.batch.plan import next_errors
from producers.batch.state import LineState, Marks, State, id_hash

RECOVER_LINES = 1000
"""Lines read back in one transaction."""


class _Error(msgspec.Struct):
    code: str = ""
    line: int = 0


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    error: _Error | None = None


_results = msgspec.json.Decoder(_Result)


@dataclass(slots=True)
class _File:
    """One open, locked file."""

    path: Path
    descriptor: int
    size: int

    def append(self, data: bytes) -> None:
        """Write all of `data` at the end, or leave the file as it was."""
        view = memoryview(data)
        with _told(self.path):
            try:
                while view:
                    view = view[os.write(self.descriptor, view) :]
            except OSError:
                os.ftruncate(self.descriptor, self.size)
                raise
        self.size += len(data)

    def cut(self, size: int) -> None:
        with _told(self.path):
            os.ftruncate(self.descriptor, size)
        self.size = size

    def sync(self) -> None:
        with _told(self.path):
            os.fsync(self.descriptor)


class Results:
    """The output and the error file of one batch. Used by one thread."""

    def __init__(self, output: Path, errors: Path) -> None:
        """Open, create and lock both files. Raises OutputUnusable."""
        if _same(output, errors):
            message = f"results and errors can't both go to {output}; name another --errors"
            raise OutputUnusable(message)
        self._output = _open(output)
        try:
            self._errors = _open(errors)
        except BaseException:
            os.close(self._output.descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._errors.size:
            self._errors.path.unlink(missing_ok=True)
        os.close(self._output.descriptor)
        os.close(self._errors.descriptor)

    @property
    def empty(self) -> bool:
        """Whether nothing stands in either file."""
        return not self._output.size and not self._errors.size

    def write(self, ended: Iterable[Ended]) -> None:
        """Append what ended. Raises OutputUnusable; what couldn't be written whole isn't there."""
        good, failed = bytearray(), bytearray()
        for end in ended:
            (good if end.ok else failed).extend(end.text)
        if good:
            self._output.append(bytes(good))
        if failed:
            self._errors.append(bytes(failed))

    def checkpoint(self) -> Marks:
        """Bring all that was written to disk; return how far the files are whole now."""
        self._output.sync()
        self._errors.sync()
        return Marks(self._output.size, self._errors.size)

    def recover(self, state: State) -> bool:
        """Take over what a run that died has written; say whether results were missing.

        Raises OutputUnusable when something stands there that isn't this batch's.
        """
        marks = state.marks
        if marks.rewriting:
            self.rewrite_errors(state)
            marks = state.marks
        missing = self._output.size < marks.output or self._errors.size < marks.errors
        if missing:
            # Somebody took results away. What is there counts; the rest is collected again.
            with state.transaction():
                state.reopen_all()
                state.marks = Marks()
            marks = Marks()
        self.checkpoint()  # What is read back must not be lost once it is noted.
        self._read_back(state, self._output, marks.output, may_cut=not missing)
        self._read_back(state, self._errors, marks.errors, may_cut=not missing)
        with state.transaction():
            state.marks = self.checkpoint()
        return missing

    def rewrite_errors(self, state: State) -> None:
        """Take those lines out of the error file that are open again; crash-safe, repeatable."""
        old = self._errors
        path = next_errors(old.path)
        with _told(path):
            path.unlink(missing_ok=True)
        new = _open(path)
        for _, text, result in _whole_lines(old, 0):
            number = _number(state, result) if result else 0
            if number and not state.is_open(number):
                new.append(text)
        new.sync()
        with _told(old.path):
            path.replace(old.path)
            _sync_folder(old.path.parent)  # Else a power cut could bring the old file back.
        os.close(old.descriptor)
        self._errors = _File(old.path, new.descriptor, new.size)
        with state.transaction():
            state.marks = Marks(state.marks.output, new.size)

    def _read_back(self, state: State, file: _File, start: int, *, may_cut: bool) -> None:
        """Note the lines beyond `start` as ended, and cut off a torn end."""
        end = start
        ended: list[tuple[LineState, int]] = []
        is_output = file is self._output
        for position, text, result in _whole_lines(file, start):
            if result is None:
                if may_cut:
                    break
                raise OutputUnusable(_foreign(file.path, position))
            number = _number(state, result)
            if not number or not state.is_open(number):
                raise OutputUnusable(_foreign(file.path, position))
            ended.append((_state_of(result, is_output=is_output), number))
            end = position + len(text)
            if len(ended) >= RECOVER_LINES:
                _note(state, ended, end, is_output=is_output)
        _note(state, ended, end, is_output=is_output)
        if end < file.size:
            file.cut(end)


def _note(state: State, ended: list[tuple[LineState, int]], upto: int, *, is_output: bool) -> None:
    """Note lines as ended, and how far their file is accounted for, both or neither.

    A run that dies between the two would find lines there that ended and are not accounted for.
    """
    with state.transaction():
        state.end(ended)
        marks = state.marks
        state.marks = Marks(upto, marks.errors) if is_output else Marks(marks.output, upto)
    ended.clear()


def _state_of(result: _Result, *, is_output: bool) -> LineState:
    if is_output:
        return LineState.COMPLETED
    code = result.error.code if result.error else ""
    return LineState.BAD if code in FINAL else LineState.FAILED


def _number(state: State, result: _Result) -> int:
    """Number of the line that a result is of; 0 when it is of none."""
    if result.custom_id is not None:
        return state.number_of(id_hash(result.custom_id))
    number = result.error.line if result.error else 0
    return number if number and state.has(number) else 0


def _whole_lines(file: _File, start: int) -> Iterator[tuple[int, bytes, _Result | None]]:
    """Give (position, text, result) of each line that has its end; garbage has no result."""
    with _told(file.path), file.path.open("rb") as reader:
        reader.seek(start)
        position = start
        while (text := reader.readline()).endswith(b"\n"):
            try:
                result = _results.decode(text)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                result = None
            yield position, text, result
            position += len(text)


def _open(path: Path) -> _File:
    """Open and lock one file. Raises OutputUnusable."""
    with _told(path):
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, descriptor):
                    return _File(path, descriptor, os.fstat(descriptor).st_size)
            except BlockingIOError as error:
                os.close(descriptor)
                message = f"another run writes to {path} now; wait for it, or name another --output"
                raise OutputUnusable(message) from error
            os.close(descriptor)  # It was swapped or removed between opening and locking.


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_at(path: Path, descriptor: int) -> bool:
    """Say whether `path` still names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve() or (
        one.exists() and other.exists() and one.samefile(other)
    )


def _foreign(path: Path, position: int) -> str:
    return (
        f"{path} holds something at byte {position} that this batch did not write; "
        "take it out, or name another --output"
    )


@contextmanager
def _told(path: Path) -> Generator[None]:
    """Tell a fault of a file in one sentence."""
    try:
        yield
    except BlockingIOError:
        raise
    except OSError as error:
        message = (
            f"{path} can't be written or read ({error.strerror}); "
            "put that right and run the same command again: nothing that ended is lost"
        )
        raise OutputUnusable(message) from error
