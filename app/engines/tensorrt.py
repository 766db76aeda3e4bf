"""Plans of TensorRT and of TensorRT for RTX, usually the fastest way to run a model on the GPU they were built for.

A plan is executable code, so it only comes from `convoy.models.plan_cache.find_plan`, which verifies the very bytes
that are loaded. Each slot and batch size has one execution context, whose addresses are set once, and one CUDA graph if
it can be captured: a run is one launch. All contexts share one scratch block, because the device computes one batch at
a time.

Uses the runtime API that TensorRT 10.12 to 11.x and TensorRT for RTX share; `convoy.app.engines.tensorrt_contexts`
knows how their contexts differ.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import CaptureDisturbed, Handle, undisturbed
from convoy.app.engines.cuda.engine import SLOTS, CudaEngine, bucket_sizes
from convoy.app.engines.cuda.slots import DeviceSlot
from convoy.app.engines.tensorrt_contexts import Contexts, Kernels, open_contexts
from convoy.app.engines.tensorrt_library import Needed, collecting_logger, explained, library_named
from convoy.models.errors import BundleError
from convoy.models.plans import BuildOptions, Plan
from convoy.models.spec import TensorSpec

_log = logging.getLogger("convoy")

NEEDED: Needed = (
    ("Runtime", "deserialize_cuda_engine"),
    ("ICudaEngine", "create_execution_context"),
    ("ICudaEngine", "get_device_memory_size_for_profile_v2"),
    ("IExecutionContext", "execute_async_v3"),
    ("IExecutionContext", "get_tensor_shape"),
    ("IExecutionContext", "set_device_memory"),
    ("IExecutionContext", "set_optimization_profile_async"),
    ("ExecutionContextAllocationStrategy", "USER_MANAGED"),
)
_PREPARING_RUNS = 2
_PREPARING_ATTEMPTS = 3
_CAPTURE_WORD = "captur"
# What records a batch's work as a CUDA graph.
Captures = Literal["own", "library", "nobody"]
# TensorRT's names of data types, by ours.
_DATA_TYPES = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "FP16": "HALF",
    "FP32": "FLOAT",
    "BF16": "BF16",
}


class TensorRtEngine(CudaEngine):
    """One plan on `device`.

    Uses the plan's batch sizes up to the first that holds `max_batch_size`; if one profile has them all, the sizes that
    a server runs. `trt` is the module of the library that built it. If nothing `captures`, every run is a plain
    enqueue; "library" leaves capturing to a library that can. `kernels` is where kernels compiled on the device are
    kept. Raises BundleError if the plan does not load or has other tensors, and EngineFailure if the device lacks
    memory.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        trt: Any,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        batched: bool,
        max_batch_size: int | None = None,
        captures: Captures = "own",
        kernels: Kernels | None = None,
        slots: int = SLOTS,
    ) -> None:
        options, library = plan.record.options, plan.record.key.target.library
        sizes = options.batch_sizes
        super().__init__(
            device,
            inputs=inputs,
            outputs=outputs,
            batch_sizes=_used_sizes(options, min(max_batch_size or sizes[-1], sizes[-1])),
            batched=batched,
            engine=library,
            library=f"{library} {trt.__version__}",
            precision=options.precision,
            slots=slots,
        )
        self._trt = trt
        self._title = library_named(library).title
        self._captures = captures
        self._plan_sizes = sizes
        self._has_one_profile = options.profiles == "range"
        self._logger = collecting_logger(trt)
        self._scratch = 0
        self._ways: dict[tuple[DeviceSlot, int], _Way] = {}
        self._runtime: Any = None
        self._engine: Any = None
        self._contexts: Contexts | None = None
        try:
            scratch_bytes = max(plan.record.scratch_bytes[: len(self.info.batch_sizes)], default=0)
            device.check_room(len(plan.data) + scratch_bytes, plan.path.name)
            with self._cuda.beside_captures():
                self._runtime = trt.Runtime(self._logger)
                self._engine = self._load(plan)
                self._contexts = open_contexts(trt, self._engine, kernels, captures=captures == "library")
            self._check_tensors(plan)
            profiles = range(1 if self._has_one_profile else len(self.info.batch_sizes))
            needed = (int(self._engine.get_device_memory_size_for_profile_v2(index)) for index in profiles)
            self._scratch_bytes = max(1, *needed)
            self._open_slots(library_bytes=self._scratch_bytes)
            self._scratch = self._cuda.allocate(self._scratch_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def graphs(self) -> int:
        """For how many pairs of slot and batch size a graph was captured."""
        return sum(way.graph is not None for way in self._ways.values())

    def warm_up(self) -> None:
        super().warm_up()
        if self._contexts is not None:
            self._contexts.keep()

    def _load(self, plan: Plan) -> Any:
        engine = self._runtime.deserialize_cuda_engine(plan.data)
        if engine is None:
            reason = self._reason()
            if "memory" in reason.lower():
                raise EngineFailure(f"{plan.path}: {reason}", FailureScope.MEMORY)
            raise BundleError(f"{plan.path}: {self._title} does not load it ({reason}); remove it to build it again")
        return engine

    def _check_tensors(self, plan: Plan) -> None:
        """Check that the plan was built from what the manifest describes.

        A wrong dtype would be misread, and a larger shape written out of bounds.
        """
        names = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        specs = {spec.name: spec for spec in (*self.inputs, *self.outputs)}
        wrong = sorted((names ^ specs.keys()) | {name for name in names & specs.keys() if not self._fits(specs[name])})
        if wrong:
            raise BundleError(
                f"{plan.path}: tensor {wrong[0]!r} does not match the manifest; remove it to build it again"
            )
        if self._engine.num_optimization_profiles != (1 if self._has_one_profile else len(self._plan_sizes)):
            raise BundleError(f"{plan.path}: has no profile for some batch sizes; remove it to build it again")

    def _fits(self, spec: TensorSpec) -> bool:
        dtype = getattr(self._trt.DataType, _DATA_TYPES.get(spec.dtype, ""), None)
        have, want = tuple(self._engine.get_tensor_shape(spec.name)), self.whole_shape(spec, -1)
        if len(self._plan_sizes) == 1:
            # If the only profile has one size, that size is static, and TensorRT may report it so.
            have, want = self._batch_of_one_size(have), self._batch_of_one_size(want)
        # -1: TensorRT knows the size only when a batch comes.
        same_shape = len(have) == len(want) and all(h in (w, -1) for h, w in zip(have, want, strict=True))
        return self._engine.get_tensor_dtype(spec.name) == dtype and same_shape

    def _batch_of_one_size(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.batched and shape[:1] == (-1,):
            return (*self._plan_sizes, *shape[1:])
        return shape

    # Preparing

    def _prepare(self, slot: DeviceSlot, size: int) -> None:
        with self._cuda.beside_captures():
            way = _Way(self._bound_context(slot, size))
            self._ways[slot, size] = way
            if self._captures != "library":
                # The first enqueue does deferred initialisation, which a graph must not contain.
                self._enqueue(way, slot, size)
                self._cuda.wait_for_stream(slot.stream)
        if self._captures == "own":
            way.graph = self._captured(way, slot, size)
        if self._captures == "library":
            # It captures at some time within its first enqueues: alone on the device, and again if disturbed.
            undisturbed(_PREPARING_ATTEMPTS, lambda: self._let_capture(way, slot, size))

    def _let_capture(self, way: _Way, slot: DeviceSlot, size: int) -> None:
        with self._cuda.capturing():
            for _ in range(_PREPARING_RUNS):
                self._enqueue(way, slot, size)
                self._cuda.wait_for_stream(slot.stream)

    def _bound_context(self, slot: DeviceSlot, size: int) -> Any:
        """Make a context whose profile, shapes and addresses are set here and never again."""
        context = self._contexts.create() if self._contexts is not None else None
        if context is None:
            raise EngineFailure(f"no execution context: {self._reason()}", FailureScope.MEMORY)
        context.set_device_memory(self._scratch, self._scratch_bytes)
        profile = 0 if self._has_one_profile else self.info.batch_sizes.index(size)
        done = context.set_optimization_profile_async(profile, int(slot.stream))
        self._cuda.wait_for_stream(slot.stream)
        for index, spec in enumerate(self.inputs):
            done = done and context.set_input_shape(spec.name, self.whole_shape(spec, size))
            done = done and context.set_tensor_address(spec.name, slot.device_input(index))
        for index, spec in enumerate(self.outputs):
            done = done and context.set_tensor_address(spec.name, slot.device_output(index))
        if not done:
            raise EngineFailure(
                f"{self._title} does not accept batch size {size}: {self._reason()}", FailureScope.ENGINE
            )
        self._check_outputs(context, size)
        return context

    def _check_outputs(self, context: Any, size: int) -> None:
        """Check that a run of this size fills exactly the outputs' places.

        -1 is a size that only the run tells: behind a shorter output would be data of the previous batch.
        """
        for spec in self.outputs:
            have, declared = tuple(context.get_tensor_shape(spec.name)), self.whole_shape(spec, size)
            if have != declared:
                raise EngineFailure(
                    f"output '{spec.name}' has the shape {list(have)}, but the model declares {list(declared)}; "
                    "declare a dimension that varies as -1, which is served without a plan",
                    FailureScope.ENGINE,
                )

    def _captured(self, way: _Way, slot: DeviceSlot, size: int) -> Handle | None:
        """The graph, or None if it cannot be captured; then the context is enqueued each time."""
        try:
            # A refused enqueue would leave an empty graph and stale answers: it must fail here.
            return self._cuda.capture(slot.stream, lambda: self._enqueue(way, slot, size))
        except EngineFailure as failure:
            if failure.scope is FailureScope.DEVICE:
                raise
            _log.info("no CUDA graph for batch size %d (%s); running without one", size, failure)
            return None

    # Running

    def _compute(self, slot: DeviceSlot, size: int) -> None:
        way = self._ways[slot, size]
        if way.graph is not None:
            self._cuda.launch_graph(way.graph, slot.stream)
        else:
            self._enqueue(way, slot, size)

    def _enqueue(self, way: _Way, slot: DeviceSlot, size: int) -> None:
        if not way.context.execute_async_v3(int(slot.stream)):
            reason = self._reason()
            kind = CaptureDisturbed if _CAPTURE_WORD in reason.lower() else EngineFailure
            raise kind(f"{self._title} refused a batch of {size}: {reason}")

    def _reason(self) -> str:
        """What TensorRT has logged as errors since the last call."""
        reason = explained(self._logger.errors)
        self._logger.errors.clear()
        return reason

    def _release(self) -> None:
        with ExitStack() as owned:  # callbacks run in reverse order
            if self._scratch:
                owned.callback(self._cuda.free, self._scratch)
            owned.callback(self._release_library)
            for graph in [way.graph for way in self._ways.values() if way.graph is not None]:
                owned.callback(self._cuda.destroy_graph, graph)

    def _release_library(self) -> None:
        with self._cuda.beside_captures():
            # Contexts before the engine, the engine before the runtime: each holds a bare pointer to the next.
            self._ways.clear()
            self._contexts = None
            self._engine = None
            self._runtime = None


def _used_sizes(options: BuildOptions, largest: int) -> tuple[int, ...]:
    sizes = options.batch_sizes
    if options.profiles == "range" and sizes[0] == 1:
        return bucket_sizes(largest)  # sizes between are no larger than necessary
    return sizes[: sum(size < largest for size in sizes) + 1]


@dataclass(slots=True)
class _Way:
    """How one slot runs one batch size."""

    context: Any
    graph: Handle | None = None


def supports(specs: tuple[TensorSpec, ...]) -> bool:
    """Whether TensorRT has all of these data types and every size is known."""
    return all(spec.dtype in _DATA_TYPES and spec.sample_bytes is not None for spec in specs)
