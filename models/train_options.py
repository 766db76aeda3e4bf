"""What a training is asked to do, checked once, at birth.

Knows the options' meanings, defaults and limits, and needs neither torch nor numpy for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from convoy.models import zoo
from convoy.models.errors import UsageError
from convoy.models.option import Option

Device = Literal["auto", "cpu", "cuda"]
Optimizer = Literal["adamw", "sgd"]


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """What to train and how.

    `learning_rate` is the peak of one cycle, None the optimiser's own of `LEARNING_RATES`. `amp` None means mixed
    precision exactly where there is a GPU. `data_root` None is the user's cache. Raises UsageError for values out of
    range.
    """

    dataset: Annotated[str, Option("digits, cifar10, or a folder of images by class.", is_argument=True)]
    out: Annotated[Path, Option("Checkpoint to write, .safetensors.")]
    arch: Annotated[str, Option("Network of the zoo.")] = "simple_cnn"
    device: Annotated[Device, Option("auto, cpu or cuda.")] = "auto"
    amp: Annotated[bool | None, Option("Mixed precision; by default where there is a GPU.")] = None
    optimizer: Annotated[Optimizer, Option("adamw or sgd.")] = "adamw"
    learning_rate: Annotated[
        float | None, Option("Peak learning rate; by default the optimiser's own.", name="--lr")
    ] = None
    batch_size: Annotated[int, Option("Images a step.")] = 64
    epochs: Annotated[int, Option("Passes over the training images.")] = 60
    seed: Annotated[int, Option("Seed of weights, order and augmentation.")] = 0
    data_root: Path | None = None

    def __post_init__(self) -> None:
        zoo.entry(self.arch)
        if self.out.suffix != ".safetensors":
            named = self.out / f"{self.arch}.safetensors" if self.out.is_dir() else self.out.with_suffix(".safetensors")
            raise UsageError(f"--out {self.out}: checkpoints are safetensors, whatever the name; write --out {named}")
        refuse_unknown("--device", self.device, get_args(Device))
        refuse_unknown("--optimizer", self.optimizer, get_args(Optimizer))
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise UsageError(f"--lr must be above 0, got {self.learning_rate}")
        if self.batch_size < 1 or self.epochs < 1:
            raise UsageError(f"--batch-size and --epochs must be at least 1, got {self.batch_size} and {self.epochs}")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed must be from 0 to 2**63 - 1, got {self.seed}")


def refuse_unknown(option: str, value: str, allowed: Sequence[str]) -> None:
    """Raises UsageError for a value that is not one of `allowed`."""
    if value not in allowed:
        raise UsageError(f"{option} {value} is not known; use one of: {', '.join(allowed)}")
