"""Log lines, as text or as JSON: time, level, message, and the request that they are about.

JSON lines also have the `extra` fields. Everything that a server reports is logged here, including crashes. A thread
writes the lines, so no caller waits for a slow reader. The queue is bounded: lines that do not fit are dropped and
counted, and the log says how many as soon as it is read again.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import select
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from contextvars import Context, ContextVar
from functools import lru_cache
from types import TracebackType
from typing import Any, Literal

from convoy.models.errors import UsageError

_log = logging.getLogger("convoy")


class LogWriter(logging.Handler):
    """Writes formatted records, of which at most `room_bytes` wait. It owns `descriptor` from now on.

    Its thread never ends, and the process does not wait for it.
    """

    def __init__(self, descriptor: int, encoding: str = "utf-8", room_bytes: int = 4 << 20) -> None:
        super().__init__()
        self.dropped_lines = 0  # in total
        self._descriptor, self._encoding, self._room_bytes = descriptor, encoding, room_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0  # including those being written
        self._untold_lines = 0  # dropped since the log said so
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encoded(record)
        except Exception:  # the library's `handleError` prints it, which may block
            line = f"cannot write a log line:\n{traceback.format_exc()}".encode()
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + len(line) > self._room_bytes:
                self._count_dropped(1)
                return
            self._tell_of_dropped()  # before the lines that follow
            self._add(line)

    def flush(self, within_s: float = 2.0) -> None:
        """Wait until everything has been written, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes or not self._thread.is_alive(), within_s)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def _count_dropped(self, count: int) -> None:
        self.dropped_lines += count
        self._untold_lines += count

    def _tell_of_dropped(self) -> None:
        if not self._untold_lines:
            return
        count, self._untold_lines = self._untold_lines, 0
        told = "%d log lines were dropped here: nothing reads the log, and its buffer of %d MiB is full"
        given = (told, (count, self._room_bytes >> 20), None)
        record = logging.LogRecord("convoy", logging.WARNING, "", 0, *given)
        # Without a request's context, whichever task runs now.
        self._add(Context().run(self._line_of_own, record))

    def _line_of_own(self, record: logging.LogRecord) -> bytes:
        self.filter(record)
        return self._encoded(record)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting_bytes += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            chunk = self._next_chunk()
            written_bytes = self._write(b"".join(chunk))
            with self._changed:
                self._waiting_bytes -= sum(map(len, chunk))
                if not written_bytes:  # a full disk, or a reader that is gone
                    self._count_dropped(len(chunk))
                elif not self._lines:
                    self._tell_of_dropped()
                self._changed.notify_all()

    def _next_chunk(self) -> list[bytes]:
        """Wait for lines and return some."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines)
            chunk, nbytes = [], 0
            # the capacity of a pipe, so that there is room as soon as it is read
            while self._lines and nbytes < 64 << 10:
                chunk.append(self._lines.popleft())
                nbytes += len(chunk[-1])
            return chunk

    def _write(self, data: bytes) -> int:
        """Returns how many bytes were written: all, unless writing fails."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except BlockingIOError:  # another process that shares the descriptor made it non-blocking
                select.select([], [self._descriptor], [])
            except OSError:
                break
        return done


# The id of the request that the current task answers; empty outside of one.
request_id: ContextVar[str] = ContextVar("request_id", default="")


LogFormat = Literal["text", "json"]


def printable(text: str) -> str:
    """Escape what a client could use to forge log lines or to control a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# Characters that end a field, or could begin another.
_ENDS_FIELD = re.compile(r'[\s"=\[\]\\]')


def field(text: str) -> str:
    """A client's value as one field of a line: unchanged, or quoted if it could look like several."""
    if text and text.isprintable() and not _ENDS_FIELD.search(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(escaped)}"'


class _Formatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        own_id = request_id.get()
        told = f" [request {field(own_id)}]" if own_id else ""
        moment = f"{_moment(int(record.created))}.{int(record.msecs):03d}Z"
        return f"{moment} {record.levelname:<7} {printable(record.message)}{told}"


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
    """Whether any handler uses `extra` fields: JSON does, our text does not, and others may."""
    handlers: list[logging.Handler] = []
    logger: logging.Logger | None = logging.getLogger("convoy.access")
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return not (len(handlers) == 1 and isinstance(handlers[0].formatter, _Formatter))


def _to_stderr() -> logging.Handler:
    try:
        descriptor = os.dup(sys.stderr.fileno())
    except (AttributeError, OSError, ValueError):  # it is closed, or replaced by an object without a descriptor
        return logging.StreamHandler(sys.stderr)
    return LogWriter(descriptor, sys.stderr.encoding)


def _handler(form: LogFormat) -> logging.Handler:
    """Raises UsageError."""
    handler = _to_stderr()
    if form == "text":
        handler.setFormatter(_Formatter())
        return handler
    try:
        from pythonjsonlogger.orjson import OrjsonFormatter
    except ImportError as error:
        raise UsageError(
            f"--log-format json needs python-json-logger ({error}); pip install python-json-logger"
        ) from error
    names = {"levelname": "level", "exc_info": "exception"}
    handler.setFormatter(OrjsonFormatter(["levelname", "message"], rename_fields=names, timestamp="time"))
    handler.addFilter(_for_json)
    return handler


def configure(level: str, form: LogFormat = "text") -> None:
    """Log everything to standard error, in our format, from `level` on. Raises UsageError."""
    handler = _handler(form)
    # Our lines do not name the line of code or the thread: finding these took a quarter of the time of each.
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
    logging.captureWarnings(True)
    sys.excepthook = _tell_of_crash
    threading.excepthook = lambda crash: _tell_of_crash(
        crash.exc_type, crash.exc_value, crash.exc_traceback, f"thread {crash.thread and crash.thread.name}"
    )
    sys.unraisablehook = lambda crash: _tell_of_crash(
        crash.exc_type, crash.exc_value, crash.exc_traceback, crash.err_msg or f"{crash.object!r}"
    )


def _tell_of_crash(
    kind: type[BaseException],
    error: BaseException | None,
    frames: TracebackType | None,
    where: str = "the process",
) -> None:
    if issubclass(kind, SystemExit):
        return
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error or kind(), frames)
        return
    crash: Any = (kind, error or kind(), frames)
    _log.critical("%s: uncaught %s", where, kind.__name__, exc_info=crash)


def tell_stacks() -> None:
    """Log the stack of every thread."""
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read().decode(errors="replace")
    except OSError as error:
        _log.error("cannot log the stacks of the threads: %s", error)
        return
    _log.handle(_log.makeRecord(_log.name, logging.ERROR, "", 0, "stacks of all threads:", (), None, sinfo=stacks))


def dropped_lines() -> int:
    """How many lines were dropped because earlier ones were not read."""
    return sum(writer.dropped_lines for writer in _writers())


def flush(within_s: float = 2.0) -> None:
    """Write the waiting lines before the process ends, as far as they are read within that time."""
    for writer in _writers():
        writer.flush(within_s)


def _writers() -> list[LogWriter]:
    handlers = (*logging.getLogger().handlers, *_log.handlers)
    return [handler for handler in handlers if isinstance(handler, LogWriter)]


def set_level(level: str) -> None:
    """Log lines of this level and above from now on."""
    logging.getLogger().setLevel(level.upper())


def configure_own(level: str, form: LogFormat = "text") -> None:
    """Configure only our loggers, in a process that has a log of its own. Raises UsageError."""
    handler = _handler(form)
    logger = logging.getLogger("convoy")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
