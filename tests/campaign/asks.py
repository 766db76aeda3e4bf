"""What a client asks, as bytes, and what is right: tensors and pictures drawn from a seed, answers computed by numpy.

Pure. Knows the campaign's models by their arithmetic, and how HTTP carries requests and answers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tests.support.pictures import enlarged
from tests.support.stores import digit
from tests.support.wire import chunk, head

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# What users have: each way of decoding, from what is decoded at once to what takes many milliseconds.
_FILES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("PNG", {}),
    ("JPEG", {"quality": 95}),
    ("JPEG", {"quality": 95, "progressive": True}),
    ("WEBP", {"lossless": True}),
    ("GIF", {}),
    ("BMP", {}),
    ("TIFF", {"compression": "tiff_deflate"}),
)
SIDES_PX, LARGE_SIDES_PX = (28, 64, 200, 340), (500, 900)
SHIFT_STEP = 100.0
MODELS = ("simple", "shift", "mean", "identity_fp32")
_NUMPY = {"FP32": "<f4", "INT32": "<i4"}


class WrongAnswer(Exception):
    """The server's answer is not what the model's arithmetic says."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input."""

    name: str
    dtype: str
    values: np.ndarray

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def data(self) -> bytes:
        return self.values.tobytes()

    def document(self, *, binary: bool) -> dict[str, Any]:
        """As the protocol's JSON has it, with its values or with their size."""
        values = (
            {"parameters": {"binary_data_size": len(self.data)}} if binary else {"data": self.values.ravel().tolist()}
        )
        return {"name": self.name, "shape": self.shape, "datatype": self.dtype, **values}


@dataclass(frozen=True, slots=True)
class Ask:
    """One inference. `is_wrong`: the request has a fault of its own, and 400 or 404 is the right answer."""

    model: str
    inputs: tuple[Tensor, ...]
    id: str
    binary: bool
    is_wrong: bool = False
    timeout_ms: float | None = None
    priority: int = 0

    def request(self, chunk_bytes: int | None = None) -> bytes:
        """The whole request over HTTP, in chunks of this size if there is one."""
        query = "" if self.timeout_ms is None else f"?timeout_ms={self.timeout_ms:g}"
        body, headers = self._body()
        sized = {"Transfer-Encoding": "chunked"} if chunk_bytes else {"Content-Length": str(len(body))}
        if chunk_bytes:
            pieces = [chunk(body[start : start + chunk_bytes]) for start in range(0, len(body), chunk_bytes)]
            body = b"".join(pieces) + chunk(b"")
        return head(f"/v2/models/{self.model}/infer{query}", {**sized, **headers}) + body

    def _body(self) -> tuple[bytes, dict[str, str]]:
        parameters: dict[str, Any] = {"binary_data_output": True} if self.binary else {}
        if self.priority:
            parameters["priority"] = self.priority
        inputs = [one.document(binary=self.binary) for one in self.inputs]
        text = json.dumps({"id": self.id, "inputs": inputs, "parameters": parameters}).encode()
        if not self.binary:
            return text, {"Content-Type": "application/json"}
        return text + b"".join(one.data for one in self.inputs), {"Inference-Header-Content-Length": str(len(text))}

    def check_reply(self, headers: Mapping[str, str], body: bytes) -> None:
        """An answer over HTTP; header names in lower case. Raises WrongAnswer."""
        text_bytes = int(headers.get("inference-header-content-length", len(body)))
        try:
            document, tail = json.loads(body[:text_bytes]), body[text_bytes:]
        except ValueError as error:
            raise WrongAnswer(f"the answer is no JSON ({error}): {body[:80]!r}") from error
        outputs: dict[str, np.ndarray] = {}
        for one in document["outputs"]:
            nbytes = one.get("parameters", {}).get("binary_data_size")
            if nbytes is not None and nbytes > len(tail):
                raise WrongAnswer(f"{one['name']} should have {nbytes} bytes, and {len(tail)} are there")
            outputs[one["name"]] = _values(one, None if nbytes is None else tail[:nbytes])
            tail = tail[nbytes or 0 :]
        if tail:
            raise WrongAnswer(f"{len(tail)} bytes after the last output")
        self.check(document["model_name"], document["model_version"], document.get("id", ""), outputs)

    def check(self, model: str, version: str, own_id: str, outputs: dict[str, np.ndarray]) -> None:
        """Whether these are the outputs, under their names. Raises WrongAnswer."""
        if self.is_wrong:
            raise WrongAnswer(f"{self.model} answered a request with {self.inputs[0].shape}, which it cannot take")
        if (model, own_id) != (self.model, self.id):
            raise WrongAnswer(f"asked {self.model} as {self.id!r} and was answered by {model} as {own_id!r}")
        for name, right in self._right(version).items():
            answer = outputs.get(name)
            # The runtime may add up in another order.
            if answer is None or answer.shape != right.shape or not np.allclose(answer, right, rtol=1e-5, atol=1e-4):
                raise WrongAnswer(f"{model} version {version} said {name} = {_brief(answer)}, not {_brief(right)}")

    def _right(self, version: str) -> dict[str, np.ndarray]:
        values = self.inputs[0].values
        if self.model == "simple":
            return {"OUTPUT0": values + self.inputs[1].values, "OUTPUT1": values - self.inputs[1].values}
        if self.model == "shift":
            return {"y": values + np.float32(SHIFT_STEP * int(version))}
        if self.model == "mean":
            return {"y": values - values.mean(axis=0, keepdims=True)}
        return {"y": values}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture and its label. `data` that is no picture has none, and 400 is right."""

    data: bytes
    label: str | None
    timeout_ms: float | None = None
    model: str = "digits"

    @property
    def is_wrong(self) -> bool:
        return self.label is None

    def request(self, chunk_bytes: int | None = None) -> bytes:
        query = "" if self.timeout_ms is None else f"?timeout_ms={self.timeout_ms:g}"
        return head(f"/predictions/digits{query}", {"Content-Length": str(len(self.data))}) + self.data

    def check_reply(self, headers: Mapping[str, str], body: bytes) -> None:
        try:
            self.check(json.loads(body))
        except ValueError as error:
            raise WrongAnswer(f"the answer is no JSON ({error}): {body[:80]!r}") from error

    def check(self, document: dict[str, Any]) -> None:
        """Raises WrongAnswer unless the best of the predictions is the digit that is seen."""
        best = document["predictions"][0]
        if best["label"] != self.label or not 0.3 < best["score"] <= 1.0:
            raise WrongAnswer(f"a picture of {self.label} is said to be {best['label']} ({best['score']:.3f})")


Asked = Ask | Picture


class Script:
    """What one client asks: the call with a number is always the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def chance(self, number: int) -> random.Random:
        return random.Random(self.seed * 1_000_003 + number)

    def ask(self, number: int, *, hurried: bool = False, models: tuple[str, ...] = MODELS) -> Ask:
        chance = self.chance(number)
        model = chance.choice(models)
        timeout_ms = chance.choice((2.0, 10.0, 50.0, 400.0)) if hurried else None
        is_wrong = not hurried and chance.random() < 0.05
        priority = chance.randrange(3) if hurried else 0
        inputs = _inputs(model, chance, is_wrong=is_wrong)
        own_id = f"{self.seed:08x}-{number}"
        return Ask(model, inputs, own_id, chance.random() < 0.6, is_wrong, timeout_ms, priority)

    def picture(self, number: int, sides_px: tuple[int, ...] = SIDES_PX, *, hurried: bool = False) -> Picture:
        """A digit as a file of any format and one of these sizes; some are cut off."""
        chance = self.chance(number)
        which, side_px = chance.randrange(10), chance.choice(sides_px)
        data = _file(which, side_px, chance.randrange(len(_FILES) if side_px <= 500 else 4))
        timeout_ms = chance.choice((10.0, 50.0, 400.0, 2000.0)) if hurried else None
        if not hurried and chance.random() < 0.05:
            return Picture(data[: min(len(data) // 2, 60)], None)
        return Picture(data, str(which), timeout_ms)


@cache
def _file(which: int, side_px: int, form: int) -> bytes:
    name, options = _FILES[form]
    if side_px == 28 and form == 0:
        return digit(DIGIT_WORDS[which])
    return enlarged(DIGIT_WORDS[which], side_px, name, **options)


def _inputs(model: str, chance: random.Random, *, is_wrong: bool) -> tuple[Tensor, ...]:
    rows, numbers = chance.choice((1, 1, 1, 2, 3, 8)), np.random.default_rng(chance.randrange(1 << 32))
    if model == "simple":
        shape = (rows, 15 if is_wrong else 16)
        return tuple(
            Tensor(name, "INT32", numbers.integers(-1000, 1000, shape, np.int32)) for name in ("INPUT0", "INPUT1")
        )
    if model in ("shift", "mean"):
        values = numbers.integers(-64, 64, (rows, 5 if is_wrong else 4)).astype(np.float32)
        return (Tensor("x", "FP32", values),)
    size = chance.choice((1, 3, 17, 1000, 8_000))
    return (Tensor("x", "FP32", numbers.random((rows, 1, size) if is_wrong else (rows, size), np.float32)),)


def _values(output: dict[str, Any], data: bytes | None) -> np.ndarray:
    """An output's values, from its JSON or from these bytes of its own."""
    dtype = _NUMPY[output["datatype"]]
    flat = np.array(output["data"], dtype) if data is None else np.frombuffer(data, dtype)
    return flat.reshape(output["shape"])


def _brief(values: Any) -> str:
    return "nothing" if values is None else f"{np.asarray(values).reshape(-1)[:4].tolist()} of {np.shape(values)}"
