"""What a client asks, and what is right: tensors and images drawn from a seed, answers computed by numpy.

Pure. Knows the campaign's models by their arithmetic and nothing of any wire.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from convoy.models.tensors import pack
from tests.support.pictures import enlarged
from tests.support.stores import digit

DIGIT_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
IMAGES = tuple(digit(word) for word in DIGIT_WORDS)
# What users have: each way of decoding, of either colour, from what is decoded at once to what takes many milliseconds.
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
_IDENTITIES = {"identity_fp32": "FP32", "identity_int64": "INT64", "identity_bytes": "BYTES"}
MODELS = ("simple", "shift", "mean", *_IDENTITIES)
DTYPES = {"FP32": np.float32, "INT64": np.int64, "INT32": np.int32}


class WrongAnswer(Exception):
    """The server's answer is not what the model's arithmetic says."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input. Strings are an object array of bytes."""

    name: str
    dtype: str
    values: np.ndarray

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def data(self) -> bytes:
        return bytes(pack(self.values.reshape(-1))) if self.dtype == "BYTES" else self.values.tobytes()

    @property
    def json(self) -> list[Any]:
        flat = self.values.reshape(-1).tolist()
        return [one.decode() for one in flat] if self.dtype == "BYTES" else flat


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

    def check(self, model: str, version: str, own_id: str, outputs: dict[str, np.ndarray]) -> None:
        """Whether these are the outputs, under their names. Raises WrongAnswer."""
        if self.is_wrong:
            raise WrongAnswer(f"{self.model} answered a request with {self.inputs[0].shape}, which it cannot take")
        if (model, own_id) != (self.model, self.id):
            raise WrongAnswer(f"asked {self.model} as {self.id!r} and was answered by {model} as {own_id!r}")
        for name, right in self._right(version).items():
            answer = outputs.get(name)
            if answer is None or not _is_equal(np.asarray(answer), right):
                raise WrongAnswer(f"{model} version {version} said {name} = {_brief(answer)}, not {_brief(right)}")

    def _right(self, version: str) -> dict[str, np.ndarray]:
        if self.model == "simple":
            left, right = (one.values for one in self.inputs)
            return {"OUTPUT0": left + right, "OUTPUT1": left - right}
        values = self.inputs[0].values
        if self.model == "shift":
            return {"y": values + np.float32(SHIFT_STEP * int(version))}
        if self.model == "mean":
            return {"y": values - values.mean(axis=0, keepdims=True)}
        return {"y": values}


@dataclass(frozen=True, slots=True)
class Picture:
    """One image and its label. `data` that is no image has none, and 400 is right."""

    data: bytes
    label: str | None
    timeout_ms: float | None = None

    def check(self, document: dict[str, Any]) -> None:
        """Raises WrongAnswer unless the best of the predictions is the digit that is seen."""
        best = document["predictions"][0]
        if best["label"] != self.label or not 0.3 < best["score"] <= 1.0:
            raise WrongAnswer(f"an image of {self.label} is said to be {best['label']} ({best['score']:.3f})")


class Script:
    """What one client asks: the call with a number is always the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def chance(self, number: int) -> random.Random:
        return random.Random(self.seed * 1_000_003 + number)

    def ask(self, number: int, *, hurried: bool = False, models: tuple[str, ...] = MODELS) -> Ask:
        chance = self.chance(number)
        model = chance.choice(models)
        own_id = f"{self.seed:08x}-{number}"
        timeout_ms = chance.choice((2.0, 10.0, 50.0, 400.0)) if hurried else None
        is_wrong = not hurried and chance.random() < 0.05
        priority = chance.randrange(3) if hurried else 0
        inputs = _inputs(model, chance, is_wrong=is_wrong)
        return Ask(model, inputs, own_id, chance.random() < 0.6, is_wrong, timeout_ms, priority)

    def file(self, number: int, sides_px: tuple[int, ...] = SIDES_PX, *, hurried: bool = False) -> Picture:
        """A digit as a file of any format and one of these sizes; some are cut off."""
        chance = self.chance(number)
        which, side_px = chance.randrange(10), chance.choice(sides_px)
        data = _file(which, side_px, chance.randrange(len(_FILES) if side_px <= 500 else 4))
        timeout_ms = chance.choice((10.0, 50.0, 400.0, 2000.0)) if hurried else None
        if not hurried and chance.random() < 0.05:
            return Picture(data[: min(len(data) // 2, 60)], None)
        return Picture(data, str(which), timeout_ms)

    def picture(self, number: int, *, hurried: bool = False) -> Picture:
        chance = self.chance(number)
        which = chance.randrange(10)
        timeout_ms = chance.choice((2.0, 10.0, 50.0, 400.0)) if hurried else None
        if not hurried and chance.random() < 0.05:
            return Picture(chance.choice((b"no image", IMAGES[which][:60], chance.randbytes(300))), None)
        return Picture(IMAGES[which], str(which), timeout_ms)


@cache
def _file(which: int, side_px: int, form: int) -> bytes:
    name, options = _FILES[form]
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
    dtype = _IDENTITIES[model]
    size = chance.choice((1, 3, 17, 1000, 8_000 if dtype == "FP32" else 50))
    shape = (rows, 1, size) if is_wrong else (rows, size)
    if dtype == "BYTES":
        strings = np.empty(shape, object)
        strings.reshape(-1)[:] = [b"%d \xc3\xa9" % one for one in range(rows * size)]
        return (Tensor("x", dtype, strings),)
    if dtype == "INT64":
        return (Tensor("x", dtype, numbers.integers(-(1 << 52), 1 << 52, shape, np.int64)),)
    return (Tensor("x", dtype, numbers.random(shape, np.float32)),)


def _is_equal(answer: np.ndarray, right: np.ndarray) -> bool:
    if answer.shape != right.shape:
        return False
    if right.dtype == object:
        return all(_as_bytes(a) == b for a, b in zip(answer.reshape(-1), right.reshape(-1), strict=True))
    if right.dtype.kind == "f":  # the runtime may add up in another order
        return bool(np.allclose(answer, right, rtol=1e-5, atol=1e-4))
    return bool((answer == right).all())


def _as_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _brief(values: Any) -> str:
    return "nothing" if values is None else f"{np.asarray(values).reshape(-1)[:4].tolist()} of {np.shape(values)}"
