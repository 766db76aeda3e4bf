"""The slab against a model of itself, and what it gives back to the system."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from convoy.app.scheduling.request import SlotRef, TensorRef
from convoy.app.scheduling.slab import (
    ALIGNMENT_BYTES,
    DISCARD_BYTES,
    KEEP_RESIDENT_BYTES,
    Slab,
    Slot,
    SlotError,
    SlotState,
)

CAPACITY = 64 * ALIGNMENT_BYTES
# The life of a slot as the module draws it, written out a second time on purpose.
ALLOWED = {
    SlotState.FILLING: {SlotState.QUEUED, SlotState.FREE, SlotState.DECODING},
    SlotState.DECODING: {SlotState.FILLING},
    SlotState.QUEUED: {SlotState.COPYING, SlotState.FREE},
    SlotState.COPYING: {SlotState.QUEUED, SlotState.ANSWERED, SlotState.FREE},
    SlotState.ANSWERED: {SlotState.FREE},
}


class SlabMachine(RuleBasedStateMachine):
    """Random reservations, moves and misuse. Every live slot is filled with a byte of its own."""

    live_slots = Bundle("live_slots")
    dead_refs = Bundle("dead_refs")

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(CAPACITY)
        self.live: dict[SlotRef, Slot] = {}
        self.marks: dict[SlotRef, int] = {}
        self.seen: set[SlotRef] = set()
        self.outside_bytes = 0
        self.freed = 0
        self.slab.on_freed = self.note_freed

    def note_freed(self) -> None:
        self.freed += 1

    def room(self) -> int:
        return CAPACITY - self.outside_bytes - sum(slot.extent_bytes for slot in self.live.values())

    def lines(self, nbytes: int) -> int:
        """How many bytes the cache lines have that a slot takes."""
        return max(1, -(-nbytes // ALIGNMENT_BYTES)) * ALIGNMENT_BYTES

    @rule(nbytes=st.integers(-CAPACITY, CAPACITY))
    def count_outside(self, nbytes: int) -> None:
        nbytes, before = max(nbytes, -self.outside_bytes), self.freed
        fits = nbytes <= max(0, self.room())
        assert self.slab.count_outside(nbytes) == fits
        assert self.freed - before == (nbytes < 0)
        if fits:
            self.outside_bytes += nbytes

    @rule(target=live_slots, nbytes=st.integers(0, CAPACITY + 1), mark=st.integers(1, 255))
    def reserve(self, nbytes: int, mark: int):
        slot = self.slab.reserve(nbytes)
        if slot is None:
            assert self.lines(nbytes) > min(self.room(), self.largest_gap())
            return multiple()
        assert slot.extent_bytes <= self.room(), "more is taken than there is"
        assert slot.state is SlotState.FILLING
        assert len(slot.view) == nbytes
        assert slot.ref not in self.seen, "a reference was given out twice"
        slot.view[:] = bytes([mark]) * nbytes
        self.seen.add(slot.ref)
        self.live[slot.ref], self.marks[slot.ref] = slot, mark
        return slot

    @rule(slot=live_slots, state=st.sampled_from(SlotState))
    def move(self, slot: Slot, state: SlotState) -> None:
        if slot.ref not in self.live:
            with pytest.raises(SlotError):
                self.slab.move((slot.ref,), state)
        elif state in ALLOWED[slot.state]:
            self.slab.move((slot.ref,), state)
            assert self.slab.state(slot.ref) is state
            if state is SlotState.FREE:
                del self.live[slot.ref]
        else:
            before = slot.state
            with pytest.raises(SlotError):
                self.slab.move((slot.ref,), state)
            assert self.slab.state(slot.ref) is before

    @rule(target=dead_refs, slot=consumes(live_slots))
    def end(self, slot: Slot) -> SlotRef:
        if slot.ref in self.live:
            self.give_back(slot.ref)
            del self.live[slot.ref]
        return slot.ref

    def give_back(self, ref: SlotRef) -> None:
        """As its owner does, who waits for the decoder."""
        if self.slab.state(ref) is SlotState.DECODING:
            with pytest.raises(SlotError):
                self.slab.free(ref)
            self.slab.move((ref,), SlotState.FILLING)
        before = self.freed
        self.slab.free(ref)
        assert self.freed == before + 1

    @rule(ref=dead_refs)
    def use_after_the_end(self, ref: SlotRef) -> None:
        assert self.slab.state(ref) is SlotState.FREE
        for misuse in (
            lambda: self.slab.free(ref),
            lambda: self.slab.move((ref,), SlotState.FILLING),
            lambda: self.slab.tensor(TensorRef(ref, 0, 0)),
        ):
            with pytest.raises(SlotError):
                misuse()

    @rule(slot=live_slots, offset=st.integers(-2, 200), nbytes=st.integers(-2, 200))
    def take_a_tensor(self, slot: Slot, offset: int, nbytes: int) -> None:
        tensor = TensorRef(slot.ref, offset, nbytes)
        inside = offset >= 0 and nbytes >= 0 and offset + nbytes <= len(slot.view)
        if slot.ref in self.live and inside:
            assert self.slab.tensor(tensor) == bytes([self.marks[slot.ref]]) * nbytes
        else:
            with pytest.raises(SlotError):
                self.slab.tensor(tensor)

    @invariant()
    def slots_lie_inside_and_apart(self) -> None:
        end = 0
        for slot in sorted(self.live.values(), key=lambda slot: slot.offset):
            assert slot.offset >= end
            assert slot.offset % ALIGNMENT_BYTES == 0
            assert slot.extent_bytes >= len(slot.view)
            end = slot.offset + slot.extent_bytes
        assert end <= self.slab.capacity_bytes == CAPACITY

    @invariant()
    def nobody_wrote_into_a_neighbour(self) -> None:
        for ref, slot in self.live.items():
            assert slot.view == bytes([self.marks[ref]]) * len(slot.view)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        assert self.slab.used_bytes == CAPACITY - self.room()
        assert self.slab.slots_in_use == len(self.live)

    def teardown(self) -> None:
        for ref in self.live:
            self.give_back(ref)
        self.live.clear()
        self.slab.count_outside(-self.outside_bytes)
        self.outside_bytes = 0
        self.every_byte_is_accounted_for()
        whole = self.slab.reserve(CAPACITY)
        assert whole is not None, "the holes did not grow together again"

    def largest_gap(self) -> int:
        gaps, end = [], 0
        for slot in sorted(self.live.values(), key=lambda slot: slot.offset):
            gaps.append(slot.offset - end)
            end = slot.offset + slot.extent_bytes
        return max([*gaps, CAPACITY - end])


TestSlabMachine = SlabMachine.TestCase
TestSlabMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.integers(1, 100_000))
@settings(max_examples=50, deadline=None)
def test_capacity_is_what_was_asked_for_rounded_up_to_cache_lines(capacity: int) -> None:
    slab = Slab(capacity)
    assert capacity <= slab.capacity_bytes < capacity + ALIGNMENT_BYTES
    assert slab.reserve(slab.capacity_bytes + 1) is None
    assert slab.reserve(slab.capacity_bytes) is not None
    assert slab.reserve(0) is None


def test_a_reused_slot_does_not_answer_to_its_old_name() -> None:
    slab = Slab(ALIGNMENT_BYTES)
    first = slab.reserve(8)
    assert first is not None
    slab.free(first.ref)
    second = slab.reserve(8)
    assert second is not None
    assert first.offset == second.offset
    with pytest.raises(SlotError, match="this is a bug"):
        slab.tensor(TensorRef(first.ref, 0, 8))
    assert slab.state(second.ref) is SlotState.FILLING


def test_large_traffic_is_given_back_to_the_system_once_the_slab_is_empty() -> None:
    slab = Slab(4 * KEEP_RESIDENT_BYTES)
    before = _resident_bytes()
    slots = [slab.reserve(KEEP_RESIDENT_BYTES) for _ in range(4)]
    for slot in slots:
        assert slot is not None
        slot.view[:: mmap.PAGESIZE] = b"x" * len(slot.view[:: mmap.PAGESIZE])
    filled = _resident_bytes()
    assert filled - before > 3 * KEEP_RESIDENT_BYTES
    for slot in slots:
        assert slot is not None
        assert slot.view[0] == ord("x"), "what is in use stays"
        slab.free(slot.ref)
    assert filled - _resident_bytes() > 3 * KEEP_RESIDENT_BYTES
    again = slab.reserve(KEEP_RESIDENT_BYTES)
    assert again is not None
    assert again.view[0] == 0


def _resident_bytes() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_a_slot_that_is_vacated_keeps_its_room_and_not_its_neighbours_bytes() -> None:
    slab = Slab(8 * DISCARD_BYTES)
    slots = [slab.reserve(nbytes) for nbytes in (100, 3 * DISCARD_BYTES, 100)]
    assert all(slots)
    first, large, last = (slot for slot in slots if slot is not None)
    for slot in (first, large, last):
        slot.view[:] = b"x" * len(slot.view)
    used = slab.used_bytes
    slab.discard_pages([first.ref, large.ref, last.ref])
    assert slab.used_bytes == used
    assert bytes(first.view) == bytes(last.view) == b"x" * 100
    assert bytes(large.view[mmap.PAGESIZE : 2 * mmap.PAGESIZE]) == bytes(mmap.PAGESIZE)
