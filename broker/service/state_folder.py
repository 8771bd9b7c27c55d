"""A broker's own folder: no other broker writes there, on whatever host it runs.

Two would rotate one decision log under each other. Nothing in the folder is needed to lead, so one
that can't be locked (a read-only disk, a file system without locks, one that hangs) only means that
nobody is kept out: that is logged, and what can't be written is the log's own alarm.
"""

import threading
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import structlog

from broker.disk.folder_lock import FolderTaken, held
from broker.service.config_records import BrokerConfig

LOCK_S_MAX = 5.0
"""How long a start waits for a disk: a share whose server is away hangs for minutes."""

_log = structlog.get_logger(__name__)


class StateTaken(Exception):
    """Another broker has this one's state_dir."""


@contextmanager
def own_state(config: BrokerConfig) -> Generator[None]:
    """Keep other brokers out of the state_dir until the block ends; without a log there is none.

    Raises StateTaken, at once, when one is there already.
    """
    if not config.decision_log_bytes_max:
        yield
        return
    folder = Path(config.state_dir)
    with _locked(folder):
        yield


def _locked(folder: Path) -> ExitStack:
    # Not on the event loop's own threads: those are waited for at the end, this one never.
    taken: Future[ExitStack] = Future()
    threading.Thread(target=_take, args=(folder, taken), name="state-lock", daemon=True).start()
    try:
        return taken.result(LOCK_S_MAX)
    except FolderTaken as error:
        message = (
            f"state_dir {folder} is in use by another broker ({error.holder}): end that one, or"
            " give this one a broker.state_dir of its own (--state-dir)"
        )
        raise StateTaken(message) from error
    except TimeoutError:
        _log.warning("broker.state_not_locked", folder=str(folder), error="its disk hangs")
    except OSError as error:
        _log.warning("broker.state_not_locked", folder=str(folder), error=str(error))
    return ExitStack()


def _take(folder: Path, taken: "Future[ExitStack]") -> None:
    stack = ExitStack()
    try:
        stack.enter_context(held(folder))
    except Exception as error:  # noqa: BLE001  # Passed on to who waits.
        taken.set_exception(error)
    else:
        taken.set_result(stack)
