"""An engine without a model: it computes what it is told, takes as long as it is told, fails when it is told.

Keeps the contract of `base` to the letter, so whatever stands on engines can be tried without one: batches
that take a known time, requests that poison their batch, devices that hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from convoy.app.engines.base import Engine, EngineInfo
from convoy.app.engines.batch import BatchResult, EngineFailure, StageTimes
from convoy.app.engines.parts import Landed, Part, check_landed
from convoy.models.spec import TensorSpec
from convoy.models.tensors import MalformedStrings, TensorBytes, from_bytes, to_bytes

Arrays = tuple[np.ndarray, ...]
RunRows = Callable[[Arrays], Sequence[np.ndarray]]


class FakeEngine(Engine):
    """`run_rows` maps the inputs of a whole batch to its outputs; by default `echo_or_sum`.

    A batch of b samples takes `latency_s(b)`, spent in `sleep`. The hooks may be changed at any time:
    `is_poisonous` is asked about every part and fails its batch, `gate` makes runs hang until it is set. `runs` counts
    what was tried, warm-up included.
    """

    def __init__(
        self,
        inputs: tuple[TensorSpec, ...],
        outputs: tuple[TensorSpec, ...],
        *,
        max_batch_size: int,
        run_rows: RunRows | None = None,
        latency_s: Callable[[int], float] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.batched = max_batch_size > 0
        self._run_rows = run_rows or self.echo_or_sum
        self._latency_s, self._sleep = latency_s, sleep
        self.is_poisonous: Callable[[Arrays], bool] | None = None
        self.gate: threading.Event | None = None
        self.runs = 0
        self.info = EngineInfo(
            engine="fake",
            precision="fp32",
            device="fake",
            device_fingerprint="fake",
            library="fake 1",
            batch_sizes=tuple(range(1, max(1, max_batch_size) + 1)),
        )

    def warm_up(self) -> None:
        for samples in self.info.batch_sizes:
            self._compute(tuple(blank(spec, self.whole_shape(spec, samples)) for spec in self.inputs))

    def run(self, parts: Sequence[Part]) -> BatchResult:
        started_ns = time.monotonic_ns()
        each = [self._arrays(part) for part in parts]
        gathered = tuple(np.concatenate(column) for column in zip(*each, strict=True)) if self.batched else each[0]
        gathered_ns = time.monotonic_ns()
        if self.is_poisonous and any(map(self.is_poisonous, each)):
            self.runs += 1
            raise EngineFailure("a part of this batch is poisonous")
        results = self._compute(gathered)
        samples = sum(part.samples for part in parts)
        check_landed([Landed(one) for one in results], self.outputs, samples, batched=self.batched)
        computed_ns = time.monotonic_ns()
        answers, start = [], 0
        for part in parts:
            rows = slice(start, start + part.samples)
            start += part.samples
            wanted = zip(part.wanted, part.destinations, strict=True)
            mine = [(self.outputs[i], results[i][rows] if self.batched else results[i], to) for i, to in wanted]
            answers.append(tuple(_deliver(spec, array, to) for spec, array, to in mine))
        times = StageTimes(gathered_ns - started_ns, computed_ns - gathered_ns, time.monotonic_ns() - computed_ns)
        return BatchResult(tuple(answers), times)

    def close(self) -> None:
        pass

    def echo_or_sum(self, arrays: Arrays) -> Sequence[np.ndarray]:
        """Each output is the first input of its dtype and shape; without one, each sample's sum over all inputs."""
        samples = len(arrays[0]) if self.batched else 1
        results = []
        for spec in self.outputs:
            twin = next((a for s, a in zip(self.inputs, arrays, strict=True) if _alike(s, spec)), None)
            if twin is None:
                total = sum(array.reshape(samples, -1).sum(axis=1, dtype=np.float64) for array in arrays)
                twin = np.empty(self.whole_shape(spec, samples), spec.numpy_dtype)
                twin.reshape(samples, -1)[:] = np.reshape(total, (samples, 1))
            results.append(twin)
        return results

    def _compute(self, arrays: Arrays) -> Sequence[np.ndarray]:
        self.runs += 1
        if self.gate is not None:
            self.gate.wait()
        if self._latency_s is not None:
            self._sleep(self._latency_s(len(arrays[0]) if self.batched else 1))
        return self._run_rows(arrays)

    def _arrays(self, part: Part) -> Arrays:
        tensors = zip(self.inputs, part.inputs, part.shapes, strict=True)
        try:
            return tuple(from_bytes(data, spec, shape) for spec, data, shape in tensors)
        except MalformedStrings as error:
            raise EngineFailure(f"an input cannot be read as strings: {error}") from error


def blank(spec: TensorSpec, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros, or empty strings."""
    return np.full(shape, b"", object) if spec.is_strings else np.zeros(shape, spec.numpy_dtype)


def _alike(one: TensorSpec, other: TensorSpec) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape)


def _deliver(spec: TensorSpec, rows: np.ndarray, destination: memoryview | None) -> TensorBytes:
    if destination is None:
        return TensorBytes(rows.shape, to_bytes(np.array(rows, order="C"), spec))
    destination[:] = to_bytes(np.asarray(rows, order="C"), spec)
    return TensorBytes(rows.shape, destination)
