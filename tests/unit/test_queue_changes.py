"""Levels that change while requests wait: each stands where it would stand had it come by the new ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convoy.app.lifecycle.model_lifecycle import QueueOptions
from convoy.app.scheduling.queues import Queue, State
from convoy.app.scheduling.request import ModelKey, Request
from convoy.models.priorities import Priorities

KEY = ModelKey("a", 1)
LEVELS = st.integers(1, 5).flatmap(lambda levels: st.tuples(st.just(levels), st.integers(1, levels)))
ASKED = st.lists(st.tuples(st.integers(0, 6), st.none() | st.integers(1, 50), st.integers(1, 2)), max_size=12)


def request(number: int, priority: int, deadline_ns: int | None, shape: int) -> Request:
    return Request(number, KEY, 1, ((shape,),), (), (), (), (), number, priority, deadline_ns)


def filled(levels: tuple[int, int], asked: list[Request]) -> tuple[State, Queue]:
    state = State()
    queue = state.queues[KEY] = Queue(KEY, 4, 100, *levels)
    for one in asked:
        state.enqueue(one)
    return state, queue


@given(LEVELS, LEVELS, ASKED, st.randoms(use_true_random=False))
def test_the_order_is_that_of_the_new_levels(before, after, asked, random):
    requests = [request(number, *one) for number, one in enumerate(asked)]
    state, queue = filled(before, requests)
    queue.levels, queue.default_level = after
    queue.put_in_order()
    assert queue.groups == filled(after, requests)[1].groups
    for one in random.sample(requests, len(requests)):  # each is found again
        state.remove(one)
    assert (queue.waiting, queue.groups, state.waiting) == (0, {}, {})


@given(LEVELS, st.none() | st.integers(1, 5), st.none() | st.integers(1, 5))
def test_what_a_file_leaves_out_is_the_models_own(own, levels, default):
    held = QueueOptions(None, levels, default).priorities(Priorities(*own))
    assert held.levels == (own[0] if levels is None else levels)
    assert held.default == min(held.levels, own[1] if default is None else default)
