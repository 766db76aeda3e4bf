"""What a model gave, in the forms in which it was asked for: the same for every wire.

An output goes back as it is, as the strings of the classification extension, or into the client's shared
memory. Turning it into JSON or protobuf is the wire's business.
"""

from __future__ import annotations

import numpy as np

from convoy.app.batch import Answer
from convoy.app.edge.oip.classification import classify
from convoy.app.edge.oip.inference import INLINE_BYTES, InferRequest
from convoy.app.edge.oip.outputs import WantedOutput
from convoy.app.edge.oip.shared_tensors import check_room
from convoy.app.edge.oip.tensors import TensorOut
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done
from convoy.models.spec import TensorSpec


def answers_of(request: InferRequest, served: Served, done: Done) -> tuple[TensorOut, ...]:
    """The answers for either wire to encode; their views must be used up before the call ends.

    Raises InvalidRequest for an answer that does not fit the form in which it was asked for.
    """
    return tuple(
        TensorOut(served.spec.outputs[wanted.index], answer.shape, answer.data, wanted.binary)
        if not wanted.classes and wanted.place is None
        else _other_answer(served, wanted, answer)
        for wanted, answer in zip(request.outputs, done.answers, strict=True)
    )


def is_heavy_answer(request: InferRequest, done: Done) -> bool:
    """Whether encoding the answers takes longer than the event loop may be held up; binary ones never do."""
    if sum(len(answer.data) for answer in done.answers) <= INLINE_BYTES:
        return False
    return any(wanted.classes or not wanted.binary for wanted in request.outputs)


def _other_answer(served: Served, wanted: WantedOutput, answer: Answer) -> TensorOut:
    spec = served.spec.outputs[wanted.index]
    if wanted.place is not None:
        check_room(wanted.place, spec, answer.data.nbytes)
        wanted.place.region.write(answer.data, wanted.place.offset)
        return TensorOut(spec, answer.shape, memoryview(b""), wanted.binary, elsewhere=True)
    values = np.frombuffer(answer.data, spec.numpy_dtype).reshape(answer.shape)
    labels = served.spec.labels_of(wanted.index)
    batched = served.spec.max_batch_size > 0
    shape, packed = classify(values, wanted.classes, labels, batched=batched)
    return TensorOut(TensorSpec(spec.name, "BYTES", shape), shape, packed, wanted.binary)
