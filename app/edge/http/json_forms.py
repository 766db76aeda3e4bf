"""JSON requests that differ in one list of numbers alone: what is around the list settles what they mean.

A client writes the same names, shape and parameters around every tensor. Such a text is not read again but for its
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convoy.app.edge.http.json_documents import numbers
from convoy.app.edge.oip.inference import InferRequest
from convoy.app.edge.oip.tensors import converted
from convoy.models.spec import ModelSpec

_DATA = b'"data"'
_LONGEST_BYTES = 4 << 10  # of what is around the list


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A text with a list of `count` numbers between these bytes: a request with one input of floats."""

    before: bytes
    after: bytes
    count: int
    dtype: np.dtype[Any]

    def fits(self, text: bytes) -> bool:
        """Whether it has these bytes around something."""
        return text.startswith(self.before) and text.endswith(self.after)

    def values(self, text: bytes) -> np.ndarray | None:
        """The input's values, 1-d; None where the text has not this form."""
        if not self.fits(text):
            return None
        found = numbers(text[len(self.before) : len(text) - len(self.after)])
        if found is None or found.size != self.count:
            return None
        return converted(found, self.dtype)


def json_form(text: bytes, request: InferRequest, spec: ModelSpec) -> JsonForm | None:
    """The form of a text that was understood so; None where its numbers are not the only thing that may change."""
    values = request.tensors[0]
    if len(request.tensors) != 1 or not isinstance(values, np.ndarray) or request.regions:
        return None
    dtype = spec.inputs[0].numpy_dtype
    start = text.find(b"[", text.find(_DATA) + len(_DATA))
    end = text.find(b"]", start) + 1
    if (
        spec.inputs[0].is_strings
        or dtype.kind != "f"
        or text.count(_DATA) != 1
        or len(text) - (end - start) > _LONGEST_BYTES
    ):
        return None
    form = JsonForm(text[:start], text[end:], values.size, dtype)
    found = form.values(text)
    is_it = found is not None and np.array_equal(found, values.reshape(-1))
    return form if is_it else None
