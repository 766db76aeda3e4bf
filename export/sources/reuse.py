"""The torch step's result from the run before, where nothing that it depends on has changed.

Knows which sources can be known whole: the zoo is Convoy's own code, a registry's network its package's, an
archive or a graph its file. A user's Python file may import anything from anywhere, so it runs every time; the
steps behind it are reused where it makes the same graph.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import numpy as np

from convoy.export.cache import StepCache, step_key
from convoy.export.plan import ExportPlan
from convoy.export.sources.torch_job import TorchResult
from convoy.models.bundle import sha256_file

_REUSABLE = frozenset({"zoo", "torchvision"})
_PACKAGES = ("torch", "torchvision", "onnxscript")
_REFERENCE = "reference"


def reused(
    plan: ExportPlan,
    samples: np.ndarray,
    folder: Path,
    cache: StepCache,
    to_onnx: Callable[[ExportPlan, np.ndarray, Path], TorchResult],
) -> TorchResult:
    """What `to_onnx` gives, from the cache where it can be; either way the graph lies in `folder`."""
    if plan.source.kind not in _REUSABLE or plan.weights is None or plan.is_free:
        return to_onnx(plan, samples, folder)
    key = _key(plan, samples)
    graph, answers, entry = cache.read(f"{key}-onnx"), cache.read_arrays(f"{key}-answers"), cache.read(f"{key}-entry")
    if graph is not None and answers is not None and entry is not None:
        path = folder / "model.onnx"
        path.write_bytes(graph)
        return TorchResult(path, answers[_REFERENCE], metadata.version("torch"), weights_entry=entry.decode())
    result = to_onnx(plan, samples, folder)
    # A graph with its weights beside it is too large to keep.
    if not any(folder.glob("*.data")):
        cache.write(f"{key}-onnx", result.onnx.read_bytes())
        cache.write_arrays(f"{key}-answers", {_REFERENCE: result.reference})
        cache.write(f"{key}-entry", result.weights_entry.encode())
    return result


def _key(plan: ExportPlan, samples: np.ndarray) -> str:
    assert plan.weights is not None
    packages = ",".join(metadata.version(name) for name in _PACKAGES)
    return step_key(
        "torch",
        plan.source.shown,
        sha256_file(plan.weights),
        repr(plan.asked.weights_key),
        repr(plan.image),
        repr(plan.labels),
        str(plan.asked.max_batch),
        packages,
        hashlib.sha256(np.ascontiguousarray(samples).data).hexdigest(),
    )
