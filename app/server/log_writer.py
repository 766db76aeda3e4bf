"""Log lines on their way to a file descriptor, by a thread of its own: whoever logs never waits for who reads.

Between the two is a queue of limited size. What does not fit is dropped and counted, and the log says how much as soon
as it is read again. Knows lines and descriptors; knows nothing of what is said.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import traceback
from collections import deque
from contextvars import Context

_ROOM_BYTES = 4 << 20
_CHUNK_BYTES = 64 << 10  # what a pipe holds: the queue has room again as soon as that is read
_FLUSH_WITHIN_S = 2.0


class LogWriter(logging.Handler):
    """Writes formatted records, of which at most `room_bytes` wait. `descriptor` is its own from now on."""

    def __init__(self, descriptor: int, encoding: str = "utf-8", room_bytes: int = _ROOM_BYTES) -> None:
        super().__init__()
        self.dropped_lines = 0  # in all
        self._descriptor, self._encoding, self._room_bytes = descriptor, encoding, room_bytes
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0  # with what is being written
        self._untold_lines = 0  # dropped since the log said so
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._encoded(record)
        except Exception:
            self.handleError(record)
            return
        self._put(line)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """The usual way is to print it, which may wait for ever."""
        self._put(f"a line of the log could not be written:\n{traceback.format_exc()}".encode())

    def flush(self, within_s: float = _FLUSH_WITHIN_S) -> None:
        """Wait until everything has been written, but not for longer than that: perhaps nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting_bytes or not self._thread.is_alive(), within_s)

    def close(self) -> None:
        """What has not been written by now is left to the thread, which the process does not wait for."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        super().close()

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode(self._encoding, "backslashreplace")

    def _put(self, line: bytes) -> None:
        with self._changed:
            if self._waiting_bytes and self._waiting_bytes + len(line) > self._room_bytes:
                self.dropped_lines += 1
                self._untold_lines += 1
                return
            self._tell_of_dropped()  # before what comes after them
            self._add(line)

    def _tell_of_dropped(self) -> None:
        if not self._untold_lines:
            return
        count, self._untold_lines = self._untold_lines, 0
        told = "%d lines of the log were dropped here, because nobody read it and %d MiB were waiting"
        given = (told, (count, self._room_bytes >> 20), None)
        record = logging.LogRecord("convoy", logging.WARNING, "", 0, *given)
        # In no request's name, whoever comes by.
        self._add(Context().run(self._line_of_own, record))

    def _line_of_own(self, record: logging.LogRecord) -> bytes:
        self.filter(record)
        return self._encoded(record)

    def _add(self, line: bytes) -> None:
        self._lines.append(line)
        self._waiting_bytes += len(line)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while chunk := self._next_chunk():
            written_bytes = self._write(b"".join(chunk))
            with self._changed:
                self._waiting_bytes -= sum(map(len, chunk))
                if not written_bytes:  # a disk that is full, or a reader that is gone
                    self.dropped_lines += len(chunk)
                    self._untold_lines += len(chunk)
                elif not self._lines:
                    self._tell_of_dropped()
                self._changed.notify_all()

    def _next_chunk(self) -> list[bytes]:
        """Some lines, when there are any; none when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._lines or self._is_closing)
            chunk, nbytes = [], 0
            while self._lines and nbytes < _CHUNK_BYTES:
                chunk.append(self._lines.popleft())
                nbytes += len(chunk[-1])
            return chunk

    def _write(self, data: bytes) -> int:
        """How much of it was written: all, unless something else than patience is lacking."""
        done = 0
        while done < len(data):
            try:
                done += os.write(self._descriptor, data[done:])
            except BlockingIOError:  # somebody has made it so for all that share it
                select.select([], [self._descriptor], [])
            except OSError:
                break
        return done
