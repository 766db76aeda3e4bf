"""Execution contexts of a plan. TensorRT has all kernels in the plan; TensorRT for RTX compiles them for the device.

Compiled kernels are kept beside the plan, for this GPU and driver, so that the next start compiles nothing. They are
code, so the rule of `convoy.models.plan_cache` applies to them as well. The library itself checks that they fit.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from convoy.models.plan_cache import NotTrusted, read_trusted, write_trusted

_log = logging.getLogger("convoy")


class Kernels:
    """The compiled kernels of one plan for one device: in a file if that can be written, and in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at_hand = b""

    def read(self) -> bytes:
        """The kernels; empty if there are none that can be trusted."""
        if self._at_hand:
            return self._at_hand
        try:
            return read_trusted(self.path)
        except FileNotFoundError:
            return b""
        except (NotTrusted, OSError) as error:
            _log.warning("the cache of compiled kernels is not used: %s", error)
            return b""

    def write(self, compiled: bytes) -> None:
        """Keep the kernels. If the file cannot be written, only the next start compiles again."""
        self._at_hand = compiled
        try:
            write_trusted(self.path, compiled, self.path.stem)
        except OSError as error:
            _log.info("cannot write %s (%s); the next start compiles again", self.path, error.strerror)


class Contexts(Protocol):
    """Creates an engine's contexts, which all use the caller's scratch memory."""

    def create(self) -> Any:
        """Create a context, or return None if the library refuses."""

    def keep(self) -> None:
        """Everything has run once: keep what was compiled for it."""


def open_contexts(trt: Any, engine: Any, kernels: Kernels | None, *, captures: bool) -> Contexts:
    """The contexts of `engine`. `kernels` is where compiled kernels are kept; `captures` means that the library
    captures graphs.

    Only a library that compiles uses either.
    """
    if hasattr(getattr(trt, "IRuntimeConfig", None), "create_runtime_cache"):
        return _Compiling(trt, engine, kernels, captures=captures)
    return _Compiled(trt, engine)


class _Compiled:
    def __init__(self, trt: Any, engine: Any) -> None:
        self._engine, self._strategy = engine, trt.ExecutionContextAllocationStrategy.USER_MANAGED

    def create(self) -> Any:
        return self._engine.create_execution_context(self._strategy)

    def keep(self) -> None:
        pass


class _Compiling:
    """All contexts share one kernel cache, and each is compiled at once for the one shape that it gets."""

    def __init__(self, trt: Any, engine: Any, kernels: Kernels | None, *, captures: bool) -> None:
        self._engine, self._kernels = engine, kernels
        self._config = engine.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Compiled lazily, the first batches of a size would be slow, and so would a graph of them.
        self._config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        strategies = trt.CudaGraphStrategy
        self._config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if captures else strategies.DISABLED
        self._cache = self._config.create_runtime_cache()
        self._known = kernels.read() if kernels is not None else b""
        if kernels is not None and self._known and not self._cache.deserialize(self._known):
            _log.info("%s was compiled for another GPU or version; compiling again", kernels.path)
            self._known = b""
        self._config.set_runtime_cache(self._cache)

    def create(self) -> Any:
        return self._engine.create_execution_context(self._config)

    def keep(self) -> None:
        kernels, known = self._kernels, self._known
        # Once, because large networks have a hundred megabytes of kernels.
        self._kernels, self._known = None, b""
        if kernels is None:
            return
        compiled = self._cache.serialize()
        if compiled is None:
            _log.info("the library does not export its compiled kernels; the next start compiles again")
        elif bytes(compiled) != known:
            kernels.write(bytes(compiled))
