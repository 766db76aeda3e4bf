"""When a device will be free: what it computes now, and what it has been given to compute next.

Batches compute one after the other, whatever the lanes; the copies of one hide behind the computation of
the one before. Knows times and nothing else: neither requests nor lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """One batch on the device: it can compute from `ready_ns` on and is then expected to take `takes_ns`.

    `batch` tells it from the others, `lane` says where it runs; `soonest_ns` is what it takes at the least.
    """

    batch: int
    lane: int
    ready_ns: int
    takes_ns: int
    soonest_ns: int


@dataclass(slots=True, eq=False)
class Timeline:
    """The batches in flight, in the order in which they compute. `begun_ns`: when the last one left.

    `turns` counts all that ever began.
    """

    begun_ns: int = 0
    batches: list[InFlightBatch] = field(default_factory=list)
    turns: int = 0
    next_overdue_turn: int = 0  # whoever is overdue may be raised once so many have begun

    def begin(self, batch: InFlightBatch) -> None:
        """The device has one more batch before it."""
        self.batches.append(batch)
        self.turns += 1

    def free_at_ns(self, now_ns: int) -> int:
        """When everything in flight is expected to have ended; now, where nothing is."""
        if not self.batches:
            return now_ns
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.takes_ns
            if one is self.batches[0]:
                # A batch that is late by a minute will hardly end in this moment: rather in another minute.
                ends_ns = max(ends_ns, 2 * now_ns - ends_ns)
        return max(now_ns, ends_ns)

    def may_be_free_ns(self, now_ns: int) -> int:
        """The earliest time at which everything in flight could have ended."""
        ends_ns = self.begun_ns
        for one in self.batches:
            ends_ns = max(ends_ns, one.ready_ns) + one.soonest_ns
        return max(now_ns, ends_ns)

    def leave(self, batch: int, now_ns: int) -> None:
        """The batch is done; what is behind it computes from now on."""
        self.batches = [one for one in self.batches if one.batch != batch]
        self.begun_ns = now_ns

    def drop_lane(self, lane: int) -> None:
        """Expect nothing more of what runs in a lane that was given up."""
        self.batches = [one for one in self.batches if one.lane != lane]
