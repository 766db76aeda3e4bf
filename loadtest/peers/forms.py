"""The ways in which servers want one sample and give its logits back.

Knows bytes and JSON. Knows no server: a peer's definition names the form that it speaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from convoy.loadtest.bodies import Input, Payload, binary_payload, compact_json, json_payload

Floats = npt.NDArray[np.float32]

_JSON = (("Content-Type", "application/json"),)


@dataclass(frozen=True, slots=True)
class Form:
    """`ask` makes the request of one sample (float32, without a batch) for an input of that name.

    `read` finds the logits in an answer's body, flat. It raises ValueError, KeyError, TypeError or IndexError
    where there are none.
    """

    name: str
    ask: Callable[[str, Floats], Payload]
    read: Callable[[bytes], Floats]


def _read_v2_binary(body: bytes) -> Floats:
    # The JSON head ends where the tensor begins; latin-1 maps bytes to characters one to one.
    answer, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    size = int(answer["outputs"][0]["parameters"]["binary_data_size"])
    return np.frombuffer(body[end : end + size], "<f4")


def _input(name: str, sample: Floats) -> list[Input]:
    return [Input(name, "FP32", (1, *sample.shape))]


def _flat(values: object) -> Floats:
    return np.array(values, np.float32).ravel()


FORMS = {
    form.name: form
    for form in (
        Form(
            "raw",
            lambda _, sample: Payload(sample.tobytes(), (("Content-Type", "application/octet-stream"),)),
            lambda body: np.frombuffer(body, "<f4"),
        ),
        Form("v2-binary", lambda name, sample: binary_payload(_input(name, sample), [sample]), _read_v2_binary),
        Form(
            "v2-json",
            lambda name, sample: json_payload(_input(name, sample), [sample]),
            lambda body: _flat(json.loads(body)["outputs"][0]["data"]),
        ),
        Form(
            "flat-json",
            lambda _, sample: Payload(compact_json({"input": sample.ravel().tolist()}), _JSON),
            lambda body: _flat(json.loads(body)["output"]),
        ),
        Form(
            "nested-json",
            lambda _, sample: Payload(compact_json({"input": [sample.tolist()]}), _JSON),
            lambda body: _flat(json.loads(body)),
        ),
    )
}
