"""The plan's network as an ONNX graph, with answers to hold the graph against.

Knows which kind of source goes which way: through torch in a child, or as the ONNX file that it is.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from convoy.app.engines.cpu import cpu_budget
from convoy.export.plan import ExportPlan
from convoy.export.sources.onnx_source import wrap
from convoy.export.sources.torch_job import TorchJob, TorchResult
from convoy.export.sources.torch_process import run_job

# A protobuf holds 2 GiB at most, and the graph itself takes some of it.
INLINE_BYTES = int(1.8 * (1 << 30))


def to_onnx(plan: ExportPlan, samples: np.ndarray, folder: Path) -> TorchResult:
    """Export the plan's network; `folder` is an empty one, in which the graph will lie.

    Raises JobError with one line that says why it cannot be done.
    """
    if plan.source.kind == "onnx":
        return wrap(plan.source, plan.image, samples, folder, cpu_budget(), INLINE_BYTES)
    return run_job(_job(plan), samples, folder)


def _job(plan: ExportPlan) -> TorchJob:
    return TorchJob(
        kind=plan.source.kind,
        name=plan.source.name,
        file=str(plan.source.file) if plan.source.file else None,
        weights_from=plan.weights_from,
        weights=str(plan.weights.resolve()) if plan.weights else None,
        classes=len(plan.labels) or None,
        uint8_front=plan.image.front == "uint8_nhwc",
        mean=plan.image.mean,
        std=plan.image.std,
        max_batch=plan.asked.max_batch,
        threads=cpu_budget(),
        inline_bytes=INLINE_BYTES,
        weights_key=plan.asked.weights_key,
        refuse_random=plan.weights_from == "network" and not plan.asked.random_weights,
    )
