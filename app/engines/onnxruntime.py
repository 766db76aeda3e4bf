"""ONNX Runtime on the CPU.

Inputs are gathered into staging buffers that are allocated once, bound once per batch size, and run in
place; outputs of known size land in buffers of the same kind. After warm-up a batch allocates no tensor,
except for outputs whose size only the run can tell, and for models with strings, which cannot be bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from convoy.app.engines import cpu
from convoy.app.engines.base import Engine, EngineFailure, EngineInfo, Part, RunResult
from convoy.app.engines.delivery import Landed, scatter
from convoy.app.engines.memory import Growth, check_batch
from convoy.app.engines.onnx_tensors import Staging, bind_input, bind_output, has_strings, tensor_spec, unbound_array
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec

LIBRARY = f"onnxruntime {ort.__version__}"
Shapes = tuple[tuple[int, ...], ...]

# So many shape combinations keep their binding; models with free shapes must not collect them for ever.
_MAX_BINDINGS = 256


@dataclass(frozen=True, slots=True)
class Signature:
    """A graph's tensors as the file declares them: whole shapes, -1 for every size that is not fixed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class _Bound(NamedTuple):
    """A session's binding for some shapes, and where its outputs land; None where a size is free."""

    binding: Any
    outputs: list[Landed] | None


class OnnxRuntimeCpuEngine(Engine):
    """One ONNX file in one session with `threads` intra-op threads, spinning off.

    `inputs` and `outputs` give per-sample shapes when `max_batch_size` is at least 1, whole shapes when
    it is 0, as in `ModelSpec`. Raises BundleError when the file cannot be loaded, or a batch has no room in memory.
    """

    text_only = True
    computes_in_caller = True

    def __init__(
        self,
        model: Path,
        *,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        max_batch_size: int,
        precision: Precision,
        threads: int,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.batched = max_batch_size > 0
        check_batch(inputs, outputs, max_batch_size)
        self._session = open_session(model, threads)
        check_names(model, read_signature(self._session, model), inputs, outputs)
        self._has_strings = has_strings(model, (*inputs, *outputs))
        largest = max(1, max_batch_size)
        self.info = EngineInfo(
            engine="onnxruntime-cpu",
            precision=precision,
            device="cpu",
            device_fingerprint=cpu.fingerprint(threads, LIBRARY),
            library=LIBRARY,
            batch_sizes=tuple(range(1, largest + 1)),
        )
        self._staging_in = [Staging(spec, largest * (spec.sample_bytes or 0)) for spec in inputs]
        self._staging_out = [Staging(spec, largest * (spec.sample_bytes or 0)) for spec in outputs]
        self._bindings: dict[Shapes, _Bound] = {}

    def warm_up(self) -> None:
        for samples in Growth(self.info.batch_sizes[-1]).sizes():
            shapes = tuple(self._whole_shape(spec, samples) for spec in self.inputs)
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                self._make_room(staging, math.prod(shape) * staging.spec.numpy_dtype.itemsize)
                staging.clear(shape)
            self._execute(shapes, samples)

    def run(self, parts: Sequence[Part]) -> RunResult:
        started_ns = time.monotonic_ns()
        samples = sum([part.samples for part in parts])
        shapes = parts[0].shapes  # all parts agree but in the first dimension
        if self.batched:
            # Through a list: a tuple made of a generator leaves its interpreter one more spare tuple each time.
            shapes = tuple([(samples, *shape[1:]) for shape in shapes])
        self._gather(parts)
        gathered_ns = time.monotonic_ns()
        landed = self._execute(shapes, samples)
        computed_ns = time.monotonic_ns()
        outputs = scatter(parts, landed, batched=self.batched)
        return RunResult(
            outputs=outputs,
            copy_in_ns=gathered_ns - started_ns,
            compute_ns=computed_ns - gathered_ns,
            copy_out_ns=time.monotonic_ns() - computed_ns,
        )

    def close(self) -> None:
        self._bindings.clear()
        self._session = None
        self._staging_in, self._staging_out = [], []

    def _gather(self, parts: Sequence[Part]) -> None:
        for index, staging in enumerate(self._staging_in):
            if staging.is_strings:
                staging.take_strings(parts, index)
                continue
            sources = [part.inputs[index] for part in parts]
            self._make_room(staging, sum([source.nbytes for source in sources]))
            view, offset = staging.view, 0
            for source in sources:
                end = offset + source.nbytes
                view[offset:end] = source
                offset = end

    def _make_room(self, staging: Staging, nbytes: int) -> None:
        if staging.ensure(nbytes):
            self._bindings.clear()  # they point to where the memory was

    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        """Run what lies in the staging buffers; returns outputs in buffers that the next run reuses."""
        if self._has_strings:
            return self._execute_unbound(shapes)
        bound = self._bindings.get(shapes)
        if bound is None:
            bound = self._bind(shapes, samples)
        elif bound.outputs is None:
            # A binding remembers the output of its last run, and refuses another size for it.
            self._bind_outputs(bound.binding, samples)
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # onnxruntime's errors share no base class
            raise EngineFailure(first_line(error)) from error
        if bound.outputs is not None:
            return bound.outputs
        values = zip(self._staging_out, bound.binding.get_outputs(), strict=True)
        return [self._landed(staging, value, samples) for staging, value in values]

    def _execute_unbound(self, shapes: Shapes) -> list[Landed]:
        staged = zip(self._staging_in, shapes, strict=True)
        feeds = {staging.spec.name: staging.array(shape) for staging, shape in staged}
        try:
            arrays: list[np.ndarray] = self._session.run([spec.name for spec in self.outputs], feeds)
        except Exception as error:  # onnxruntime's errors share no base class
            raise EngineFailure(first_line(error)) from error
        return [Landed(array) for array in arrays]

    def _landed(self, staging: Staging, value: Any, samples: int) -> Landed:
        """One output of a run in which some size was free."""
        if staging.spec.sample_bytes is None:
            return Landed(unbound_array(staging.spec, value))
        return staging.landed(self._whole_shape(staging.spec, samples))

    def _bind(self, shapes: Shapes, samples: int) -> _Bound:
        if len(self._bindings) >= _MAX_BINDINGS:
            self._bindings.clear()
        binding = self._session.io_binding()
        try:
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                bind_input(binding, staging, shape)
        except Exception as error:
            raise EngineFailure(first_line(error)) from error
        self._bind_outputs(binding, samples)
        outputs = None
        if not any(staging.spec.sample_bytes is None for staging in self._staging_out):
            outputs = [staging.landed(self._whole_shape(staging.spec, samples)) for staging in self._staging_out]
        bound = self._bindings[shapes] = _Bound(binding, outputs)
        return bound

    def _bind_outputs(self, binding: Any, samples: int) -> None:
        binding.clear_binding_outputs()
        try:
            for staging in self._staging_out:
                if staging.spec.sample_bytes is None:
                    binding.bind_output(staging.spec.name, "cpu")
                else:
                    bind_output(binding, staging, self._whole_shape(staging.spec, samples))
        except Exception as error:
            raise EngineFailure(first_line(error)) from error

    def _whole_shape(self, spec: TensorSpec, samples: int) -> tuple[int, ...]:
        # A free size is warmed up as 1; the run itself takes it from the request.
        fixed = tuple(1 if size < 0 else size for size in spec.shape)
        return (samples, *fixed) if self.batched else fixed


def open_session(model: Path, threads: int, *, quiet: bool = False) -> Any:
    """A CPU session for an ONNX file; a `quiet` one does not log what fails in it. Raises BundleError."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4 if quiet else 3
    # Idle cores belong to the edge and to other models.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors share no base class
        raise BundleError(f"{model}: ONNX Runtime cannot load it ({first_line(error)})") from error


def read_signature(session: Any, model: Path) -> Signature:
    """The tensors that a session takes and gives, in the file's order. Raises BundleError."""
    return Signature(
        tuple(tensor_spec(node, model) for node in session.get_inputs()),
        tuple(tensor_spec(node, model) for node in session.get_outputs()),
    )


def check_names(model: Path, have: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Whether the file has the tensors that the specification promises. Raises BundleError."""
    for ours, theirs in ((inputs, have.inputs), (outputs, have.outputs)):
        if [(t.name, t.dtype) for t in ours] != [(t.name, t.dtype) for t in theirs]:
            raise BundleError(
                f"{model}: the specification says {[(t.name, t.dtype) for t in ours]}, "
                f"the file has {[(t.name, t.dtype) for t in theirs]}; export the model again"
            )


def first_line(error: Exception) -> str:
    """What an error of the library says, without its stack."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
