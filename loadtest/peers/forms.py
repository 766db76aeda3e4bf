"""The ways in which servers want one sample and give its logits back.

Knows bytes, JSON and gRPC's messages. Knows no server: a peer's definition names the form that it speaks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from convoy.loadtest.bodies import Input, Payload, binary_payload, compact_json, json_payload

Floats = npt.NDArray[np.float32]
# An array without a batch, or a picture's bytes: a body is of one kind, and so is its form.
Sample = Any

# The model that gRPC's messages name, as paths do over HTTP.
MODEL = "cnn"
# What wrk.lua puts another number of as many digits in place of, in each request.
ID_MARK = "#" * 16
# Both networks that are asked with pictures have so many, and so many of them are answered with their scores.
_CLASSES, _TOP = 10, 5
_JSON = (("Content-Type", "application/json"),)
_BOUNDARY = "convoy-peers-3f1c9a"


def _as_they_are(logits: Floats) -> Floats:
    return logits


@dataclass(frozen=True, slots=True)
class Form:
    """`ask` makes the request of one sample for an input of that name.

    `read` finds the figures in an answer's body, flat. It raises ValueError, KeyError, TypeError or IndexError
    where there are none. `expect` makes of the engine's logits what `read` should find.
    """

    name: str
    ask: Callable[[str, Sample], Payload]
    read: Callable[[bytes], Floats]
    expect: Callable[[Floats], Floats] = _as_they_are
    wire: Literal["http", "grpc"] = "http"


def _read_v2_binary(body: bytes) -> Floats:
    # The JSON head ends where the tensor begins; latin-1 maps bytes to characters one to one.
    answer, end = json.JSONDecoder().raw_decode(body.decode("latin-1"))
    size = int(answer["outputs"][0]["parameters"]["binary_data_size"])
    return np.frombuffer(body[end : end + size], "<f4")


def _input(name: str, sample: Sample) -> list[Input]:
    return [Input(name, "UINT8" if sample.dtype == np.uint8 else "FP32", (1, *sample.shape))]


def _binary_with_id(name: str, sample: Sample) -> Payload:
    plain = binary_payload(_input(name, sample), [sample])
    start = b'{"id":"%s",' % ID_MARK.encode()
    kind, (length, size) = plain.headers
    return Payload(start + plain.body[1:], (kind, (length, str(int(size) + len(start) - 1))))


def _ask_grpc(name: str, sample: Sample) -> Payload:
    from convoy.loadtest.grpc_client import infer_message

    return Payload(infer_message(MODEL, _input(name, sample), [sample]), ())


def _read_grpc(body: bytes) -> Floats:
    from google.protobuf.message import DecodeError
    from tritonclient.grpc import service_pb2

    try:
        return np.frombuffer(service_pb2.ModelInferResponse.FromString(body).raw_output_contents[0], "<f4")
    except DecodeError as error:
        raise ValueError(error) from error


def _picture_type(picture: bytes) -> str:
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"


def _multipart(picture: bytes) -> Payload:
    """As browsers send a form whose one field is a file."""
    head = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="image"\r\n'
        f"Content-Type: {_picture_type(picture)}\r\n\r\n"
    )
    body = head.encode() + picture + f"\r\n--{_BOUNDARY}--\r\n".encode()
    return Payload(body, (("Content-Type", f"multipart/form-data; boundary={_BOUNDARY}"),))


def _read_predictions(body: bytes) -> Floats:
    scores = np.zeros(_CLASSES, np.float32)
    for found in json.loads(body)["predictions"]:
        scores[found["class_id"]] = found["score"]
    return scores


def _best_scores(logits: Floats) -> Floats:
    """Softmax, and nothing but the best classes of it."""
    shares: Floats = np.exp(logits - logits.max())
    shares /= shares.sum()
    shares[np.argsort(shares)[:-_TOP]] = 0
    return shares


def _flat(values: object) -> Floats:
    return np.array(values, np.float32).ravel()


def _read_flat_json(body: bytes) -> Floats:
    return _flat(json.loads(body)["output"])


def _read_nested_json(body: bytes) -> Floats:
    return _flat(json.loads(body))


FORMS = {
    form.name: form
    for form in (
        Form(
            "raw",
            lambda _, sample: Payload(sample.tobytes(), (("Content-Type", "application/octet-stream"),)),
            lambda body: np.frombuffer(body, "<f4"),
        ),
        Form("v2-binary", lambda name, sample: binary_payload(_input(name, sample), [sample]), _read_v2_binary),
        Form("v2-binary-id", _binary_with_id, _read_v2_binary),
        Form(
            "v2-json",
            lambda name, sample: json_payload(_input(name, sample), [sample]),
            lambda body: _flat(json.loads(body)["outputs"][0]["data"]),
        ),
        Form(
            "flat-json",
            lambda _, sample: Payload(compact_json({"input": sample.ravel().tolist()}), _JSON),
            _read_flat_json,
        ),
        Form(
            "nested-json",
            lambda _, sample: Payload(compact_json({"input": [sample.tolist()]}), _JSON),
            _read_nested_json,
        ),
        Form("grpc", _ask_grpc, _read_grpc, wire="grpc"),
        Form(
            "image",
            lambda _, picture: Payload(picture, (("Content-Type", _picture_type(picture)),)),
            _read_flat_json,
        ),
        Form("image-form", lambda _, picture: _multipart(picture), _read_flat_json),
        Form("image-form-nested", lambda _, picture: _multipart(picture), _read_nested_json),
        Form(
            "predictions",
            lambda _, picture: Payload(picture, (("Content-Type", _picture_type(picture)),)),
            _read_predictions,
            _best_scores,
        ),
    )
}
