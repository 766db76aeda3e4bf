"""The options of a training, checked at construction. Needs neither torch nor numpy."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

from convoy.models import zoo
from convoy.models.errors import UsageError
from convoy.models.option import Option
from convoy.models.shapes.shape_set import named_set
from convoy.models.tasks import Task
from convoy.models.training.schedule import Schedule
from convoy.models.weights.key import refuse_needless_key

Device = Literal["auto", "cpu", "cuda"]
TrainPrecision = Literal["fp32", "bf16", "fp16"]
Layout = Literal["contiguous", "channels_last"]
Optimizer = Literal["adamw", "sgd"]
ClassWeights = Literal["none", "balanced"]

# The prefix of torchvision's networks, as in a SOURCE of `convoy export`.
TORCHVISION = "torchvision:"
# The value of `--weights` for torchvision's published weights.
IMAGENET = "imagenet"

# Options that may change between an interrupted run and its continuation, because they do not affect the result.
_FREE = frozenset({"out", "device", "data_root", "loader_workers", "log", "resume", "tensorboard"})


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train and how.

    `learning_rate` is the peak of the schedule. It, `weight_decay` and `warm_up` default to values that fit the
    optimiser and the schedule (None), `batch_size` and `epochs` to values that fit the network's task. `amp` None means
    mixed precision on a GPU only, and `channels_last` None that layout there; `precision` names the one that `amp`
    leaves to the device. `compile` applies to training steps; the network itself is measured and written. `validation`
    is a share or a folder. `data_root` None is the user's cache.

    Raises UsageError for values out of range.
    """

    dataset: Annotated[
        str, Option("digits, cifar10, glyphs, shapes, or a folder with one folder per class.", is_argument=True)
    ]
    out: Annotated[Path, Option("Checkpoint to write (.safetensors).", group="Basics")]
    arch: Annotated[str, Option("Network of the zoo, or torchvision:NAME.", group="Basics")] = "simple_cnn"
    image_size: Annotated[
        int | None, Option("Input size of a torchvision network; default: as published.", group="Network")
    ] = None
    weights: Annotated[
        str | None, Option("Initial weights: a .safetensors or .pth file, or `imagenet`.", group="Basics")
    ] = None
    weights_key: Annotated[str | None, Option("Entry of a .pth file that has the weights.", group="Network")] = None
    freeze: Annotated[bool, Option("Train only the head.", group="Network")] = False
    device: Annotated[Device, Option("Device to train on.", group="Basics")] = "auto"
    amp: Annotated[bool | None, Option("Mixed precision; default: on a GPU only.", group="Speed")] = None
    precision: Annotated[
        TrainPrecision | None,
        Option("Precision of the forward pass, instead of --amp.", words=get_args(TrainPrecision), group="Speed"),
    ] = None
    channels_last: Annotated[
        bool | None, Option("Channels-last memory format; default: on a GPU only.", group="Speed")
    ] = None
    compile: Annotated[bool, Option("Train with torch.compile.", group="Speed")] = False
    optimizer: Annotated[Optimizer, Option("Optimiser.", group="Optimisation")] = "adamw"
    learning_rate: Annotated[
        float | None, Option("Peak learning rate; default: by optimiser.", name="--lr", group="Basics")
    ] = None
    schedule: Annotated[
        Schedule, Option("Learning rate schedule; step: divide by ten, twice.", group="Optimisation")
    ] = "one_cycle"
    warm_up: Annotated[
        float | None,
        Option("Share of the run with a rising learning rate.", name="--lr-warm-up", group="Optimisation"),
    ] = None
    weight_decay: Annotated[float | None, Option("Weight decay; default: by optimiser.", group="Optimisation")] = None
    label_smoothing: Annotated[float, Option("Label smoothing of classifiers, from 0 to 1.", group="Optimisation")] = (
        0.05
    )
    class_weights: Annotated[
        ClassWeights, Option("balanced: weight images by the rarity of their class.", group="Optimisation")
    ] = "none"
    ema: Annotated[
        float | None, Option("Decay of a moving average of the weights, such as 0.99.", group="Optimisation")
    ] = None
    batch_size: Annotated[int | None, Option("Images per step; default: 64, for shapes 16.", group="Basics")] = None
    epochs: Annotated[
        int | None, Option("Passes over the training images; default: 60, for shapes 12.", group="Basics")
    ] = None
    seed: Annotated[int, Option("Seed of weights, order and augmentation.", group="Optimisation")] = 0
    validation: Annotated[
        str | None,
        Option("Images to choose the best epoch: a share such as 0.1, or a folder.", group="Optimisation"),
    ] = None
    loader_workers: Annotated[
        int, Option("Processes that decode images in each epoch; 0: decode all once.", group="Speed")
    ] = 0
    log: Annotated[
        bool, Option("Write NAME.training.csv and NAME.training.html beside the checkpoint.", group="Output")
    ] = True
    tensorboard: Annotated[Path | None, Option("Folder for TensorBoard logs.", group="Output")] = None
    resume: Annotated[bool, Option("Continue an interrupted run of the same command.", group="Output")] = False
    data_root: Path | None = None

    def __post_init__(self) -> None:
        if self.out.suffix != ".safetensors":
            own = f"{self.arch.removeprefix(TORCHVISION)}.safetensors"
            named = self.out / own if self.out.is_dir() else self.out.with_suffix(".safetensors")
            raise UsageError(f"--out {self.out}: checkpoints are always safetensors; use --out {named}")
        is_zoos = not self.arch.startswith(TORCHVISION)
        if is_zoos:
            zoo.entry(self.arch)
        if self.image_size is not None and (is_zoos or self.image_size < 1):
            raise UsageError(
                f"--image-size {self.image_size} is only for {TORCHVISION}NAME and must be at least 1; remove it"
            )
        if self.weights == IMAGENET and is_zoos:
            raise UsageError(f"--weights {IMAGENET} is only for {TORCHVISION}NAME; pass a file, or another --arch")
        refuse_needless_key(self.weights_key, None if self.weights in (None, IMAGENET) else Path(self.weights))
        if self.freeze and self.weights is None:
            raise UsageError("--freeze needs --weights; pass --weights, or remove --freeze")
        refuse_unknown("--device", self.device, get_args(Device))
        if self.precision is not None:
            refuse_unknown("--precision", self.precision, get_args(TrainPrecision))
            if self.amp is not None:
                raise UsageError(f"--precision {self.precision} and --amp exclude each other; remove one")
        refuse_unknown("--optimizer", self.optimizer, get_args(Optimizer))
        refuse_unknown("--schedule", self.schedule, get_args(Schedule))
        refuse_unknown("--class-weights", self.class_weights, get_args(ClassWeights))
        for option, share in (("--lr-warm-up", self.warm_up), ("--label-smoothing", self.label_smoothing)):
            if share is not None and not 0 <= share < 1:
                raise UsageError(f"{option} must be at least 0 and below 1, got {share}")
        if self.weight_decay is not None and not 0 <= self.weight_decay < float("inf"):
            raise UsageError(f"--weight-decay must be 0 or above, got {self.weight_decay}")
        if self.ema is not None and not 0 < self.ema < 1:
            raise UsageError(f"--ema is a decay between 0 and 1, such as 0.99, got {self.ema}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--lr must be above 0, got {self.learning_rate}")
        for option, number in (("--batch-size", self.batch_size), ("--epochs", self.epochs)):
            if number is not None and number < 1:
                raise UsageError(f"{option} must be at least 1, got {number}")
        self._refuse_other_task()
        if self.validation is not None:
            parse_validation(self.validation)
        if not 0 <= self.loader_workers <= 1024:
            raise UsageError(f"--loader-workers must be from 0 to 1024, got {self.loader_workers}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")

    @property
    def task(self) -> Task:
        """What the network is for."""
        return "classify" if self.arch.startswith(TORCHVISION) else zoo.entry(self.arch).task

    def _refuse_other_task(self) -> None:
        """Raise UsageError if network and data set are for different tasks, or an option does not fit the task."""
        networks = " or ".join(f"--arch {name}" for name in zoo.names() if zoo.entry(name).task != "classify")
        is_shapes = named_set(self.dataset) is not None
        if is_shapes and self.task == "classify":
            raise UsageError(f"shapes have boxes and masks, but {self.arch} is a classifier; pass {networks}")
        if not is_shapes and self.task != "classify":
            raise UsageError(f"{self.arch} learns from the data set shapes, not from {self.dataset}; pass shapes")
        if not is_shapes:
            return
        if self.class_weights != "none":
            raise UsageError(f"--class-weights {self.class_weights} is for classifiers; remove it")
        if self.loader_workers:
            raise UsageError("--loader-workers decode files, and shapes are drawn; remove it")
        if self.validation is not None and isinstance(parse_validation(self.validation), Path):
            raise UsageError(f"--validation {self.validation}: for shapes it is a share; pass one such as 0.1")

    def beside(self, ending: str) -> Path:
        """The file of this training with `ending`, beside the checkpoint: `cnn.training.ENDING`."""
        return self.out.with_name(f"{self.out.stem}.training.{ending}")

    def deciding(self) -> dict[str, str]:
        """Everything that determines what is learned, by option name."""
        hints = get_type_hints(type(self), include_extras=True)
        return {
            _option_name(field.name, hints[field.name]): str(getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in _FREE
        }


def parse_validation(text: str) -> float | Path:
    """Parse a share of the training images, such as `0.1` or `10%`, or a folder. Raises UsageError."""
    is_percent = text.endswith("%")
    try:
        share = float(text.removesuffix("%")) / (100 if is_percent else 1)
    except ValueError:
        if Path(text).is_dir():
            return Path(text)
        raise UsageError(
            f"--validation {text}: there is no such folder; pass a folder, or a share such as 0.1"
        ) from None
    if not 0 < share < 1:
        raise UsageError(
            f"--validation {text} is not a share of the training images; use a share such as 0.1, or a folder"
        )
    return share


def _option_name(field: str, hint: object) -> str:
    said: Option = getattr(hint, "__metadata__", (Option(""),))[0]
    return "DATASET" if said.is_argument else said.name or f"--{field.replace('_', '-')}"


def refuse_unknown(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raise UsageError for a value that is not in `allowed`."""
    if value not in allowed:
        raise UsageError(f"{option} {value} is not known; use one of: {', '.join(allowed)}")
