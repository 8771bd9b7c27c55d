"""A process of a pool: it ends with the one that started it, however that one ended."""

import multiprocessing
import os
import threading
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
