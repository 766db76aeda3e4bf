"""ONNX Runtime on a GPU with its fastest settings: tuned once and remembered, or with defaults at once.

Tuning opens half a dozen sessions, so it is postponed if something better is coming. Only a model's canary can tell
whether it runs with defaults, captured in graphs or not. The best heuristic, layout and graphs depend on the network
and differ by several times. The result is kept in the plan cache. Fusing the bias into convolutions is not tried,
because no GPU has shown yet that a replayed graph survives it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

from convoy.app.engines.base import Engine
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.engine import CudaEngine, bucket_sizes
from convoy.app.engines.cuda.trials import best_of, read_memory, told, try_all, write_memory
from convoy.app.engines.jobs import Job, NotProved, OpenEngine, Place, TuningCandidate
from convoy.app.engines.onnxruntime_cuda import ConvolutionSearch, ConvolutionTuning, OnnxRuntimeCudaEngine
from convoy.models.bundle import Variant

_log = logging.getLogger("convoy")
_FILE_VERSION = 3

# Opens an engine with one slot for some batch sizes, without warming it up.
OpenTrial = Callable[[ConvolutionTuning, tuple[int, ...]], CudaEngine]


def open_tuned(job: Job, variant: Variant, place: Place) -> Engine:
    """Open the fastest engine, tuned if necessary. Raises NotProved, BundleError or EngineFailure."""
    assert place.gpu is not None
    if no_code := job.machine.why_no_code(place.gpu):
        raise NotProved(no_code)
    return _OnnxOpener(job, variant, place.gpu).open()


def ways_as_it_comes(job: Job, variant: Variant, place: Place) -> tuple[OpenEngine, ...]:
    """What to try before tuning, if something better is coming. Raises JobError and OSError."""
    assert place.gpu is not None
    opener = _OnnxOpener(job, variant, place.gpu)
    if not place.is_hurried or job.machine.why_no_code(place.gpu) or opener.is_tuned():
        return ()
    sizes = bucket_sizes(job.max_batch_size)
    # Not every model can be captured in graphs.
    return tuple(partial(opener.open_as, ConvolutionTuning(graphs=graphs), sizes) for graphs in (True, False))


def left_to_tune(job: Job, variant: Variant, place: Place, is_open: bool | None) -> TuningCandidate | None:
    """The file to tune later, if it does not serve yet or serves untuned."""
    assert place.gpu is not None
    if is_open is False or job.machine.why_no_code(place.gpu):
        return None
    if is_open and (not place.is_hurried or _OnnxOpener(job, variant, place.gpu).is_tuned()):
        return None
    return TuningCandidate(place.gpu, variant)


@dataclass(frozen=True, slots=True)
class _OnnxOpener:
    """One ONNX file on one device."""

    job: Job
    variant: Variant
    device: Device

    def is_tuned(self) -> bool:
        return remembered(self._memory()) is not None

    def open(self) -> Engine:
        """Open the file with the fastest settings. Raises BundleError or EngineFailure."""
        sizes, started_s = bucket_sizes(self.job.max_batch_size), time.monotonic()
        tuning = tuned(partial(self.open_as, slots=1), sizes[-1], self._memory())
        onnx, took_s = self.job.path(self.variant), time.monotonic() - started_s
        _log.info("%s on %s: %s, found in %.1f s", onnx, self.device.name, tuning, took_s)
        return self.open_as(tuning, sizes)

    def open_as(self, tuning: ConvolutionTuning, sizes: tuple[int, ...], **options: int) -> OnnxRuntimeCudaEngine:
        """Open the file with given settings. Raises BundleError or EngineFailure."""
        return OnnxRuntimeCudaEngine(
            self.job.path(self.variant),
            self.device,
            self.job.machine.onnxruntime.module,
            inputs=self.job.spec.inputs,
            outputs=self.job.spec.outputs,
            batch_sizes=sizes,
            batched=self.job.max_batch_size > 0,
            precision=self.variant.precision,
            tuning=tuning,
            **options,
        )

    def _memory(self) -> Path | None:
        """The file with the results for this graph, device, library and batch size."""
        if self.job.plan_cache is None:
            return None
        gpu, library = self.device.properties, self.job.machine.onnxruntime.module.__version__
        about = json.dumps([gpu.name, gpu.compute_capability, library, self.job.max_batch_size])
        digest = hashlib.sha256(about.encode()).hexdigest()[:16]
        folder = self.job.plan_cache / self.job.digest(self.job.path(self.variant))
        return folder / f"ort{library}-sm{gpu.compute_capability}-{digest}.json"


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The file's content: the choice, and milliseconds of the smallest and the largest batch with each setting."""

    schema_version: int
    chosen: ConvolutionTuning
    tried_ms: dict[str, dict[str, float]]


def remembered(memory: Path | None) -> ConvolutionTuning | None:
    """The remembered choice; None if it was never tuned."""
    known = read_memory(memory, TuningRecord, _FILE_VERSION) if memory is not None else None
    return known.chosen if known is not None else None


def tuned(open_trial: OpenTrial, largest: int, memory: Path | None) -> ConvolutionTuning:
    """The remembered choice, or the fastest of all, which is then written to `memory` (None: not kept).

    Everything is tried with graphs, unless nothing can be captured: graphs save launches, and without them every size
    needs its own session. Raises BundleError or EngineFailure if nothing runs.
    """
    known = remembered(memory)
    if known is not None:
        return known
    record = _measured(open_trial, largest)
    if memory is not None:
        write_memory(memory, record)
    return record.chosen


def _measured(open_trial: OpenTrial, largest: int) -> TuningRecord:
    sizes = tuple(sorted({1, largest}))
    ways = [ConvolutionTuning(search, nhwc) for search, nhwc in product(get_args(ConvolutionSearch), (True, False))]
    tried, problem = try_all(open_trial, ways, sizes)
    if not tried:
        _log.info("no CUDA graphs for this model: %s", problem)
        tried, problem = try_all(open_trial, (replace(way, graphs=False) for way in ways), sizes)
    if not tried:
        assert problem is not None
        raise problem
    return TuningRecord(_FILE_VERSION, best_of(tried), told(tried, _name))


def _name(way: ConvolutionTuning) -> str:
    return f"{way.search} {'NHWC' if way.nhwc else 'NCHW'}{'' if way.graphs else ', without graphs'}"
