"""The exchange between parent and torch child: records and files in one folder.

    job.json, samples.safetensors  ->  model.onnx, reference.safetensors, outcome.json
             in:NAME, noise:NAME, other0 ...        out:NAME, noise:NAME, other0:NAME ...
    inquiry.json                   ->  description.json

Needs no torch; both sides import it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from convoy.export.rows import Rows
from convoy.models.spec import ImageSpec, Interpolation
from convoy.models.tasks import DetectionOutputs, Layout, Task

JOB = "job.json"
SAMPLES = "samples.safetensors"
ONNX = "model.onnx"
REFERENCE = "reference.safetensors"
OUTCOME = "outcome.json"
INQUIRY = "inquiry.json"
DESCRIPTION = "description.json"
# Weights too large for one protobuf are here, beside the graph and under this name for good.
EXTERNAL_DATA = "fp32.onnx.data"
# Prefixes of the names of inputs and outputs in those files.
IN, OUT = "in:", "out:"
# And for noise samples, for which the network may return anything, or nothing.
NOISE = "noise:"
# A network of dynamic height and width has samples of its only input at other sizes, two of which must run.
OTHERS = ("other0", "other1", "other2", "other3")
OTHER_SIZES = 2
INPUT_NAME = "images"
# The name of a single output without one: for [N, classes], and for any other shape.
LOGITS, OUTPUT = "logits", "output"
ANY_BATCH = 1 << 30

SourceKind = Literal["zoo", "torchvision", "timm", "file", "pt2", "onnx"]
# From the network as built, a file, the registry that published it, or drawn at random to test graphs.
WeightsFrom = Literal["network", "file", "registry", "random"]


@dataclass(frozen=True, slots=True)
class TorchJob:
    """What to export, as plain data.

    `file` is the user's file and `name` its factory for kind "file", the archive for kind "pt2"; otherwise `name` is a
    registry's. `classes` is None if the network determines them. `mean` and `std` apply to values in [0, 1]: with
    `uint8_front` the graph takes uint8 [N, H, W, C] and applies them, otherwise float32 [N, C, H, W]. Parameters of
    more than `inline_bytes` go into a file beside the graph. `weights_key` names the entry of the file of weights; None
    takes the usual one. `refuse_random` makes weights that a factory draws at random an error. `is_free` asks for
    dynamic height and width, if the network runs at `OTHER_SIZES` of the other sizes' samples. `inputs` names the
    inputs; with `uint8_front` there is one. `is_alone` means that the network gets one sample at a time. With a
    `layout`, outputs that it does not read are left out of the graph.
    """

    kind: SourceKind
    name: str
    file: str | None
    weights_from: WeightsFrom
    weights: str | None
    classes: int | None
    uint8_front: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    max_batch: int
    threads: int
    inline_bytes: int
    weights_key: str | None = None
    refuse_random: bool = False
    is_free: bool = False
    inputs: tuple[str, ...] = (INPUT_NAME,)
    is_alone: bool = False
    layout: Layout | None = None

    @property
    def shown(self) -> str:
        """The source as the user gave it, without folders."""
        return f"{Path(self.file).name if self.file else self.kind}:{self.name}"


@dataclass(frozen=True, slots=True)
class TorchOutcome:
    """The result: either `error`, one line for the user, or torch's version and the names of the outputs.

    `weights_entry` says what was taken, changed and left out of the file of weights; empty if it was used as it is.
    `why_fixed` says why height and width are not dynamic, if that was asked for, and `why_alone` why the graph takes
    one sample at a time; empty if it takes batches. `task` is what the registry publishes the network for, and
    `detection` how the outputs of a detector are read.
    """

    error: str | None
    outputs: tuple[str, ...]
    torch_version: str
    weights_entry: str = ""
    why_fixed: str = ""
    task: Task | None = None
    detection: DetectionOutputs | None = None
    why_alone: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """The original's answers to samples of one size, by the names of outputs and inputs.

    `rounding` is how far rounding of the samples alone moves each output, ||a - b|| / ||b||; empty if it is unknown.
    """

    samples: Rows
    reference: Rows
    rounding: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TorchResult:
    """The fp32 graph, and the original's own answers to the samples, by output in the graph's order.

    An input of images is called `INPUT_NAME`. `torch_version` is empty if torch was not involved. The graph takes at
    most `max_batch` samples per run, and `remark` is a further note. `original` names what gave the answers;
    `weights_entry` is as in `TorchOutcome`. `noise` has its answers to noise of both signs; None if it does not run on
    noise. `elsewhere` has the answers at other sizes for a graph of dynamic height and width; empty if they are fixed.
    `task` and `detection` are as in `TorchOutcome`, `rounding` as in `Answered`.
    """

    onnx: Path
    reference: Rows
    torch_version: str
    max_batch: int = ANY_BATCH
    remark: str = ""
    original: str = "torch"
    weights_entry: str = ""
    elsewhere: tuple[Answered, ...] = ()
    task: Task | None = None
    detection: DetectionOutputs | None = None
    noise: Answered | None = None
    rounding: Mapping[str, float] = field(default_factory=dict)

    def with_remarks(self, *remarks: str) -> TorchResult:
        """The same with further remarks; empty ones are ignored."""
        return replace(self, remark="; ".join(filter(None, (self.remark, *remarks))))


RANDOM_WEIGHTS_ADVICE = (
    "pass --weights FILE, load them in the function, or pass --random-weights to export an untrained network"
)


@dataclass(frozen=True, slots=True)
class Inquiry:
    """A question about a registry's model.

    With `file`, a user's, it asks what its network runs on: 1 channel or 3, at `size` (height and width); or whether
    its weights are random, if `is_about_weights`; or what it says of itself, if `is_about_metadata`, at `size` if it
    is given; or how its transform `name` prepares images, if `is_transform`.
    """

    kind: SourceKind
    name: str
    file: str | None = None
    size: tuple[int, ...] = ()
    is_transform: bool = False
    is_about_weights: bool = False
    is_about_metadata: bool = False


@dataclass(frozen=True, slots=True)
class TransformRecipe:
    """What a user's transform does to images; None is what it does not do.

    `exact` (height, width) is the size to which images are scaled directly, `resize_px` the size of their shorter side
    before the `crop` (height, width). `mean` and `std`, per channel or one for all, apply to values in 0..1.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize_px: int | None = None
    exact: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    interpolation: Interpolation | None = None
    antialias: bool = True
    channels: Literal[1, 3] | None = None


@dataclass(frozen=True, slots=True)
class Description:
    """A registry's answer, or `error`, one line for the user, whose usage may be wrong.

    `image` is the preprocessing of the published weights, with front "uint8_nhwc"; None with the reason in
    `why_no_image`. `labels` are those of the published weights, whose name is `weights`; both may be empty. `channels`
    and `is_random` answer the questions about a file, `transform` the one about a transform. `metadata` is as in an
    ONNX file of Ultralytics, and `outputs` are the shapes of its outputs for an image of `size` (height, width); they
    are empty for other networks.
    """

    error: str | None = None
    is_wrong_call: bool = False
    image: ImageSpec | None = None
    why_no_image: str = ""
    labels: tuple[str, ...] = ()
    weights: str = ""
    channels: tuple[int, ...] = ()
    is_random: bool = False
    transform: TransformRecipe | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    size: tuple[int, ...] = ()


_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


def one_line(text: str, limit: int = 300) -> str:
    """The text without line breaks and repeated blanks.

    A text longer than `limit` characters ends after the last whole sentence or line within the limit, or after the
    first if that is longer: no sentence is cut.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    flat = " ".join(lines)
    if len(flat) <= limit:
        return flat
    ends = {match.end() for match in _SENTENCE_END.finditer(flat)}
    ends |= {len(" ".join(lines[: count + 1])) for count in range(len(lines))}
    within = [end for end in ends if end <= limit]
    return flat[: max(within) if within else min(ends)]
