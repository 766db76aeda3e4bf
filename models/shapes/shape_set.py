"""A whole set of pictures: how many there are in each part, and of what size. Needs no numpy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from convoy.models.errors import JobError

SHAPES = ("circle", "square", "triangle", "star")
# The classes of a mask's pixels, by number.
MASK_CLASSES = ("background", *SHAPES)
# The side of a picture.
PX = 160
LEAST_PX, MOST_PX = 64, 1024
# In one picture.
MOST_SHAPES = 5

ShapePart = Literal["train", "val"]
SHAPE_PARTS: tuple[ShapePart, ...] = get_args(ShapePart)
TRAINING_IMAGES = 512
# One picture to be measured on for this many to learn from.
_TRAIN_PER_VAL = 4
# `shapes`, or `shapes:N` with this many training pictures.
_NAME = re.compile(r"shapes(?::([0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class ShapeSet:
    """The parameters of a set: pictures of `px` x `px`, `training_images` of them to learn from.

    A quarter as many again are to measure on. Raises JobError for what cannot be drawn.
    """

    seed: int = 0
    px: int = PX
    training_images: int = TRAINING_IMAGES

    def __post_init__(self) -> None:
        if not LEAST_PX <= self.px <= MOST_PX:
            raise JobError(f"pictures of shapes have {LEAST_PX} to {MOST_PX} pixels per side, not {self.px}")
        if not 1 <= self.training_images <= 100_000:
            raise JobError(f"shapes have 1 to 100000 training pictures, not {self.training_images}")
        if not 0 <= self.seed < 2**63:
            raise JobError(f"the seed of shapes is from 0 to 2**63 - 1, not {self.seed}")

    def images(self, part: ShapePart) -> int:
        """The number of pictures in a part, at least one."""
        return self.training_images if part == "train" else -(-self.training_images // _TRAIN_PER_VAL)


def named_set(source: str) -> ShapeSet | None:
    """The set that `shapes` or `shapes:N` names; None for other data sets. Raises JobError for an impossible N."""
    found = _NAME.fullmatch(source)
    if found is None:
        return None
    return ShapeSet() if found[1] is None else ShapeSet(training_images=int(found[1]))
