"""Find the usual image preparation that fits a network when the requested one is wrong.

A wrong mean or range costs accuracy without an error. Where accuracy is at chance, or below what the checkpoint states,
the usual preparations are tried on a few images, so that the error can name the one that works.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from convoy.export.data import ImageSet, decoded
from convoy.export.plan import ExportPlan
from convoy.export.progress import Progress
from convoy.export.proof.outcomes import Outcomes
from convoy.export.proof.verify import observe
from convoy.export.sources.preprocess import PRESETS, InputSize, preset
from convoy.export.sources.to_onnx import to_onnx
from convoy.export.sources.torch_job import INPUT_NAME
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import opened
from convoy.models.errors import ConvoyError
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec

# The images that each preparation is tried on, and by how many points it must be better to be named.
_IMAGES = 256
_LEAST_GAIN_POINTS = 5.0
_SHOWN_AT_ONCE = 8


def better_preparation(plan: ExportPlan, spec: ModelSpec, images: ImageSet, top1: float, progress: Progress) -> str:
    """Advice for an error message: the usual preparation with the best top-1; empty if none is better.

    `images` are labelled; `top1` (0..1) is the accuracy with the current preparation.
    """
    few = images.thinned(_IMAGES)
    best, found = top1 + _LEAST_GAIN_POINTS / 100, ""
    for name, image in _candidates(images.image):
        with progress.step(f"Trying --preprocess {name}") as step, tempfile.TemporaryDirectory() as folder:
            shown = replace(few, image=image)
            inputs = (TensorSpec(INPUT_NAME, image.tensor_dtype, image.tensor_shape),)
            tried = replace(plan, image=image, inputs=inputs, is_free=False)
            try:
                made = to_onnx(tried, decoded(shown.thinned(_SHOWN_AT_ONCE), step), Path(folder))
                made.onnx.rename(Path(folder) / REFERENCE.file)
                with opened(replace(spec, image=image, inputs=inputs), [REFERENCE], Path(folder)) as candidates:
                    (outcomes,) = observe(candidates, shown, progress, f"Measuring --preprocess {name}")
            except ConvoyError:  # the network does not run with it
                continue
        share = float(outcomes.right.mean()) if isinstance(outcomes, Outcomes) else 0.0
        if share > best:
            best, found = share, f"--preprocess {name}"
    return f"with {found}: {100 * best:.2f} % of {few.count} images are right" if found else ""


def _candidates(now: ImageSpec) -> Iterator[tuple[str, ImageSpec]]:
    """The usual preparations of classifiers at the input's size, without the current one."""
    size = InputSize.of(now)
    for name, recipe in PRESETS.items():
        fits = len(recipe.mean) in (1, now.channels) and not recipe.is_letterbox
        if fits and (image := preset(name, size, now.front)) != now:
            yield name, image
