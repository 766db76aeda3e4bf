"""An image in an inference request: its only input is one element of BYTES, for a model that takes images.

It is answered by one output of BYTES, named by the task, that holds the document which `/predictions` answers. Such a
model's own input is numbers, so that no tensor can be meant. Knows no wire.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import orjson

from convoy.app.calls.call import Call, Terms
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import Wanted
from convoy.app.pictures.documents import answer_document, check_takes_pictures, envelope, wanted_of
from convoy.app.pictures.predictor import EncodedPicture, Predicted
from convoy.app.protocol.inference import terms_of, wrong_request
from convoy.app.protocol.tensors import RawRequest, SharedBytes, Target, TensorIn, TensorOut, brief
from convoy.app.scheduling.request import TensorRef
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec
from convoy.models.tensors import pack

_ONE = (1,)


class PictureRequest(NamedTuple):
    """The picture, whose file is in the slab, and what is asked of it. `id` is the request's own."""

    id: str | None
    picture: EncodedPicture
    wanted: Wanted
    terms: Terms


def brings_picture(datatypes: list[str], served: Served) -> bool:
    """Whether inputs of these types are for the decoder and not for the model."""
    return served.spec.image is not None and "BYTES" in datatypes


def picture_request(asked: RawRequest, served: Served, call: Call) -> PictureRequest:
    """What is asked, with the file copied into the slab. Raises InvalidRequest, NotFound or Overloaded."""
    check_takes_pictures(served)
    if len(asked.inputs) != 1:
        raise wrong_request(asked.id, f"an image is the only input of its request, got {len(asked.inputs)} inputs")
    wanted = wanted_of(served, asked.parameters.get("top_k"), asked.parameters.get("threshold"))
    key = wanted.answering.key
    if any(one.name != key or one.parameters for one in asked.outputs) or len(asked.outputs) > 1:
        raise wrong_request(asked.id, f"an image is answered by the output '{key}' alone; leave 'outputs' away")
    picture = _picture(asked.id, asked.inputs[0], served, call)
    return PictureRequest(asked.id, picture, wanted, terms_of(asked.parameters))


def picture_output(served: Served, wanted: Wanted, predicted: Predicted) -> TensorOut:
    """What was found, as the output."""
    document = orjson.dumps({**envelope(served), **answer_document(wanted, predicted)})
    spec = TensorSpec(wanted.answering.key, "BYTES", _ONE)
    return TensorOut(spec, _ONE, memoryview(pack((document,))), binary=True)


def _picture(request_id: str | None, tensor: TensorIn, served: Served, call: Call) -> EncodedPicture:
    sizes = [size for size in tensor.shape if isinstance(size, int)]
    if len(sizes) != len(tensor.shape) or math.prod(sizes) != 1:
        raise wrong_request(
            request_id,
            f"an image for '{served.key.model}' is one element of BYTES, shape [1], got {brief(list(tensor.shape))}; "
            "send each image in a request of its own",
        )
    spec = TensorSpec(tensor.name, "BYTES", _ONE)
    values = tensor.source.read(Target(spec, _ONE, f"'{served.key.model}'", InvalidRequest))
    assert not isinstance(values, TensorRef), "no wire that brings pictures reads into the slab; this is a bug"
    if isinstance(values, SharedBytes):
        call.hold_region(values.place.region)
    slot = call.reserve(values.nbytes)
    if isinstance(values, np.ndarray):
        np.frombuffer(slot.view, values.dtype)[:] = values
    else:
        values.write_into(slot.view)
    # An element of BYTES begins with its length.
    return EncodedPicture(slot.view[4:], (slot,))
