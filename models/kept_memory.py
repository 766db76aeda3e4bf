"""Memory for pixels that is used again, up to a bound.

Fresh memory is not there until it is touched: for a picture of 12 megapixels the system makes 12 thousand pages, one
fault each, and takes them back when it is freed. That is a fifth of what decoding costs, and meanwhile the other
threads of the process wait for its page tables. Knows nothing of images, and no clock; safe from many threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class _Piece(NamedTuple):
    memory: npt.NDArray[np.uint8]
    used_in: int  # the turn

    @property
    def nbytes(self) -> int:
        return self.memory.size


class KeptMemory:
    """Lends pieces of memory, and keeps up to `most_bytes` of those that nobody uses now, the largest of them."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._free: list[_Piece] = []  # the smallest first
        self._turn = 0

    @contextmanager
    def begin_decode(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """uint8 [nbytes], whatever it holds, until the block ends. Nobody may read it from then on."""
        with self._lock:
            place = next((place for place, piece in enumerate(self._free) if piece.nbytes >= nbytes), None)
            found = None if place is None else self._free.pop(place)
        memory = np.empty(nbytes, np.uint8) if found is None else found.memory
        try:
            yield memory[:nbytes]
        finally:
            with self._lock:
                self._keep(_Piece(memory, self._turn))

    def give_back_unused(self) -> int:
        """To the system, what nobody has used since this was called before; how many bytes are kept now."""
        with self._lock:
            self._free = [piece for piece in self._free if piece.used_in == self._turn]
            self._turn += 1
            return self._kept_bytes

    @property
    def kept_bytes(self) -> int:
        """How much is kept that nobody uses now."""
        with self._lock:
            return self._kept_bytes

    @property
    def _kept_bytes(self) -> int:
        return sum(piece.nbytes for piece in self._free)

    def _keep(self, piece: _Piece) -> None:
        if piece.nbytes > self._most_bytes:
            return
        self._free.append(piece)
        self._free.sort(key=lambda one: one.nbytes)
        while self._kept_bytes > self._most_bytes:
            del self._free[0]
