"""ONNX Runtime on the CPU.

The staging buffers are bound once per batch size and run in place. After warm-up a batch allocates no tensor, except
for outputs whose size only the run can tell, and for models with strings, which cannot be bound.

Intermediate tensors are in memory that all sessions share: a session that does not run needs memory for its weights.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.memory import FreeRuns
from convoy.app.engines.onnx_session import Level, new_session, session_options
from convoy.app.engines.onnx_tensors import bind_input, bind_output, has_strings, tensor_spec, unbound_array
from convoy.app.engines.parts import Landed, Shapes
from convoy.app.engines.signature import Signature, check_names
from convoy.app.engines.staged import StagedEngine, StagingBuffer
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError

LIBRARY = f"onnxruntime {ort.__version__}"
# Words that the library's messages have in common where an output does not fit its place.
_SHAPE_WORDS = re.compile(r"shape|dimension", re.IGNORECASE)
_ARENA_LOCK = Lock()
_NEWER_IR = re.compile(r"Unsupported model IR version: (\d+), max supported IR version: (\d+)")


class _SessionBinding(NamedTuple):
    """A session's binding for some shapes, and where its outputs land; None where a size is free."""

    binding: Any
    outputs: list[Landed] | None


class OnnxRuntimeCpuEngine(StagedEngine):
    """One session, whose intra-op threads do not spin."""

    name = "onnxruntime-cpu"
    text_only = True

    def _open(self, model: Path, precision: Precision, threads: int) -> str:
        is_free = FreeRuns.wanted(self.inputs)
        self._session = open_session(model, threads, any_shape=is_free)
        self._run_options = _giving_back() if is_free else None
        check_names(model, read_signature(self._session, model), self.inputs, self.outputs)
        self._has_strings = has_strings(model, (*self.inputs, *self.outputs))
        return LIBRARY

    def close(self) -> None:
        super().close()
        self._session = None

    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        if self._has_strings:
            return self._execute_unbound(shapes)
        bound: _SessionBinding = self._bound(shapes, samples)
        if bound.outputs is None:
            # A binding remembers the output of its last run, and refuses another size for it.
            self._bind_outputs(bound.binding, samples)
        try:
            self._session.run_with_iobinding(bound.binding, self._run_options if self._is_large else None)
        except Exception as error:  # onnxruntime's errors share no base class
            if _SHAPE_WORDS.search(str(error)) and (unplaced := self._execute_unplaced(shapes)) is not None:
                return unplaced
            raise EngineFailure(first_line(error)) from error
        if bound.outputs is not None:
            return bound.outputs
        values = zip(self._staging_out, bound.binding.get_outputs(), strict=True)
        return [self._landed(staging, value, samples) for staging, value in values]

    def _execute_unplaced(self, shapes: Shapes) -> list[Landed] | None:
        """The outputs without given sizes, to name the one that is not as declared. None where that fails, too."""
        binding = self._session.io_binding()
        try:
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                bind_input(binding, staging, shape)
            for spec in self.outputs:
                binding.bind_output(spec.name, "cpu")
            self._session.run_with_iobinding(binding, self._run_options if self._is_large else None)
        except Exception:  # onnxruntime's errors share no base class
            return None
        values = zip(self.outputs, binding.get_outputs(), strict=True)
        return [Landed(unbound_array(spec, value)) for spec, value in values]

    def _execute_unbound(self, shapes: Shapes) -> list[Landed]:
        staged = zip(self._staging_in, shapes, strict=True)
        feeds = {staging.spec.name: staging.array(shape) for staging, shape in staged}
        try:
            options = self._run_options if self._is_large else None
            arrays: list[np.ndarray] = self._session.run([spec.name for spec in self.outputs], feeds, options)
        except Exception as error:  # onnxruntime's errors share no base class
            raise EngineFailure(first_line(error)) from error
        return [Landed(array) for array in arrays]

    def _landed(self, staging: StagingBuffer, value: Any, samples: int) -> Landed:
        """One output of a run in which some size was free."""
        if staging.spec.sample_bytes is None:
            return Landed(unbound_array(staging.spec, value))
        return staging.landed(self.whole_shape(staging.spec, samples))

    def _bind(self, shapes: Shapes, samples: int) -> _SessionBinding:
        binding = self._session.io_binding()
        try:
            for staging, shape in zip(self._staging_in, shapes, strict=True):
                bind_input(binding, staging, shape)
        except Exception as error:
            raise EngineFailure(first_line(error)) from error
        if any(staging.spec.sample_bytes is None for staging in self._staging_out):
            return _SessionBinding(binding, None)
        self._bind_outputs(binding, samples)
        outputs = [staging.landed(self.whole_shape(staging.spec, samples)) for staging in self._staging_out]
        return _SessionBinding(binding, outputs)

    def _bind_outputs(self, binding: Any, samples: int) -> None:
        binding.clear_binding_outputs()
        try:
            for staging in self._staging_out:
                if staging.spec.sample_bytes is None:
                    binding.bind_output(staging.spec.name, "cpu")
                else:
                    bind_output(binding, staging, self.whole_shape(staging.spec, samples))
        except Exception as error:
            raise EngineFailure(first_line(error)) from error


def _giving_back() -> Any:
    """Options for a run whose memory goes back to the system. The library itself keeps what its largest run took."""
    options = ort.RunOptions()
    options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return options


@cache
def _register_arena() -> None:
    """The arena that sessions share: as large as the runs at the same time need."""
    kind = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(kind, None)


def open_session(model: Path, threads: int, *, quiet: bool = False, any_shape: bool = False) -> Any:
    """A CPU session for an ONNX file; a `quiet` one does not log what fails in it. Raises BundleError.

    `any_shape`: it will see more shapes than it may remember.
    """
    options = session_options(threads=threads, quiet=quiet)
    # A pattern is kept for ever for each combination of shapes.
    options.enable_mem_pattern = not any_shape
    # Weights go back to the system with their session; in an arena they would stay.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # A session that gives back the memory of large runs has an arena of its own: others would have to allocate again.
    if not any_shape:
        with _ARENA_LOCK:
            _register_arena()
        options.add_session_config_entry("session.use_env_allocators", "1")
    return _opened(model, options)


def open_original(model: Path, threads: int, *, quiet: bool = False) -> Any:
    """The same without any optimisation: what the graph means, to hold a served one against. Raises BundleError."""
    return _opened(model, session_options(threads=threads, quiet=quiet, level=Level.ORT_DISABLE_ALL))


def _opened(model: Path, options: Any) -> Any:
    try:
        return new_session(model, options)
    except Exception as error:  # onnxruntime's errors share no base class
        if version := _NEWER_IR.search(str(error)):
            own, known = version.groups()
            raise BundleError(
                f"{model}: its IR version is {own}, and ONNX Runtime knows {known} at most; save it again with an "
                f"older one: load it with onnx.load, set model.ir_version = {known}, and onnx.save it"
            ) from error
        raise BundleError(f"{model}: ONNX Runtime cannot load it ({first_line(error)})") from error


def read_signature(session: Any, model: Path) -> Signature:
    """The tensors that a session takes and gives, in the file's order. Raises BundleError."""
    return Signature(
        tuple(tensor_spec(node, model) for node in session.get_inputs()),
        tuple(tensor_spec(node, model) for node in session.get_outputs()),
    )


def first_line(error: Exception) -> str:
    """What an error of the library says, in one line, without its stack.

    Its sentences go on from line to line, as where sizes are listed.
    """
    lines = str(error).strip().splitlines()
    stack = (index for index, line in enumerate(lines) if index and re.match(r"\s*(#\d|0x|Stacktrace|\*+$)", line))
    words = " ".join(" ".join(lines[: next(stack, len(lines))]).split())
    return words or type(error).__name__
