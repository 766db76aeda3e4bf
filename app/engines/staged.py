"""Engines that compute in this process's memory: inputs are gathered into buffers that are allocated once, and answers
are scattered from others.

The same for every library; a subclass computes in between.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from convoy.app.engines import cpu
from convoy.app.engines.base import CPU, Engine, EngineInfo, WarmShapes
from convoy.app.engines.batch import BatchResult, EngineFailure, StageTimes
from convoy.app.engines.memory import FreeRuns, check_batch, growing_sizes
from convoy.app.engines.parts import Landed, Part, Shapes, check_landed, gather, joined, scatter
from convoy.models.bundle import Precision
from convoy.models.spec import TensorSpec
from convoy.models.tensors import unpack

MOST_SHAPES = 256  # whose bindings are cached


class StagingBuffer:
    """Memory for one tensor of a batch. Grows for a larger shape; `keep_only` shrinks it."""

    def __init__(self, spec: TensorSpec, capacity_bytes: int) -> None:
        self.spec = spec
        self.is_strings = spec.is_strings
        self.memory = np.zeros(capacity_bytes, np.uint8)
        self._strings: list[str] = []

    @property
    def view(self) -> memoryview:
        """The bytes of the memory."""
        return self.memory.data

    def keep_only(self, nbytes: int) -> None:
        """Free memory beyond this size. The contents are lost."""
        if len(self.memory) > nbytes:
            self.memory = np.zeros(nbytes, np.uint8)

    def ensure(self, nbytes: int) -> bool:
        """Make room for a shape. Returns whether the memory moved, which invalidates bindings."""
        if nbytes <= len(self.memory):
            return False
        self.memory = np.zeros(nbytes, np.uint8)
        return True

    def clear(self, shape: tuple[int, ...]) -> None:
        """Fill with zeros or empty strings, for a run without a request."""
        if self.is_strings:
            self._strings = [""] * math.prod(shape)
        else:
            self.memory[: math.prod(shape) * self.spec.numpy_dtype.itemsize] = 0

    def take_strings(self, parts: Sequence[Part], index: int) -> None:
        """Unpack the batch's strings. Raises EngineFailure if these bytes have none, or none in UTF-8."""
        try:
            self._strings = [element.decode() for part in parts for element in unpack(part.inputs[index])]
        except ValueError as error:
            raise EngineFailure(f"input '{self.spec.name}' cannot be read as strings: {error}") from error

    def array(self, shape: tuple[int, ...]) -> np.ndarray:
        """The contents, as an array of the tensor's dtype."""
        if self.is_strings:
            strings = np.empty(len(self._strings), object)
            strings[:] = self._strings
            return strings.reshape(shape)
        nbytes = math.prod(shape) * self.spec.numpy_dtype.itemsize
        return self.memory[:nbytes].view(self.spec.numpy_dtype).reshape(shape)

    def landed(self, shape: tuple[int, ...]) -> Landed:
        """The contents as an output of a run, valid until the memory moves. Not for strings."""
        array = self.array(shape)
        return Landed(array, self.view[: array.nbytes])


class StagedEngine(Engine):
    """Gathers, lets the library execute, scatters. After warm-up a batch allocates no tensors if sizes are known.

    One ONNX file, computed by `threads` threads. Specs give per-sample shapes if `max_batch_size` is at least 1, and
    whole shapes if it is 0, as in `ModelSpec`. Raises BundleError if the file cannot be loaded, has tensors that the
    library does not support, if a batch does not fit into memory, or if the library is missing.
    """

    name: ClassVar[str]
    # Whether outputs land in our buffers, which is only safe if the library never writes beyond the given size.
    places_outputs: ClassVar[bool] = True

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
        self.batched, largest = max_batch_size > 0, max(1, max_batch_size)
        check_batch(inputs, outputs, max_batch_size)
        self._free_runs = FreeRuns(inputs, largest) if FreeRuns.wanted(inputs) else None
        self._is_large = False  # whether the current run is larger than what the warm-up has shown to fit
        self._bindings: dict[Shapes, Any] = {}
        library = self._open(model, precision, threads)
        self.info = EngineInfo(
            engine=self.name,
            precision=precision,
            device=CPU,
            device_fingerprint=cpu.fingerprint(threads, library),
            library=library,
            batch_sizes=tuple(range(1, largest + 1)),
        )
        self._staging_in = [StagingBuffer(spec, largest * (spec.sample_bytes or 0)) for spec in inputs]
        placed = outputs if self.places_outputs else ()
        self._staging_out = [StagingBuffer(spec, largest * (spec.sample_bytes or 0)) for spec in placed]

    @abstractmethod
    def _open(self, model: Path, precision: Precision, threads: int) -> str:
        """Load the file and check its tensors. Returns the library and its version. Raises BundleError."""

    @abstractmethod
    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        """Run what is in the staging buffers, with these whole shapes. Returns outputs in memory that the next run
        reuses, in their real shapes. Raises EngineFailure.
        """

    @abstractmethod
    def _bind(self, shapes: Shapes, samples: int) -> Any:
        """Bind these shapes to the staging buffers. Raises what the library raises."""

    def _bound(self, shapes: Shapes, samples: int) -> Any:
        """The cached binding, made in the first run of these shapes. The cache is bounded for dynamic shapes."""
        bound = self._bindings.get(shapes)
        if bound is None:
            if len(self._bindings) >= MOST_SHAPES:
                self._forget()
            bound = self._bindings[shapes] = self._bind(shapes, samples)
        return bound

    def _forget(self) -> None:
        """Drop bindings to a buffer that moved."""
        self._bindings.clear()

    def warm_shapes(self) -> WarmShapes | None:
        free = self._free_runs
        if free is None:
            return None
        outputs = sum([len(staging.memory) for staging in self._staging_out])
        return WarmShapes(
            warm=len(self._bindings),
            limit=MOST_SHAPES,
            buffer_bytes=outputs + sum([len(staging.memory) for staging in self._staging_in]),
            # Each input alone may have been as large as a usual batch.
            buffer_limit_bytes=outputs + len(self.inputs) * free.usual_bytes,
            run_limit_bytes=free.usual_run_bytes,
        )

    def warm_up(self) -> None:
        for samples in growing_sizes(self.info.batch_sizes[-1]):
            self._run_blank(samples)
            if self._free_runs is not None and samples == 1:
                self._free_runs.ran_one()
        if self._free_runs is not None:
            self._free_runs.ran_largest()

    def run(self, parts: Sequence[Part]) -> BatchResult:
        free = self._free_runs
        if free is None:
            return self._run_together(parts)
        results = [self._run_of_any_size(free, group) for group in free.groups(parts)]
        if len(results) == 1:
            return results[0]
        stages = zip(*(result.times for result in results), strict=True)
        times = StageTimes(*(sum(stage) for stage in stages))
        return BatchResult(tuple([answers for result in results for answers in result.answers]), times)

    def _run_of_any_size(self, free: FreeRuns, parts: Sequence[Part]) -> BatchResult:
        self._is_large = free.is_large(parts)
        if not self._is_large:
            return self._run_together(parts)
        usual = [staging.memory.nbytes for staging in self._staging_in]
        try:
            return self._run_together(parts)
        finally:
            self._forget()
            for staging, nbytes in zip(self._staging_in, usual, strict=True):
                staging.keep_only(nbytes)
            # The library only frees memory after the outputs are gone, so at the end of another run.
            with suppress(EngineFailure):
                self._run_blank(1)

    def _run_blank(self, samples: int) -> None:
        """Run a batch without a request, with the examples' sizes."""
        shapes = tuple(self.whole_shape(spec, samples) for spec in self.inputs)
        for staging, shape in zip(self._staging_in, shapes, strict=True):
            self._make_room(staging, math.prod(shape) * staging.spec.numpy_dtype.itemsize)
            staging.clear(shape)
        landed = self._execute(shapes, samples)
        if not any(staging.is_strings for staging in self._staging_in):  # empty outputs prove nothing
            check_landed(landed, self.outputs, samples, batched=self.batched)

    def _run_together(self, parts: Sequence[Part]) -> BatchResult:
        started_ns = time.monotonic_ns()
        samples, shapes = joined(parts, batched=self.batched)
        self._gather(parts)
        gathered_ns = time.monotonic_ns()
        landed = self._execute(shapes, samples)
        computed_ns = time.monotonic_ns()
        outputs = scatter(parts, landed, self.outputs, batched=self.batched)
        times = StageTimes(gathered_ns - started_ns, computed_ns - gathered_ns, time.monotonic_ns() - computed_ns)
        return BatchResult(outputs, times)

    def close(self) -> None:
        self._forget()
        self._staging_in, self._staging_out = [], []

    def _gather(self, parts: Sequence[Part]) -> None:
        for index, staging in enumerate(self._staging_in):
            if staging.is_strings:
                staging.take_strings(parts, index)
                continue
            nbytes = gather(parts, index, staging.view)
            if nbytes > len(staging.view):
                self._make_room(staging, nbytes)
                gather(parts, index, staging.view)

    def _make_room(self, staging: StagingBuffer, nbytes: int) -> None:
        if staging.ensure(nbytes):
            self._forget()
