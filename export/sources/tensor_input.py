"""`--input` for networks that take no images: tensors by name, each as the shape of one sample.

Knows the spelling alone.
"""

from __future__ import annotations

import re

from convoy.models.errors import UsageError
from convoy.models.spec import OIP_NAMES, TensorSpec

# What one input is called that has no name of its own.
_ONLY = "input"
_TENSOR = re.compile(r"(?:([A-Za-z_][\w.]*)=)?([1-9]\d{0,8}(?:x[1-9]\d{0,8})*)(?::(\w+))?")


def is_of_tensors(text: str) -> bool:
    """Whether it is not the spelling of an image, channels x height x width without a name."""
    return "=" in text or ":" in text or text.count("x") != 2


def parse_tensors(text: str) -> tuple[TensorSpec, ...]:
    """`1x1000`, or `signal=1x1000,age=1:INT64`; without a dtype they are FP32. Raises UsageError."""
    found = [_TENSOR.fullmatch(part.strip()) for part in text.split(",")]
    dtypes = tuple(OIP_NAMES.values())
    specs = []
    for part in found:
        if part is None or (part[1] is None and len(found) > 1) or (part[3] or "FP32").upper() not in dtypes:
            raise UsageError(
                f"--input {text!r} is not understood; write an image as 3x224x224, one tensor as 1x1000, several as "
                f"signal=1x1000,age=1:INT64 with one of {', '.join(dtypes)}"
            )
        shape = tuple(int(size) for size in part[2].split("x"))
        specs.append(TensorSpec(part[1] or _ONLY, (part[3] or "FP32").upper(), shape))
    if len({spec.name for spec in specs}) < len(specs):
        raise UsageError(f"--input {text!r} names an input twice; give each its own name")
    return tuple(specs)
