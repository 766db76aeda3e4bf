"""How many connections each edge has, told to the others by way of the first page of the shared memory.

A connection belongs to one edge for as long as it lasts, and one edge that is awake could take all that come
while the others wake up. So an edge with more than another waits a moment, in which the other may take it.
Each writes its own number only, and reads the others' as they happen to be: a hint, not a lock.
"""

from __future__ import annotations

import mmap

BOARD_BYTES = mmap.PAGESIZE
_PATIENCE_PER_CONNECTION_S = 0.001
_MOST_PATIENCE_S = 0.02


class Balance:
    """The numbers of `edges` edges; this one's is at `own`."""

    def __init__(self, memory: mmap.mmap, edges: int, own: int) -> None:
        self._counts = memoryview(memory)[:BOARD_BYTES].cast("q")[:edges]
        self._own = own
        self.publish(0)

    def publish(self, connections: int) -> None:
        self._counts[self._own] = connections

    def patience_s(self) -> float:
        """How long to leave a new connection to the others: the longer, the more this edge has than one of them."""
        excess = self._counts[self._own] - min(self._counts)
        return min(_MOST_PATIENCE_S, excess * _PATIENCE_PER_CONNECTION_S)
