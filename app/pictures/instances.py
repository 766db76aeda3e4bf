"""The masks and keypoints of a detector's objects, in pixels of the picture, as far as its spec declares them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from convoy.models.answers import Keypoint, Mask, MaskForm
from convoy.models.boxes import Floats, InputBoxes, Values, further_values, input_keypoints
from convoy.models.errors import InvalidRequest
from convoy.models.geometry import Extent, ImagePlacement
from convoy.models.masks import masks_on_picture
from convoy.models.polygons import polygons_of
from convoy.models.run_lengths import counts_text
from convoy.models.tasks import DetectionOutputs

Polygons = list[list[int]]
# In one answer. More is an untrained network, or a threshold near 0; it would take seconds and many megabytes.
MOST_MASKS, MOST_RUNS = 1000, 4_000_000
_ADVICE = "raise threshold, lower top_k, or leave the masks out with masks=none"


def masks_of(
    values: Values,
    said: DetectionOutputs,
    found: InputBoxes,
    corners: np.ndarray,
    placement: ImagePlacement,
    form: MaskForm,
) -> Iterator[tuple[Mask | None, Polygons | None]]:
    """The mask of each object in the asked form, within its box in `corners` float64 [n, 4] on the picture.

    Raises InvalidRequest if there are too many for an answer, and ModelFailed if a value is not a number.
    """
    assert said.prototypes is not None, "only detectors with prototypes have masks; this is a bug"
    if len(found.rows) > MOST_MASKS:
        raise InvalidRequest(f"{len(found.rows)} objects are more than the limit of {MOST_MASKS} for masks; {_ADVICE}")
    width, height = placement.picture
    prototypes: Floats = values[said.prototypes]  # type: ignore[assignment]
    runs = 0
    for counts in masks_on_picture(further_values(values, said, found.rows), prototypes, corners, placement):
        runs += len(counts)
        if runs > MOST_RUNS:
            raise InvalidRequest(f"the masks have more runs than the limit of {MOST_RUNS}; {_ADVICE}")
        if form == "rle":
            yield Mask(height, width, counts_text(counts)), None
        else:
            yield None, [outline.reshape(-1).tolist() for outline in polygons_of(counts, height)]


def keypoints_of(
    values: Values, said: DetectionOutputs, found: InputBoxes, placement: ImagePlacement
) -> list[tuple[Keypoint, ...]]:
    """The keypoints of each object, clipped to the picture. Raises ModelFailed if a value is not a number."""
    points = input_keypoints(values, said, found.rows, placement.window)
    points[..., :2] = placement.points_on_picture(points[..., :2]).round(2)
    return [tuple(Keypoint(*point) for point in of_object) for of_object in points.round(6).tolist()]


def masks_bytes(prototypes: tuple[int, ...], size: Extent) -> int:
    """Estimate the memory to compute the masks: the values between columns of the prototypes, several times, and the
    run lengths of a hundred objects as wide as the picture.
    """
    masks, rows, columns = prototypes
    return 4 * rows * columns * (masks + 32) + size[0] * (20 * rows + 100 * 16)
