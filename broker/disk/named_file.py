"""Files that people name: opened only if they are files, and read up to a bound.

A device is endless, and a named pipe without a writer keeps whoever opens it for ever. Neither is
what somebody means who names a configuration, a trace or a log, but a slip of the shell makes it.
"""

import errno
import os
import stat
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISFIFO, "it is a pipe, not a file; write it to a file first"),
    (stat.S_ISCHR, "it is a device, not a file"),
    (stat.S_ISBLK, "it is a device, not a file"),
    (stat.S_ISSOCK, "it is a socket, not a file"),
)


def open_named(path: Path, *, pipes: bool = False) -> BufferedReader:
    """Open a regular file for reading; with `pipes` a pipe, too, whose writer may still come.

    Raises OSError at once, its `strerror` a sentence, on what is not there, a folder, a device, a
    socket, and on a pipe.
    """
    # Without O_NONBLOCK, opening a named pipe waits for its writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _require_file(descriptor, path, pipes=pipes)
        os.set_blocking(descriptor, True)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_named(path: Path, *, bytes_max: int, pipes: bool = False) -> bytes:
    """Read a whole file of at most `bytes_max` bytes; may be empty.

    Raises OSError as `open_named`, and on a larger file, of which no more than that is read.
    """
    with open_named(path, pipes=pipes) as file:
        if os.fstat(file.fileno()).st_size > bytes_max:
            raise _too_large(path, bytes_max)
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise _too_large(path, bytes_max)
    return data


def _require_file(descriptor: int, path: Path, *, pipes: bool) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode)):
        return
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    what = next(text for is_one, text in _KINDS if is_one(mode))
    raise OSError(errno.EINVAL, what, str(path))


def _too_large(path: Path, bytes_max: int) -> OSError:
    return OSError(errno.EFBIG, f"it is larger than {bytes_max:,} bytes", str(path))
