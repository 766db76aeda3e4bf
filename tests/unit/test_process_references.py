"""The core believes no reference: what an edge may say of a request, and that nothing else passes."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from convoy.app.processes.messages import Extent, Submit
from convoy.app.processes.references import WrongReference, adopted, check_request, request_of, submission
from convoy.app.scheduling.request import ModelKey, Request, TensorPlace
from convoy.app.scheduling.slab import SharedPart, Slab, SlotState
from convoy.models.spec import ModelSpec, TensorSpec

PAGE = mmap.PAGESIZE
PART = Extent(PAGE, 2 * PAGE)
SPEC = ModelSpec(
    "m",
    (TensorSpec("a", "FP32", (4,)), TensorSpec("b", "UINT8", (-1,))),
    (TensorSpec("y", "FP32", (2,)), TensorSpec("z", "INT64", (-1,))),
    8,
    None,
    "none",
    (),
)
REQUEST = Request(
    id=1 << 40,
    key=ModelKey("m", 1, 1),
    samples=2,
    shapes=((4,), (3,)),
    slots=(),
    inputs=(TensorPlace(0, 0, 32), TensorPlace(0, 40, 6)),
    wanted=(0, 1),
    outputs=(TensorPlace(1, 0, 16), None),
    arrival_ns=5,
    latest_start_ns=7,
)
RIGHT = Submit(REQUEST, (Extent(PAGE, 64), Extent(PAGE + 64, 16)))


@dataclass(frozen=True)
class Served:
    """A version, as far as a request is compared with it."""

    spec: ModelSpec = SPEC
    key: ModelKey = REQUEST.key
    text_only: bool = False

    def enter(self) -> None: ...

    def leave(self) -> None: ...


def slabs() -> tuple[Slab, Slab]:
    """An edge's and the core's, over the same memory."""
    memory = mmap.mmap(-1, 4 * PAGE)
    return Slab(PART.nbytes, SharedPart(memory, *PART)), Slab(PAGE, SharedPart(memory, 3 * PAGE, PAGE))


def test_what_the_edge_writes_is_what_the_core_reads_and_the_other_way_round() -> None:
    edge, core = slabs()
    body, answer = edge.reserve(64), edge.reserve(16)
    assert body is not None
    assert answer is not None
    body.view[:32] = bytes(range(32))
    request = REQUEST._replace(slots=(body.ref, answer.ref))
    submit = submission(request, edge)
    assert submit == RIGHT._replace(request=request)
    check_request(submit, Served())
    freed: list[int] = []
    slots = adopted(submit, PART, core, lambda: freed.append(1))
    there = request_of(submit, slots)
    assert there == request._replace(slots=tuple(slot.ref for slot in slots))
    assert core.tensors(there.slots, there.inputs)[0] == bytes(range(32))
    place, _ = core.tensors(there.slots, there.outputs)
    assert place is not None
    place[:] = b"y" * 16
    assert answer.view == b"y" * 16
    assert core.used_bytes == 0, "what is adopted is counted where it is lent from"
    for slot in slots:
        core.move((slot.ref,), SlotState.QUEUED)
        core.free(slot.ref)
    assert freed == [1, 1]
    assert edge.used_bytes == 64 + 64


near = st.integers(-3, 100)
places = st.builds(TensorPlace, st.integers(-2, 3), near, near)


@given(st.lists(places, min_size=1, max_size=3), st.lists(st.none() | places, max_size=3), st.integers(-1, 9))
def test_whatever_passes_lies_inside(
    inputs: list[TensorPlace], outputs: list[TensorPlace | None], samples: int
) -> None:
    request = REQUEST._replace(inputs=tuple(inputs), outputs=tuple(outputs), samples=samples)
    submit = RIGHT._replace(request=request)
    try:
        check_request(submit, Served())
    except WrongReference:
        return
    for place in (*request.inputs, *request.outputs):
        if place is not None:
            assert 0 <= place.offset <= place.offset + place.nbytes <= submit.extents[place.slot].nbytes


@given(st.integers(-PAGE, 5 * PAGE), st.integers(-PAGE, 5 * PAGE))
def test_no_extent_outside_the_edges_part(offset: int, nbytes: int) -> None:
    assume(nbytes < 0 or offset < PART.offset or offset + nbytes > PART.offset + PART.nbytes)
    _, core = slabs()
    with pytest.raises(WrongReference):
        adopted(RIGHT._replace(extents=(Extent(offset, nbytes),)), PART, core, lambda: None)
    assert core.slots_in_use == 0


@pytest.mark.parametrize(
    "change",
    [
        {"samples": 0},
        {"samples": 9},
        {"samples": 3},
        {"shapes": ((4,),)},
        {"shapes": ((4,), (-3,))},
        {"shapes": ((5,), (3,))},
        {"inputs": (TensorPlace(0, 0, 32),)},
        {"inputs": (TensorPlace(0, 40, 32), TensorPlace(0, 40, 6))},
        {"inputs": (TensorPlace(2, 0, 32), TensorPlace(0, 40, 6))},
        {"inputs": (TensorPlace(0, -1, 32), TensorPlace(0, 40, 6))},
        {"wanted": (0,)},
        {"wanted": (0, 2)},
        {"wanted": (0, -1)},
        {"outputs": (TensorPlace(1, 0, 17), None)},
        {"outputs": (TensorPlace(1, 0, 16), TensorPlace(1, 0, 16))},
        {"outputs": (None, None)},
    ],
)
def test_what_does_not_fit_the_model_does_not_pass(change: dict[str, object]) -> None:
    check_request(RIGHT, Served())
    with pytest.raises(WrongReference):
        check_request(RIGHT._replace(request=REQUEST._replace(**change)), Served())
