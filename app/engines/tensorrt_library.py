"""TensorRT, as found on this machine: the module, its log, and its errors in words.

The engine that runs plans and the builder that makes them share it. Versions 10 and 11 differ in names, so
names are probed and version numbers are never compared. The module is untyped and may be missing: it travels
as `Any`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from models.errors import JobError

INSTALL = "pip install 'convoy-serve[tensorrt]' (its libraries come from pypi.nvidia.com)"
# A class and a name in it: what older versions lack, or a later one may take away.
Needed = tuple[tuple[str, str], ...]


def load_tensorrt(needed: Needed) -> Any:
    """The module. Raises JobError where it is missing, does not load, or lacks what is needed of it."""
    try:
        trt: Any = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise JobError(f"TensorRT is not installed; run {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are found at import, by several means
        raise JobError(f"TensorRT does not load ({error}); run {INSTALL}") from error
    missing = [f"{kind}.{name}" for kind, name in needed if not hasattr(getattr(trt, kind, None), name)]
    if missing:
        version = getattr(trt, "__version__", "of unknown version")
        raise JobError(f"TensorRT {version} has no {missing[0]}, which Convoy needs; run {INSTALL}")
    return trt


def collecting_logger(trt: Any) -> Any:
    """A TensorRT logger that keeps errors, for messages, in its list `errors`, and drops the rest."""
    severities = (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR)

    class Collecting(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, msg: str) -> None:
            if severity in severities:
                self.errors.append(" ".join(msg.split()))

    return Collecting()


# A word in TensorRT's errors, and what to do about it.
_ADVICE = (
    ("uint8", "TensorRT takes a uint8 input only straight into a Cast: export the model with the cast first"),
    ("memory", "free memory on the GPU, or lower --workspace-mb or the largest batch size"),
)


def explained(errors: Iterable[str]) -> str:
    """TensorRT's first error, and advice where there is any; for the end of a message."""
    listed = list(errors)
    if not listed:
        return "TensorRT gave no reason"
    advice = next((text for word, text in _ADVICE for error in listed if word in error.lower()), None)
    return listed[0] if advice is None else f"{listed[0]}; {advice}"
