"""Lines appended to a file that is rotated by size, with a count kept; made for a full disk.

A write that fails loses its lines and nothing else: the caller counts, and the next write starts
on a new line, so that no reader meets two halves in one.
"""

import os
from pathlib import Path


class LogFiles:
    """`name.jsonl` and its predecessors `name.1.jsonl`, ...; the highest number is the oldest."""

    def __init__(self, folder: Path, name: str, *, bytes_max: int, files_max: int) -> None:
        """Nothing is touched until `open` or the first `append`."""
        self._folder = folder
        self._name = name
        self._bytes_max = bytes_max
        self._files_max = files_max
        self._descriptor: int | None = None
        self._bytes = 0
        self._torn = False

    @property
    def path(self) -> Path:
        """Where the newest lines are."""
        return self._folder / f"{self._name}.jsonl"

    def open(self) -> None:
        """Open the file, made if absent; again, where it was deleted or moved. Raises OSError."""
        if self._descriptor is not None and not self._is_in_place(self._descriptor):
            self.close()
        if self._descriptor is None:
            self._descriptor = self._open()

    def append(self, lines: bytes) -> None:
        """Write whole lines. Raises OSError; then what was written of them is not known."""
        try:
            self._append(lines)
        except OSError:
            # Opened anew next time: the folder may be back, or the file moved away.
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _append(self, lines: bytes) -> None:
        self.open()
        assert self._descriptor is not None
        if self._bytes and self._bytes + len(lines) > self._bytes_max:
            self._rotate()
        _write_all(self._descriptor, b"\n" + lines if self._torn else lines)
        self._bytes += len(lines) + self._torn
        self._torn = False

    def _is_in_place(self, descriptor: int) -> bool:
        """Say whether what is written is read under the file's name."""
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        except FileNotFoundError:
            return False

    def _open(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._bytes = os.fstat(descriptor).st_size
        # A process that was killed, or a write that failed, may have left half a line.
        self._torn = self._bytes > 0 and os.pread(descriptor, 1, self._bytes - 1) != b"\n"
        return descriptor

    def _rotate(self) -> None:
        self.close()
        for number in range(self._files_max - 1, 0, -1):
            older = self._numbered(number)
            newer = self._numbered(number - 1) if number > 1 else self.path
            if newer.exists():
                newer.replace(older)
        if self._files_max == 1:
            self.path.unlink(missing_ok=True)
        self._descriptor = self._open()

    def _numbered(self, number: int) -> Path:
        return self._folder / f"{self._name}.{number}.jsonl"


def _write_all(descriptor: int, data: bytes) -> None:
    # A write may take less than it was given, most of all on a disk that is nearly full.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
