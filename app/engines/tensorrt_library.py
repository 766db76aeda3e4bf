"""The two TensorRT libraries on this machine: their modules, logs and errors.

TensorRT builds a plan on the GPU that will serve it. TensorRT for RTX builds plans anywhere, for several GPUs at once,
and compiles the device's kernels when a plan is opened. Otherwise they share one API. The engine and the builder both
use this. Versions differ in names, so names are probed and version numbers are never compared. The modules are untyped
and may be missing: they are passed as `Any`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from convoy.models.checkout import pip_install
from convoy.models.errors import JobError
from convoy.models.plans import LibraryName, Profiles

# A class and a name in it that older versions lack or a later one may remove.
Needed = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TensorRt:
    """One of the two libraries. `name` is its name in plans and metrics, `engine` in --engine.

    `builds_anywhere` means that it needs no GPU. `profiles` is how batch sizes go into its plans: kernels chosen by
    measuring want one size each; kernels compiled on the device can have all in one.
    """

    name: LibraryName
    engine: str
    title: str
    module: str
    install: str
    builds_anywhere: bool
    profiles: Profiles


TENSORRT = TensorRt(
    name="tensorrt",
    engine="tensorrt",
    title="TensorRT",
    module="tensorrt",
    install=f"{pip_install('tensorrt')} (its libraries come from pypi.nvidia.com)",
    builds_anywhere=False,
    profiles="each",
)
RTX = TensorRt(
    name="tensorrt-rtx",
    engine="rtx",
    title="TensorRT for RTX",
    module="tensorrt_rtx",
    install=pip_install("rtx"),
    builds_anywhere=True,
    profiles="range",
)
LIBRARIES = (RTX, TENSORRT)

BUILDER_NEEDS: Needed = (
    ("Builder", "build_serialized_network"),
    ("IBuilderConfig", "progress_monitor"),
    ("IBuilderConfig", "hardware_compatibility_level"),
    ("ICudaEngine", "get_device_memory_size_for_profile_v2"),
    ("ICudaEngine", "create_engine_inspector"),
    ("HardwareCompatibilityLevel", "SAME_COMPUTE_CAPABILITY"),
    ("OnnxParser", "parse_from_file"),
)
_RTX_BUILDER_NEEDS: Needed = (
    ("IBuilderConfig", "num_compute_capabilities"),
    ("IBuilderConfig", "set_compute_capability"),
    ("ComputeCapability", "SM89"),
)


# What NVIDIA lists, which is less than what a portable plan has code for.
_SUPPORTED_BY_RTX = "NVIDIA supports 7.5, 8.6, 8.9 and 12.0, not the A100 (8.0)"


def library_named(name: LibraryName) -> TensorRt:
    """The library with this name in plans."""
    return {library.name: library for library in LIBRARIES}[name]


def load_tensorrt(library: TensorRt, needed: Needed) -> Any:
    """Import the module. Raises JobError if it is missing, does not load, or lacks something that is needed."""
    title, install = library.title, library.install
    try:
        trt: Any = importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        raise JobError(f"{title} is not installed; run {install}") from error
    except (ImportError, OSError, RuntimeError) as error:  # it looks for its libraries at import, in several ways
        raise JobError(f"{title} does not load ({error}); run {install}") from error
    missing = [f"{kind}.{name}" for kind, name in needed if not hasattr(getattr(trt, kind, None), name)]
    if missing:
        version = getattr(trt, "__version__", "of unknown version")
        raise JobError(f"{title} {version} has no {missing[0]}, which Convoy needs; run {install}")
    return trt


def load_builder(library: TensorRt) -> Any:
    """Import the module if it can build. Raises JobError."""
    return load_tensorrt(library, BUILDER_NEEDS + (_RTX_BUILDER_NEEDS if library.builds_anywhere else ()))


@dataclass(frozen=True, slots=True)
class BuilderFound:
    """Whether a library can build plans on this machine. `targets` are compute capabilities; `reason` says what it
    builds for, or why it cannot.
    """

    library: LibraryName
    version: str
    builds: bool
    targets: tuple[str, ...]
    reason: str


def find_builder(library: TensorRt, capabilities: tuple[str, ...]) -> BuilderFound:
    """Load a library and ask what it can build. `capabilities` are those of the GPUs here."""
    try:
        trt = load_builder(library)
    except JobError as error:
        return BuilderFound(library.name, "", False, (), str(error))
    version = str(trt.__version__)
    if library.builds_anywhere:
        told = f"needs no GPU; {_SUPPORTED_BY_RTX}"
        return BuilderFound(library.name, version, True, nameable_capabilities(trt), told)
    if not capabilities:
        return BuilderFound(
            library.name, version, False, (), "it only builds on the GPU that serves, but there is none"
        )
    return BuilderFound(library.name, version, True, capabilities, "for the GPUs of this machine")


def nameable_capabilities(trt: Any) -> tuple[str, ...]:
    """The compute capabilities that TensorRT for RTX can build for by name, ascending."""
    numbers = sorted(int(name[2:]) for name in dir(trt.ComputeCapability) if name.startswith("SM"))
    return tuple(f"{number // 10}.{number % 10}" for number in numbers)


def collecting_logger(trt: Any) -> Any:
    """A logger that collects messages: the lists `errors` and `warnings`, and the text `layers`.

    `layers` is the builder's list of the finished plan's layers, which some libraries only log at their most verbose.
    The logger lives as long as the process: a library keeps the first one for everything outside builders and engines,
    without owning it.
    """
    lists = {trt.ILogger.INTERNAL_ERROR: "errors", trt.ILogger.ERROR: "errors", trt.ILogger.WARNING: "warnings"}

    class Collecting(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.layers = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in lists:
                getattr(self, lists[severity]).append(" ".join(msg.split()))
            elif msg.startswith(_LAYERS):
                self.layers = msg

    logger = Collecting()
    _kept.append(logger)
    return logger


_kept: list[Any] = []
_LAYERS = "Layers:"
# Words in TensorRT's errors, and advice for each.
_ADVICE = (
    ("uint8", "TensorRT accepts a uint8 input only directly into a Cast; export the model with the cast first"),
    ("fp8", "FP8 needs GPUs of compute capability 8.9 or later; remove the other GPUs, or this precision"),
    ("memory", "free memory on the GPU, or lower --workspace-mb or the largest batch size"),
)


def explained(errors: Iterable[str]) -> str:
    """TensorRT's first error, with advice if there is any, for the end of a message."""
    listed = list(errors)
    if not listed:
        return "TensorRT gave no reason"
    advice = next((text for word, text in _ADVICE for error in listed if word in error.lower()), None)
    return listed[0] if advice is None else f"{listed[0]}; {advice}"
