"""The CUDA runtime as the experiments use it: cuda-python itself, of which nothing is hidden or mended.

Independent of the house's own layer on purpose, which is built on what these experiments find out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tests.gpu.proof.experiment import NotMeasurable

NON_BLOCKING = 1  # cudaStreamNonBlocking
TO_DEVICE, TO_HOST = "cudaMemcpyHostToDevice", "cudaMemcpyDeviceToHost"


class CudaError(Exception):
    """A call's own complaint. `code` is cudaError_t."""

    def __init__(self, name: str, code: int, text: str) -> None:
        super().__init__(f"{name}: {text} (CUDA error {code})")
        self.code = code


class Runtime:
    """Every call of the module by its name, raising CudaError; `status` gives the code instead."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self.module, name)

        def call(*arguments: Any) -> Any:
            status, *values = function(*arguments)
            if int(status):
                raise CudaError(name, int(status), self.text(status))
            return values[0] if len(values) == 1 else tuple(values)

        return call

    def status(self, name: str, *arguments: Any) -> int:
        """0 where it went well."""
        return int(getattr(self.module, name)(*arguments)[0])

    def text(self, status: Any) -> str:
        raw = self.module.cudaGetErrorString(status)[1]
        return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)

    def copy(self, target: int, source: int, nbytes: int, way: str, stream: Any) -> None:
        self.cudaMemcpyAsync(target, source, nbytes, getattr(self.module.cudaMemcpyKind, way), stream)


def load_module() -> Any:
    """cuda-python's bindings. Raises NotMeasurable."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except (ImportError, OSError, RuntimeError) as error:
        raise NotMeasurable(f"cuda-python does not load ({error})") from error


def open_runtime() -> Runtime:
    """The first GPU, current. Raises NotMeasurable where there is none."""
    runtime = Runtime(load_module())
    try:
        if not runtime.cudaGetDeviceCount():
            raise NotMeasurable("the driver sees no GPU")
    except CudaError as error:
        raise NotMeasurable(f"no usable NVIDIA driver: {error}") from error
    runtime.cudaSetDevice(0)
    return runtime
