"""The ways in which servers want one sample and give its logits back.

Knows bytes and JSON. Knows no server: a peer's definition names the form that it speaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.loadtest.bodies import Payload, compact_json

Floats = npt.NDArray[np.float32]

_JSON = (("Content-Type", "application/json"),)
_BYTES = ("Content-Type", "application/octet-stream")


@dataclass(frozen=True, slots=True)
class Form:
    """`ask` makes the request of one sample (float32, without a batch) for an input of that name.

    `read` finds the logits in an answer's body, flat. It raises ValueError, KeyError, TypeError or IndexError
    where there are none.
    """

    name: str
    ask: Callable[[str, Floats], Payload]
    read: Callable[[bytes], Floats]


def _ask_raw(_: str, sample: Floats) -> Payload:
    return Payload(sample.tobytes(), (_BYTES,))


def _read_raw(body: bytes) -> Floats:
    return np.frombuffer(body, "<f4")


def _ask_v2_binary(name: str, sample: Floats) -> Payload:
    asked = {**_described(name, sample), "parameters": {"binary_data_size": sample.nbytes}}
    head = compact_json({"inputs": [asked], "parameters": {"binary_data_output": True}})
    return Payload(head + sample.tobytes(), (_BYTES, ("Inference-Header-Content-Length", str(len(head)))))


def _read_v2_binary(body: bytes) -> Floats:
    # The JSON head ends where the tensor begins; latin-1 maps bytes to characters one to one.
    answer, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    size = int(answer["outputs"][0]["parameters"]["binary_data_size"])
    return np.frombuffer(body[end : end + size], "<f4")


def _ask_v2_json(name: str, sample: Floats) -> Payload:
    return Payload(compact_json({"inputs": [{**_described(name, sample), "data": sample.ravel().tolist()}]}), _JSON)


def _read_v2_json(body: bytes) -> Floats:
    return _flat(json.loads(body)["outputs"][0]["data"])


def _ask_flat_json(_: str, sample: Floats) -> Payload:
    return Payload(compact_json({"input": sample.ravel().tolist()}), _JSON)


def _read_flat_json(body: bytes) -> Floats:
    return _flat(json.loads(body)["output"])


def _ask_nested_json(_: str, sample: Floats) -> Payload:
    return Payload(compact_json({"input": [sample.tolist()]}), _JSON)


def _read_nested_json(body: bytes) -> Floats:
    return _flat(json.loads(body))


def _described(name: str, sample: Floats) -> dict[str, object]:
    return {"name": name, "shape": [1, *sample.shape], "datatype": "FP32"}


def _flat(values: object) -> Floats:
    return np.array(values, np.float32).ravel()


FORMS = {
    form.name: form
    for form in (
        Form("raw", _ask_raw, _read_raw),
        Form("v2-binary", _ask_v2_binary, _read_v2_binary),
        Form("v2-json", _ask_v2_json, _read_v2_json),
        Form("flat-json", _ask_flat_json, _read_flat_json),
        Form("nested-json", _ask_nested_json, _read_nested_json),
    )
}
