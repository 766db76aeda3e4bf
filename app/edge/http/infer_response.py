"""The Open Inference Protocol's infer response: answers in the slab to JSON, binary tensors, or both."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import orjson

from convoy.app.edge.oip.answers import answers_of
from convoy.app.edge.oip.inference import InferRequest
from convoy.app.lifecycle.catalog import Served
from convoy.app.scheduling.request import Done
from convoy.models.errors import InvalidRequest
from convoy.models.tensors import unpack


class InferResponse(NamedTuple):
    """A response body in pieces; `header_length` is that of the JSON when binary tensors follow it."""

    pieces: tuple[bytes | memoryview, ...]
    header_length: int | None

    @property
    def content_type(self) -> str:
        return "application/json" if self.header_length is None else "application/octet-stream"


def render_infer(request: InferRequest, served: Served, done: Done) -> InferResponse:
    """Encode the answers in the order in which they were asked for.

    The pieces are views of the slab: they must be sent before the call ends. Raises InvalidRequest for
    an answer that does not fit the form in which it was asked for.
    """
    outputs: list[dict[str, Any]] = []
    binary: list[memoryview] = []
    is_strict_json = True
    for answer in answers_of(request, served, done):
        spec = answer.spec
        document: dict[str, Any] = {"name": spec.name, "datatype": spec.dtype, "shape": list(answer.shape)}
        if answer.elsewhere:
            pass  # the client has it
        elif answer.binary:
            document["parameters"] = {"binary_data_size": answer.data.nbytes}
            binary.append(answer.data)
        elif spec.is_strings:
            document["data"] = _texts(spec.name, answer.data)
        else:
            values = np.frombuffer(answer.data, spec.numpy_dtype)
            is_strict_json &= values.dtype.kind != "f" or bool(np.isfinite(values).all())
            document["data"] = values
        outputs.append(document)
    envelope: dict[str, Any] = {"id": request.id} if request.id is not None else {}
    envelope |= {"model_name": served.key.model, "model_version": str(served.key.version), "outputs": outputs}
    header = _dump(envelope, is_strict_json)
    return InferResponse((header, *binary), len(header) if binary else None)


def _texts(name: str, data: memoryview) -> list[str]:
    try:
        return [element.decode() for element in unpack(data)]
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"output '{name}' holds bytes that are not UTF-8, which JSON cannot carry; ask for it as binary data"
        ) from error


def _dump(document: dict[str, Any], is_strict_json: bool) -> bytes:
    if is_strict_json:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    # NaN and Infinity are the protocol's own extension of JSON; orjson would write null.
    return json.dumps(document, default=lambda values: values.tolist(), separators=(",", ":")).encode()
