"""The devices that a plan is built for: the GPU of this machine, or named ones."""

from __future__ import annotations

from typing import Any

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.driver import Cuda, CudaUnavailable, load_runtime, probe_cuda
from convoy.app.engines.tensorrt_library import TensorRt, nameable_capabilities
from convoy.models.errors import JobError, UsageError
from convoy.models.gpus import PORTABLE
from convoy.models.plans import BuildOptions, Gpu, PlanTarget, tensorrt_target


def find_gpu() -> Gpu:
    """The first device of this process. Raises JobError if there is none or it cannot be queried."""
    try:
        cuda: Cuda = probe_cuda(load_runtime())
        found = cuda.properties(0)
    except (CudaUnavailable, EngineFailure) as error:
        raise JobError(f"no GPU to build for: {error}; check that nvidia-smi shows one here") from error
    return Gpu(found.name, found.compute_capability)


def resolve_target(
    library: TensorRt, trt: Any, capabilities: tuple[str, ...], options: BuildOptions, gpu: Gpu | None
) -> PlanTarget:
    """The target of a build. `capabilities` are the requested ones; a library that builds only for its own GPU needs
    `gpu`.

    Raises UsageError for what this library cannot build.
    """
    if not library.builds_anywhere:
        assert gpu is not None, "a library that builds on the GPU itself was given none; this is a bug"
        if capabilities not in ((), (gpu.compute_capability,)):
            raise UsageError(
                f"{library.title} builds only for the GPU it runs on ({gpu.compute_capability}), not for "
                f"{', '.join(capabilities)}"
            )
        return tensorrt_target(trt.__version__, gpu, options)
    if options.hardware_compatibility != "none":
        raise UsageError(f"{library.title} has no hardware compatibility; name the GPUs that the plan is for")
    check_targets(f"{library.title} {trt.__version__}", nameable_capabilities(trt), capabilities)
    return PlanTarget(library.name, trt.__version__, capabilities)


def check_targets(builder: str, known: tuple[str, ...], capabilities: tuple[str, ...]) -> None:
    """Raise UsageError for a compute capability that `builder` does not know."""
    unknown = [capability for capability in capabilities if capability not in known]
    if unknown:
        raise UsageError(
            f"{builder} cannot be asked for compute capability {unknown[0]}, only for {', '.join(known)}; a plan that "
            f"is {PORTABLE} may run there"
        )
