"""Engines that compute in this process's own memory: a batch is gathered into buffers that are allocated once, and its
answers are handed out from others.

Gathering and scattering are the same for every library; a subclass computes between. Knows no library.
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

MOST_SHAPES = 256  # whose bindings are kept


class StagingBuffer:
    """Memory for one tensor of a batch. Grows for a larger shape, and shrinks by `keep_only`."""

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
        """Give back what is more than this. The contents are lost."""
        if len(self.memory) > nbytes:
            self.memory = np.zeros(nbytes, np.uint8)

    def ensure(self, nbytes: int) -> bool:
        """Whether the memory moved, so that bindings to it are void."""
        if nbytes <= len(self.memory):
            return False
        self.memory = np.zeros(nbytes, np.uint8)
        return True

    def clear(self, shape: tuple[int, ...]) -> None:
        """Zeros, or empty strings, for a run without a request."""
        if self.is_strings:
            self._strings = [""] * math.prod(shape)
        else:
            self.memory[: math.prod(shape) * self.spec.numpy_dtype.itemsize] = 0

    def take_strings(self, parts: Sequence[Part], index: int) -> None:
        """The batch's strings. Raises EngineFailure where there are none in these bytes, or none of UTF-8."""
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
        """The same as an output of a run, for as long as the memory does not move. Not for strings."""
        array = self.array(shape)
        return Landed(array, self.view[: array.nbytes])


class StagedEngine(Engine):
    """Gathers, lets the library execute, scatters. After warm-up a batch allocates no tensor where sizes are known.

    One ONNX file, computed by `threads` threads. Specs give per-sample shapes when `max_batch_size` is at least 1,
    whole shapes when it is 0, as in `ModelSpec`. Raises BundleError when the file cannot be loaded or has tensors that
    are not for the library, when a batch has no room in memory, and where the library is missing.
    """

    name: ClassVar[str]
    # Whether outputs land in our buffers, which is safe only where the library never writes beyond the given size.
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
        self._is_large = False  # what runs now: more than the warm-up has shown to fit
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
        """Let the library load the file and check its tensors; returns the library and its version.

        Raises BundleError.
        """

    @abstractmethod
    def _execute(self, shapes: Shapes, samples: int) -> list[Landed]:
        """Run what lies in the staging buffers, whose whole shapes these are; returns outputs in memory that the next
        run reuses, in the shapes that they really have. Raises EngineFailure."""

    @abstractmethod
    def _bind(self, shapes: Shapes, samples: int) -> Any:
        """What the library needs to run these shapes over the staging buffers. Raises what the library raises."""

    def _bound(self, shapes: Shapes, samples: int) -> Any:
        """The same, from the first run of these shapes on. Models with free shapes must not collect them for ever."""
        bound = self._bindings.get(shapes)
        if bound is None:
            if len(self._bindings) >= MOST_SHAPES:
                self._forget()
            bound = self._bindings[shapes] = self._bind(shapes, samples)
        return bound

    def _forget(self) -> None:
        """A buffer moved: nothing that points to one holds any more."""
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
            # Each input by itself may have had all of a usual batch.
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
            # The library gives nothing back before the outputs are gone, so at the end of another run.
            with suppress(EngineFailure):
                self._run_blank(1)

    def _run_blank(self, samples: int) -> None:
        """Run a batch without a request, of the sizes of the examples."""
        shapes = tuple(self.whole_shape(spec, samples) for spec in self.inputs)
        for staging, shape in zip(self._staging_in, shapes, strict=True):
            self._make_room(staging, math.prod(shape) * staging.spec.numpy_dtype.itemsize)
            staging.clear(shape)
        landed = self._execute(shapes, samples)
        if not any(staging.is_strings for staging in self._staging_in):  # empty ones prove nothing
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
