"""The campaign's requests as bytes of HTTP, and its answers read from them, for clients without a library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from convoy.models.tensors import unpack
from tests.campaign.asks import Ask, Tensor, WrongAnswer

_NUMPY = {"FP32": "<f4", "INT32": "<i4", "INT64": "<i8"}


def infer_path(ask: Ask) -> str:
    query = "" if ask.timeout_ms is None else f"?timeout_ms={ask.timeout_ms:g}"
    return f"/v2/models/{ask.model}/infer{query}"


def infer_body(ask: Ask) -> tuple[bytes, dict[str, str]]:
    """The body, and the headers that explain it."""
    parameters: dict[str, Any] = {"binary_data_output": True} if ask.binary else {}
    if ask.priority:
        parameters["priority"] = ask.priority
    document: dict[str, Any] = {"id": ask.id, "inputs": [_input(one, ask.binary) for one in ask.inputs]}
    if parameters:
        document["parameters"] = parameters
    text = json.dumps(document).encode()
    if not ask.binary:
        return text, {"Content-Type": "application/json"}
    return text + b"".join(one.data for one in ask.inputs), {"Inference-Header-Content-Length": str(len(text))}


def check_infer(ask: Ask, headers: Mapping[str, str], body: bytes) -> None:
    """Header names in lower case. Raises WrongAnswer."""
    text_bytes = int(headers.get("inference-header-content-length", len(body)))
    try:
        document, tail = json.loads(body[:text_bytes]), body[text_bytes:]
    except ValueError as error:
        raise WrongAnswer(f"the answer is no JSON ({error}): {body[:80]!r}") from error
    outputs: dict[str, np.ndarray] = {}
    for one in document["outputs"]:
        nbytes = one.get("parameters", {}).get("binary_data_size")
        if nbytes is None:
            outputs[one["name"]] = _from_json(one)
            continue
        if nbytes > len(tail):
            raise WrongAnswer(f"{one['name']} should have {nbytes} bytes, and {len(tail)} are there")
        outputs[one["name"]], tail = _from_bytes(one, tail[:nbytes]), tail[nbytes:]
    if tail:
        raise WrongAnswer(f"{len(tail)} bytes after the last output")
    ask.check(document["model_name"], document["model_version"], document.get("id", ""), outputs)


def _input(tensor: Tensor, binary: bool) -> dict[str, Any]:
    values = {"parameters": {"binary_data_size": len(tensor.data)}} if binary else {"data": tensor.json}
    return {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.dtype, **values}


def _from_json(output: dict[str, Any]) -> np.ndarray:
    dtype = object if output["datatype"] == "BYTES" else _NUMPY[output["datatype"]]
    return np.array(output["data"], dtype).reshape(output["shape"])


def _from_bytes(output: dict[str, Any], data: bytes) -> np.ndarray:
    if output["datatype"] == "BYTES":
        strings = np.empty(output["shape"], object)
        strings.reshape(-1)[:] = unpack(memoryview(data))
        return strings
    return np.frombuffer(data, _NUMPY[output["datatype"]]).reshape(output["shape"])
