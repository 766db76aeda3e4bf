"""A model's inputs and outputs: names, dtypes, shapes, image preprocessing and labels.

Dtypes are the Open Inference Protocol's names (`UINT8`, `FP32`, ...), which clients see and which translate to every
other format without loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from convoy.models.errors import BundleError
from convoy.models.priorities import ORDINARY_PRIORITIES, Priorities
from convoy.models.tasks import CLASS_TASKS, DetectionOutputs, SegmentationOutput, Task

# Open Inference Protocol name -> numpy. BYTES are byte strings of any length; numpy has no BF16, so it is two opaque
# bytes. `convoy.models.tensors` converts both to bytes and back.
NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
    "BF16": np.dtype("V2"),
}

# The reverse, for types that numpy has as numbers.
OIP_NAMES: dict[np.dtype[np.generic], str] = {
    dtype: name for name, dtype in NUMPY_DTYPES.items() if dtype.kind in "biuf"
}

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
ResizeMode = Literal["shorter_side", "exact", "letterbox"]
PadPosition = Literal["center", "top_left"]
ChannelOrder = Literal["rgb", "bgr"]
Front = Literal["uint8_nhwc", "float32_nchw"]
Activation = Literal["softmax", "sigmoid", "none"]


@dataclass(frozen=True)
class TensorSpec:
    """One named input or output.

    `shape` is that of one sample, without the batch dimension, if the model's `max_batch_size` is at least 1; otherwise
    it is the whole shape. -1 is a size known only at run time. `example` is a shape without -1 at which the model is
    known to run; empty if none was determined.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    example: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY_DTYPES:
            raise BundleError(
                f"tensor {self.name!r} has dtype {self.dtype}, which cannot be served; "
                f"use one of {', '.join(NUMPY_DTYPES)}"
            )
        if self.example and not fits(self.example, self.shape):
            raise BundleError(f"tensor {self.name!r}: the example {list(self.example)} does not fit {list(self.shape)}")

    @cached_property
    def drawn_shape(self) -> tuple[int, ...]:
        """The shape for runs without a request: the example, or 1 for each dynamic size."""
        return self.example or tuple([1 if size < 0 else size for size in self.shape])

    def without_batch(self) -> TensorSpec:
        """Convert a spec with a whole shape to that of one sample."""
        return replace(self, shape=self.shape[1:], example=self.example[1:])

    @cached_property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        return NUMPY_DTYPES[self.dtype]

    @cached_property
    def is_strings(self) -> bool:
        """Whether elements are byte strings, so that the shape does not determine the number of bytes."""
        return self.dtype == "BYTES"

    @cached_property
    def sample_bytes(self) -> int | None:
        """Bytes of one sample, or None if a size is known only at run time."""
        if self.is_strings or any(size < 0 for size in self.shape):
            return None
        return math.prod(self.shape) * self.numpy_dtype.itemsize


def fits(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of these sizes has this shape, in which -1 is any size."""
    return len(sizes) == len(shape) and all(b in (-1, a) for a, b in zip(sizes, shape, strict=True)) and -1 not in sizes


@dataclass(frozen=True)
class ImageSpec:
    """How encoded bytes become the model's one image input.

    `resize_mode` "shorter_side" scales so that the shorter side is `resize_px` and then crops the centre to `height` x
    `width`; "exact" scales directly to `height` x `width` and ignores `resize_px`. "letterbox" keeps the proportions,
    scales until the picture just fits into `height` x `width`, and fills the rest with `pad_value`, 0 to 255; the
    picture is in the centre ("center", as Ultralytics' LetterBox) or in the corner ("top_left", as YOLOX). Without
    `scale_up`, smaller pictures keep their size. These three fields matter for "letterbox" only.

    `channel_order` "bgr" is for networks trained on images as OpenCV reads them. `mean` and `std` apply to values
    scaled to [0, 1], one per channel in that order. With front "uint8_nhwc" they are already inside
    the graph and the tensor is uint8 [N, height, width, channels]; with "float32_nchw" the host applies them and the
    tensor is float32 [N, channels, height, width].
    """

    height: int
    width: int
    channels: Literal[1, 3]
    resize_mode: ResizeMode
    resize_px: int
    interpolation: Interpolation
    antialias: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    front: Front
    pad_value: int = 114
    pad_position: PadPosition = "center"
    scale_up: bool = True
    channel_order: ChannelOrder = "rgb"

    def __post_init__(self) -> None:
        if not 0 <= self.pad_value <= 255:
            raise BundleError(f"image pad_value must be from 0 to 255, got {self.pad_value}")
        if min(self.height, self.width, self.resize_px) < 1:
            raise BundleError("image height, width and resize_px must be at least 1")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise BundleError(f"image mean and std must have {self.channels} values, one per channel")
        if min(self.std) <= 0:
            raise BundleError("image std must be above 0")
        if self.resize_mode == "shorter_side" and self.resize_px < max(self.height, self.width):
            raise BundleError(
                f"image resize_px {self.resize_px} is below the crop {self.height}x{self.width}; enlarge it"
            )

    @staticmethod
    def plain(height: int, width: int, channels: Literal[1, 3], front: Front) -> ImageSpec:
        """Resize exactly to a size, with values in [0, 1] and no normalisation."""
        return ImageSpec(
            height=height,
            width=width,
            channels=channels,
            resize_mode="exact",
            resize_px=max(height, width),
            interpolation="bilinear",
            antialias=True,
            mean=(0.0,) * channels,
            std=(1.0,) * channels,
            front=front,
        )

    @cached_property
    def tensor_shape(self) -> tuple[int, int, int]:
        """The shape of one sample, as the model takes it."""
        if self.front == "uint8_nhwc":
            return (self.height, self.width, self.channels)
        return (self.channels, self.height, self.width)

    @cached_property
    def free_tensor_shape(self) -> tuple[int, int, int]:
        """The same for a model that takes any height and width."""
        return (-1, -1, self.channels) if self.front == "uint8_nhwc" else (self.channels, -1, -1)

    @cached_property
    def tensor_dtype(self) -> str:
        return "UINT8" if self.front == "uint8_nhwc" else "FP32"


@dataclass(frozen=True)
class ModelSpec:
    """A model's inputs, outputs and labels.

    `max_batch_size` 0 means that the model has no batch dimension: shapes are whole, and a run serves one request.
    `labels` is empty if there are none. `activation` turns outputs into scores: softmax for one class of several (of
    log-probabilities it gives their exponentials), sigmoid for independent classes, none for what are scores already.
    Two labels for one output name the meaning of a low and a high score. `labels` are those of the first output,
    `further_labels` those of the others, in order; empty if there are none.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int
    image: ImageSpec | None
    activation: Activation
    labels: tuple[str, ...]
    priorities: Priorities = ORDINARY_PRIORITIES
    task: Task = "classify"
    segmentation: SegmentationOutput | None = None
    detection: DetectionOutputs | None = None
    further_labels: tuple[tuple[str, ...], ...] = ()

    def labels_of(self, output: int) -> tuple[str, ...]:
        """The labels of an output, by index."""
        return (self.labels, *self.further_labels)[output] if output <= len(self.further_labels) else ()

    @cached_property
    def gives_classes(self) -> bool:
        return self.task in CLASS_TASKS

    @cached_property
    def is_binary(self) -> bool:
        """Whether one output distinguishes two classes."""
        return len(self.labels) == 2 and self.outputs[0].shape[-1:] == (1,)

    def output_index(self, name: str) -> int:
        """The index of the output with this name. Raises ValueError."""
        return [output.name for output in self.outputs].index(name)

    def __post_init__(self) -> None:
        if not self.inputs or not self.outputs:
            raise BundleError(f"model {self.name!r} needs at least one input and one output")
        if self.max_batch_size < 0:
            raise BundleError(f"model {self.name!r}: max_batch_size must be 0 or more")
        self._check_task()
        if self.image is None:
            return
        first = self.inputs[0]
        # Pictures arrive at one size, tensors perhaps at others.
        is_fit = first.dtype == self.image.tensor_dtype and fits(self.image.tensor_shape, first.shape)
        if len(self.inputs) != 1 or not is_fit:
            raise BundleError(
                f"model {self.name!r}: an image model has one input of {self.image.tensor_dtype} "
                f"{list(self.image.tensor_shape)}, got {[(i.dtype, list(i.shape)) for i in self.inputs]}"
            )

    def _check_task(self) -> None:
        for task, declared in (("segment", self.segmentation), ("detect", self.detection)):
            if (self.task == task) != (declared is not None):
                problem = f"does not declare the outputs of its task {task}"
                if declared is not None:
                    problem = f"declares outputs for {task}, but its task is {self.task}"
                raise BundleError(f"model {self.name!r} {problem}; declare both or neither")
        if self.task == "multilabel" and self.activation == "softmax":
            raise BundleError(
                f"model {self.name!r}: a softmax divides one score among all classes, so they cannot be "
                "independent; declare sigmoid or none, or the task classify"
            )
        head = self.segmentation or self.detection
        if head is None:
            return
        try:
            classes = head.check(self.outputs)
        except BundleError as error:
            raise BundleError(f"model {self.name!r}: {error}") from error
        is_single = self.segmentation is not None and classes == 1
        told_apart = 2 if is_single else classes
        if self.labels and told_apart not in (None, len(self.labels)):
            raise BundleError(
                f"model {self.name!r}: there are {len(self.labels)} labels, but its outputs have {told_apart} classes; "
                "pass as many labels"
            )
        if self.activation == "softmax" and (is_single or (self.detection is not None and classes is None)):
            raise BundleError(
                f"model {self.name!r}: the softmax of a single score is always 1; "
                "declare the activation sigmoid or none"
            )
