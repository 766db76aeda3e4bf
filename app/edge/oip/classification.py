"""The classification extension: an output's largest values as strings, `value:index` or `value:index:label`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from convoy.app.scheduling.request import Shape
from convoy.models.errors import InvalidRequest
from convoy.models.spec import TensorSpec
from convoy.models.tensors import pack

_MAX_ELEMENTS = 1_000_000
_UNSUPPORTED = frozenset({"FP16", "BF16", "BOOL", "BYTES"})


def check_classifiable(spec: TensorSpec) -> None:
    """Raises InvalidRequest for an output that has no order."""
    if spec.dtype in _UNSUPPORTED:
        raise InvalidRequest(f"class result not available for output due to unsupported type '{spec.dtype}'")


def classify(values: np.ndarray, classes: int, labels: Sequence[str], *, batched: bool) -> tuple[Shape, memoryview]:
    """The best `classes` of each sample, largest first, as the shape and the packed bytes of a BYTES tensor.

    All dimensions behind the batch are taken as one. Ties go by index. Raises InvalidRequest.
    """
    if values.size > _MAX_ELEMENTS:
        raise InvalidRequest(f"classification output tensor too large: {values.size} values, {_MAX_ELEMENTS} at most")
    batch = values.shape[:1] if batched else ()
    per_sample = math.prod(values.shape[len(batch) :])
    rows = values.reshape(math.prod(batch), per_sample)
    count = min(classes, per_sample)
    strings = [_entry(row[index], int(index), labels) for row in rows for index in _largest_first(row)[:count]]
    return (*batch, count), memoryview(pack(strings))


def _largest_first(row: np.ndarray) -> np.ndarray:
    # Not `-row` for integers: the smallest one has no opposite, and unsigned ones have none at all.
    return np.argsort(-row if row.dtype.kind == "f" else ~row, kind="stable")


def _entry(value: np.generic, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if value.dtype.kind == "f" else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode()
