"""What the builder needs of this machine: TensorRT's building half, and the GPU that it builds for."""

from __future__ import annotations

from typing import Any

from app.engines.base import EngineFailure
from app.engines.cuda.driver import Cuda, CudaUnavailable, load_runtime, probe_cuda
from app.engines.tensorrt_library import load_tensorrt
from models.errors import JobError
from models.plans import Gpu

_NEEDED = (
    ("Builder", "build_serialized_network"),
    ("IBuilderConfig", "progress_monitor"),
    ("IBuilderConfig", "hardware_compatibility_level"),
    ("ICudaEngine", "get_device_memory_size_for_profile_v2"),
    ("ICudaEngine", "create_engine_inspector"),
    ("HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY"),
    ("OnnxParser", "parse_from_file"),
)


def load_builder() -> Any:
    """The tensorrt module, if it can build. Raises JobError."""
    return load_tensorrt(_NEEDED)


def find_gpu() -> Gpu:
    """The first device of this process. Raises JobError where there is none or it cannot be asked."""
    try:
        cuda: Cuda = probe_cuda(load_runtime())
        found = cuda.properties(0)
    except (CudaUnavailable, EngineFailure) as error:
        raise JobError(f"no GPU to build for: {error}; check that nvidia-smi shows one here") from error
    return Gpu(found.name, found.compute_capability)
