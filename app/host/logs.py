"""Log lines: time, level, message, and the request that they are about."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar

# The id of the request that the current task answers; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if not message.isprintable():
            # A client's bytes must not be able to write log lines of their own, or to steer a terminal.
            message = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in message)
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = f"{moment}.{int(record.msecs):03d}Z {record.levelname:<7} {message}"
        own_id = request_id.get()
        if own_id:
            line += f" [request {own_id}]"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str) -> None:
    """Send everything to standard error, in our format, from `level` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
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


def configure_own(level: str) -> None:
    """The same for our lines alone, in a process that has a log of its own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    logger = logging.getLogger("convoy")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
