"""Who may do what while a stream's work is recorded as a graph.

A capture does not survive that another thread waits for the whole device, or allocates or frees its memory: it is
invalidated, whatever mode it was begun in, and the other call fails too. So a capture is alone, and everything
device-wide waits for its end; device-wide calls do not wait for each other. Knows threads; knows nothing of CUDA.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """One device's. A capture waits until nothing device-wide is under way, but not for what comes after it did."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._capturing: int | None = None  # the thread
        self._inside: Counter[int] = Counter()  # how deep, by thread

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A capture is made inside, by whatever thread. Raises RuntimeError inside of `beside_others`."""
        own = threading.get_ident()
        with self._changed:
            if own in self._inside or own == self._capturing:
                raise RuntimeError("a capture inside of what no capture survives would wait for itself; this is a bug")
            self._changed.wait_for(lambda: self._capturing is None and not self._inside)
            self._capturing = own
        try:
            yield
        finally:
            with self._changed:
                self._capturing = None
                self._changed.notify_all()

    @contextmanager
    def beside_others(self) -> Iterator[None]:
        """What a capture would not survive is done inside."""
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: self._capturing in (None, own))
            self._inside[own] += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside[own] -= 1
                if not self._inside[own]:
                    del self._inside[own]
                self._changed.notify_all()
