"""The allocator against a list of what is taken."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from convoy.app.scheduling.slab import Extents

SIZE = 64


class ExtentsMachine(RuleBasedStateMachine):
    """Every byte is taken by one, or is free."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(SIZE)
        self.taken: list[tuple[int, int]] = []

    def is_free(self, offset: int, size: int) -> bool:
        inside = offset >= 0 and offset + size <= SIZE
        return inside and all(offset + size <= other or other + length <= offset for other, length in self.taken)

    @rule(size=st.integers(1, SIZE + 1))
    def take(self, size: int) -> None:
        first = next((offset for offset in range(SIZE) if self.is_free(offset, size)), None)
        assert self.extents.take(size) == first
        if first is not None:
            self.taken.append((first, size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.taken))
        self.taken.remove(one)
        self.extents.give_back(*one)

    @invariant()
    def the_holes_are_what_is_not_taken(self) -> None:
        holes = set()
        for begin, end in self.extents._holes:
            holes.update(range(begin, end))
        used = {byte for offset, size in self.taken for byte in range(offset, offset + size)}
        assert holes == set(range(SIZE)) - used


TestExtents = ExtentsMachine.TestCase
TestExtents.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
