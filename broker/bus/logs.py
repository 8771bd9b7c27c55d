"""The log of every program on the bus: one line of JSON per event, on standard error.

What keeps a link up must not stop because its log can't be written (its reader is gone, the disk is
full, whoever embeds us has closed the stream): the bus logs through `Log`, which never raises, and
the programs' own lines go to whatever standard error is then, or nowhere.
"""

import logging
import sys
import time
from contextlib import suppress

import orjson
import structlog

from broker.bus.log_repeats import Repeats


class Log:
    """A logger whose trouble is nobody else's."""

    def __init__(self, name: str) -> None:
        self._log = structlog.get_logger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Tell what only a closer look needs."""
        with suppress(Exception):
            self._log.debug(event, **fields)

    def info(self, event: str, **fields: object) -> None:
        """Tell what happened."""
        with suppress(Exception):
            self._log.info(event, **fields)

    def warning(self, event: str, **fields: object) -> None:
        """Tell what may need somebody."""
        with suppress(Exception):
            self._log.warning(event, **fields)

    def error(self, event: str, **fields: object) -> None:
        """Tell what needs somebody."""
        with suppress(Exception):
            self._log.error(event, **fields)


class _StandardError(structlog.BytesLogger):
    """Writes lines to whatever standard error is now."""

    def __init__(self) -> None:
        super().__init__(sys.stderr.buffer)

    def msg(self, message: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.buffer.write(message + b"\n")
            sys.stderr.buffer.flush()

    log = debug = info = warn = warning = msg
    fatal = failure = err = error = critical = exception = msg


def set_up(*, level: int = logging.INFO, **who: str) -> None:
    """Send all of this process's events to standard error; each line starts with `who` it is."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            Repeats(now=time.monotonic),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _named(who),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _StandardError(),
        cache_logger_on_first_use=True,
    )


def _named(who: dict[str, str]) -> structlog.types.Processor:
    def add(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        return {**who, **event}

    return add


def _dumps(event: object, **_: object) -> bytes:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS)
