"""The plan's network as an ONNX graph, with reference answers.

Each kind of source has its way: through torch in a child process, or as the given ONNX file. The result of an earlier
run is reused if nothing that it depends on has changed. A user's Python file may import anything, so its result is
never kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.dimensions import Size, other_sizes
from convoy.app.engines.onnxruntime import first_line, open_session
from convoy.export.cache import StepCache, step_key
from convoy.export.data import random_samples
from convoy.export.plan import ExportPlan
from convoy.export.proof.verify import MAX_FP32_ERROR, relative_error
from convoy.export.rows import Rows, noise_of_both_signs, picked
from convoy.export.sources import onnx_file
from convoy.export.sources import torch_job as files
from convoy.export.sources.onnx_source import take, wrap
from convoy.export.sources.preprocess import InputSize, resized
from convoy.export.sources.torch_job import INPUT_NAME, Answered, TorchJob, TorchResult
from convoy.export.sources.torch_process import read_result, run_job
from convoy.models.bundle import sha256_file
from convoy.models.spec import ImageSpec, TensorSpec

_OTHER_SAMPLES = 3


def to_onnx(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
    """Export the plan's network; `folder` is empty and will contain the graph.

    Raises JobError with one line that says why it cannot be done.
    """
    noise = noise_of_both_signs(plan.inputs, plan.image)
    others = _of_other_sizes(plan.image) if plan.is_free and plan.image else ()
    if plan.source.kind == "onnx":
        original = plan.source.path, plan.source.shown
        if plan.image is None:
            return take(*original, samples, folder, noise)
        return wrap(*original, plan.image, samples, folder, others, noise)
    result = run_job(_job(plan), samples, folder, others, noise)
    if not result.elsewhere or not (problem := _problem_elsewhere(result, samples)):
        return result
    # The network's size-dependent behaviour was recorded for the example's sizes only.
    fixed = run_job(replace(_job(plan), is_free=False), samples, folder, (), noise)
    assert plan.image is not None
    return replace(fixed, remark=f"height and width are fixed at {plan.image.height}x{plan.image.width}: {problem}")


def _problem_elsewhere(result: TorchResult, samples: Rows) -> str:
    """Why the graph is not the network at every size, or empty if it is."""
    session = open_session(result.onnx, cpu_budget())
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
    inputs = ((TensorSpec(INPUT_NAME, one.tensor_dtype, one.tensor_shape), one) for one in images)
    return tuple(random_samples(_OTHER_SAMPLES, [spec], one)[INPUT_NAME] for spec, one in inputs)


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
        inline_bytes=onnx_file.INLINE_BYTES,
        weights_key=plan.asked.weights_key,
        is_free=plan.is_free,
        refuse_random=plan.weights_from == "network" and not plan.asked.random_weights,
        inputs=tuple(spec.name for spec in plan.inputs),
        layout=plan.detection.layout if plan.detection and not plan.detection.boxes else None,
    )


# The torch step's result from an earlier run, if nothing that it depends on has changed. A user's Python file may
# import anything, so it runs every time; later steps are reused if it makes the same graph.


def reused(
    plan: ExportPlan,
    samples: Rows,
    folder: Path,
    cache: StepCache,
    to_onnx: Callable[[ExportPlan, Rows, Path], TorchResult],
) -> TorchResult:
    """The result of `to_onnx`, from the cache if possible; either way the graph is in `folder`."""
    if plan.source.kind not in ("zoo", "torchvision") or plan.weights is None or plan.is_free:
        return to_onnx(plan, samples, folder)
    noise = noise_of_both_signs(plan.inputs, plan.image)
    key = _key(plan, samples, noise)
    kept = {name: cache.read(f"{key}-{name}") for name in (files.ONNX, files.REFERENCE, files.OUTCOME)}
    if None not in kept.values():
        for name, content in kept.items():
            (folder / name).write_bytes(content or b"")
        return read_result(folder, (), noise)
    result = to_onnx(plan, samples, folder)
    # A graph with external weights is too large to keep.
    if not any(folder.glob("*.data")):
        for name in kept:
            cache.write(f"{key}-{name}", (folder / name).read_bytes())
    return result


def _key(plan: ExportPlan, samples: Rows, noise: Rows) -> str:
    assert plan.weights is not None
    return step_key(
        "torch",
        plan.source.shown,
        sha256_file(plan.weights),
        repr(plan.asked.weights_key),
        repr(plan.image),
        repr(plan.labels),
        str(plan.asked.max_batch),
        ",".join(metadata.version(name) for name in ("torch", "torchvision", "onnxscript")),
        *(
            hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
            for array in (*samples.values(), *noise.values())
        ),
    )
