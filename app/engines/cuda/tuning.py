"""Which convolution search, layout and graphs suit a model on a GPU: measured once and remembered.

Which one wins depends on the network and differs by several times, so every combination is tried on the
device itself. The result is kept in the plan cache; it is a hint and not code, so that nothing worse than a
slow engine comes of a wrong one.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import get_args

from app.engines.base import EngineFailure
from app.engines.cuda.engine import CudaEngine
from app.engines.measure import make_probe
from app.engines.onnxruntime_cuda import ConvolutionSearch, ConvolutionTuning
from models.errors import BundleError, ConvoyError
from models.records import from_jsonable, to_jsonable

_log = logging.getLogger("convoy")
_ROUNDS = 7
_FILE_VERSION = 1

# Opens an engine of one slot for one batch size, not warmed up.
OpenTrial = Callable[[ConvolutionTuning, int], CudaEngine]


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The file: what was chosen, and milliseconds of the largest batch under each search and layout."""

    schema_version: int
    chosen: ConvolutionTuning
    tried_ms: dict[str, float]


def remembered(memory: Path | None) -> ConvolutionTuning | None:
    """What was found to be the fastest before; None: it was never tried."""
    known = _read(memory) if memory is not None else None
    return known.chosen if known is not None else None


def tuned(open_trial: OpenTrial, largest: int, memory: Path | None) -> ConvolutionTuning:
    """What `memory` remembers, else the fastest of all, which is then written there. None: nothing is kept.

    Search and layout are tried with batches of `largest`, graphs with one sample. Raises BundleError or
    EngineFailure when no way runs.
    """
    known = remembered(memory)
    if known is not None:
        return known
    record = _measured(open_trial, largest)
    if memory is not None:
        _write(memory, record)
    return record.chosen


def _measured(open_trial: OpenTrial, largest: int) -> TuningRecord:
    ways = product(get_args(ConvolutionSearch), (True, False))
    plain = [ConvolutionTuning(search, nhwc, graphs=False) for search, nhwc in ways]
    tried: dict[ConvolutionTuning, float] = {}
    problem: EngineFailure | BundleError | None = None
    for candidate in plain:
        try:
            tried[candidate] = _time_ms(open_trial, candidate, largest)
        except (EngineFailure, BundleError) as failure:
            problem = _without_frames(failure)
    if not tried:
        assert problem is not None
        raise problem
    best = min(tried, key=lambda candidate: tried[candidate])
    names = {f"{one.search} {'NHWC' if one.nhwc else 'NCHW'}": round(ms, 4) for one, ms in tried.items()}
    return TuningRecord(_FILE_VERSION, _with_graphs_if_they_pay(open_trial, best), names)


def _with_graphs_if_they_pay(open_trial: OpenTrial, plain: ConvolutionTuning) -> ConvolutionTuning:
    """Graphs save launches, which weigh most in the smallest batch."""
    with_graphs = ConvolutionTuning(plain.search, plain.nhwc, graphs=True)
    try:
        if _time_ms(open_trial, with_graphs, 1) < _time_ms(open_trial, plain, 1):
            return with_graphs
    except (EngineFailure, BundleError) as failure:
        _log.info("no CUDA graphs for this model: %s", failure)
    return plain


def _time_ms(open_trial: OpenTrial, tuning: ConvolutionTuning, batch_size: int) -> float:
    engine = open_trial(tuning, batch_size)
    try:
        engine.warm_up()
        part = make_probe(engine, batch_size).part
        # The device's own time: copies cost the same whatever the tuning, and other models wait for the host too.
        return median(engine.run([part]).compute_ns for _ in range(_ROUNDS)) / 1e6
    finally:
        engine.close()


def _without_frames(failure: EngineFailure | BundleError) -> EngineFailure | BundleError:
    """The failure alone: the frames of its tracebacks would keep a closed engine's session, and so its memory."""
    failure.__cause__ = failure.__context__ = None
    return failure.with_traceback(None)


def _read(path: Path) -> TuningRecord | None:
    try:
        record = from_jsonable(TuningRecord, json.loads(path.read_bytes()), path.name)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ConvoyError) as error:
        _log.warning("%s cannot be read (%s); the model is tuned again", path, error)
        return None
    return record if record.schema_version == _FILE_VERSION else None


def _write(path: Path, record: TuningRecord) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside.write_text(json.dumps(to_jsonable(record), indent=1))
        aside.replace(path)
    except OSError as error:
        _log.info("the tuning of this model is not kept (%s)", error)
