"""What clients may ask about a picture over any protocol, by the task of the model, and the answer as a document.

In an inference request a picture is the only input, one element of BYTES, for a model that takes images. The model's
own inputs are numbers, so no tensor can be meant. The answer is one output of BYTES, named by the task, with the
document that `/predictions` returns. Slow parts run in a thread, in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import orjson

from convoy.app.calls.call import Call, Terms
from convoy.app.lifecycle.catalog import Served
from convoy.app.pictures.answering import (
    ANSWERING,
    BOXES,
    CLASS_MAP,
    CLASSES,
    SegmentedPicture,
    Wanted,
    run_lengths,
    why_no_predictions,
)
from convoy.app.pictures.predictor import (
    MOST_TOP_K,
    EncodedPicture,
    Predicted,
    check_iou,
    check_masks,
    check_threshold,
    check_top_k,
    wanted_classes,
)
from convoy.app.protocol.inference import terms_of, wrong_request
from convoy.app.protocol.tensors import RawRequest, SharedBytes, Target, TensorIn, TensorOut, brief
from convoy.app.scheduling.request import TensorRef
from convoy.models.answers import Detection, MaskForm
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec
from convoy.models.tensors import pack

Document = dict[str, Any]
OPTIONS = ("top_k", "threshold", "iou", "masks")


def check_takes_pictures(served: Served) -> None:
    """Raise InvalidRequest with the alternative if the model does not take pictures."""
    why = why_no_predictions(served.spec)
    if why is not None:
        name, version = served.key.model, served.key.version
        raise InvalidRequest(f"'{name}' {why}; send tensors to /v2/models/{name}/versions/{version}/infer")


def wanted_of(served: Served, asked: Mapping[str, object]) -> Wanted:
    """Parse the options for a picture: numbers, text or None, of those named in `OPTIONS`. Raises InvalidRequest."""
    top_k, threshold, iou, masks = (asked.get(name) for name in OPTIONS)
    overlap = None if iou is None else check_iou(_decimal(iou), iou, served)
    form: MaskForm = "rle" if masks is None else check_masks(masks, served)
    answering = ANSWERING[served.spec.task]
    if answering is CLASS_MAP:
        for word, given in (("top_k", top_k), ("threshold", threshold)):
            if given is not None:
                name = served.key.model
                raise InvalidRequest(f"{word} is for classes and boxes, but '{name}' returns a class map; remove it")
        return Wanted(CLASS_MAP, finish=_map_document)
    least = _threshold(threshold, served)
    most = _top_k(top_k)
    if answering is CLASSES:
        return wanted_classes(most, least)
    return Wanted(BOXES, most, least, overlap, form, _box_documents)


def answer_document(wanted: Wanted, predicted: Predicted) -> Document:
    """The answer for one picture, with its timing."""
    return {wanted.answering.key: predicted.found, "timing_ms": predicted.timing.document()}


def envelope(served: Served) -> Document:
    """The fields that name the model and version."""
    return {"model": served.key.model, "version": str(served.key.version)}


def _threshold(given: object, served: Served) -> float | None:
    return None if given is None else check_threshold(_decimal(given), given, served)


def _decimal(given: object) -> float:
    """A number, or text that is one; NaN for everything else."""
    if isinstance(given, str | int | float) and not isinstance(given, bool):
        with suppress(ValueError, OverflowError):
            return float(given)
    return math.nan


def _top_k(given: object) -> int | None:
    if isinstance(given, str):
        is_number = given.isascii() and given.isdigit()
        digits = given.lstrip("0") if is_number else ""
        return check_top_k(int(digits or 0) if len(digits) <= len(str(MOST_TOP_K)) else MOST_TOP_K, given)
    return None if given is None else check_top_k(given, given)


def _box_documents(found: list[Detection]) -> orjson.Fragment:
    """Encoded in the thread that reads the boxes; there may be thousands."""
    return orjson.Fragment(orjson.dumps([one.document() for one in found]))


def _map_document(found: SegmentedPicture) -> orjson.Fragment:
    """Encoded by itself, so that the event loop only has to insert it into the answer."""
    height, width = found.class_map.shape
    counts = run_lengths(found.class_map, [one.class_id for one in found.classes])
    classes = [
        {**asdict(one), "rle": {"size": [height, width], "counts": runs}}
        for one, runs in zip(found.classes, counts, strict=True)
    ]
    document = {"height": height, "width": width, "unseen_share": found.unseen_share, "classes": classes}
    return orjson.Fragment(orjson.dumps(document))


_ONE = (1,)


class PictureRequest(NamedTuple):
    """A picture, whose file is in the slab, and what is asked about it. `id` is the request's own id."""

    id: str | None
    picture: EncodedPicture
    wanted: Wanted
    terms: Terms


def brings_picture(datatypes: list[str], served: Served) -> bool:
    """Whether inputs of these types are pictures for the decoder."""
    return served.spec.image is not None and "BYTES" in datatypes


def picture_request(asked: RawRequest, served: Served, call: Call) -> PictureRequest:
    """Copy the file into the slab and parse what is asked. Raises InvalidRequest, NotFound or Overloaded."""
    check_takes_pictures(served)
    if len(asked.inputs) != 1:
        raise wrong_request(asked.id, f"an image is the only input of its request, got {len(asked.inputs)} inputs")
    wanted = wanted_of(served, asked.parameters)
    key = wanted.answering.key
    if any(one.name != key or one.parameters for one in asked.outputs) or len(asked.outputs) > 1:
        raise wrong_request(asked.id, f"an image is answered by the output '{key}' only; remove 'outputs'")
    picture = _picture(asked.id, asked.inputs[0], served, call)
    return PictureRequest(asked.id, picture, wanted, terms_of(asked.parameters))


def picture_output(served: Served, wanted: Wanted, predicted: Predicted) -> TensorOut:
    """The answer as an output."""
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
