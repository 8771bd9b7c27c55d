"""The log of every program on the bus: one line of JSON per event, on standard error."""

import logging
import sys

import orjson
import structlog


def set_up(*, level: int = logging.INFO, **who: str) -> None:
    """Send all of this process's events to standard error; each line starts with `who` it is."""
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _named(who),
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.BytesLoggerFactory(sys.stderr.buffer),
        cache_logger_on_first_use=True,
    )


def _named(who: dict[str, str]) -> structlog.types.Processor:
    def add(_: object, __: str, event: structlog.types.EventDict) -> structlog.types.EventDict:
        return {**who, **event}

    return add


def _dumps(event: object, **_: object) -> bytes:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS)
