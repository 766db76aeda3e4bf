"""TensorRT and the GPU, as found on this machine.

Knows how to load the library, what of it the builder needs, and which device it will build for. Versions 10
and 11 differ in names, so names are probed and version numbers are never compared. The module is untyped and
may be missing: it travels as `Any`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from models.errors import JobError
from models.plans import Gpu

INSTALL = "pip install 'tensorrt-cu13>=10.12,<12'"
_INSTALL_CUDA = "pip install cuda-python"
# What the builder uses and older versions lack, or a later one may take away.
_NEEDED = (
    ("Builder", "build_serialized_network"),
    ("IBuilderConfig", "progress_monitor"),
    ("IBuilderConfig", "hardware_compatibility_level"),
    ("ICudaEngine", "get_device_memory_size_for_profile_v2"),
    ("ICudaEngine", "create_engine_inspector"),
    ("HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY"),
    ("OnnxParser", "parse_from_file"),
)


def load_tensorrt() -> Any:
    """The module. Raises JobError where it is missing, does not load, or lacks what the builder needs."""
    try:
        trt: Any = importlib.import_module("tensorrt")
    except ModuleNotFoundError as error:
        raise JobError(f"TensorRT is not installed; run {INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:  # its libraries are found at import, by several means
        raise JobError(f"TensorRT does not load ({error}); run {INSTALL}") from error
    missing = [f"{kind}.{name}" for kind, name in _NEEDED if not hasattr(getattr(trt, kind, None), name)]
    if missing:
        version = getattr(trt, "__version__", "of unknown version")
        raise JobError(f"TensorRT {version} has no {missing[0]}, which the builder needs; run {INSTALL}")
    return trt


def find_gpu() -> Gpu:
    """The current device of this process. Raises JobError where there is none or it cannot be asked."""
    try:
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError, RuntimeError) as error:
        raise JobError(
            f"cuda-python is needed to ask the GPU and does not load ({error}); run {_INSTALL_CUDA}"
        ) from error
    attribute = runtime.cudaDeviceAttr
    device = _asked(runtime, runtime.cudaGetDevice())
    major = _asked(runtime, runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrComputeCapabilityMajor, device))
    minor = _asked(runtime, runtime.cudaDeviceGetAttribute(attribute.cudaDevAttrComputeCapabilityMinor, device))
    properties = _asked(runtime, runtime.cudaGetDeviceProperties(device))
    return Gpu(properties.name.decode(errors="replace"), f"{major}.{minor}")


def _asked(runtime: Any, answer: tuple[Any, Any]) -> Any:
    status, value = answer
    if int(status) != 0:
        text = runtime.cudaGetErrorString(status)[1].decode()
        raise JobError(f"no GPU to build for: {text}; check that nvidia-smi shows one here")
    return value


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
