"""Which parts of a stretch of memory are taken. First fit in address order; knows offsets, and no memory.

First fit keeps the traffic at low addresses, which stay warm in the caches and leave large holes high.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Extents:
    """The holes of `size` bytes, in address order; no two of them touch."""

    def __init__(self, size: int) -> None:
        self._offsets = [0]
        self._sizes = [size]

    def take(self, size: int) -> int | None:
        """The offset of the first hole that is large enough, which is taken; None where there is none."""
        for position, hole in enumerate(self._sizes):
            if hole >= size:
                offset = self._offsets[position]
                self._cut(position, offset, size)
                return offset
        return None

    def take_at(self, offset: int, size: int) -> bool:
        """Take exactly this part; False, and nothing is taken, where some of it is not free."""
        position = bisect_right(self._offsets, offset) - 1
        if position < 0 or offset + size > self._offsets[position] + self._sizes[position]:
            return False
        self._cut(position, offset, size)
        return True

    def give_back(self, offset: int, size: int) -> None:
        """Make a part that was taken a hole again, one with those that it touches."""
        offsets, sizes = self._offsets, self._sizes
        position = bisect_left(offsets, offset)
        if position < len(offsets) and offset + size == offsets[position]:
            size += sizes[position]
            del offsets[position], sizes[position]
        if position and offsets[position - 1] + sizes[position - 1] == offset:
            sizes[position - 1] += size
        else:
            offsets.insert(position, offset)
            sizes.insert(position, size)

    def _cut(self, position: int, offset: int, size: int) -> None:
        if offset == self._offsets[position] and size < self._sizes[position]:  # nearly always
            self._offsets[position] += size
            self._sizes[position] -= size
            return
        begin, end = self._offsets[position], self._offsets[position] + self._sizes[position]
        rest = [(a, b - a) for a, b in ((begin, offset), (offset + size, end)) if b > a]
        self._offsets[position : position + 1] = [a for a, _ in rest]
        self._sizes[position : position + 1] = [length for _, length in rest]
