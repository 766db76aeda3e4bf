"""Log lines, as text or as JSON: time, level, message, and the request that they are about.

A line of JSON has besides what its writer gave as `extra`.
"""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from functools import lru_cache
from typing import Literal

from convoy.models.errors import UsageError

# The id of the request that the current task answers; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")


LogFormat = Literal["text", "json"]


def printable(text: str) -> str:
    """A client's bytes must not be able to write log lines of their own, or to steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = printable(record.getMessage())
        line = f"{_moment(int(record.created))}.{int(record.msecs):03d}Z {record.levelname:<7} {message}"
        own_id = request_id.get()
        if own_id:
            line += f" [request {own_id}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


@lru_cache(1)
def _moment(created_s: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(created_s))


def _for_json(record: logging.LogRecord) -> bool:
    """What the text's formatter does by itself."""
    record.msg, record.args = printable(record.getMessage()), None
    own_id = request_id.get()
    if own_id:
        record.request_id = own_id
    return True


def takes_fields() -> bool:
    """Whether anybody reads what a line's writer gives as `extra`: our JSON does, our text does not, and others may."""
    handlers: list[logging.Handler] = []
    logger: logging.Logger | None = logging.getLogger("convoy.access")
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return not (len(handlers) == 1 and isinstance(handlers[0].formatter, _Formatter))


def _handler(form: LogFormat) -> logging.Handler:
    """Raises UsageError."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "text":
        handler.setFormatter(_Formatter())
        return handler
    try:
        from pythonjsonlogger.orjson import OrjsonFormatter
    except ImportError as error:
        raise UsageError(f"--log-format json needs python-json-logger ({error}); install it") from error
    names = {"levelname": "level", "exc_info": "exception"}
    handler.setFormatter(OrjsonFormatter(["levelname", "message"], rename_fields=names, timestamp="time"))
    handler.addFilter(_for_json)
    return handler


def configure(level: str, form: LogFormat = "text") -> None:
    """Send everything to standard error, in our format, from `level` on. Raises UsageError."""
    handler = _handler(form)
    # Our lines say neither which line of code wrote them nor in which thread: finding out took a quarter of each.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # One access log is enough, and it is ours.
    logging.getLogger("uvicorn.access").disabled = True
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:] = []
        logger.propagate = True
        logger.setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Let lines of this level and above be written from now on."""
    logging.getLogger().setLevel(level.upper())


def configure_own(level: str, form: LogFormat = "text") -> None:
    """The same for our lines alone, in a process that has a log of its own. Raises UsageError."""
    handler = _handler(form)
    logger = logging.getLogger("convoy")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
