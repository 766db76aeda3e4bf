"""What a server answers, as records, arrays and errors; the same over HTTP and gRPC.

The records of images are in `models.answers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from time import time
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from convoy.app.python.values import datatype_of, named_arrays, string_bytes
from convoy.models.answers import (
    Box,
    Classification,
    ClassShare,
    Detection,
    Detections,
    Keypoint,
    Mask,
    Prediction,
    Segmentation,
    Timing,
)
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
    error_kinds,
)
from convoy.models.geometry import UNSEEN
from convoy.models.spec import NUMPY_DTYPES, TensorSpec
from convoy.models.tensors import from_bytes, pack

NOT_A_SERVER = "is it a Convoy server?"
_KINDS = (
    *(InvalidRequest, Unauthorized, Forbidden, NotFound, RequestTimeout, BodyTooLarge, ModelFailed, Unsupported),
    *(DeadlineExceeded, Overloaded, Unavailable),
)
# Of those that share a code, the most general.
_BY_CODE: dict[str, type[RequestError]] = {
    **{kind.grpc_code: kind for kind in _KINDS},
    InvalidRequest.grpc_code: InvalidRequest,
}
_BY_STATUS: dict[int, type[RequestError]] = {kind.http_status: kind for kind in _KINDS}
_BY_NAME = error_kinds()
# The result for an image, by the task of the model.
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
    """A tensor as sent: the protocol's dtype, the whole shape, and its bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes

    def array(self) -> np.ndarray:
        """An array that the caller owns; strings are bytes, BF16 is V2. Raises RequestError if it does not fit its
        shape.
        """
        try:
            spec = TensorSpec(self.name, self.datatype, tuple(self.shape))
            return from_bytes(memoryview(self.data), spec, spec.shape).copy()
        except Exception as error:  # an unknown dtype, too few bytes, invalid strings
            words = f"output '{self.name}' is not a valid tensor ({error}); {NOT_A_SERVER}"
            raise RequestError(words) from None


def tensors_of(inputs: Mapping[str, np.ndarray]) -> list[NamedTensor]:
    """In their order, little-endian. Raises InvalidRequest for unsupported values."""
    return [_tensor_of(name, array) for name, array in named_arrays(inputs)]


def sight_of(document: Any) -> Sight:
    """Parse the answer for an image. Raises RequestError if it is not one."""
    try:
        timing = Timing(*(float(document["timing_ms"][stage]) for stage in Timing._fields))
        model, version = str(document["model"]), int(document["version"])
        if "detections" in document:
            return Detections(model, version, tuple(map(detection_of, document["detections"])), timing)
        if "segmentation" in document:
            found = document["segmentation"]
            classes = tuple(ClassShare(*_class(row), float(row["share"])) for row in found["classes"])
            return Segmentation(model, version, _class_map(found), classes, float(found["unseen_share"]), timing)
        predictions = tuple(Prediction(*_class(row), float(row["score"])) for row in document["predictions"])
        return Classification(model, version, predictions, timing)
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the response is not a prediction; {NOT_A_SERVER}") from None


def _class(row: Any) -> tuple[int, str | None]:
    label = row["label"]
    return int(row["class_id"]), None if label is None else str(label)


def detection_of(row: Any) -> Detection:
    """One object of an answer. Raises ValueError, KeyError and TypeError if it is none."""
    box = Box(*(float(row["box"][side]) for side in Box._fields))
    points = tuple(Keypoint(float(one["x"]), float(one["y"]), _score(one)) for one in row.get("keypoints", ()))
    polygons = row.get("polygons")
    outlines = None if polygons is None else [list(map(int, one)) for one in polygons]
    return Detection(*_class(row), float(row["score"]), box, _mask(row.get("mask")), outlines, points)


def _mask(found: Any) -> Mask | None:
    if found is None:
        return None
    height, width = found["size"]
    return Mask(int(height), int(width), str(found["counts"]))


def _score(point: Any) -> float | None:
    score = point.get("score")
    return None if score is None else float(score)


def models_of(rows: Any) -> tuple[RemoteModel, ...]:
    """Parse a list of models. Raises RequestError if it is not one."""
    try:
        return tuple(
            RemoteModel(str(row["name"]), int(row["version"]), row.get("state", "READY"), row.get("reason", ""))
            for row in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError):
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
    """uint8 [height, width] from COCO's run lengths, which go down the columns. Raises ValueError."""
    height, width = int(found["height"]), int(found["width"])
    columns = np.full(height * width, UNSEEN, np.uint8)
    for row in found["classes"]:
        counts = np.asarray(row["rle"]["counts"], np.int64)
        is_of_class = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
        np.putmask(columns, is_of_class.reshape(columns.shape), int(row["class_id"]))
    return np.ascontiguousarray(columns.reshape(width, height).T)


def of_status(status: int, words: str, retry_after: str | None, code: str = "") -> RequestError:
    """The error for an HTTP status. `words` and `code` are the server's; other servers send no code."""
    return _error(_BY_STATUS.get(status, RequestError), words, seconds_of(retry_after) or 0.0, code)


def of_grpc_code(grpc_code: str, words: str, retry_after_s: float, code: str = "") -> RequestError:
    """The error for a gRPC status, by its name."""
    return _error(_BY_CODE.get(grpc_code, RequestError), words, retry_after_s, code)


def _error(by_status: type[RequestError], words: str, retry_after_s: float, code: str) -> RequestError:
    kind = _BY_NAME.get(code, by_status)
    if issubclass(kind, Overloaded):
        error: RequestError = kind(words, reason="", retry_after_s=retry_after_s)
    elif issubclass(kind, Unavailable):
        error = kind(words, retry_after_s=retry_after_s)
    else:
        error = kind(words)
    error.code = code or kind.code  # a later server may have others
    return error


def seconds_of(retry_after: str | None) -> float | None:
    """Parse `Retry-After` as in RFC 9110: seconds, or a date; None for anything else."""
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
