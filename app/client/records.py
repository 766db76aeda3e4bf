"""What a server answers, as records, arrays and errors; the same on both wires.

The records of images are in `app.python.records`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import convert

from convoy.app.calls.timing import Timing
from convoy.app.pictures.answering import ClassShare, Detection, Prediction
from convoy.app.python.inputs import datatype_of, named_arrays, string_bytes
from convoy.app.python.records import Classification, Detections, Segmentation
from convoy.models.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    Forbidden,
    InvalidRequest,
    ModelFailed,
    NotFound,
    Overloaded,
    RequestError,
    RequestTimeout,
    Unauthorized,
    Unavailable,
    Unsupported,
)
from convoy.models.geometry import UNSEEN
from convoy.models.spec import NUMPY_DTYPES, TensorSpec
from convoy.models.tensors import from_bytes, pack

NOT_A_SERVER = "is it a Convoy server?"
_KINDS = (
    *(InvalidRequest, Unauthorized, Forbidden, NotFound, RequestTimeout, BodyTooLarge, ModelFailed, Unsupported),
    *(DeadlineExceeded, Overloaded, Unavailable),
)
# Of those that share a code, the one that says least of the cause.
_BY_CODE: dict[str, type[RequestError]] = {
    **{kind.grpc_code: kind for kind in _KINDS},
    InvalidRequest.grpc_code: InvalidRequest,
}
_BY_STATUS: dict[int, type[RequestError]] = {kind.http_status: kind for kind in _KINDS}
# What is in an image, by the task of the model that was asked.
Sight: TypeAlias = Classification | Segmentation | Detections


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A version of a model on a server: `state` is the protocol's (READY, LOADING, UNAVAILABLE), `reason` why."""

    name: str
    version: int
    state: str = "READY"
    reason: str = ""

    @property
    def is_ready(self) -> bool:
        return self.state == "READY"


class NamedTensor(NamedTuple):
    """A tensor as it travels: the protocol's dtype, the whole shape, and its bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes

    def array(self) -> np.ndarray:
        """The caller's own array; strings are bytes, BF16 is V2. Raises RequestError for what fits no shape."""
        try:
            spec = TensorSpec(self.name, self.datatype, tuple(self.shape))
            return from_bytes(memoryview(self.data), spec, spec.shape).copy()
        except Exception as error:  # a dtype that is none, too few bytes, strings that are none
            words = f"output '{self.name}' is not a valid tensor ({error}); {NOT_A_SERVER}"
            raise RequestError(words) from None


def tensors_of(inputs: Mapping[str, np.ndarray]) -> list[NamedTensor]:
    """In their order, little-endian. Raises InvalidRequest for what no tensor can hold."""
    return [_tensor_of(name, array) for name, array in named_arrays(inputs)]


def sight_of(document: Any) -> Sight:
    """What a server says of an image. Raises RequestError for a document that is no such answer."""
    try:
        timing = Timing(*(float(document["timing_ms"][stage]) for stage in Timing._fields))
        model, version = str(document["model"]), int(document["version"])
        if "detections" in document:
            boxes = convert(document["detections"], tuple[Detection, ...])
            return Detections(model, version, boxes, timing)
        if "segmentation" in document:
            found = document["segmentation"]
            classes = convert(found["classes"], tuple[ClassShare, ...])
            return Segmentation(model, version, _class_map(found), classes, float(found["unseen_share"]), timing)
        predictions = convert(document["predictions"], tuple[Prediction, ...])
        return Classification(model, version, predictions, timing)
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the response is not a prediction; {NOT_A_SERVER}") from None


def models_of(rows: Any) -> tuple[RemoteModel, ...]:
    """What a server lists. Raises RequestError for what is no such list."""
    try:
        return convert(rows, tuple[RemoteModel, ...], strict=False, from_attributes=True)
    except ValueError:
        raise RequestError(f"the response is not a list of models; {NOT_A_SERVER}") from None


def _tensor_of(name: str, array: np.ndarray) -> NamedTensor:
    datatype = datatype_of(array)
    if datatype not in NUMPY_DTYPES:
        raise InvalidRequest(
            f"input '{name}' has dtype {datatype}, which is not supported; send {', '.join(NUMPY_DTYPES)}"
        )
    if datatype == "BYTES":
        data = bytes(pack(_strings(name, array)))
    elif datatype == "BF16":
        data = array.tobytes()
    else:
        data = array.astype(NUMPY_DTYPES[datatype], copy=False).tobytes()
    return NamedTensor(name, datatype, list(array.shape), data)


def _strings(name: str, array: np.ndarray) -> Iterator[bytes]:
    for element in array.flat:
        found = string_bytes(element)
        if found is None:
            raise InvalidRequest(f"input '{name}' must hold str or bytes, got {type(element).__name__}")
        yield found


def _class_map(found: dict[str, Any]) -> np.ndarray:
    """uint8 [height, width] of COCO's run lengths, which go down the columns. Raises ValueError if they do not fit."""
    height, width = int(found["height"]), int(found["width"])
    columns = np.full(height * width, UNSEEN, np.uint8)
    for row in found["classes"]:
        counts = np.asarray(row["rle"]["counts"], np.int64)
        is_of_class = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        np.putmask(columns, is_of_class.reshape(columns.shape), int(row["class_id"]))
    return np.ascontiguousarray(columns.reshape(width, height).T)


def of_status(status: int, words: str, retry_after: str | None) -> RequestError:
    """The error behind an HTTP status. `words` are the server's, which say what to do."""
    return _error(_BY_STATUS.get(status, RequestError), words, seconds_of(retry_after) or 0.0)


def of_grpc_code(code: str, words: str, retry_after_s: float) -> RequestError:
    """The error behind a gRPC status, by its name."""
    return _error(_BY_CODE.get(code, RequestError), words, retry_after_s)


def _error(kind: type[RequestError], words: str, retry_after_s: float) -> RequestError:
    if kind is Overloaded:
        return Overloaded(words, reason="", retry_after_s=retry_after_s)
    if kind is Unavailable:
        return Unavailable(words, retry_after_s=retry_after_s)
    return kind(words)


def seconds_of(retry_after: str | None) -> float | None:
    """`Retry-After` as RFC 9110 has it: seconds, or a date; None for what is neither."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    except ValueError:
        return None
