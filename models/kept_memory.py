"""Memory for pixels that is reused, up to a bound.

Fresh memory must be mapped: for a picture of 12 megapixels the system creates 12 thousand pages, one fault each, and
removes them when it is freed. That is a fifth of the cost of decoding, and meanwhile other threads wait for the
process's page tables. Thread-safe; has no clock.
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
    used_in: int  # the generation of its last use

    @property
    def nbytes(self) -> int:
        return self.memory.size


class KeptMemory:
    """Lends pieces of memory, and keeps up to `most_bytes` of those not in use, the largest of them."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._free: list[_Piece] = []  # smallest first
        self._turn = 0

    @contextmanager
    def begin_decode(self, nbytes: int) -> Iterator[npt.NDArray[np.uint8]]:
        """uint8 [nbytes] with arbitrary contents, valid until the block ends."""
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
        """Free what was not used since the last call. Returns how many bytes are still kept."""
        with self._lock:
            self._free = [piece for piece in self._free if piece.used_in == self._turn]
            self._turn += 1
            return self._kept_bytes

    @property
    def kept_bytes(self) -> int:
        """How much unused memory is kept."""
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
