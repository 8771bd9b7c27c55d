"""Files that stand whole or not at all."""

import os
from pathlib import Path

from ops.cli.errors import Misused


def require_writable(*paths: Path | None) -> None:
    """See before a long run that its results can be written. Raises Misused."""
    for path in paths:
        if path is None:
            continue
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            message = f"{path} can't be written: name a file in a folder that exists"
            raise Misused(message)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever looks finds the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
