"""Which heuristic, layout, fusion and graphs suit a model on a GPU under ONNX Runtime: measured once and remembered.

Which one wins depends on the network and differs by several times. The result is kept in the plan cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from convoy.app.engines.cuda.engine import CudaEngine
from convoy.app.engines.cuda.trials import best_of, read_memory, told, try_all, write_memory
from convoy.app.engines.onnxruntime_cuda import ConvolutionSearch, ConvolutionTuning

_log = logging.getLogger("convoy")
_FILE_VERSION = 2

# Opens an engine of one slot for some batch sizes, not warmed up.
OpenTrial = Callable[[ConvolutionTuning, tuple[int, ...]], CudaEngine]


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
    fused = replace(best_of(tried), fuse_conv_bias=True)
    tried |= try_all(open_trial, [fused], sizes)[0]
    return TuningRecord(_FILE_VERSION, best_of(tried), told(tried, _name))


def _name(way: ConvolutionTuning) -> str:
    fused = ", bias fused" if way.fuse_conv_bias else ""
    return f"{way.search} {'NHWC' if way.nhwc else 'NCHW'}{fused}{'' if way.graphs else ', without graphs'}"
