"""What the user asked for, as typed on the command line and before its meaning was checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar, get_type_hints

from convoy.models.errors import UsageError
from convoy.models.option import Option
from convoy.models.priorities import ORDINARY_PRIORITIES

_P, _T = ParamSpec("_P"), TypeVar("_T")
_PLAN_CACHE = Option("Folder of plans; by default the server's.")


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """One field per option of `convoy export`; `convoy.export.plan` gives them their meaning.

    `weights` "default" means the published ones; `trust` allows a source that carries pickle. `precisions` None means
    all that can be made with what was given. `accuracy_budget_points` is in percentage points of top-1; `strict_gate`
    wants it proved, not only estimated. `data_root` is where downloaded data sets lie, None the user's cache. `mean`,
    `std`, `resize`, `crop` and `interpolation` go before `preprocess`. The accuracies that are expected, or are the
    least, are in percent of top-1. `plan_cache` None is the server's own. With `remeasure` only `store` and `sign`
    count beside it.
    """

    source: Annotated[
        str,
        Option(
            "zoo:NAME, torchvision:NAME, timm:NAME, file.py:factory, 'file.py:Net(num_classes=5)', FILE.onnx or "
            "FILE.pt2.",
            is_argument=True,
        ),
    ] = ""
    name: Annotated[str, Option("Name to serve the model under; default: the source's.")] = ""
    weights: Annotated[Path | None, Option("Checkpoint, .safetensors or .pth; default: download.")] = None
    input: Annotated[
        str | None,
        Option(
            "Image as CxHxW: 3x224x224, or 3x224?x224? for other sizes, too. Tensors: 1x1000, or a=1x1000,b=8:INT64."
        ),
    ] = None
    task: Annotated[
        str | None,
        Option(
            "What the network is for; by default what is sure.",
            words=("classify", "multilabel", "segment", "detect", "none"),
        ),
    ] = None
    detection: Annotated[Path | None, Option("JSON file: how a detector's outputs become boxes.")] = None
    labels: Annotated[Path | None, Option("File with one label a line, or imagenet.")] = None
    preprocess: Annotated[
        str | None,
        Option(
            "How images are prepared: imagenet, inception, clip, cifar10, mnist, unit (0..1), raw (0..255), "
            "file.py:transform (torchvision), timm:NAME, or a JSON file (Convoy's, timm's or transformers')."
        ),
    ] = None
    mean: Annotated[str | None, Option("Mean per channel, of pixels in 0..1: 0.5,0.5,0.5.")] = None
    std: Annotated[str | None, Option("Standard deviation per channel, likewise.")] = None
    resize: Annotated[str | None, Option("Shorter side before the crop, or HxW to scale to straight.")] = None
    crop: Annotated[str | None, Option("Cut out of the centre: 224, or HxW.")] = None
    interpolation: Annotated[
        str | None, Option("How images are scaled.", words=("nearest", "bilinear", "bicubic", "lanczos"))
    ] = None
    front: Annotated[str, Option("uint8: normalisation in the graph; none: FP32 input.", words=("uint8", "none"))] = (
        "uint8"
    )
    calibrate: Annotated[str | None, Option("Data set, or .npz, whose calibration part sets the ranges.")] = None
    evaluate: Annotated[str | None, Option("Data set, or .npz, whose test part measures accuracy.")] = None
    metric: Annotated[str | None, Option("file.py:function(outputs, targets) that scores each sample.")] = None
    class_map: Annotated[Path | None, Option("JSON file: what data sets call a class, to its label.")] = None
    precisions: Annotated[str | None, Option("Variants to make, of fp32,bf16,fp16,int8,fp8.")] = None
    calibration_method: Annotated[
        str, Option("How ranges are taken from images.", words=("auto", "minmax", "entropy", "percentile"))
    ] = "auto"
    int8_budget_s: Annotated[
        float, Option("Seconds that the search for layers to keep may take, for each file of 8 bits.")
    ] = 1800.0
    allow_random_calibration: Annotated[bool, Option("Without images, take ranges from noise.")] = False
    accuracy_budget_points: Annotated[
        float, Option("Points of top-1 a variant may lose.", name="--accuracy-budget")
    ] = 1.0
    strict_gate: Annotated[bool, Option("Refuse what is not proved to stay within the budget.")] = False
    max_batch: Annotated[int, Option("Largest batch.")] = 64
    priority_levels: Annotated[int, Option("How many priorities requests may have, 1 the most urgent.")] = (
        ORDINARY_PRIORITIES.levels
    )
    default_priority_level: Annotated[int, Option("The one of those that name none.")] = ORDINARY_PRIORITIES.default
    trust: Annotated[bool, Option("Read a .pt2, which can run any code.", name="--trust")] = False
    activation: Annotated[
        str,
        Option("What makes scores of outputs; auto: found out.", words=("auto", "softmax", "sigmoid", "none")),
    ] = "auto"
    expect_accuracy_percent: Annotated[
        float | None, Option("Top-1 in percent that the model is known for.", name="--expect-accuracy")
    ] = None
    min_accuracy_percent: Annotated[
        float | None, Option("Top-1 in percent below which nothing is published.", name="--min-accuracy")
    ] = None
    weights_key: Annotated[str | None, Option("Which entry of a .pth has the weights.")] = None
    random_weights: Annotated[
        bool, Option("Export a network that was never trained, to try its graph.", name="--random-weights")
    ] = False
    force: Annotated[bool, Option("Publish what fails the proof, marked as such.", name="--force")] = False
    remeasure: Annotated[Path | None, Option("Folder of a bundle: measure its latencies again, and nothing else.")] = (
        None
    )
    sign: Annotated[Path | None, Option("File with a private key (elliptic curve, PEM) to sign the bundle with.")] = (
        None
    )
    store: Annotated[Path, Option("Folder of models.")] = Path("store")
    data_root: Annotated[Path | None, Option("Where downloaded data sets lie.")] = None
    plan_cache: Annotated[Path | None, _PLAN_CACHE] = None

    def __post_init__(self) -> None:
        """Raises UsageError for what does not fit together, whatever it means, and where the store is a URL.

        Of one a path would make a folder with a strange name.
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
    option: Option = get_type_hints(ExportOptions, include_extras=True)[field].__metadata__[0]
    return option


def flag_of(field: str) -> str:
    """What a field is called on the command line: `SOURCE`, or its `--option`."""
    option = option_of(field)
    return "SOURCE" if option.is_argument else option.name or f"--{field.replace('_', '-')}"


class MissingOption(UsageError):
    """An option that must be given: its `flag`, and an `example` of its value, empty for a flag without one."""

    def __init__(self, message: str, flag: str, example: str) -> None:
        super().__init__(message)
        self.flag, self.example = flag, example


class Mistakes:
    """Collects what is wrong with a call, so that all of it is reported at once."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def attempt(self, check: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T | None:
        """What `check` returns; None where it raises UsageError, which is kept."""
        try:
            return check(*args, **kwargs)
        except UsageError as error:
            self.found.append(error)
            return None


@dataclass(frozen=True, slots=True)
class BuildAheadOptions:
    """One field per option of `convoy build`. `targets` None: every GPU that the library supports by default.

    `store` None is the demo.
    """

    name: Annotated[str, Option("The model; its newest version is built.", is_argument=True)]
    store: Annotated[Path | None, Option("Folder of models. Without it the demo's plans are built.")] = None
    plan_cache: Annotated[Path | None, _PLAN_CACHE] = None
    targets: Annotated[
        str | None, Option("GPUs such as a10,l4 or sm80,sm89; by default every one since sm80.", name="--for")
    ] = None
    precisions: Annotated[str | None, Option("Variants to build, such as fp16,int8.")] = None
