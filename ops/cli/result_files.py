"""Files that commands write: each stands whole or not at all, and never in place of what was read.

A result is first written beside its place, under a name that nobody else uses, and takes its place
in one step. Through a link it takes the place of what the link leads to.
"""

import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ops.cli.errors import CommandError, Misused

NAME_CHARS_MAX = 50
"""Of a result's name in that of the file beside it: four bytes each, and a number, have room in the
255 bytes of a file's name."""


def require_writable(*paths: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """See before a long run that its results can be written.

    Each is a file in a folder that exists, or will be one; none is another, or one of `inputs`:
    what the run reads. Raises Misused.
    """
    results = [path for path in paths if path is not None]
    for path in results:
        _require_place(path)
    read = {_place(path) for path in inputs if path is not None}
    seen: set[Path] = set()
    for path in results:
        if _place(path) in read:
            message = f"{path} is what is read; give the result another name"
            raise Misused(message)
        if _place(path) in seen:
            message = f"{path} is named for two results; give each its own name"
            raise Misused(message)
        seen.add(_place(path))


def _require_place(path: Path) -> None:
    place = _place(path)
    try:
        problem = _problem(place)
    except OSError as error:  # A name too long for a file, a folder that may not be entered.
        problem = (error.strerror or str(error)).lower()
    if problem:
        message = f"{path} can't be written: {problem}"
        raise Misused(message)


def _problem(place: Path) -> str:
    folder = place.parent
    if os.path.lexists(place) and not place.is_file():
        kind = "a folder" if place.is_dir() else "a device or a pipe"
        return f"it is {kind}; name a file"
    place.exists()  # Raises what `lexists` hides.
    if not folder.is_dir():
        return "name a file in a folder that exists"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "nobody may write into its folder as this user; name another"
    return ""


def _place(path: Path) -> Path:
    """Follow links, as far as they lead."""
    return Path(os.path.realpath(path))


@contextmanager
def whole_file(path: Path) -> Generator[IO[bytes]]:
    """Open a file for writing that takes its place when the block is done, and only then.

    Raises:
        CommandError: it can't be written; what stood there still does.
    """
    place = _place(path)
    beside = place.with_name(f".{place.name[:NAME_CHARS_MAX]}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
        beside.replace(place)
    except OSError as error:
        message = f"{path} can't be written: {(error.strerror or str(error)).lower()}"
        raise CommandError(message) from error
    finally:
        beside.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever looks finds the old one or the new one.

    Raises CommandError as `whole_file`.
    """
    with whole_file(path) as file:
        file.write(data)
