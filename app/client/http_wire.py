"""Questions and answers over HTTP: paths, bodies and documents. docs/protocol.md lists the routes. Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import httpx
import numpy as np
import orjson

from convoy.app.client.errors import NOT_A_SERVER, of_status
from convoy.app.client.records import RemoteModel, Sight
from convoy.app.client.response import sight_of
from convoy.app.client.retry import WireQuestion
from convoy.app.client.tensors import NamedTensor, array_from, tensors_of
from convoy.models.errors import RequestError

HEADER_LENGTH = "Inference-Header-Content-Length"
_BYTES = (("Content-Type", "application/octet-stream"),)


class HttpMessage(NamedTuple):
    """What is to be sent."""

    method: str
    path: str
    body: bytes = b""
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


def look(
    model: str, version: str | None, image: bytes, top_k: int | None, threshold: float | None
) -> WireQuestion[Sight]:
    """What is in an image, as the model's task has it."""
    path = "/".join(("/predictions", *(quote(part, safe="") for part in (model, version) if part is not None)))
    asked = [(name, f"{value}") for name, value in (("top_k", top_k), ("threshold", threshold)) if value is not None]
    return WireQuestion(lambda left_s: HttpMessage("POST", path, image, (*asked, _within(left_s)), _BYTES), _sight)


def infer(
    model: str,
    version: str | None,
    inputs: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None,
    priority: int,
) -> WireQuestion[dict[str, np.ndarray]]:
    """Raises InvalidRequest."""
    tensors = tensors_of(inputs)
    described = [
        {"name": name, "datatype": datatype, "shape": shape, "parameters": {"binary_data_size": len(data)}}
        for name, datatype, shape, data in tensors
    ]
    path = _model_path(model, version) + "/infer"
    parameters = {"binary_data_output": True, **({"priority": priority} if priority else {})}
    document: dict[str, Any] = {"inputs": described, "parameters": parameters}
    if outputs is not None:
        document["outputs"] = [{"name": name} for name in outputs]
    header = orjson.dumps(document)
    body = b"".join((header, *(tensor.data for tensor in tensors)))
    headers = (*_BYTES, (HEADER_LENGTH, f"{len(header)}"), ("Accept-Encoding", "identity"))
    return WireQuestion(lambda left_s: HttpMessage("POST", path, body, (_within(left_s),), headers), _tensors)


def models() -> WireQuestion[tuple[RemoteModel, ...]]:
    """What is served, and what was refused and why."""
    return WireQuestion(lambda _: HttpMessage("POST", "/v2/repository/index", b"{}"), _models)


def _within(left_s: float) -> tuple[str, str]:
    """The server gives up what nobody waits for any more."""
    return "timeout_ms", f"{max(1.0, left_s * 1000):.0f}"


def _model_path(model: str, version: str | None) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _sight(response: httpx.Response) -> Sight:
    return sight_of(_document(response))


def _tensors(response: httpx.Response) -> dict[str, np.ndarray]:
    _refuse_errors(response)
    content, length = response.content, response.headers.get(HEADER_LENGTH)
    try:
        at = len(content) if length is None else int(length)
        document = json.loads(content[:at])
        found = {}
        for output in document["outputs"]:
            name, datatype, shape = (
                str(output["name"]),
                str(output["datatype"]),
                [int(size) for size in output["shape"]],
            )
            nbytes = int(output["parameters"]["binary_data_size"])
            found[name] = array_from(NamedTensor(name, datatype, shape, content[at : at + nbytes]))
            at += nbytes
    except (ValueError, KeyError, TypeError):
        raise RequestError(f"the answer is not a protocol's; {NOT_A_SERVER}") from None
    return found


def _models(response: httpx.Response) -> tuple[RemoteModel, ...]:
    rows = _document(response)
    try:
        return tuple(
            RemoteModel(str(row["name"]), int(row["version"]), row.get("state", "READY"), row.get("reason", ""))
            for row in rows
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        raise RequestError(f"the answer is not a list of models; {NOT_A_SERVER}") from None


def _document(response: httpx.Response) -> Any:
    _refuse_errors(response)
    try:
        return response.json()
    except ValueError:
        raise RequestError(f"the answer is not JSON; {NOT_A_SERVER}") from None


def _refuse_errors(response: httpx.Response) -> None:
    """Raises the server's error in its own words, which say what to do; else its status."""
    if response.status_code == 200:
        return
    try:
        words = str(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        words = f"HTTP {response.status_code} without an explanation; {NOT_A_SERVER}"
    raise of_status(response.status_code, words, response.headers.get("Retry-After"))
