"""ONNX Runtime on one GPU as it is fastest there: tuned once and remembered, or at once as it comes.

Tuning opens half a dozen sessions, so it is left for later where something better is to come.
Whether a model runs as it comes, captured in graphs or not, only its canary can tell. Which heuristic, layout and
graphs suit it depends on the network and differs by several times. The result is kept in the plan cache. Whether the
bias is fused into convolutions is not tried: no GPU has shown yet that a replayed graph survives it.
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

# Opens an engine of one slot for some batch sizes, not warmed up.
OpenTrial = Callable[[ConvolutionTuning, tuple[int, ...]], CudaEngine]


def open_tuned(job: Job, variant: Variant, place: Place) -> Engine:
    """Raises NotProved, BundleError or EngineFailure."""
    assert place.gpu is not None
    if no_code := job.machine.why_no_code(place.gpu):
        raise NotProved(no_code)
    return _OnnxOpener(job, variant, place.gpu).open()


def ways_as_it_comes(job: Job, variant: Variant, place: Place) -> tuple[OpenEngine, ...]:
    """What is tried before it is tuned, where something better is to come. Raises JobError and OSError."""
    assert place.gpu is not None
    opener = _OnnxOpener(job, variant, place.gpu)
    if not place.is_hurried or job.machine.why_no_code(place.gpu) or opener.is_tuned():
        return ()
    sizes = bucket_sizes(job.max_batch_size)
    # Not every model can be captured in graphs.
    return tuple(partial(opener.open_as, ConvolutionTuning(graphs=graphs), sizes) for graphs in (True, False))


def left_to_tune(job: Job, variant: Variant, place: Place, is_open: bool | None) -> TuningCandidate | None:
    """The file to tune later, where it does not serve yet or serves untuned."""
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
        """Raises BundleError or EngineFailure."""
        sizes, started_s = bucket_sizes(self.job.max_batch_size), time.monotonic()
        tuning = tuned(partial(self.open_as, slots=1), sizes[-1], self._memory())
        onnx, took_s = self.job.path(self.variant), time.monotonic() - started_s
        _log.info("%s on %s: %s, found in %.1f s", onnx, self.device.name, tuning, took_s)
        return self.open_as(tuning, sizes)

    def open_as(self, tuning: ConvolutionTuning, sizes: tuple[int, ...], **options: int) -> OnnxRuntimeCudaEngine:
        """Raises BundleError or EngineFailure."""
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
        """Where what was measured for this file, device, library and batch size is remembered."""
        if self.job.plan_cache is None:
            return None
        gpu, library = self.device.properties, self.job.machine.onnxruntime.module.__version__
        about = json.dumps([gpu.name, gpu.compute_capability, library, self.job.max_batch_size])
        digest = hashlib.sha256(about.encode()).hexdigest()[:16]
        folder = self.job.plan_cache / self.job.digest(self.job.path(self.variant))
        return folder / f"ort{library}-sm{gpu.compute_capability}-{digest}.json"


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The file: what was chosen, and milliseconds of the smallest and the largest batch under all that was tried."""

    schema_version: int
    chosen: ConvolutionTuning
    tried_ms: dict[str, dict[str, float]]


def remembered(memory: Path | None) -> ConvolutionTuning | None:
    """What was found to be the fastest before; None: it was never tried."""
    known = read_memory(memory, TuningRecord, _FILE_VERSION) if memory is not None else None
    return known.chosen if known is not None else None


def tuned(open_trial: OpenTrial, largest: int, memory: Path | None) -> ConvolutionTuning:
    """What `memory` remembers, else the fastest of all, which is then written there. None: nothing is kept.

    Everything is tried with graphs, unless no way can be captured: a graph saves the launches, and without graphs every
    size needs a session of its own. Raises BundleError or EngineFailure when no way runs.
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
