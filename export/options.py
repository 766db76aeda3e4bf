"""The user's options, as typed on the command line and before their meaning is checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, get_type_hints

from convoy.models.errors import UsageError
from convoy.models.option import Option
from convoy.models.priorities import ORDINARY_PRIORITIES

_P = ParamSpec("_P")
_T = TypeVar("_T")
_PLAN_CACHE = Option("Folder of TensorRT plans; the default is the server's.", group="Output")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One field per option of `convoy export`; `convoy.export.plan` interprets them.

    `weights` "default" means the published ones; `trust` allows a source that contains pickle. `precisions` None means
    all that can be made. `accuracy_budget_points` is in percentage points of top-1; `strict_gate` requires a proof, not
    only an estimate. `data_root` is the folder of downloaded data sets, None the user's cache. `mean`, `std`, `resize`,
    `crop` and `interpolation` override `preprocess`. The expected and the minimum accuracy are in percent of top-1.
    `plan_cache` None is the server's own. With `remeasure`, only `store` and `sign` apply as well.
    """

    source: Annotated[
        str,
        Option(
            "The model: zoo:NAME, torchvision:NAME, timm:NAME, file.py:factory, 'file.py:Net(num_classes=5)', "
            "FILE.onnx or FILE.pt2.",
            is_argument=True,
        ),
    ] = ""
    name: Annotated[str, Option("Name of the model; the default comes from the source.", group="Basics")] = ""
    weights: Annotated[
        Path | None,
        Option("Checkpoint (.safetensors, .pth), or `default` for published weights.", group="Basics"),
    ] = None
    input: Annotated[
        str | None,
        Option(
            "Shape of one input: 3x224x224, or 3x224?x224? for images of any size; tensors as 1x1000 or "
            "a=1x1000,b=8:INT64.",
            group="Model",
        ),
    ] = None
    task: Annotated[
        str | None,
        Option(
            "Task of the model; the default comes from its outputs.",
            words=("classify", "multilabel", "segment", "detect", "none"),
            group="Model",
        ),
    ] = None
    detection: Annotated[
        Path | None,
        Option(
            "How outputs become boxes: yolo_v5, yolo_v8, yolo_v8_seg, yolo_v8_pose, end_to_end, detr, or a JSON file.",
            group="Model",
        ),
    ] = None
    labels: Annotated[
        Path | None,
        Option("Text file with one label per line, or `imagenet`; the default is the data's folders.", group="Basics"),
    ] = None
    preprocess: Annotated[
        str | None,
        Option(
            "How images are prepared: imagenet, inception, clip, cifar10, mnist, unit (0..1), raw (0..255), letterbox "
            "(YOLO), file.py:transform (torchvision), timm:NAME, or a JSON file (Convoy's, timm's or transformers').",
            group="Basics",
        ),
    ] = None
    mean: Annotated[str | None, Option("Mean per channel of pixels in 0..1, such as 0.5,0.5,0.5.", group="Images")] = (
        None
    )
    std: Annotated[str | None, Option("Standard deviation per channel of pixels in 0..1.", group="Images")] = None
    resize: Annotated[
        str | None, Option("Size of the shorter side before the crop, or HxW for the whole image.", group="Images")
    ] = None
    crop: Annotated[str | None, Option("Size of the centre crop: 224, or HxW.", group="Images")] = None
    interpolation: Annotated[
        str | None,
        Option("Interpolation of the resize.", words=("nearest", "bilinear", "bicubic", "lanczos"), group="Images"),
    ] = None
    front: Annotated[
        str,
        Option(
            "uint8: the graph takes uint8 images and normalises them; none: it takes FP32.",
            words=("uint8", "none"),
            group="Images",
        ),
    ] = "uint8"
    data: Annotated[
        str | None,
        Option(
            "Images to calibrate and to evaluate with: a folder, COCO, YOLO, VOC, masks, a data set or .npz file.",
            group="Basics",
        ),
    ] = None
    calibrate: Annotated[
        str | None, Option("Data for the ranges of INT8 and FP8; its calibration part.", group="Accuracy")
    ] = None
    evaluate: Annotated[str | None, Option("Data to measure accuracy on; its test part.", group="Accuracy")] = None
    metric: Annotated[
        str | None,
        Option("Your own score, file.py:function(outputs, targets), which returns one per sample.", group="Accuracy"),
    ] = None
    class_map: Annotated[
        Path | None, Option("JSON file that maps class names of the data to labels.", group="Accuracy")
    ] = None
    precisions: Annotated[str | None, Option("Variants to make: any of fp32,bf16,fp16,int8,fp8.", group="Accuracy")] = (
        None
    )
    calibration_method: Annotated[
        str,
        Option(
            "How ranges are computed from the images.",
            words=("auto", "minmax", "entropy", "percentile"),
            group="Accuracy",
        ),
    ] = "auto"
    int8_budget_s: Annotated[
        float,
        Option("Most seconds per 8-bit file to search for layers to keep in high precision.", group="Accuracy"),
    ] = 1800.0
    allow_random_calibration: Annotated[
        bool, Option("Compute ranges from random noise if there are no images.", group="Accuracy")
    ] = False
    accuracy_budget_points: Annotated[
        float,
        Option("Points of accuracy that a variant may lose.", name="--accuracy-budget", group="Accuracy"),
    ] = 1.0
    strict_gate: Annotated[
        bool, Option("Serve a variant only if it is proved to stay within the budget.", group="Accuracy")
    ] = False
    max_batch: Annotated[int, Option("Largest batch.", group="Model")] = 64
    priority_levels: Annotated[
        int, Option("Number of priority levels of requests; 1 is the most urgent.", group="Model")
    ] = ORDINARY_PRIORITIES.levels
    default_priority_level: Annotated[
        int, Option("Priority level of requests that do not name one.", group="Model")
    ] = ORDINARY_PRIORITIES.default
    trust: Annotated[bool, Option("Read a .pt2 file, which can run any code.", name="--trust", group="Security")] = (
        False
    )
    activation: Annotated[
        str,
        Option(
            "What turns outputs into scores; auto: found from the graph.",
            words=("auto", "softmax", "sigmoid", "none"),
            group="Model",
        ),
    ] = "auto"
    expect_accuracy_percent: Annotated[
        float | None,
        Option(
            "Known top-1, mAP@50:95 or mean IoU of the model, in percent.", name="--expect-accuracy", group="Accuracy"
        ),
    ] = None
    min_accuracy_percent: Annotated[
        float | None,
        Option("Lowest top-1, mAP@50:95 or mean IoU to publish, in percent.", name="--min-accuracy", group="Accuracy"),
    ] = None
    weights_key: Annotated[str | None, Option("Entry of a .pth file that has the weights.", group="Model")] = None
    random_weights: Annotated[
        bool, Option("Export with random weights, to try the graph.", name="--random-weights", group="Model")
    ] = False
    force: Annotated[
        bool, Option("Publish although checks fail; the bundle is marked.", name="--force", group="Accuracy")
    ] = False
    remeasure: Annotated[
        Path | None, Option("Measure the latencies of this bundle again, and nothing else.", group="Output")
    ] = None
    sign: Annotated[
        Path | None, Option("PEM file with a private key (elliptic curve) to sign the bundle.", group="Security")
    ] = None
    store: Annotated[Path, Option("Folder of models to write to.", group="Basics")] = Path("store")
    data_root: Annotated[Path | None, Option("Folder for downloaded data sets.", group="Output")] = None
    plan_cache: Annotated[Path | None, _PLAN_CACHE] = None

    def __post_init__(self) -> None:
        """Raises UsageError for options that do not fit together, and if the store is a URL, which as a path would
        become a folder with a strange name.
        """
        if self.remeasure is not None:
            given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
            others = [name for name in given if name not in ("remeasure", "store", "sign")]
            if others:
                raise UsageError(
                    f"--remeasure measures a bundle that is there, and takes nothing beside it but --store and --sign; "
                    f"leave out {', '.join(map(flag_of, others))}"
                )
        elif not self.source:
            raise UsageError("SOURCE is missing; say what to export, such as torchvision:resnet18 or model.onnx")
        if re.match(r"[a-z0-9]+:/", str(self.store)):
            raise UsageError("--store must be a folder here; write to one, and upload it, such as by `aws s3 sync`")


def option_of(field: str) -> Option:
    """The option that sets a field of `ExportOptions`."""
    option: Option = _hints()[field].__metadata__[0]
    return option


@cache
def _hints() -> dict[str, Any]:
    """The types of the fields, with their options."""
    return get_type_hints(ExportOptions, include_extras=True)


def flag_of(field: str) -> str:
    """A field's name on the command line: `SOURCE`, or its `--option`."""
    option = option_of(field)
    return "SOURCE" if option.is_argument else option.name or f"--{field.replace('_', '-')}"


class MissingOption(UsageError):
    """A required option: its `flag`, and an `example` of its value, empty for a flag without one."""

    def __init__(self, message: str, flag: str, example: str) -> None:
        super().__init__(message)
        self.flag, self.example = flag, example


class Mistakes:
    """Collects the mistakes of a call, so that all are reported at once."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def attempt(self, check: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """The result of `check`; None if it raises UsageError, which is kept."""
        try:
            return check(*args, **kwargs)
        except UsageError as error:
            self.found.append(error)
            return None


@dataclass(frozen=True, slots=True)
class BuildAheadOptions:
    """One field per option of `convoy build`. `targets` None means every GPU that the library supports by default.

    `store` None is the demo.
    """

    name: Annotated[str, Option("The model; its newest version is built.", is_argument=True)]
    store: Annotated[Path | None, Option("Folder of models; the default is the demo.")] = None
    plan_cache: Annotated[Path | None, _PLAN_CACHE] = None
    targets: Annotated[
        str | None, Option("GPUs, such as a10,l4 or sm80,sm89; the default is all from sm80.", name="--for")
    ] = None
    precisions: Annotated[str | None, Option("Variants to build, such as fp16,int8.")] = None
