"""The processes of a pool: they end with the one that started them, however that one ends."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from types import FrameType


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


def shut_down(pool: ProcessPoolExecutor) -> None:
    """End a pool once its processes are done with what they run; if Ctrl-C comes, at once.

    Left half-way it would leave semaphores behind, of which Python tells when the command ends. So
    Ctrl-C raises nothing meanwhile.
    """

    def kill(_number: int, _frame: FrameType | None) -> None:
        for process in multiprocessing.active_children():
            process.kill()

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, kill)
    try:
        pool.shutdown(cancel_futures=True)
    finally:
        signal.signal(signal.SIGINT, before)
