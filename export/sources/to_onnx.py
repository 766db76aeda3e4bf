"""The plan's network as an ONNX graph, with answers to hold the graph against.

Knows which kind of source goes which way: through torch in a child, or as the ONNX file that it is.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.free_sizes import Size, other_sizes
from convoy.app.engines.onnxruntime import first_line, open_session
from convoy.export.data import RandomRows
from convoy.export.noise import noise_of_both_signs
from convoy.export.plan import ExportPlan
from convoy.export.proof.verify import MAX_FP32_ERROR, relative_error
from convoy.export.rows import Rows, picked
from convoy.export.sources.onnx_source import take, wrap
from convoy.export.sources.preprocess import InputSize, resized
from convoy.export.sources.torch_job import INPUT_NAME, Answered, TorchJob, TorchResult
from convoy.export.sources.torch_process import run_job
from convoy.models.spec import ImageSpec

# A protobuf holds 2 GiB at most, and the graph itself takes some of it.
INLINE_BYTES = int(1.8 * (1 << 30))
_OTHER_SAMPLES = 3


def to_onnx(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
    """Export the plan's network; `folder` is an empty one, in which the graph will lie.

    Raises JobError with one line that says why it cannot be done.
    """
    noise = noise_of_both_signs(plan.inputs, plan.image)
    others = _of_other_sizes(plan.image) if plan.is_free and plan.image else ()
    if plan.source.kind == "onnx" and plan.image is None:
        return take(plan.source, samples, folder, cpu_budget(), INLINE_BYTES, noise)
    if plan.source.kind == "onnx":
        assert plan.image is not None
        return wrap(plan.source, plan.image, samples, folder, cpu_budget(), INLINE_BYTES, others, noise)
    result = run_job(_job(plan), samples, folder, others, noise)
    if not result.elsewhere or not (problem := _problem_elsewhere(result, samples)):
        return result
    # What the network does by its sizes was written down for those of the example alone.
    fixed = run_job(replace(_job(plan), is_free=False), samples, folder, noise=noise)
    assert plan.image is not None
    return replace(fixed, remark=f"height and width are fixed at {plan.image.height}x{plan.image.width}: {problem}")


def _problem_elsewhere(result: TorchResult, samples: Rows) -> str:
    """Why the graph is not the network at every size, or nothing where it is."""
    session = open_session(result.onnx, cpu_budget(), quiet=True)
    few = slice(_OTHER_SAMPLES)
    for one in (Answered(picked(samples, few), picked(result.reference, few)), *result.elsewhere):
        try:
            answers = dict(zip(one.reference, session.run(list(one.reference), dict(one.samples)), strict=True))
        except Exception as error:  # onnxruntime's errors share no base class
            return f"exported with free ones it does not run at others than the example's ({first_line(error)})"
        if any(answers[name].shape != exact.shape for name, exact in one.reference.items()):
            return "exported with free ones it gives outputs of other shapes than torch at one of three sizes"
        if any(relative_error(answers[name], exact) > MAX_FP32_ERROR for name, exact in one.reference.items()):
            return "exported with free ones it answers otherwise than torch at one of three sizes"
    return ""


def _of_other_sizes(image: ImageSpec) -> tuple[np.ndarray, ...]:
    """Noise, a few samples of each size."""
    sizes = other_sizes(Size(image.height, image.width))
    images = (resized(image, InputSize(image.channels, size.height, size.width)) for size in sizes)
    return tuple(RandomRows.of_images(_OTHER_SAMPLES, one).samples()[INPUT_NAME] for one in images)


def _job(plan: ExportPlan) -> TorchJob:
    return TorchJob(
        kind=plan.source.kind,
        name=plan.source.name,
        file=str(plan.source.file) if plan.source.file else None,
        weights_from=plan.weights_from,
        weights=str(plan.weights.resolve()) if plan.weights else None,
        classes=len(plan.labels) or None,
        uint8_front=plan.image is not None and plan.image.front == "uint8_nhwc",
        mean=plan.image.mean if plan.image else (),
        std=plan.image.std if plan.image else (),
        max_batch=plan.asked.max_batch,
        threads=cpu_budget(),
        inline_bytes=INLINE_BYTES,
        weights_key=plan.asked.weights_key,
        is_free=plan.is_free,
        refuse_random=plan.weights_from == "network" and not plan.asked.random_weights,
        inputs=tuple(spec.name for spec in plan.inputs),
    )
