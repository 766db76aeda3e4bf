"""The memory that requests live in, and who may touch it when.

One block, bounded for ever: reserving a slot before a body is read is how bytes in flight are admitted.

    FREE -> FILLING   the edge owns it and writes: a body, decoded inputs, or room for the outputs
         -> QUEUED    its request waits; the scheduler owns it
         -> COPYING   an engine may read or write it at any moment; only the engine's side takes it back
         -> ANSWERED  the outputs are in it; the edge owns it again and encodes from it
         -> FREE

A slot is named by its number and a generation that grows with every use, so a reference that outlived its
slot is caught instead of reading another client's bytes. Used from one thread; the views may be read and
written from others while the state allows.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from enum import Enum
from itertools import count

from app.scheduling.request import SlotRef, TensorRef

# Keeps every slot on cache lines of its own, so that two cores filling neighbours do not fight.
ALIGNMENT_BYTES = 64
# Touched memory up to here stays with the process when the slab falls empty; more is given back.
KEEP_RESIDENT_BYTES = 16 << 20


class SlotState(Enum):
    FREE = "free"
    FILLING = "filling"
    QUEUED = "queued"
    COPYING = "copying"
    ANSWERED = "answered"


_NEXT: dict[SlotState, frozenset[SlotState]] = {
    SlotState.FREE: frozenset({SlotState.FILLING}),
    SlotState.FILLING: frozenset({SlotState.QUEUED, SlotState.FREE}),
    SlotState.QUEUED: frozenset({SlotState.COPYING, SlotState.ANSWERED, SlotState.FREE}),
    SlotState.COPYING: frozenset({SlotState.QUEUED, SlotState.ANSWERED, SlotState.FREE}),
    SlotState.ANSWERED: frozenset({SlotState.FREE}),
}


class SlotError(Exception):
    """A slot was used after its end or out of turn. This is a bug in the caller."""


class Slot:
    """One reservation. `view` is exactly as long as was asked for."""

    __slots__ = ("extent_bytes", "offset", "ref", "state", "view")

    def __init__(self, ref: SlotRef, offset: int, extent_bytes: int, view: memoryview) -> None:
        self.ref, self.offset, self.extent_bytes, self.view = ref, offset, extent_bytes, view
        self.state = SlotState.FILLING


class Slab:
    """A bounded block of memory, handed out in slots, first fit in address order.

    First fit keeps the traffic at low addresses, which stay warm in the caches and leave large holes high.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = _aligned(capacity_bytes)
        # Private, because shared pages would outlive MADV_DONTNEED and never go back to the system.
        self._memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self._hole_offsets = [0]
        self._hole_sizes = [self.capacity_bytes]
        self._slots: dict[int, Slot] = {}
        self._spare_numbers: list[int] = []
        self._generations = count(1)
        self._high_water = 0
        self.used_bytes = 0

    def reserve(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` in state FILLING, or None when there is no room for it now."""
        extent = _aligned(max(1, nbytes))
        for position, size in enumerate(self._hole_sizes):
            if size >= extent:
                return self._take(position, nbytes, extent)
        return None

    def move(self, ref: SlotRef, state: SlotState) -> None:
        """Take the slot to its next state; FREE gives its memory back. Raises SlotError."""
        slot = self._slot(ref)
        if state not in _NEXT[slot.state]:
            raise SlotError(f"slot {ref.number} cannot go from {slot.state.value} to {state.value}; this is a bug")
        slot.state = state
        if state is SlotState.FREE:
            self._give_back(slot)

    def free(self, ref: SlotRef) -> None:
        """Give the slot back. Raises SlotError for a slot that is already free."""
        self.move(ref, SlotState.FREE)

    def state(self, ref: SlotRef) -> SlotState:
        """The slot's state; FREE for a reference whose use has ended."""
        slot = self._slots.get(ref.number)
        return slot.state if slot is not None and slot.ref == ref else SlotState.FREE

    def tensor(self, ref: TensorRef) -> memoryview:
        """The bytes that a tensor reference names. Raises SlotError when it is stale or leaves its slot."""
        slot = self._slot(ref.slot)
        if min(ref.offset, ref.nbytes) < 0 or ref.offset + ref.nbytes > len(slot.view):
            raise SlotError(f"tensor at {ref.offset}+{ref.nbytes} leaves its slot of {len(slot.view)}; this is a bug")
        return slot.view[ref.offset : ref.offset + ref.nbytes]

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    def _slot(self, ref: SlotRef) -> Slot:
        slot = self._slots.get(ref.number)
        if slot is None or slot.ref != ref:
            raise SlotError(f"slot {ref.number} generation {ref.generation} is no longer in use; this is a bug")
        return slot

    def _take(self, position: int, nbytes: int, extent: int) -> Slot:
        offset = self._hole_offsets[position]
        if self._hole_sizes[position] == extent:
            del self._hole_offsets[position], self._hole_sizes[position]
        else:
            self._hole_offsets[position] += extent
            self._hole_sizes[position] -= extent
        number = self._spare_numbers.pop() if self._spare_numbers else len(self._slots)
        slot = Slot(SlotRef(number, next(self._generations)), offset, extent, self._view[offset : offset + nbytes])
        self._slots[number] = slot
        self.used_bytes += extent
        self._high_water = max(self._high_water, offset + nbytes)
        return slot

    def _give_back(self, slot: Slot) -> None:
        del self._slots[slot.ref.number]
        self._spare_numbers.append(slot.ref.number)
        self.used_bytes -= slot.extent_bytes
        self._merge_hole(slot.offset, slot.extent_bytes)
        if not self._slots and self._high_water > KEEP_RESIDENT_BYTES:
            self._memory.madvise(mmap.MADV_DONTNEED)
            self._high_water = 0

    def _merge_hole(self, offset: int, size: int) -> None:
        offsets, sizes = self._hole_offsets, self._hole_sizes
        position = bisect_left(offsets, offset)
        if position < len(offsets) and offset + size == offsets[position]:
            size += sizes[position]
            del offsets[position], sizes[position]
        if position and offsets[position - 1] + sizes[position - 1] == offset:
            sizes[position - 1] += size
        else:
            offsets.insert(position, offset)
            sizes.insert(position, size)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
