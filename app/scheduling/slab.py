"""The memory that requests live in, and who may touch it when.

One block, bounded for ever: reserving a slot before a body is read is how bytes in flight are admitted.

    FREE -> FILLING   the edge owns it and writes: a body, decoded inputs, or room for the outputs
         -> DECODING  a decoder's thread may read or write it at any moment; only the decoder takes it back, to FILLING
         -> QUEUED    its request waits; the scheduler owns it
         -> COPYING   an engine may read or write it at any moment; only the engine's side takes it back
         -> ANSWERED  the outputs are in it; the edge owns it again and encodes from it
         -> FREE

A request that is refused or cancelled frees its slot from FILLING, QUEUED or COPYING, and from DECODING as soon as the
decoder has returned. One whose batch failed goes from
COPYING back to QUEUED, and one that ends while it waits goes from QUEUED to ANSWERED at once.

A slot is named by a number that no later one ever gets, so a reference that outlived its slot is caught instead
of reading another client's bytes. Used from one thread; the views may be read and written from others while the
state allows.

The memory may be one process's own, or shared by several of which each hands out its own part. Then the
process with the engines adopts a slot that another has filled: it is a slot like its own from there on, until
it is free, and whoever lent it is told.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import cast, overload

from convoy.app.scheduling.extents import Extents
from convoy.app.scheduling.request import SlotRef, TensorPlace

# Keeps every slot on cache lines of its own, so that two cores filling neighbours do not fight.
ALIGNMENT_BYTES = 64
# Touched memory up to here stays with the process when the slab falls empty; more is given back.
KEEP_RESIDENT_BYTES = 16 << 20

# Fewer are not worth asking the system for.
VACATE_BYTES = 1 << 20


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
    (SlotState.COPYING, SlotState.ANSWERED, SlotState.FREE),
    (SlotState.QUEUED, SlotState.ANSWERED, SlotState.FREE),
    (SlotState.FREE,),
    (SlotState.FILLING,),
)


class SlotError(Exception):
    """A slot was used after its end or out of turn. This is a bug in the caller."""


@dataclass(frozen=True, slots=True)
class SharedPart:
    """`nbytes` from `offset` of memory that other processes have mapped too; both whole pages."""

    memory: mmap.mmap
    offset: int
    nbytes: int


@dataclass(slots=True, eq=False)
class Slot:
    """One reservation. `view` is exactly as long as was asked for, and `offset` where it lies in the memory."""

    ref: SlotRef
    offset: int
    extent_bytes: int
    view: memoryview
    state: SlotState = SlotState.FILLING
    on_freed: Callable[[], None] | None = None  # only of a slot that was adopted


class _Slots(dict[SlotRef, Slot]):
    """The slots in use. Raises SlotError for a stale reference."""

    def __missing__(self, ref: SlotRef) -> Slot:
        raise SlotError(f"slot {ref} is no longer in use; this is a bug")


class Slab:
    """A bounded block of memory, handed out in slots: memory of its own, or its part of what is shared."""

    def __init__(self, capacity_bytes: int, shared: SharedPart | None = None) -> None:
        if shared is None:
            self.capacity_bytes = aligned(capacity_bytes)
            memory = mmap.mmap(-1, self.capacity_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._part = SharedPart(memory, 0, self.capacity_bytes)
            self._advice = mmap.MADV_DONTNEED
        else:
            self.capacity_bytes, self._part = shared.nbytes, shared
            # Shared pages would outlive MADV_DONTNEED and never go back to the system.
            self._advice = mmap.MADV_REMOVE
        self._view = memoryview(self._part.memory)
        self._extents = Extents(self._part.offset, self.capacity_bytes)
        self._slots = _Slots()
        self._refs = cast("Iterator[SlotRef]", count(1))
        self._high_water = 0
        self.used_bytes = 0
        # A device is told where the pages are, by this process or by another that shares them: none may be given back.
        self.keeps_pages = False

    def reserve(self, nbytes: int) -> Slot | None:
        """A slot of `nbytes` in state FILLING, or None when there is no room for it now."""
        extent = aligned(max(1, nbytes))
        offset = self._extents.take(extent)
        return None if offset is None else self._add(offset, nbytes, extent)

    def reserve_at(self, offset: int, nbytes: int) -> Slot:
        """Exactly this part of the memory as a slot. Raises SlotError where some of it is in use."""
        extent = aligned(max(1, nbytes))
        if not self._extents.take_at(offset, extent):
            raise SlotError(f"{nbytes} bytes at {offset} are not free; this is a bug")
        return self._add(offset, nbytes, extent)

    def extend(self, slot: Slot, nbytes: int) -> bool:
        """Make a slot that is being filled longer where it lies; False, and nothing has changed, where it cannot be."""
        more = aligned(nbytes) - slot.extent_bytes
        if more and not self._extents.take_at(slot.offset + slot.extent_bytes, more):
            return False
        slot.extent_bytes += more
        slot.view = self._view[slot.offset : slot.offset + nbytes]
        self._count(slot, more)
        return True

    def trim(self, slot: Slot, nbytes: int) -> None:
        """Make a slot that is being filled as short as this, and give back what was behind."""
        extent = aligned(max(1, nbytes))
        rest = slot.extent_bytes - extent
        if rest:
            self._extents.give_back(slot.offset + extent, rest)
            self.used_bytes -= rest
        slot.extent_bytes, slot.view = extent, slot.view[:nbytes]

    def adopt(self, offset: int, nbytes: int, on_freed: Callable[[], None]) -> Slot:
        """A slot that another process has reserved and filled in its own part; `on_freed` hears when it is free.

        Raises SlotError where it would leave the memory.
        """
        if min(offset, nbytes) < 0 or offset + nbytes > len(self._view):
            raise SlotError(f"{nbytes} bytes at {offset} leave the memory of {len(self._view)}; this is a bug")
        slot = self._add(offset, nbytes, 0)
        slot.on_freed = on_freed
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

    def vacate(self, refs: Iterable[SlotRef]) -> None:
        """Give the pages of own, large slots back, of which nothing is read any more; they stay taken until freed.

        So a copy elsewhere is counted, and the memory is not needed twice.
        """
        for ref in refs:
            slot = self._slots[ref]
            start = -(-slot.offset // mmap.PAGESIZE) * mmap.PAGESIZE
            nbytes = (slot.offset + slot.extent_bytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if nbytes >= VACATE_BYTES and not self.keeps_pages:
                self._part.memory.madvise(self._advice, start, nbytes)

    def state(self, ref: SlotRef) -> SlotState:
        """The slot's state; FREE for a reference whose use has ended."""
        slot = self._slots.get(ref)
        return SlotState.FREE if slot is None else slot.state

    @overload
    def tensors(self, refs: Sequence[SlotRef], places: Iterable[TensorPlace]) -> tuple[memoryview, ...]: ...

    @overload
    def tensors(
        self, refs: Sequence[SlotRef], places: Iterable[TensorPlace | None]
    ) -> tuple[memoryview | None, ...]: ...

    def tensors(self, refs: Sequence[SlotRef], places: Iterable[TensorPlace | None]) -> tuple[memoryview | None, ...]:
        """The bytes at each place in the slots of a request, None where it has none.

        Raises SlotError when a slot is stale, or a place leaves it.
        """
        return tuple([None if place is None else self._tensor(refs[place.slot], place) for place in places])

    def _tensor(self, ref: SlotRef, place: TensorPlace) -> memoryview:
        view, end = self._slots[ref].view, place.offset + place.nbytes
        if not 0 <= place.offset <= end <= len(view):
            raise SlotError(f"tensor at {place.offset}+{place.nbytes} leaves its slot of {len(view)}; this is a bug")
        return view[place.offset : end]

    def keep_pages(self) -> memoryview:
        """The whole memory, for a device to lock; every page stays where it is from now on, locked or not yet."""
        self.keeps_pages = True
        return self._view

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    def slot(self, ref: SlotRef) -> Slot:
        """The slot behind a reference. Raises SlotError when it is stale."""
        return self._slots[ref]

    def _add(self, offset: int, nbytes: int, extent: int) -> Slot:
        """`extent` of this slab's own memory have been taken for it: 0 for a slot in somebody else's."""
        ref = next(self._refs)
        slot = self._slots[ref] = Slot(ref, offset, extent, self._view[offset : offset + nbytes])
        if extent:
            self._count(slot, extent)
        return slot

    def _count(self, slot: Slot, more_bytes: int) -> None:
        self.used_bytes += more_bytes
        self._high_water = max(self._high_water, slot.offset + len(slot.view) - self._part.offset)

    def _give_back(self, slot: Slot) -> None:
        del self._slots[slot.ref]
        if slot.on_freed is not None:
            slot.on_freed()
            return
        self.used_bytes -= slot.extent_bytes
        self._extents.give_back(slot.offset, slot.extent_bytes)
        if not self.used_bytes and self._high_water > KEEP_RESIDENT_BYTES and not self.keeps_pages:
            self._part.memory.madvise(self._advice, self._part.offset, self.capacity_bytes)
            self._high_water = 0


def aligned(nbytes: int) -> int:
    """The next multiple of `ALIGNMENT_BYTES`, where what follows so many bytes may begin."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
