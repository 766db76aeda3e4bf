"""Builds the requests as bytes before the run: HTTP/1.1 requests and bodies of the Open Inference Protocol."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from convoy.loadtest.endpoint import Endpoint
from convoy.models.errors import JobError

DATA = Path(__file__).parent / "data"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg")
# All images are in memory, so that reading them is not part of a measurement.
MAX_IMAGES = 1_000

# Several different bodies, so that a cache does not hide the model, but few enough for the memory.
VARIANTS = 16
VARIANTS_BYTES = 64 * 1024 * 1024
MAX_TENSOR_BYTES = 256 * 1024 * 1024

# For sizes that the model leaves open. The batch is one sample. Any other size is large enough for the strides of a CNN
# and small enough not to be a bottleneck.
OPEN_BATCH = 1
OPEN_SIZE = 64

INTEGERS_BELOW = 100  # valid for nearly all embeddings and in the range of every integer type
DTYPES: dict[str, str] = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}

Tensor = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Input:
    """One input of the metadata; -1 is an open size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.datatype not in DTYPES:
            raise JobError(
                f"input {self.name!r} has datatype {self.datatype}, which the load test cannot generate; "
                "use --body image over HTTP if the model takes images"
            )
        if self.size_bytes > MAX_TENSOR_BYTES:
            raise JobError(f"input {self.name!r} of shape {list(self.shape)} is larger than {MAX_TENSOR_BYTES} bytes")

    @property
    def sent_shape(self) -> tuple[int, ...]:
        return tuple(
            size if size >= 0 else OPEN_BATCH if position == 0 else OPEN_SIZE
            for position, size in enumerate(self.shape)
        )

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sent_shape) * np.dtype(DTYPES[self.datatype]).itemsize


@dataclass(frozen=True, slots=True)
class Payload:
    """A body and its headers."""

    body: bytes
    headers: tuple[tuple[str, str], ...]


def image_payloads(folder: Path = DATA) -> list[Payload]:
    """The images in the folder and below, `MAX_IMAGES` at most, evenly chosen; empty without the folder."""
    files = sorted(file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES)
    files = files[:: max(1, math.ceil(len(files) / MAX_IMAGES))]
    return [Payload(file.read_bytes(), (("Content-Type", "application/octet-stream"),)) for file in files]


def binary_payloads(inputs: Sequence[Input], seed: int) -> list[Payload]:
    """Requests with the binary tensor data extension that ask for binary outputs."""
    return [binary_payload(inputs, tensors) for tensors in draw_tensors(inputs, seed)]


def json_payloads(inputs: Sequence[Input], seed: int) -> list[Payload]:
    """Requests in JSON. Raises JobError for FP16, which the JSON of the protocol cannot represent."""
    for one in inputs:
        if one.datatype == "FP16":
            raise JobError(f"input {one.name!r} is FP16, which JSON cannot represent; use --body binary")
    return [json_payload(inputs, tensors) for tensors in draw_tensors(inputs, seed)]


def request_bytes(endpoint: Endpoint, path: str, payload: Payload, api_key: str | None) -> bytes:
    """The bytes of the whole request."""
    lines = [f"POST {endpoint.prefix}{path} HTTP/1.1", f"Host: {endpoint.host_header}", "User-Agent: convoy-loadtest"]
    lines += [f"{name}: {value}" for name, value in (*payload.headers, *auth_headers(api_key))]
    lines.append(f"Content-Length: {len(payload.body)}")
    return "\r\n".join(lines).encode("ascii") + b"\r\n\r\n" + payload.body


def auth_headers(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {api_key}"),) if api_key else ()


def predictions_path(model: str) -> str:
    return f"/predictions/{quote(model, safe='')}"


def model_path(model: str) -> str:
    return f"/v2/models/{quote(model, safe='')}"


def infer_path(model: str) -> str:
    return f"{model_path(model)}/infer"


def draw_tensors(inputs: Sequence[Input], seed: int) -> list[list[Tensor]]:
    """Several sets of random values for the inputs. The same seed gives the same values."""
    generator = np.random.default_rng(seed)
    size_bytes = max(1, sum(one.size_bytes for one in inputs))
    count = max(1, min(VARIANTS, VARIANTS_BYTES // size_bytes))
    return [[_draw(one, generator) for one in inputs] for _ in range(count)]


def _draw(one: Input, generator: np.random.Generator) -> Tensor:
    dtype = np.dtype(DTYPES[one.datatype])
    if dtype.kind == "f":
        return generator.standard_normal(one.sent_shape, dtype=np.float32).astype(dtype)
    below = {"?": 2, "B": 256}.get(dtype.char, INTEGERS_BELOW)
    return generator.integers(0, below, one.sent_shape).astype(dtype)


def binary_payload(inputs: Sequence[Input], tensors: Sequence[Tensor]) -> Payload:
    described = [
        {**_described(one), "parameters": {"binary_data_size": tensor.nbytes}}
        for one, tensor in zip(inputs, tensors, strict=True)
    ]
    head = compact_json({"inputs": described, "parameters": {"binary_data_output": True}})
    body = head + b"".join(tensor.tobytes() for tensor in tensors)
    length = ("Inference-Header-Content-Length", str(len(head)))
    return Payload(body, (("Content-Type", "application/octet-stream"), length))


def json_payload(inputs: Sequence[Input], tensors: Sequence[Tensor]) -> Payload:
    described = [
        {**_described(one), "data": tensor.ravel().tolist()} for one, tensor in zip(inputs, tensors, strict=True)
    ]
    return Payload(compact_json({"inputs": described}), (("Content-Type", "application/json"),))


def _described(one: Input) -> dict[str, object]:
    return {"name": one.name, "shape": list(one.sent_shape), "datatype": one.datatype}


def compact_json(value: object) -> bytes:
    """JSON without spaces, as clients send it."""
    return json.dumps(value, separators=(",", ":")).encode()
