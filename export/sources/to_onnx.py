"""The plan's network as an ONNX graph, with answers to hold the graph against.

Knows which kind of source goes which way: through torch in a child, or as the ONNX file that it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convoy.app.engines.cpu import cpu_budget
from convoy.export.plan import ExportPlan
from convoy.export.sources.onnx_source import wrap
from convoy.export.sources.torch_job import OUTPUT_NAME, TorchJob
from convoy.export.sources.torch_process import run_job

# A protobuf holds 2 GiB at most, and the graph itself takes some of it.
INLINE_BYTES = int(1.8 * (1 << 30))
_ANY_BATCH = 1 << 30


@dataclass(frozen=True, slots=True)
class TorchResult:
    """The fp32 graph, and the original's own answers to the samples: float32 [n, outputs].

    The graph's input is called `torch_job.INPUT_NAME`, and its output `output_name`. `torch_version` is empty where
    torch had no part in it. The graph takes at most `max_batch` samples a run, and `remark` is what else should be said
    of it. `original` names what gave the answers; `weights_entry` is as in `torch_job.Outcome`.
    """

    onnx: Path
    reference: np.ndarray
    torch_version: str
    output_name: str = OUTPUT_NAME
    max_batch: int = _ANY_BATCH
    remark: str = ""
    original: str = "torch"
    weights_entry: str = ""


def to_onnx(plan: ExportPlan, samples: np.ndarray, folder: Path) -> TorchResult:
    """Export the plan's network; `folder` is an empty one, in which the graph will lie.

    Raises JobError with one line that says why it cannot be done.
    """
    if plan.source.kind == "onnx":
        return _from_file(plan, samples, folder)
    answer = run_job(_job(plan), samples, folder)
    return TorchResult(answer.onnx, answer.reference, answer.torch_version, weights_entry=answer.weights_entry)


def _from_file(plan: ExportPlan, samples: np.ndarray, folder: Path) -> TorchResult:
    assert plan.source.file is not None
    made = wrap(plan.source.file, plan.image, samples, folder, cpu_budget(), INLINE_BYTES)
    return TorchResult(
        made.onnx,
        made.reference,
        torch_version="",
        output_name=made.output_name,
        max_batch=_ANY_BATCH if made.batched else 1,
        remark=made.batch_reason,
        original=f"{plan.source.shown} in ONNX Runtime",
    )


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
        max_batch=plan.max_batch,
        threads=cpu_budget(),
        inline_bytes=INLINE_BYTES,
        weights_key=plan.weights_key,
        refuse_random=plan.weights_from == "network" and not plan.random_weights,
    )
