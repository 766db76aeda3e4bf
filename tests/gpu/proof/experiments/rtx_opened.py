"""A plan over cuda-python, as directly as it goes: contexts, the kernels they compile, graphs, runs, times.

Independent of the house's engine on purpose, whose choices are what is asked about.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.gpu.proof.experiments.captures import MODES
from tests.gpu.proof.experiments.cudart import NON_BLOCKING, TO_DEVICE, TO_HOST, CudaError
from tests.gpu.proof.experiments.networks import INPUT, OUTPUT
from tests.gpu.proof.experiments.rtx import Built, Library, Refused, Way

_PORTABLE = 1
# After which a size is at its speed, where nothing is compiled beside the runs.
_SETTLING_RUNS = 3


@dataclass(slots=True)
class _Bound:
    """One batch size: its context, its memory on both sides, and its graph where we captured one."""

    context: Any
    device_in: int
    device_out: int
    host_out: int
    shape_out: tuple[int, ...]
    graph: Any = None


class Opened:
    """One plan on a stream of its own; batch sizes get their contexts when they are first wanted.

    `kernels` is what an earlier one has compiled; `took` tells seconds. Raises Refused.
    """

    def __init__(
        self,
        library: Library,
        plan: Built,
        way: Way | None = None,
        kernels: bytes = b"",
        names: tuple[str, str] = (INPUT, OUTPUT),
    ) -> None:
        self._library, self._plan, self._way, self._names = library, plan, way or Way(), names
        self._bound: dict[int, _Bound] = {}
        self._scratch = 0
        self.took: dict[str, float] = {}
        self.takes_kernels = False
        runtime, trt = library.runtime, library.trt
        self.stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
        began_s = time.perf_counter()
        self._runtime: Any = trt.Runtime(library.logger)
        self._engine: Any = self._runtime.deserialize_cuda_engine(plan.data)
        if self._engine is None:
            raise Refused(library.said())
        self._strategy: Any = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._cache: Any = None
        if hasattr(getattr(trt, "IRuntimeConfig", None), "create_runtime_cache"):  # else it compiles nothing
            self._strategy = self._configured(kernels)
        self.took["deserialise"] = time.perf_counter() - began_s
        profiles = range(self._engine.num_optimization_profiles)
        self.scratch_bytes = max(
            1, *(int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in profiles)
        )
        self._scratch = runtime.cudaMalloc(self.scratch_bytes)

    def _configured(self, kernels: bytes) -> Any:
        trt, config = self._library.trt, self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(self._strategy)
        config.dynamic_shapes_kernel_specialization_strategy = getattr(
            trt.DynamicShapesKernelSpecializationStrategy, self._way.specialisation
        )
        strategies = trt.CudaGraphStrategy
        is_theirs = self._way.captures == "library"
        config.cuda_graph_strategy = strategies.WHOLE_GRAPH_CAPTURE if is_theirs else strategies.DISABLED
        self._cache = config.create_runtime_cache()
        if kernels:
            self.takes_kernels = bool(self._cache.deserialize(kernels))
        config.set_runtime_cache(self._cache)
        return config

    def kernels(self) -> bytes:
        """What was compiled so far, or was given and taken."""
        memory = self._cache.serialize()
        return b"" if memory is None else bytes(memory)

    def bind(self, samples: np.ndarray, key: int | None = None) -> int:
        """Put a batch on the device and make its context; gives its size, or the `key`, by which it is run."""
        library, (size, *_) = self._library, samples.shape
        key = size if key is None else key
        runtime, began_s = library.runtime, time.perf_counter()
        context = self._engine.create_execution_context(self._strategy)
        if context is None:
            raise Refused(f"no context for batch {size}: {library.said()}")
        self.took[f"context {key}"] = time.perf_counter() - began_s
        shape_out = (size, *tuple(self._engine.get_tensor_shape(self._names[1]))[1:])
        nbytes_out = int(np.prod(shape_out)) * 4
        staging = runtime.cudaHostAlloc(max(samples.nbytes, nbytes_out), _PORTABLE)
        bound = _Bound(context, runtime.cudaMalloc(samples.nbytes), runtime.cudaMalloc(nbytes_out), staging, shape_out)
        self._bound[key] = bound
        ctypes.memmove(staging, samples.ctypes.data, samples.nbytes)
        runtime.copy(bound.device_in, staging, samples.nbytes, TO_DEVICE, self.stream)
        context.set_device_memory(self._scratch, self.scratch_bytes)
        profile = 0 if self._plan.profiles == "range" else self._plan.sizes.index(size)
        taken = context.set_optimization_profile_async(profile, int(self.stream))
        runtime.cudaStreamSynchronize(self.stream)
        taken = taken and context.set_input_shape(self._names[0], samples.shape)
        taken = taken and context.set_tensor_address(self._names[0], bound.device_in)
        if not (taken and context.set_tensor_address(self._names[1], bound.device_out)):
            raise Refused(f"batch {size}: {library.said()}")
        return int(key)

    def settle(self, key: int) -> float:
        """The runs after which a batch is at its speed, and the capture; gives the first one's time in ms."""
        first_ms, *_ = [self.run_ms(key) for _ in range(_SETTLING_RUNS)]
        if self._way.captures == "own":
            self.capture(key)
            self.run_ms(key)
        return first_ms

    def capture(self, key: int) -> None:
        """Raises Refused."""
        runtime, bound = self._library.runtime, self._bound[key]
        runtime.cudaStreamBeginCapture(
            self.stream, getattr(runtime.module.cudaStreamCaptureMode, MODES["thread-local"])
        )
        done = bound.context.execute_async_v3(int(self.stream))
        try:
            graph = runtime.cudaStreamEndCapture(self.stream)
            if not done:
                raise Refused(f"batch {key} in a capture: {self._library.said()}")
            if bound.graph is not None:
                runtime.cudaGraphExecDestroy(bound.graph)
            bound.graph = runtime.cudaGraphInstantiate(graph, 0)
            runtime.cudaGraphDestroy(graph)
        except CudaError as error:
            raise Refused(f"batch {key} in a capture: {error}; {self._library.said()}") from error

    def run(self, key: int) -> None:
        """Give the device one batch of a bound key. Raises Refused."""
        bound = self._bound[key]
        if bound.graph is not None:
            self._library.runtime.cudaGraphLaunch(bound.graph, self.stream)
        elif not bound.context.execute_async_v3(int(self.stream)):
            raise Refused(f"batch {key}: {self._library.said()}")

    def finish(self) -> None:
        self._library.runtime.cudaStreamSynchronize(self.stream)

    def run_ms(self, key: int) -> float:
        """One run and the wait for it."""
        began_s = time.perf_counter()
        self.run(key)
        self.finish()
        return (time.perf_counter() - began_s) * 1e3

    def median_ms(self, key: int, rounds: int) -> float:
        return median(self.run_ms(key) for _ in range(rounds))

    def answer(self, key: int) -> np.ndarray:
        """float32. It is overwritten first: nothing old is taken for new."""
        bound, runtime = self._bound[key], self._library.runtime
        nbytes = int(np.prod(bound.shape_out)) * 4
        runtime.cudaMemsetAsync(bound.device_out, 0xFF, nbytes, self.stream)
        self.run(key)
        runtime.copy(bound.host_out, bound.device_out, nbytes, TO_HOST, self.stream)
        runtime.cudaStreamSynchronize(self.stream)
        return np.frombuffer(ctypes.string_at(bound.host_out, nbytes), np.float32).reshape(bound.shape_out)

    def close(self) -> None:
        """From above: contexts before the engine, the engine before the runtime."""
        runtime = self._library.runtime
        runtime.status("cudaStreamSynchronize", self.stream)
        bound, self._bound = list(self._bound.values()), {}
        for one in bound:
            if one.graph is not None:
                runtime.status("cudaGraphExecDestroy", one.graph)
            one.context = None
            for name, memory in (
                ("cudaFree", one.device_in),
                ("cudaFree", one.device_out),
                ("cudaFreeHost", one.host_out),
            ):
                runtime.status(name, memory)
        self._strategy = self._cache = self._engine = self._runtime = None
        if self._scratch:
            runtime.status("cudaFree", self._scratch)
        runtime.status("cudaStreamDestroy", self.stream)


@contextmanager
def opened(library: Library, plan: Built, way: Way | None = None, **given: Any) -> Iterator[Opened]:
    """Raises Refused."""
    one = Opened(library, plan, way, **given)
    try:
        yield one
    finally:
        one.close()
