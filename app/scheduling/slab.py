"""The slab: the memory for requests, and who may use each slot of it when.

It is one block of fixed size. A slot is reserved before a body is read, so the slab bounds the bytes in flight.

    FREE -> FILLING   owned by the call, which writes a body, decoded inputs, or reserves room for outputs
         -> DECODING  a decoder thread reads or writes it; only the decoder returns it to FILLING
         -> QUEUED    owned by the scheduler while the request waits
         -> COPYING   an engine reads or writes it; only the engine's side ends this state
         -> ANSWERED  holds the outputs; owned by the call, which encodes from it
         -> FREE

A request that is refused or cancelled frees its slots from FILLING, QUEUED or COPYING, and from DECODING as soon as the
decoder has returned. If its batch fails, slots go from COPYING back to QUEUED.

Slot numbers are never reused, so a stale reference raises an error instead of reading another client's bytes. The slab
is used from one thread. Other threads may read and write the views while the state allows it.
"""

from __future__ import annotations

import mmap
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import cast

from convoy.app.scheduling.request import SlotRef, TensorRef


class Extents:
    """The free ranges of `size` bytes, as (begin, end) in the order of addresses. Adjacent ranges are merged."""

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]

    def take(self, size: int) -> int | None:
        """Take the first free range that is large enough. Returns its offset, or None."""
        for position, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[position : position + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Free a range and merge it with its neighbours."""
        holes, end = self._holes, offset + size
        position = bisect_left(holes, (offset,))
        if position < len(holes) and holes[position][0] == end:
            end = holes.pop(position)[1]
        if position and holes[position - 1][1] == offset:
            position -= 1
            offset = holes.pop(position)[0]
        holes.insert(position, (offset, end))


# Each slot starts on its own cache line, which avoids false sharing between cores.
ALIGNMENT_BYTES = 64
# When the slab is empty, resident memory beyond this is returned to the system.
KEEP_RESIDENT_BYTES = 16 << 20
# Smaller slots are not worth a system call.
DISCARD_BYTES = 1 << 20


class SlotState(IntEnum):
    """An IntEnum, because indexing a tuple is faster than hashing an enum member."""

    FREE = 0
    FILLING = 1
    QUEUED = 2
    COPYING = 3
    ANSWERED = 4
    DECODING = 5


# The allowed next states, indexed by state.
_NEXT: tuple[tuple[SlotState, ...], ...] = (
    (SlotState.FILLING,),
    (SlotState.QUEUED, SlotState.FREE, SlotState.DECODING),
    (SlotState.COPYING, SlotState.FREE),
    (SlotState.QUEUED, SlotState.ANSWERED, SlotState.FREE),
    (SlotState.FREE,),
    (SlotState.FILLING,),
)


class SlotError(Exception):
    """A slot was used after it was freed or in the wrong state. This is a bug in the caller."""


@dataclass(slots=True, eq=False)
class Slot:
    """One reservation. `view` has exactly the requested length; `offset` is its position in the slab."""

    ref: SlotRef
    offset: int
    extent_bytes: int
    view: memoryview
    state: SlotState = SlotState.FILLING


class _Slots(dict[SlotRef, Slot]):
    """The slots in use. Raises SlotError for a stale reference."""

    def __missing__(self, ref: SlotRef) -> Slot:
        raise SlotError(f"slot {ref} is no longer in use; this is a bug")


class Slab:
    """A block of memory of fixed size, handed out in slots."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = aligned(capacity_bytes)
        self._memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._view = memoryview(self._memory)
        self._extents = Extents(self.capacity_bytes)
        self._slots = _Slots()
        self._refs = cast("Iterator[SlotRef]", count(1))
        self._high_water = 0
        self._taken_bytes = 0
        self._outside_bytes = 0
        self.on_freed: Callable[[], None] | None = None  # called when memory becomes free
        # Set when a device has the page addresses: then no page may be returned to the system.
        self.keeps_pages = False

    @property
    def used_bytes(self) -> int:
        """Bytes in slots, and bytes counted outside."""
        return self._taken_bytes + self._outside_bytes

    def count_outside(self, nbytes: int) -> bool:
        """Count memory elsewhere against the capacity. Returns False and counts nothing if there is no room.

        A negative number subtracts.
        """
        if nbytes > 0 and self.used_bytes + nbytes > self.capacity_bytes:
            return False
        self._outside_bytes += nbytes
        if nbytes < 0 and self.on_freed is not None:
            self.on_freed()
        return True

    def reserve(self, nbytes: int) -> Slot | None:
        """Reserve a slot of `nbytes` in state FILLING. Returns None if there is no room."""
        extent = aligned(max(1, nbytes))
        if self._taken_bytes + self._outside_bytes + extent > self.capacity_bytes:
            return None
        offset = self._extents.take(extent)
        if offset is None:
            return None
        ref = next(self._refs)
        slot = self._slots[ref] = Slot(ref, offset, extent, self._view[offset : offset + nbytes])
        self._taken_bytes += extent
        self._high_water = max(self._high_water, offset + nbytes)
        return slot

    def move(self, refs: Iterable[SlotRef], state: SlotState) -> None:
        """Move slots to their next state; FREE releases their memory.

        Raises SlotError at the first slot that cannot move there.
        """
        for ref in refs:
            slot = self._slots[ref]
            if state not in _NEXT[slot.state]:
                raise SlotError(f"slot {ref} cannot go from {slot.state.name} to {state.name}; this is a bug")
            slot.state = state
            if state is SlotState.FREE:
                self._give_back(slot)

    def free(self, *refs: SlotRef) -> None:
        """Free slots. Raises SlotError if one is already free."""
        self.move(refs, SlotState.FREE)

    def discard_pages(self, refs: Iterable[SlotRef]) -> None:
        """Return the pages of large slots to the system when their bytes are not needed any more.

        The slots stay reserved until freed, so they account for a copy that lives elsewhere.
        """
        for ref in refs:
            slot = self._slots[ref]
            start = -(-slot.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (slot.offset + slot.extent_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if nbytes >= DISCARD_BYTES and not self.keeps_pages:
                self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def state(self, ref: SlotRef) -> SlotState:
        """The slot's state; FREE for a stale reference."""
        slot = self._slots.get(ref)
        return SlotState.FREE if slot is None else slot.state

    def tensor(self, ref: TensorRef) -> memoryview:
        """The bytes of a tensor. Raises SlotError if the slot is stale or too small."""
        view, end = self._slots[ref.slot].view, ref.offset + ref.nbytes
        if not 0 <= ref.offset <= end <= len(view):
            raise SlotError(f"tensor at {ref.offset}+{ref.nbytes} leaves its slot of {len(view)}; this is a bug")
        return view[ref.offset : end]

    def keep_pages(self) -> memoryview:
        """The whole memory, for a device to page-lock. From now on no page is returned to the system."""
        self.keeps_pages = True
        return self._view

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    def _give_back(self, slot: Slot) -> None:
        del self._slots[slot.ref]
        self._taken_bytes -= slot.extent_bytes
        self._extents.give_back(slot.offset, slot.extent_bytes)
        if self.on_freed is not None:
            self.on_freed()
        if not self._taken_bytes and self._high_water > KEEP_RESIDENT_BYTES and not self.keeps_pages:
            self._memory.madvise(mmap.MADV_DONTNEED, 0, self.capacity_bytes)
            self._high_water = 0


def aligned(nbytes: int) -> int:
    """Round up to a multiple of `ALIGNMENT_BYTES`."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
