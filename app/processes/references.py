"""Requests and answers from one process's slots to the other's, by way of places in the shared memory.

The core believes no reference: an edge is our own code, but its bug must not become a read of another request's
memory, or of none. What does not fit is a `WrongReference`, and whoever sent it is hung up on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from convoy.app.processes.messages import AnswerAt, Ended, Extent, Submit
from convoy.app.scheduling.request import Done, Request, TensorPlace
from convoy.app.scheduling.slab import Slab, Slot
from convoy.app.submission.inference import ServedLike
from convoy.models.spec import ModelSpec, TensorSpec
from convoy.models.tensors import TensorBytes


class WrongReference(ValueError):
    """A request of an edge that names what it may not, or does not fit its model. This is a bug."""


# At the edge


def submission(request: Request, slab: Slab) -> Submit:
    """The request for the core, with the places of its slots in the shared memory."""
    held = [slab.slot(ref) for ref in request.slots]
    return Submit(  # whether it comes alone is its edge's business: the core reads what all edges have sent
        request.id,
        request.key,
        request.samples,
        request.shapes,
        tuple([Extent(slot.offset, len(slot.view)) for slot in held]),
        request.inputs,
        request.wanted,
        request.outputs,
        request.arrival_ns,
        request.priority,
        request.deadline_ns,
        request.latest_start_ns,
        request.trace,
    )


def answers_of(ended: Ended, request: Request, slab: Slab) -> tuple[TensorBytes, ...]:
    """The answers, as views of this process's slots or of bytes that came apart."""
    if not ended.answers:
        return ()
    views = slab.tensors(request.slots, request.outputs)
    return tuple(
        TensorBytes(one.shape, view[: one.nbytes] if view is not None else one.apart or memoryview(b""))
        for one, view in zip(ended.answers, views, strict=True)
    )


# In the core


def adopted(submit: Submit, part: Extent, slab: Slab, on_freed: Callable[[], None]) -> list[Slot]:
    """The slots of a request that an edge lends, out of its own `part`. Raises WrongReference."""
    for extent in submit.extents:
        if extent.nbytes < 0 or not part.offset <= extent.offset <= part.offset + part.nbytes - extent.nbytes:
            raise WrongReference(f"{extent} leaves the edge's part of the memory, {part}")
    return [slab.adopt(*extent, on_freed) for extent in submit.extents]


def request_of(submit: Submit, slots: Sequence[Slot]) -> Request:
    """The request as the scheduler has it, once `check_request` has found nothing."""
    return Request(
        submit.id,
        submit.key,
        submit.samples,
        submit.shapes,
        tuple([slot.ref for slot in slots]),
        submit.inputs,
        submit.wanted,
        submit.outputs,
        submit.arrival_ns,
        submit.priority,
        submit.deadline_ns,
        submit.latest_start_ns,
        submit.trace,
    )


def check_request(submit: Submit, served: ServedLike) -> None:
    """Raises WrongReference unless every tensor lies inside its extent and is as long as the model needs it."""
    spec, extents = served.spec, submit.extents
    if not 1 <= submit.samples <= max(1, spec.max_batch_size):
        raise WrongReference(f"{submit.samples} samples, but the model takes {spec.max_batch_size}")
    if not len(spec.inputs) == len(submit.inputs) == len(submit.shapes):
        raise WrongReference(f"{len(submit.inputs)} inputs, but the model takes {len(spec.inputs)}")
    if len(submit.wanted) != len(submit.outputs):
        raise WrongReference(f"{len(submit.wanted)} outputs are wanted, {len(submit.outputs)} have a place")
    for tensor, shape, place in zip(spec.inputs, submit.shapes, submit.inputs, strict=True):
        _check_place(place, extents)
        if not tensor.is_strings and place.nbytes != _nbytes(tensor, submit.samples, shape, spec):
            raise WrongReference(f"{place.nbytes} bytes for {submit.samples} x {shape} of input '{tensor.name}'")
    for index, output in zip(submit.wanted, submit.outputs, strict=True):
        _check_output(index, output, submit, spec)
    used = {place.slot for place in submit.inputs}
    used.update([place.slot for place in submit.outputs if place is not None])
    if len(used) != len(extents):  # each of them is one that is there
        raise WrongReference("memory is lent that no tensor is in, so that it would never be given back")


def _check_output(index: int, place: TensorPlace | None, submit: Submit, spec: ModelSpec) -> None:
    if not 0 <= index < len(spec.outputs):
        raise WrongReference(f"there is no output {index}")
    if place is None:
        return
    _check_place(place, submit.extents)
    tensor = spec.outputs[index]
    if tensor.sample_bytes is None or place.nbytes != submit.samples * tensor.sample_bytes:
        raise WrongReference(f"{place.nbytes} bytes for {submit.samples} samples of output '{tensor.name}'")


def _check_place(place: TensorPlace, extents: Sequence[Extent]) -> None:
    slot, offset, nbytes = place
    if not 0 <= slot < len(extents):
        raise WrongReference(f"{place} names an extent that is not there")
    if offset < 0 or nbytes < 0 or offset + nbytes > extents[slot].nbytes:
        raise WrongReference(f"{place} leaves its extent, {extents[slot]}")


def _nbytes(tensor: TensorSpec, samples: int, shape: Sequence[int], spec: ModelSpec) -> int:
    batch = samples if spec.max_batch_size else 1
    if min(shape, default=1) < 0:
        raise WrongReference(f"the shape {shape} of input '{tensor.name}' has a negative size")
    return batch * math.prod(shape) * tensor.numpy_dtype.itemsize


def ended_of(done: Done) -> Ended:
    """How a request ended, for the edge; answers without a place in the memory travel along."""
    answers = tuple(
        [
            AnswerAt(one.shape, one.data.nbytes, one.data if ref is None else None)
            for one, ref in zip(done.answers, done.request.outputs if done.answers else (), strict=True)
        ]
    )
    told = done.outcome, answers, done.times, done.queue_ns, done.batch_samples, done.reason, done.batch
    return Ended(done.request.id, *told)
