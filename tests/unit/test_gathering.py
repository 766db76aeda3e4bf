"""For how many a batch waits, by batches that the test tells of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from convoy.app.scheduling.gathering import Arrival, Gathering

READ_NS = 100_000
HELD_NS = 2_000_000


class Queue:
    """A loop that reads a request in 0.1 ms, and has nothing else to do."""

    def __init__(self, usual: int) -> None:
        self.gathering, self.usual = Gathering(), usual
        self.now_ns = self.busy_ns = 0
        for _ in range(20):
            self.began(usual)

    def began(self, requests: int, *, idle_ns: int = 0) -> None:
        """A batch of so many that were read without rest began after such a time."""
        came = []
        for _ in range(requests):
            self.now_ns += READ_NS
            self.busy_ns += READ_NS
            came.append(Arrival(self.now_ns, self.busy_ns))
        self.now_ns += idle_ns
        self.gathering.batch_began(came[::-1], self.now_ns, self.busy_ns)

    def batch(self, comes: int | None = None) -> bool:
        """A batch of the usual size; if it is held for more so many come, or nobody. Whether it was held."""
        is_held = self.gathering.hold(self.usual)
        if is_held and comes is not None:
            self.began(comes)
        else:
            self.began(self.usual, idle_ns=HELD_NS if is_held else 0)
        return is_held

    def pauses(self, batches: int) -> list[int]:
        """How many batches were not held between two that were, all of them in vain."""
        held = [number for number in range(batches) if self.batch()]
        return [after - before - 1 for before, after in pairwise(held)]


def test_what_is_tried_in_vain_is_tried_more_and_more_seldom() -> None:
    assert Queue(4).pauses(1200) == [1, 3, 7, 15, 31, 63, 127, 255, 255, 255]


def test_when_more_have_come_than_were_expected_the_next_pause_is_half_as_long() -> None:
    queue = Queue(4)
    assert queue.pauses(12) == [1, 3]
    while not queue.batch(comes=6):
        pass
    for _ in range(20):
        queue.began(4)  # as many as usual again
    assert queue.pauses(30) == [7, 15]


@pytest.mark.parametrize("requests", [5, 9])
def test_who_comes_by_chance_while_nobody_is_waited_for_shortens_no_pause(requests: int) -> None:
    queue = Queue(4)
    assert queue.pauses(12) == [1, 3]
    assert not queue.batch()
    for _ in range(20):
        queue.began(requests)
    for _ in range(20):
        queue.began(4)
    assert queue.pauses(30) == [15]


def test_a_batch_that_grows_while_the_loop_is_busy_is_held_again() -> None:
    queue = Queue(4)
    for more in (6, 8, 10, 12, 12, 12):
        assert queue.batch(comes=more)


def test_a_batch_that_waited_for_no_more_than_usual_is_no_trial() -> None:
    queue = Queue(4)
    assert queue.gathering.hold(4)
    assert queue.gathering.hold(2)  # those have left
    queue.began(2, idle_ns=HELD_NS)
    assert queue.batch(comes=6)
    queue.began(2, idle_ns=HELD_NS)  # nobody was asked whether to hold it
    for _ in range(20):
        queue.began(4)
    assert queue.pauses(10) == [1, 3]


def test_who_is_alone_waits_for_nobody() -> None:
    queue = Queue(1)
    assert not queue.gathering.hold(1)
    queue.began(2)
    assert not queue.gathering.hold(1)
