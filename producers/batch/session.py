"""A batch opened for a run: its input checked, its result files locked and whole, its state read.

All disk work of a run goes through here, in one thread of its own, so that the event loop never
waits for a disk.
"""

import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from producers.batch.errors import InputUnusable, OutputUnusable
from producers.batch.lines import Code
from producers.batch.outcome import Ended
from producers.batch.plan import WINDOW_S, Plan
from producers.batch.reader import changed
from producers.batch.results import Results
from producers.batch.source import STDIN, survey
from producers.batch.state import Counts, Identity, LineState, State, new_identity


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a line's job was last stored."""

    submission: int
    sequence: int


class Session:
    """One run's hold on a batch's files."""

    def __init__(self, plan: Plan, *, retry: bool = False) -> None:
        """Open everything. A batch that never began leaves no file.

        Raises InputUnusable, OutputUnusable.
        """
        self.plan = plan
        self.results_were_missing = False
        self._unmarked: list[tuple[LineState, int]] = []
        with _places_told():
            _check_paths(plan)
        with ExitStack() as stack:
            self.results = stack.enter_context(Results(plan.output, plan.errors))
            self.state = stack.enter_context(State(plan.state))
            stack.callback(self._remove_unbegun)
            self.identity = self._begin() if self.state.identity is None else self._resume()
            if retry:
                self._put_back_failed()
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def counts(self) -> Counts:
        """Lines by state, as of the last checkpoint."""
        return self.state.counts()

    def write(self, ended: Iterable[Ended]) -> None:
        """Append results; they count as ended from the next checkpoint on."""
        batch = list(ended)
        self.results.write(batch)
        self._unmarked.extend((_state_of(end), end.number) for end in batch)

    def checkpoint(self, stored: Mapping[int, Stored]) -> None:
        """Bring results to disk, then note what ended and where open jobs stand."""
        marks = self.results.checkpoint()
        with self.state.transaction():
            self.state.end(self._unmarked)
            self.state.submitted(
                (where.submission, where.sequence, number) for number, where in stored.items()
            )
            self.state.marks = marks
        self._unmarked.clear()

    def _begin(self) -> Identity:
        """Begin a new batch."""
        plan = self.plan
        if not self.results.empty:
            message = (
                f"{plan.output} (or {plan.errors}) holds something, and no state stands beside it; "
                "name another --output, or move it away"
            )
            raise OutputUnusable(message)
        identity = new_identity(
            input_name=plan.input_name,
            lane=plan.lane,
            band=plan.band,
            window_s=WINDOW_S if plan.window_s is None else plan.window_s,
        )
        identity = msgspec.structs.replace(
            identity, endpoint=plan.endpoint, errors=plan.errors_name
        )
        if not plan.is_pipe:
            found = survey(plan.input)
            if not found.lines:
                message = f"{Code.EMPTY_FILE}: {plan.input} has no lines; nothing was run"
                raise InputUnusable(message)
            identity = msgspec.structs.replace(identity, digest=found.digest, lines=found.lines)
        with self.state.transaction():
            self.state.identity = identity
        return identity

    def _resume(self) -> Identity:
        """Take up a batch that was begun before."""
        plan, identity = self.plan, self.state.identity
        assert identity is not None, "the caller looked"
        if plan.lane != identity.lane:
            message = (
                f"{plan.output} was begun for lane {identity.lane!r}, not {plan.lane!r}; "
                "name another --output"
            )
            raise OutputUnusable(message)
        if plan.endpoint and identity.endpoint and plan.endpoint != identity.endpoint:
            message = f"{plan.output} was begun for {identity.endpoint}; name another --output"
            raise OutputUnusable(message)
        begun = identity.errors_of(plan.output)
        if begun != plan.errors and begun.exists():
            message = (
                f"failed lines of {plan.output} stand in {begun}, not {plan.errors}; name the same"
                " --errors, or another --output"
            )
            raise OutputUnusable(message)
        if identity.digest and not plan.is_pipe:
            found = survey(plan.input)
            if found.digest != identity.digest:
                how = f"{found.lines} lines of other content, it had {identity.lines}"
                raise InputUnusable(changed(self.state, how))
        self.results_were_missing = self.results.recover(self.state)
        window_s = identity.window_s if plan.window_s is None else plan.window_s
        now = msgspec.structs.replace(identity, window_s=window_s, errors=plan.errors_name)
        if now != identity:
            with self.state.transaction():
                self.state.identity = now
        return now

    def _remove_unbegun(self) -> None:
        """Take away the files of a batch that read no line; what others wrote stays."""
        if self.state.last_number():
            return
        if not self.plan.output.stat().st_size:
            self.plan.output.unlink()
        for ending in ("", "-wal", "-shm"):
            Path(f"{self.plan.state}{ending}").unlink(missing_ok=True)

    def _put_back_failed(self) -> None:
        """Make failed lines open again: another round, with a window of its own."""
        identity = msgspec.structs.replace(self.identity, created_at_s=time.time())
        with self.state.transaction():
            self.state.reopen_failed()
            self.state.identity = identity
            self.state.marks = msgspec.structs.replace(self.state.marks, rewriting=True)
        self.identity = identity
        self.results.rewrite_errors(self.state)


def _state_of(end: Ended) -> LineState:
    if end.ok:
        return LineState.COMPLETED
    return LineState.BAD if end.final else LineState.FAILED


@contextmanager
def _places_told() -> Generator[None]:
    """Tell in a sentence of a folder that may not be entered, a name that is too long."""
    try:
        yield
    except OSError as error:
        message = f"{error.filename} can't be written or read ({error.strerror}); name another"
        raise OutputUnusable(message) from error


def _check_paths(plan: Plan) -> None:
    for path in (plan.output, plan.errors):
        if path.exists() and not path.is_file():
            message = f"{path} is no regular file; results can only be kept in one"
            raise OutputUnusable(message)
        if not path.parent.is_dir():
            message = f"there is no folder {path.parent}; make it, or name another --output"
            raise OutputUnusable(message)
    read = None if plan.input == STDIN else Path(plan.input)
    if read is not None:
        read.exists()  # Raises for a folder that may not be entered.
    for path in (plan.output, plan.errors, *plan.files_beside):
        if read is not None and path.exists() and path.samefile(read):
            message = f"{path} is the input itself, and would be written; name another --output"
            raise OutputUnusable(message)
    for path in (plan.output, plan.errors):
        if path.resolve() in [beside.resolve() for beside in plan.files_beside]:
            message = f"{path} is a file that the run needs beside its results; name another"
            raise OutputUnusable(message)
