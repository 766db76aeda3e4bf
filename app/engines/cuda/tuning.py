"""Which heuristic, layout, fusion and graphs suit a model on a GPU: measured once and remembered.

Which one wins depends on the network and differs by several times, so they are tried on the device itself, with the
smallest and the largest batch in turns, as a server has them: what is lost whenever the size changes is part of the
price. The result is kept in the plan cache; it is a hint and not code, so that nothing worse than a slow engine comes
of a wrong one.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
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
_FILE_VERSION = 2

# Opens an engine of one slot for some batch sizes, not warmed up.
OpenTrial = Callable[[ConvolutionTuning, tuple[int, ...]], CudaEngine]
# Milliseconds by batch size.
_Times = dict[int, float]


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """The file: what was chosen, and milliseconds of the smallest and the largest batch under all that was tried."""

    schema_version: int
    chosen: ConvolutionTuning
    tried_ms: dict[str, dict[str, float]]


def remembered(memory: Path | None) -> ConvolutionTuning | None:
    """What was found to be the fastest before; None: it was never tried."""
    known = _read(memory) if memory is not None else None
    return known.chosen if known is not None else None


def tuned(open_trial: OpenTrial, largest: int, memory: Path | None) -> ConvolutionTuning:
    """What `memory` remembers, else the fastest of all, which is then written there. None: nothing is kept.

    Everything is tried with batches of one and of `largest` in turns, and with graphs, unless no way can be captured:
    a graph saves the launches, and without graphs every size needs a session of its own. Raises BundleError or
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
    sizes = tuple(sorted({1, largest}))
    ways = [ConvolutionTuning(search, nhwc) for search, nhwc in product(get_args(ConvolutionSearch), (True, False))]
    tried, problem = _tried(open_trial, ways, sizes)
    if not tried:
        _log.info("no CUDA graphs for this model: %s", problem)
        tried, problem = _tried(open_trial, (replace(way, graphs=False) for way in ways), sizes)
    if not tried:
        assert problem is not None
        raise problem
    fused = replace(_best(tried), fuse_conv_bias=True)
    tried |= _tried(open_trial, [fused], sizes)[0]
    names = {_name(way): {str(size): round(ms, 4) for size, ms in times.items()} for way, times in tried.items()}
    return TuningRecord(_FILE_VERSION, _best(tried), names)


def _tried(
    open_trial: OpenTrial, ways: Iterable[ConvolutionTuning], sizes: tuple[int, ...]
) -> tuple[dict[ConvolutionTuning, _Times], EngineFailure | BundleError | None]:
    """The times of all that run, and why the last of the others does not."""
    tried: dict[ConvolutionTuning, _Times] = {}
    problem: EngineFailure | BundleError | None = None
    for way in ways:
        try:
            tried[way] = _times_ms(open_trial, way, sizes)
        except (EngineFailure, BundleError) as failure:
            problem = _without_frames(failure)
    return tried, problem


def _best(tried: dict[ConvolutionTuning, _Times]) -> ConvolutionTuning:
    """A tenth of the smallest batch's time is worth as much as a tenth of the largest's."""
    return min(tried, key=lambda way: math.prod(tried[way].values()))


def _name(way: ConvolutionTuning) -> str:
    fused = ", bias fused" if way.fuse_conv_bias else ""
    return f"{way.search} {'NHWC' if way.nhwc else 'NCHW'}{fused}{'' if way.graphs else ', without graphs'}"


def _times_ms(open_trial: OpenTrial, way: ConvolutionTuning, sizes: tuple[int, ...]) -> _Times:
    engine = open_trial(way, sizes)
    try:
        engine.warm_up()
        parts = {size: make_probe(engine, size).part for size in sizes}
        # The device's own time: copies cost the same whatever the tuning, and other models wait for the host too.
        rounds = [{size: engine.run([part]).compute_ns for size, part in parts.items()} for _ in range(_ROUNDS)]
        return {size: median(taken[size] for taken in rounds) / 1e6 for size in sizes}
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
