"""The contract between the scheduler, which has requests, and what can run a model.

An engine is told where each request's tensors lie and where its answers belong; gathering a batch,
running it and scattering the results are the engine's own business, because a GPU does them with its
copy engine and a CPU with memcpy. An engine knows nothing of queues, deadlines, clients or files other
than its own model.

`info.slots` threads at most are in `run` at a time: one on a CPU; two on a GPU, where the copies of one
batch hide behind the computation of the other. `close` comes from any thread once every `run` has returned.
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
    """What is beside the CPU's first engine of a model is a device of its own: it computes at the same time."""
    return f"{CPU}/{number}" if number else CPU


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What runs the model, for logs, metrics and latency tables.

    `batch_sizes` are the sizes that the engine runs as they are, ascending; other sizes are padded to the
    next one. `device_fingerprint` tells on which hardware, with which threads and library a latency holds.
    `slots` batches may be in `run` at once; they share the device, so they compute one after the other.
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
    """What an engine holds for a model whose sizes are free: a client chooses them, so all of it has a limit.

    `warm` combinations of shapes are remembered with how they run, `limit` at most. `buffer_bytes` is the memory that
    batches are gathered into and known outputs land in, `buffer_limit_bytes` what is kept of it at most.
    `run_limit_bytes` is what a run of the usual size is expected to take beside that; 0 where it was too little to see.
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
    """One loaded model on one device. `batched`: the tensors' first dimension is the batch.

    `text_only`: the elements of BYTES inputs must be UTF-8.
    """

    text_only: ClassVar[bool] = False
    info: EngineInfo
    batched: bool
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @abstractmethod
    def warm_up(self) -> None:
        """Run every batch size once, so that no request pays for a first time. Raises EngineFailure.

        Comes before the first `run`; repeating it is harmless.
        """

    @abstractmethod
    def run(self, parts: Sequence[Part]) -> BatchResult:
        """Run the parts as one batch. Raises EngineFailure; then no destination may be trusted."""

    def whole_shape(self, spec: TensorSpec, samples: int) -> tuple[int, ...]:
        """A tensor's shape in a batch. Free sizes, of which only a request tells, are those of the spec's example."""
        return (samples, *spec.drawn_shape) if self.batched else spec.drawn_shape

    def warm_shapes(self) -> WarmShapes | None:
        """What is held for free sizes now; None where all sizes are fixed. Comes from any thread, beside `run`."""
        return None

    def page_lock(self, memory: memoryview) -> bool:
        """Lock the block that parts will lie in, if a device could then read it by itself; whether it is locked.

        Locked pages may not be given back to the system before `page_unlock`. A CPU has no use for it. It takes as
        long as the block is large, and may come from any thread, beside `run`.
        """
        return False

    def page_unlock(self, memory: memoryview) -> None:
        """Before the block goes: undo `page_lock`, if it locked it. May come after `close`, and no batch uses it."""
        return

    def enter_service(self) -> None:
        """Clients' batches come from now on."""
        return

    def rest(self) -> None:
        """Give back what runs have left and the next run takes again. Not beside `run`."""
        return

    @abstractmethod
    def close(self) -> None:
        """Give back the device's memory. Calling it twice is harmless."""


def run_arrays(engine: Engine, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run whole arrays, for callers without a slab: export, canaries and tests.

    `arrays` maps each input's name to an array of its dtype whose first dimension is the batch (for a
    model without batch dimension: the whole shape). Returns arrays that the caller owns.
    """
    # Not `ascontiguousarray`, which would give a scalar a dimension.
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
    """A graph's tensors as the file declares them: whole shapes, -1 for every size that is not fixed."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def check_names(model: Path, have: Signature, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Whether the file has the tensors that the specification promises. Raises BundleError."""
    for ours, theirs in ((inputs, have.inputs), (outputs, have.outputs)):
        if [(t.name, t.dtype) for t in ours] != [(t.name, t.dtype) for t in theirs]:
            raise BundleError(
                f"{model}: the specification says {[(t.name, t.dtype) for t in ours]}, "
                f"the file has {[(t.name, t.dtype) for t in theirs]}; export the model again"
            )
