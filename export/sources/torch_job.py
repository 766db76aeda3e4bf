"""What the parent asks of the torch child and what it gets back: records and files in one folder.

    job.json, samples.safetensors  ->  model.onnx, reference.safetensors, outcome.json
             in:NAME, noise:NAME, other0 ...        out:NAME, noise:NAME, other0:NAME ...
    inquiry.json                   ->  description.json

Knows neither torch nor the child's ways; both sides import it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from convoy.export.rows import Rows
from convoy.models.spec import ImageSpec, Interpolation
from convoy.models.tasks import DetectionOutputs, Task

JOB = "job.json"
SAMPLES = "samples.safetensors"
ONNX = "model.onnx"
REFERENCE = "reference.safetensors"
OUTCOME = "outcome.json"
INQUIRY = "inquiry.json"
DESCRIPTION = "description.json"
# Weights too large for one protobuf lie here, beside the graph and under this name for good.
EXTERNAL_DATA = "fp32.onnx.data"
# Before the names of inputs and outputs in those files.
IN, OUT = "in:", "out:"
# And where the samples are noise, to which the network may answer anything, or nothing.
NOISE = "noise:"
# A network of free height and width has samples of its one input at other sizes, of which two must run.
OTHERS = ("other0", "other1", "other2", "other3")
OTHER_SIZES = 2
INPUT_NAME = "images"
# What one output is called that has no name of its own: of [N, classes], and of any other shape.
LOGITS, OUTPUT = "logits", "output"
ANY_BATCH = 1 << 30

SourceKind = Literal["zoo", "torchvision", "timm", "file", "pt2", "onnx"]
# From the network as it was built, a file, the registry that published it, or drawn at random to test graphs.
WeightsFrom = Literal["network", "file", "registry", "random"]


@dataclass(frozen=True, slots=True)
class TorchJob:
    """What to export, as plain data.

    `file` is the user's file and `name` its factory for kind "file", the archive for kind "pt2"; otherwise
    `name` is a registry's. `classes` is None where the network knows by itself. `mean` and `std` apply to values
    in [0, 1]: with `uint8_front` the graph takes uint8 [N, H, W, C] and applies them, else float32 [N, C, H, W].
    Parameters of more than `inline_bytes` go into a file beside the graph. `weights_key` names the entry of the file of
    weights; None takes the usual one. `refuse_random`: weights that a factory draws at random are an error.
    `is_free`: height and width are to be free, where the network runs at `OTHER_SIZES` of the other sizes' samples.
    `inputs` names the inputs; with `uint8_front` there is one. `is_alone`: the network is shown one sample at a time.
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


@dataclass(frozen=True, slots=True)
class TorchOutcome:
    """What came of it: either `error`, one line for the user, or torch's version and the names of the outputs.

    `weights_entry` says what was taken of the file of weights, changed and left out; empty where it was all as it is.
    `why_fixed` says why height and width are not free, where they were to be, and `why_alone` why the graph takes one
    sample at a time; empty where it takes batches. `task` is what the registry publishes the
    network for, and `detection` how the outputs of a detector are read.
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
    """The original's answers to samples of one size, by the names of outputs and inputs."""

    samples: Rows
    reference: Rows


@dataclass(frozen=True, slots=True)
class TorchResult:
    """The fp32 graph, and the original's own answers to the samples, by output in the graph's order.

    An input of images is called `INPUT_NAME`. `torch_version` is empty where torch had no part in it.
    The graph takes at most `max_batch` samples a run, and `remark` is what else should be said of it.
    `original` names what gave the answers; `weights_entry` is as in `TorchOutcome`.
    `noise` is what it answers to noise of both signs; None where it does not run on that.
    `elsewhere` is what a graph of free height and width is to answer at other sizes; empty where they are fixed.
    `task` and `detection` are as in `TorchOutcome`.
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

    def with_remarks(self, *remarks: str) -> TorchResult:
        """The same with more to be said; empty remarks say nothing."""
        return replace(self, remark="; ".join(filter(None, (self.remark, *remarks))))


@dataclass(frozen=True, slots=True)
class Inquiry:
    """What does a registry say of a model?

    With `file`, which is the user's, it asks what its network runs on: 1 channel or 3, at `size` (height and width);
    or, for `is_transform`, how its transform `name` prepares images.
    """

    kind: SourceKind
    name: str
    file: str | None = None
    size: tuple[int, ...] = ()
    is_transform: bool = False


@dataclass(frozen=True, slots=True)
class TransformRecipe:
    """What a user's transform does to images; None is what it does not do.

    `exact` (height, width) is what images are scaled to straight, `resize_px` what their shorter side is scaled to
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
    """A registry's own words, or `error`, one line for the user, who may have called it wrongly.

    `image` is how the published weights want their images, with front "uint8_nhwc"; None with the reason in
    `why_no_image`. `labels` are those of the published weights, whose name is `weights`; both may be empty.
    `channels` answers the question about a file, `transform` the one about a transform.
    """

    error: str | None = None
    is_wrong_call: bool = False
    image: ImageSpec | None = None
    why_no_image: str = ""
    labels: tuple[str, ...] = ()
    weights: str = ""
    channels: tuple[int, ...] = ()
    transform: TransformRecipe | None = None


_SENTENCE_END = re.compile(r"[.!?](?=\s|$)")


def one_line(text: str, limit: int = 300) -> str:
    """The text without its line breaks and runs of blanks.

    What is longer than `limit` characters ends behind the last whole sentence or line within them, or behind the first
    where that is longer: nothing is cut in its middle.
    """
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    flat = " ".join(lines)
    if len(flat) <= limit:
        return flat
    ends = {match.end() for match in _SENTENCE_END.finditer(flat)}
    ends |= {len(" ".join(lines[: count + 1])) for count in range(len(lines))}
    within = [end for end in ends if end <= limit]
    return flat[: max(within) if within else min(ends)]
