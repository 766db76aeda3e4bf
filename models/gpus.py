"""GPUs as build targets: compute capabilities, and the devices' common names.

From NVIDIA's table (developer.nvidia.com/cuda-gpus).
"""

from __future__ import annotations

import re

from convoy.models.errors import UsageError

# The default target: a plan for every GPU that the library supports by default.
PORTABLE = "portable"
# The first with tensor cores for 8-bit floats.
FP8_SINCE = "8.9"

_CAPABILITIES = {
    "7.5": ("t4", "rtx2080", "rtx2080ti", "rtx6000", "rtx8000"),
    "8.0": ("a100", "a30"),
    "8.6": ("a10", "a10g", "a16", "a2", "a40", "a4000", "a5000", "a6000", "rtx3080", "rtx3090"),
    "8.7": ("orin",),
    "8.9": ("l4", "l40", "l40s", "l20", "l2", "rtx4080", "rtx4090", "rtx6000ada"),
    "9.0": ("h100", "h200", "h20", "gh200"),
    "10.0": ("b100", "b200", "gb200"),
    "10.3": ("b300", "gb300"),
    "12.0": ("rtx5080", "rtx5090", "rtxpro6000"),
    "12.1": ("gb10", "dgxspark"),
}
_BY_NAME = {name: capability for capability, names in _CAPABILITIES.items() for name in names}
_NUMBER = re.compile(r"(?:sm_?)?(\d{2,3})|(\d{1,2})\.(\d)")


def parse_targets(text: str) -> tuple[str, ...]:
    """Compute capabilities, ascending and unique, from "a10,l4", "sm80,sm89", "8.6" or a mixture of these.

    Empty for "portable". Raises UsageError for an unknown GPU.
    """
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    if parts == [PORTABLE]:
        return ()
    if PORTABLE in parts or not parts:
        raise UsageError(f"{text!r} lists no GPUs; use GPUs such as a10,l4 or sm80,sm89, or {PORTABLE} alone")
    return tuple(sorted({_capability(part) for part in parts}, key=as_number))


def as_number(capability: str) -> int:
    """ "8.9" as 89, for ordering."""
    major, _, minor = capability.partition(".")
    return int(major) * 10 + int(minor)


def _capability(part: str) -> str:
    number = _NUMBER.fullmatch(part)
    if number is not None:
        digits = number[1] or number[2] + number[3]
        return f"{int(digits) // 10}.{int(digits) % 10}"
    found = _BY_NAME.get(re.sub(r"[-_ ]", "", part))
    if found is None:
        raise UsageError(
            f"{part!r} is not a known GPU; use capabilities such as sm80,sm89, or {PORTABLE}, or of "
            f"{', '.join(sorted(_BY_NAME))}"
        )
    return found
