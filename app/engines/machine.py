"""What this process can run engines on, found out once: GPUs, libraries, and why any of them is missing.

`table` decides what to do with it. Tests can replace everything here by fakes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from convoy.app.engines import tensorrt
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cuda.code import codes_of, has_code, in_words
from convoy.app.engines.cuda.device import Device, UnusableGpu, open_all_devices
from convoy.app.engines.cuda.driver import CudaUnavailable
from convoy.app.engines.onnxruntime_cuda import PROVIDER
from convoy.app.engines.openvino import load_openvino
from convoy.app.engines.tensorrt_library import RTX, TENSORRT, TensorRt, load_tensorrt
from convoy.models.checkout import pip_install
from convoy.models.errors import JobError

_log = logging.getLogger("convoy")
_PROVIDER_FILE = Path("capi") / "libonnxruntime_providers_cuda.so"
_CUDNN = "libcudnn.so.9"
_INSTALL = f"uninstall onnxruntime and run {pip_install('gpu')}"


@dataclass(frozen=True, slots=True)
class Library:
    """A library's module, or None and the reason; untyped, because it may be a fake."""

    module: Any
    reason: str = ""


_NO_LIBRARY = Library(None, "no GPU")


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of this process, or why there are none, and the libraries for them.

    `unusable` are GPUs that CUDA counts but cannot use.
    """

    gpus: tuple[Device, ...] = ()
    no_gpu: str = "GPUs are not used with this --engine"
    tensorrt: Library = field(default=_NO_LIBRARY)
    onnxruntime: Library = field(default=_NO_LIBRARY)
    rtx: Library = field(default=_NO_LIBRARY)
    openvino: Library = field(default=Library(None, "OpenVINO is not used with this --engine"))
    unusable: tuple[UnusableGpu, ...] = ()

    def tried(self) -> Machine:
        """The machine with only the GPUs that work now. Creates a context on each, which takes a second."""
        working, unusable = [], [*self.unusable]
        for gpu in self.gpus:
            try:
                gpu.ensure_works()
                working.append(gpu)
            except EngineFailure as failure:
                unusable.append(UnusableGpu(gpu.name, str(failure)))
        no_gpu = self.no_gpu or ("" if working else "no GPU works in this process")
        return replace(self, gpus=tuple(working), no_gpu=no_gpu, unusable=tuple(unusable))

    def runs(self, library: TensorRt) -> Library:
        """The library that runs a kind of plans."""
        return self.rtx if library is RTX else self.tensorrt

    def why_no_code(self, gpu: Device) -> str:
        """Why the installed ONNX Runtime has no code for a GPU; empty if it has, or does not say."""
        module, properties = self.onnxruntime.module, gpu.properties
        place = getattr(module, "__file__", None)
        codes = codes_of(Path(place).parent / _PROVIDER_FILE) if place else frozenset()
        if not codes or has_code(codes, properties.compute_capability):
            return ""
        return (
            f"onnxruntime {module.__version__} has no kernels for {properties.name}, compute capability "
            f"{properties.compute_capability}: it has kernels for {in_words(codes)}; use TensorRT, or another "
            "build of onnxruntime-gpu"
        )


CPU_ONLY = Machine()


@cache
def find_cpu() -> Machine:
    """The machine without its GPUs."""
    return Machine(openvino=_found(load_openvino))


@cache
def find_machine() -> Machine:
    """Ask the driver and the libraries. Takes a second with a GPU, otherwise as long as importing OpenVINO."""
    try:
        gpus, unusable = open_all_devices()
    except CudaUnavailable as reason:
        return Machine(no_gpu=str(reason), openvino=_found(load_openvino))
    found = {library: _found(partial(load_tensorrt, library, tensorrt.NEEDED)) for library in (TENSORRT, RTX)}
    return Machine(gpus, "", found[TENSORRT], _find_onnxruntime(), found[RTX], _found(load_openvino), unusable)


def _found(load: Callable[[], Any]) -> Library:
    try:
        return Library(load())
    except JobError as error:
        return Library(None, str(error))


def _find_onnxruntime() -> Library:
    try:
        module: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        return Library(None, f"onnxruntime does not load ({error}); {_INSTALL}")
    if PROVIDER not in module.get_available_providers():
        return Library(None, f"this build of onnxruntime has no {PROVIDER}; {_INSTALL}")
    if hasattr(module, "preload_dlls"):
        # Finds libraries that came with pip, and prints what it does not find instead of raising.
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            module.preload_dlls()
        if said.getvalue():
            _log.info("onnxruntime: %s", " ".join(said.getvalue().split()))
    try:
        ctypes.CDLL(_CUDNN)
    except OSError as error:
        # The provider looks for it only at the first convolution, which would then fail.
        return Library(None, f"cuDNN does not load ({error}); run {pip_install('gpu')}, which brings it")
    return Library(module)
