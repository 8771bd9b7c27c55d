"""A process of a pool: it ends with the one that started it, however that one ended."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process as soon as its parent is gone: kill -9 of a command leaves nothing running.

    For the start of a pool's process; does nothing in one that has no parent.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=_end_after, args=(sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@contextmanager
def ctrl_c_later() -> Generator[None]:
    """Let Ctrl-C wait while processes are started: they inherit that they don't hear it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
