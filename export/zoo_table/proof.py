"""One network of torchvision with random weights, exported and held against torch on random pictures.

Knows registries, pictures and errors. Knows nothing of variants, of times or of the table.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from convoy.export.data import ImageSet
from convoy.export.proof.verify import relative_error
from convoy.export.sources.to_onnx import INLINE_BYTES
from convoy.export.sources.torch_job import INPUT_NAME, LOGITS, Inquiry, TorchJob, TorchResult
from convoy.export.sources.torch_process import ask, run_job
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import OpenVariant, opened
from convoy.models.errors import JobError
from convoy.models.samples import Sample
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec

MAX_ERROR = 1e-3
BATCHES = (1, 3, 8)
# Below this share of the outputs that differs between images, agreeing would prove nothing.
MIN_SPREAD = 1e-3
_IMAGES = max(BATCHES)


@dataclass(frozen=True, slots=True)
class Proof:
    """`samples` uint8 [8, H, W, C] were answered by torch and by ONNX Runtime with a relative error of `error`.

    `spread` is how much of the answers differs between samples.
    """

    spec: ModelSpec
    samples: np.ndarray
    error: float
    spread: float

    @property
    def is_proved(self) -> bool:
        return self.error <= MAX_ERROR and self.spread >= MIN_SPREAD


def image_of(name: str) -> ImageSpec:
    """How the network's published weights want their images. Raises JobError where that is not known."""
    image = ask(Inquiry("torchvision", name)).image
    if image is None:
        raise JobError("its preprocessing is not known")
    return image


def prove(name: str, image: ImageSpec, folder: Path, threads: int) -> Proof:
    """Export torchvision's `name` with random weights into `folder`, and hold it against torch in the serving engine.

    Raises JobError for what cannot be exported, EngineFailure for what does not run.
    """
    samples = samples_of(image)
    answer = export_random(name, image, samples, folder, threads)
    spec = _spec(name, image, answer)
    with opened(spec, [REFERENCE], folder) as (fp32,):
        error = max(_error_at(fp32, samples, answer.reference[LOGITS], batch) for batch in BATCHES)
    return Proof(spec, samples, error, _spread(answer.reference[LOGITS]))


def samples_of(image: ImageSpec) -> np.ndarray:
    """uint8 [8, height, width, channels]: the random pictures of this size, the same each time."""
    return np.stack([random_picture(image, seed) for seed in range(_IMAGES)])


def export_random(name: str, image: ImageSpec, samples: np.ndarray, folder: Path, threads: int) -> TorchResult:
    """`REFERENCE.file` in `folder`, and torch's own answers. Weights are drawn by what they make of the samples.

    Raises JobError for what cannot be exported.
    """
    answer = run_job(_job(name, image, threads), {INPUT_NAME: samples}, folder)
    answer.onnx.rename(folder / REFERENCE.file)
    return answer


def _job(name: str, image: ImageSpec, threads: int) -> TorchJob:
    return TorchJob(
        kind="torchvision",
        name=name,
        file=None,
        weights_from="random",
        weights=None,
        classes=None,
        uint8_front=True,
        mean=image.mean,
        std=image.std,
        max_batch=max(BATCHES),
        threads=threads,
        inline_bytes=INLINE_BYTES,
    )


def _spec(name: str, image: ImageSpec, answer: TorchResult) -> ModelSpec:
    inputs = (TensorSpec(INPUT_NAME, image.tensor_dtype, image.tensor_shape),)
    outputs = (TensorSpec(LOGITS, "FP32", answer.reference[LOGITS].shape[1:]),)
    return ModelSpec(name, inputs, outputs, max(BATCHES), image, "softmax", ())


def random_picture(image: ImageSpec, seed: int) -> np.ndarray:
    """uint8 [height, width, channels]: coloured squares of several sizes over each other.

    Plain noise looks the same to a network whatever its seed; squares differ as photographs do.
    """
    generator = np.random.default_rng(seed)
    canvas = np.zeros((image.height, image.width, image.channels))
    for cells in (2, 7, 28):
        rows, columns = (np.arange(size) * cells // size for size in (image.height, image.width))
        canvas += generator.random((cells, cells, image.channels))[rows][:, columns]
    picture: np.ndarray = (canvas * (255 / 3)).astype(np.uint8)
    return picture


def _spread(answers: np.ndarray) -> float:
    """How much of the answers [n, outputs] differs between images: ||a - mean|| / ||a||."""
    return float(np.linalg.norm(answers - answers.mean(axis=0)) / max(float(np.linalg.norm(answers)), 1e-30))


def _error_at(candidate: OpenVariant, samples: np.ndarray, reference: np.ndarray, batch: int) -> float:
    parts = [samples[start : start + batch] for start in range(0, len(samples), batch)]
    return relative_error(np.concatenate([logits_of(candidate, part) for part in parts]), reference)


def logits_of(candidate: OpenVariant, samples: np.ndarray) -> np.ndarray:
    """float32 [n, classes] for images [n, ...]."""
    logits: np.ndarray = candidate.answers({INPUT_NAME: samples})[LOGITS]
    return logits


def pictures_of(image: ImageSpec, samples: np.ndarray) -> ImageSet:
    """The samples as files that reach the network unchanged: they have its size, and resizing would blur them."""
    listed = tuple(
        Sample(str(index), 0, hashlib.sha256(pixels.tobytes()).hexdigest(), pixels)
        for index, pixels in enumerate(samples)
    )
    return ImageSet("random pictures", listed, replace(image, resize_mode="exact"))
