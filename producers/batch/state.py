"""What a batch remembers beside its output, in one SQLite file.

Which lines it has read, which of them have ended, and how far the result files are known to be
whole.

The result files are the truth, and this is the index to them: a line is noted as ended only after
its result is on disk, so a crash in between leaves a tail of results that the next start reads back
(`results.py`). It also is the check that custom ids are unique: a million ids take a file of some
80 MB, and no memory.
"""

import secrets
import sqlite3
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import xxhash

from producers.batch.errors import OutputUnusable
from producers.batch.plan import default_errors, state_of

_Value = TypeVar("_Value")
_Missing = TypeVar("_Missing")

VERSION = 1

CACHE_KIB = 8192
"""Page cache of SQLite: a window of lines touches about 4 MB of it, and more would be memory for
nothing."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS line (
    number INTEGER PRIMARY KEY,
    id_hash BLOB,
    digest INTEGER NOT NULL,
    state INTEGER NOT NULL DEFAULT 0,
    submission INTEGER NOT NULL DEFAULT 0,
    sequence INTEGER NOT NULL DEFAULT 0,
    round INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS line_of_id ON line (id_hash) WHERE id_hash IS NOT NULL;
CREATE INDEX IF NOT EXISTS open_line ON line (number) WHERE state = 0;
"""


class LineState(IntEnum):
    """How far a line is."""

    OPEN = 0
    COMPLETED = 1
    FAILED = 2
    """In the error file; another run may help."""
    BAD = 3
    """In the error file; the line itself is at fault."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch is. Fixed when it begins, but for the window, which may be given anew."""

    batch_id: str
    input: str
    lane: str
    band: int
    created_at_s: float
    window_s: float
    endpoint: str = ""
    """Empty until the first good line told it."""
    digest: str = ""
    """Of the input's content; empty for standard input, which is compared line by line."""
    lines: int = 0
    """In the input; 0 while not known."""
    errors: str = ""
    """The error file, seen from the output's folder; empty for the one that is named after it."""

    @property
    def deadline_at_s(self) -> float:
        """Unix time when the window is over."""
        return self.created_at_s + self.window_s

    def errors_of(self, output: Path) -> Path:
        """The error file of this batch, whose output stands here now."""
        return output.parent / self.errors if self.errors else default_errors(output)

    def job_id(self, number: int, again: int) -> str:
        """Id of a line's job, the same on every run: what ran or runs already is found by it.

        `again` counts how often the line was put back after a failure: each time it is another job.
        """
        again_text = f"-r{again}" if again else ""
        return f"{self.batch_id}-{number}{again_text}"


class Marks(msgspec.Struct, frozen=True):
    """How many bytes of the result files are accounted for."""

    output: int = 0
    errors: int = 0
    rewriting: bool = False
    """The error file is being rewritten without the lines that are open again."""


@dataclass(frozen=True, slots=True)
class Known:
    """A line as an earlier run left it."""

    number: int
    digest: int
    state: LineState
    submission: int = 0
    sequence: int = 0
    again: int = 0


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines by state."""

    open: int = 0
    completed: int = 0
    failed: int = 0
    bad: int = 0

    @property
    def total(self) -> int:
        """All lines read so far."""
        return self.open + self.completed + self.failed + self.bad


def new_identity(*, input_name: str, lane: str, band: int, window_s: float) -> Identity:
    """Begin a batch. Its id is random: one begun anew asks for nothing that an old one got."""
    return Identity(
        batch_id=f"b{secrets.token_hex(8)}",
        input=input_name,
        lane=lane,
        band=band,
        created_at_s=time.time(),
        window_s=window_s,
    )


def id_hash(custom_id: str) -> bytes:
    """Hash of a custom id: 128 bits, so that two ids of a billion are not taken for one."""
    return xxhash.xxh3_128_digest(custom_id.encode(errors="surrogatepass"))


class State:
    """The state file of one batch. Used by one thread."""

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises OutputUnusable."""
        self.path = path
        with self._told():
            self._base = sqlite3.connect(path, isolation_level=None)
            self._base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._base.executescript(_SCHEMA)
        if self._meta("version", int, VERSION) != VERSION:
            message = f"{path} was written by another version; finish the batch with that one"
            raise OutputUnusable(message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._base.close()

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Do all of it or nothing. Raises OutputUnusable."""
        with self._told():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @property
    def identity(self) -> Identity | None:
        """What batch this is; None of a new file."""
        return self._meta("identity", Identity, None)

    @identity.setter
    def identity(self, identity: Identity) -> None:
        self._set_meta("version", VERSION)
        self._set_meta("identity", identity)

    @property
    def marks(self) -> Marks:
        """How far the result files are accounted for."""
        return self._meta("marks", Marks, Marks())

    @marks.setter
    def marks(self, marks: Marks) -> None:
        self._set_meta("marks", marks)

    def known(self, first: int, last: int) -> dict[int, Known]:
        """Lines read by an earlier run, from number `first` to `last`."""
        with self._told():
            rows = self._base.execute(
                "SELECT number, digest, state, submission, sequence, round FROM line "
                "WHERE number BETWEEN ? AND ?",
                (first, last),
            )
            return {row[0]: Known(row[0], row[1], LineState(row[2]), *row[3:]) for row in rows}

    def add(self, number: int, digest: int, hashed: bytes | None) -> bool:
        """Note a line as read; False when another line has this id (it is noted without it)."""
        with self._told():
            added = self._base.execute(
                "INSERT INTO line (number, digest, id_hash) VALUES (?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (number, digest, hashed),
            ).rowcount
            if not added:
                self._base.execute(
                    "INSERT INTO line (number, digest) VALUES (?, ?)", (number, digest)
                )
            return bool(added)

    def number_of(self, hashed: bytes) -> int:
        """Number of the line with this id; 0 without one."""
        with self._told():
            row = self._base.execute(
                "SELECT number FROM line WHERE id_hash = ?", (hashed,)
            ).fetchone()
            return int(row[0]) if row else 0

    def has(self, number: int) -> bool:
        """Say whether a line of this number was read."""
        with self._told():
            found = self._base.execute("SELECT 1 FROM line WHERE number = ?", (number,))
            return found.fetchone() is not None

    def end(self, ended: Iterable[tuple[LineState, int]]) -> None:
        """Note lines (state, number) as ended."""
        with self._told():
            self._base.executemany("UPDATE line SET state = ? WHERE number = ?", ended)

    def submitted(self, submitted: Iterable[tuple[int, int, int]]) -> None:
        """Note where jobs were stored: (submission, sequence, number)."""
        with self._told():
            self._base.executemany(
                "UPDATE line SET submission = ?, sequence = ? WHERE number = ?", submitted
            )

    def reopen_all(self) -> None:
        """Take every line as not ended: the result files are going to be read anew."""
        with self._told():
            self._base.execute("UPDATE line SET state = 0 WHERE state != 0")

    def reopen_failed(self) -> int:
        """Put failed lines back, as if they were never submitted; return how many."""
        with self._told():
            return self._base.execute(
                "UPDATE line SET state = 0, submission = 0, sequence = 0, round = round + 1 "
                "WHERE state = ?",
                (LineState.FAILED,),
            ).rowcount

    def is_open(self, number: int) -> bool:
        """Say whether a line has not ended."""
        with self._told():
            row = self._base.execute(
                "SELECT 1 FROM line WHERE number = ? AND state = 0", (number,)
            ).fetchone()
            return row is not None

    def counts(self) -> Counts:
        """Count lines by state."""
        with self._told():
            rows = self._base.execute("SELECT state, count(*) FROM line GROUP BY state")
            return Counts(**{LineState(row[0]).name.lower(): row[1] for row in rows})

    def last_number(self) -> int:
        """Greatest number read so far; 0 of none."""
        with self._told():
            return int(self._base.execute("SELECT max(number) FROM line").fetchone()[0] or 0)

    def _meta(self, key: str, kind: "type[_Value]", missing: "_Missing") -> "_Value | _Missing":
        with self._told():
            row = self._base.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return msgspec.json.decode(row[0], type=kind) if row else missing

    def _set_meta(self, key: str, value: object) -> None:
        with self._told():
            self._base.execute(
                "INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, msgspec.json.encode(value))
            )

    @contextmanager
    def _told(self) -> Generator[None]:
        """Tell what SQLite says in one sentence."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # A fault of this code, not of the file.
        except sqlite3.DatabaseError as error:
            message = (
                f"the state file {self.path} can't be used ({error}); see that the disk has room "
                "and nobody else writes there, then run the same command again"
            )
            raise OutputUnusable(message) from error


def read_identity(output: Path) -> Identity:
    """Read what batch an output belongs to. Raises OutputUnusable when it is none's."""
    path = state_of(output)
    identity = None
    try:
        is_there = path.exists()
    except OSError as error:
        message = f"{path} can't be read ({error.strerror}); name another output"
        raise OutputUnusable(message) from error
    if is_there:
        with State(path) as state:
            identity = state.identity
    if identity is None:
        message = f"{output} is the output of no batch that was begun here (no {path} stands by it)"
        raise OutputUnusable(message)
    return identity
