"""Execution contexts of a plan: TensorRT has every kernel in it, TensorRT for RTX compiles the device's own.

What was compiled is kept beside the plan, for this GPU and driver, so that the next start compiles nothing. It is code,
so the rule of `convoy.models.plan_cache` holds for it as for plans. The library itself checks that it fits, too.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from convoy.models.plan_cache import NotTrusted, read_trusted, write_trusted

_log = logging.getLogger("convoy")


class Kernels:
    """What was compiled of one plan for one device: in a file where that can be written, and at hand anyway."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at_hand = b""

    def read(self) -> bytes:
        """Empty where there are none that can be trusted."""
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
        """Where the file cannot be written, the next start compiles again, but nobody who has this."""
        self._at_hand = compiled
        try:
            write_trusted(self.path, compiled, self.path.stem)
        except OSError as error:
            _log.info("cannot write %s (%s); the next start compiles again", self.path, error.strerror)


class Contexts(Protocol):
    """Where an engine's contexts come from; all of them use scratch memory of the caller's."""

    def create(self) -> Any:
        """A new one, or None where the library refuses."""

    def keep(self) -> None:
        """Everything has run once: what was worked out for that shall not be worked out again."""


def open_contexts(trt: Any, engine: Any, kernels: Kernels | None, *, captures: bool) -> Contexts:
    """The contexts of `engine`. `kernels` is where what is compiled is kept; `captures`: the library captures graphs.

    Only what compiles has a use for either.
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
    """All contexts share one cache of kernels, and each is compiled for the one shape that it gets, at once."""

    def __init__(self, trt: Any, engine: Any, kernels: Kernels | None, *, captures: bool) -> None:
        self._engine, self._kernels = engine, kernels
        self._config = engine.create_runtime_config()
        self._config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        # Lazily, the first batches of a size would be slow, and a graph of them would stay so.
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
        # Once; and large networks have a hundred megabytes of them.
        self._kernels, self._known = None, b""
        if kernels is None:
            return
        compiled = self._cache.serialize()
        if compiled is None:
            _log.info("the library does not export its compiled kernels; the next start compiles again")
        elif bytes(compiled) != known:
            kernels.write(bytes(compiled))
