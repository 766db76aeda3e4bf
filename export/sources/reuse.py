"""The torch step's result from the run before, where nothing that it depends on has changed.

Knows which sources can be known whole: the zoo is Convoy's own code, a registry's network its package's, an
archive or a graph its file. A user's Python file may import anything from anywhere, so it runs every time; the
steps behind it are reused where it makes the same graph.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from convoy.export.cache import StepCache, step_key
from convoy.export.noise import noise_of_both_signs
from convoy.export.plan import ExportPlan
from convoy.export.rows import NOTHING, Rows
from convoy.export.sources.torch_job import NOISE, Answered, TorchResult
from convoy.models.bundle import sha256_file
from convoy.models.records import from_jsonable, to_jsonable
from convoy.models.tasks import DetectionOutputs, Task

_REUSABLE = frozenset({"zoo", "torchvision"})
_PACKAGES = ("torch", "torchvision", "onnxscript")


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a result says beside its graph and its answers; `outputs` are in the graph's order."""

    outputs: tuple[str, ...]
    weights_entry: str
    task: Task | None
    detection: DetectionOutputs | None


def reused(
    plan: ExportPlan,
    samples: Rows,
    folder: Path,
    cache: StepCache,
    to_onnx: Callable[[ExportPlan, Rows, Path], TorchResult],
) -> TorchResult:
    """What `to_onnx` gives, from the cache where it can be; either way the graph lies in `folder`."""
    if plan.source.kind not in _REUSABLE or plan.weights is None or plan.is_free:
        return to_onnx(plan, samples, folder)
    key = _key(plan, samples)
    graph, answers, said = cache.read(f"{key}-onnx"), cache.read_arrays(f"{key}-answers"), cache.read(f"{key}-said")
    if graph is not None and answers is not None and said is not None:
        path = folder / "model.onnx"
        path.write_bytes(graph)
        kept = from_jsonable(_Kept, json.loads(said), "said")
        reference = {name: answers[name] for name in kept.outputs}
        on_noise = {name: answers[f"{NOISE}{name}"] for name in kept.outputs if f"{NOISE}{name}" in answers}
        noise = Answered(noise_of_both_signs(plan.inputs, plan.image), on_noise) if on_noise else None
        torch = metadata.version("torch")
        entry, task, detection = kept.weights_entry, kept.task, kept.detection
        return TorchResult(path, reference, torch, weights_entry=entry, task=task, detection=detection, noise=noise)
    result = to_onnx(plan, samples, folder)
    # A graph with its weights beside it is too large to keep.
    if not any(folder.glob("*.data")):
        cache.write(f"{key}-onnx", result.onnx.read_bytes())
        answered = result.noise.reference if result.noise else NOTHING
        noisy = {f"{NOISE}{name}": array for name, array in answered.items()}
        cache.write_arrays(f"{key}-answers", {**result.reference, **noisy})
        kept = _Kept(tuple(result.reference), result.weights_entry, result.task, result.detection)
        cache.write(f"{key}-said", json.dumps(to_jsonable(kept)).encode())
    return result


def _key(plan: ExportPlan, samples: Rows) -> str:
    assert plan.weights is not None
    noise = noise_of_both_signs(plan.inputs, plan.image)
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
        *(
            hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
            for array in (*samples.values(), *noise.values())
        ),
    )


def _digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
