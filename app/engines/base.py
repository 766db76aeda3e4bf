"""The contract between the scheduler and whatever can run a model.

An engine is told where each request's tensors are and where its answers belong. It gathers a batch, runs it and
scatters the results itself, because a GPU does that with its copy engine and a CPU with memcpy. An engine knows nothing
about queues, deadlines, clients or files other than its model.

At most `info.slots` threads are in `run` at a time: one on a CPU; two on a GPU, where the copies of one batch overlap
with the computation of the other. `close` may come from any thread after every `run` has returned.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from convoy.app.engines.batch import BatchResult
from convoy.app.engines.parts import Part
from convoy.models.bundle import Precision
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from convoy.models.tensors import from_bytes, to_bytes

CPU = "cpu"


def is_cpu(device: str) -> bool:
    return device == CPU or device.startswith(f"{CPU}/")


def nth_of_cpu(number: int) -> str:
    """The name of the CPU's nth engine of a model. Each counts as its own device, because they compute at the same
    time.
    """
    return f"{CPU}/{number}" if number else CPU


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs the model, for logs, metrics and latency tables.

    `batch_sizes` are the sizes that the engine runs without padding, in ascending order; other sizes are padded to the
    next one. `device_fingerprint` names the hardware, threads and library for which a measured latency is valid. Up to
    `slots` batches may be in `run` at once; they share the device and compute one after the other.
    """

    engine: str
    precision: Precision
    device: str
    device_fingerprint: str
    library: str
    batch_sizes: tuple[int, ...]
    slots: int = 1

    @property
    def is_on_cpu(self) -> bool:
        return is_cpu(self.device)


@dataclass(frozen=True, slots=True)
class WarmShapes:
    """What an engine keeps for a model with dynamic sizes, all of it bounded because clients choose the sizes.

    `warm` is the number of shape combinations whose bindings are cached, at most `limit`. `buffer_bytes` is the memory
    for gathered batches and known outputs, of which at most `buffer_limit_bytes` is kept. `run_limit_bytes` is the
    expected memory of a run of the usual size beside that; 0 if it was too small to measure.
    """

    warm: int
    limit: int
    buffer_bytes: int
    buffer_limit_bytes: int
    run_limit_bytes: int

    def __add__(self, other: WarmShapes) -> WarmShapes:
        return WarmShapes(
            self.warm + other.warm,
            self.limit + other.limit,
            self.buffer_bytes + other.buffer_bytes,
            self.buffer_limit_bytes + other.buffer_limit_bytes,
            self.run_limit_bytes + other.run_limit_bytes,
        )


class Engine(ABC):
    """One loaded model on one device. `batched` means that the first dimension of tensors is the batch.

    With `text_only`, elements of BYTES inputs must be UTF-8.
    """

    text_only: ClassVar[bool] = False
    info: EngineInfo
    batched: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @abstractmethod
    def warm_up(self) -> None:
        """Run every batch size once, so that no request pays for a first time. Raises EngineFailure.

        Called before the first `run`; may be repeated.
        """

    @abstractmethod
    def run(self, parts: Sequence[Part]) -> BatchResult:
        """Run the parts as one batch. Raises EngineFailure; the contents of all destinations are then undefined."""

    def whole_shape(self, spec: TensorSpec, samples: int) -> tuple[int, ...]:
        """A tensor's shape in a batch. Dynamic sizes are those of the spec's example."""
        return (samples, *spec.drawn_shape) if self.batched else spec.drawn_shape

    def warm_shapes(self) -> WarmShapes | None:
        """What is kept for dynamic sizes; None if all sizes are fixed. May be called from any thread, during `run`."""
        return None

    def page_lock(self, memory: memoryview) -> bool:
        """Page-lock the block that parts will be in, if a device can then read it directly. Returns whether it is
        locked.

        Locked pages must not be returned to the system before `page_unlock`. A CPU has no use for it. Takes long for a
        large block; may be called from any thread, during `run`.
        """
        return False

    def page_unlock(self, memory: memoryview) -> None:
        """Undo `page_lock` before the block is freed. May be called after `close`; no batch may use the block."""
        return

    def enter_service(self) -> None:
        """Note that batches of clients come from now on."""
        return

    def rest(self) -> None:
        """Free memory that runs have left and that the next run would allocate again. Not during `run`."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free the device's memory. Can be called twice."""


def run_arrays(engine: Engine, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run whole arrays, for callers without a slab: export, canaries and tests.

    `arrays` maps each input's name to an array of its dtype whose first dimension is the batch, or of its whole shape
    for a model without batches. Returns arrays that the caller owns.
    """
    # Not `ascontiguousarray`, which adds a dimension to a scalar.
    inputs = [np.asarray(arrays[spec.name], spec.numpy_dtype, order="C") for spec in engine.inputs]
    part = Part(
        samples=inputs[0].shape[0] if engine.batched else 1,
        shapes=tuple(array.shape for array in inputs),
        inputs=tuple(to_bytes(array, spec) for array, spec in zip(inputs, engine.inputs, strict=True)),
        wanted=tuple(range(len(engine.outputs))),
        destinations=(None,) * len(engine.outputs),
    )
    (answers,) = engine.run([part]).answers
    return {
        spec.name: from_bytes(answer.data, spec, answer.shape)
        for spec, answer in zip(engine.outputs, answers, strict=True)
    }


@dataclass(frozen=True, slots=True)
class Signature:
    """A graph's tensors as the file declares them: whole shapes, with -1 for dynamic sizes."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def check_names(model: Path, have: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Check that the file has the tensors of the specification. Raises BundleError."""
    for ours, theirs in ((inputs, have.inputs), (outputs, have.outputs)):
        if [(t.name, t.dtype) for t in ours] != [(t.name, t.dtype) for t in theirs]:
            raise BundleError(
                f"{model}: the specification says {[(t.name, t.dtype) for t in ours]}, "
                f"the file has {[(t.name, t.dtype) for t in theirs]}; export the model again"
            )
