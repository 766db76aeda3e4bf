"""The memory that requests live in, and which side may touch it when.

One block, bounded for ever: reserving a slot before a body is read is how bytes in flight are admitted.

    FREE -> FILLING   its call owns it and writes: a body, decoded inputs, or room for the outputs
         -> DECODING  a decoder's thread may read or write it at any moment; only the decoder takes it back, to FILLING
         -> QUEUED    its request waits; the scheduler owns it
         -> COPYING   an engine may read or write it at any moment; only the engine's side takes it back
         -> ANSWERED  the outputs are in it; its call owns it again and encodes from it
         -> FREE

A request that is refused or cancelled frees its slot from FILLING, QUEUED or COPYING, and from DECODING as soon as the
decoder has returned. A request whose batch failed goes from COPYING back to QUEUED.

A slot is named by a number that no later one ever gets, so a reference that outlived its slot is caught instead
of reading another client's bytes. Used from one thread; the views may be read and written from others while the
state allows.
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
    """The holes of `size` bytes: (begin, end) in address order; no two of them touch."""

    def __init__(self, size: int) -> None:
        self._holes = [(0, size)]

    def take(self, size: int) -> int | None:
        """The offset of the first hole that is large enough, which is taken; None where there is none."""
        for position, (begin, end) in enumerate(self._holes):
            if end - begin >= size:
                self._holes[position : position + 1] = [(begin + size, end)] if end - begin > size else []
                return begin
        return None

    def give_back(self, offset: int, size: int) -> None:
        """Make a part that was taken a hole again, one with those that it touches."""
        holes, end = self._holes, offset + size
        position = bisect_left(holes, (offset,))
        if position < len(holes) and holes[position][0] == end:
            end = holes.pop(position)[1]
        if position and holes[position - 1][1] == offset:
            position -= 1
            offset = holes.pop(position)[0]
        holes.insert(position, (offset, end))


# Keeps every slot on cache lines of its own, so that two cores filling neighbours do not fight.
ALIGNMENT_BYTES = 64
# Touched memory up to here stays with the process when the slab falls empty; more is given back.
KEEP_RESIDENT_BYTES = 16 << 20
# Fewer are not worth asking the system for.
DISCARD_BYTES = 1 << 20


class SlotState(IntEnum):
    """A number, which finds its place in a tuple; other enumerations hash in Python."""

    FREE = 0
    FILLING = 1
    QUEUED = 2
    COPYING = 3
    ANSWERED = 4
    DECODING = 5


# By state, where a slot may go from there.
_NEXT: tuple[tuple[SlotState, ...], ...] = (
    (SlotState.FILLING,),
    (SlotState.QUEUED, SlotState.FREE, SlotState.DECODING),
    (SlotState.COPYING, SlotState.FREE),
    (SlotState.QUEUED, SlotState.ANSWERED, SlotState.FREE),
    (SlotState.FREE,),
    (SlotState.FILLING,),
)


class SlotError(Exception):
    """A slot was used after its end or out of turn. This is a bug in the caller."""


@dataclass(slots=True, eq=False)
class Slot:
    """One reservation. `view` is exactly as long as was asked for, and `offset` where it lies in the memory."""

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
    """A bounded block of memory, handed out in slots."""

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
        self.on_freed: Callable[[], None] | None = None  # called when some memory is free again
        # A device is told where the pages are: none may be given back.
        self.keeps_pages = False

    @property
    def used_bytes(self) -> int:
        """What slots take, and what is counted beside them."""
        return self._taken_bytes + self._outside_bytes

    def count_outside(self, nbytes: int) -> bool:
        """Count memory elsewhere as if it were in here; False, and nothing is counted, when there is no room for it.

        A negative number takes some of it off.
        """
        if nbytes > 0 and self.used_bytes + nbytes > self.capacity_bytes:
            return False
        self._outside_bytes += nbytes
        if nbytes < 0 and self.on_freed is not None:
            self.on_freed()
        return True

    def reserve(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` in state FILLING, or None when there is no room for it now."""
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
        """Take slots to their next state; FREE gives their memory back.

        Raises SlotError at the first that cannot go.
        """
        for ref in refs:
            slot = self._slots[ref]
            if state not in _NEXT[slot.state]:
                raise SlotError(f"slot {ref} cannot go from {slot.state.name} to {state.name}; this is a bug")
            slot.state = state
            if state is SlotState.FREE:
                self._give_back(slot)

    def free(self, *refs: SlotRef) -> None:
        """Give slots back. Raises SlotError for one that is already free."""
        self.move(refs, SlotState.FREE)

    def discard_pages(self, refs: Iterable[SlotRef]) -> None:
        """Give the pages of large slots back, of which nothing is read any more; they stay taken until freed.

        So a copy elsewhere is counted, and the memory is not needed twice.
        """
        for ref in refs:
            slot = self._slots[ref]
            start = -(-slot.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (slot.offset + slot.extent_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if nbytes >= DISCARD_BYTES and not self.keeps_pages:
                self._memory.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def state(self, ref: SlotRef) -> SlotState:
        """The slot's state; FREE for a reference whose use has ended."""
        slot = self._slots.get(ref)
        return SlotState.FREE if slot is None else slot.state

    def tensor(self, ref: TensorRef) -> memoryview:
        """The bytes of a tensor. Raises SlotError when its slot is stale, or it leaves its slot."""
        view, end = self._slots[ref.slot].view, ref.offset + ref.nbytes
        if not 0 <= ref.offset <= end <= len(view):
            raise SlotError(f"tensor at {ref.offset}+{ref.nbytes} leaves its slot of {len(view)}; this is a bug")
        return view[ref.offset : end]

    def keep_pages(self) -> memoryview:
        """The whole memory, for a device to lock; every page stays where it is from now on, locked or not yet."""
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
    """The next multiple of `ALIGNMENT_BYTES`, where what follows `nbytes` may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
