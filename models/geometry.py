"""The position of the network's input in the original picture, in both directions.

Rule 9 of `images.py` in numbers: the size after resizing, and the part that the crop keeps or the padding around it;
and the mapping of boxes and class maps from the input to the picture. Sizes are (width, height) of the picture as a
viewer shows it, after its EXIF orientation. Coordinates are of edges and not of pixel centres: pixel i covers i to
i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.models.spec import ImageSpec

Extent = tuple[int, int]
# In a class map: the network did not see this pixel.
UNSEEN = 255


def full_size(size: Extent, image: ImageSpec) -> Extent:
    """The size to which a picture is resized before the crop or the padding."""
    if image.resize_mode == "exact":
        return image.width, image.height
    width, height = size
    if image.resize_mode == "letterbox":
        scale = min(image.height / height, image.width / width)
        scale = scale if image.scale_up else min(scale, 1.0)
        return max(1, round(width * scale)), max(1, round(height * scale))
    if width <= height:
        return image.resize_px, int(image.resize_px * height / width)
    return int(image.resize_px * width / height), image.resize_px


def crop_corner(full: Extent, image: ImageSpec) -> Extent:
    """Left and top of the input in the resized picture; below 0 by the padding of a letterbox.

    torchvision's CenterCrop rounds halves to even, as Python does. Ultralytics' LetterBox puts the larger half of the
    padding to the right and below.
    """
    if image.resize_mode == "letterbox":
        if image.pad_position == "top_left":
            return 0, 0
        return -round((image.width - full[0]) / 2 - 0.1), -round((image.height - full[1]) / 2 - 0.1)
    return round((full[0] - image.width) / 2), round((full[1] - image.height) / 2)


class ImagePlacement(NamedTuple):
    """A picture of size `picture` was resized to `full`; the input is `window` of that, from `corner` on."""

    picture: Extent
    full: Extent
    corner: Extent
    window: Extent

    @staticmethod
    def of(picture: Extent, image: ImageSpec) -> ImagePlacement:
        """The placement of a picture of this size."""
        full = full_size(picture, image)
        return ImagePlacement(picture, full, crop_corner(full, image), (image.width, image.height))

    def boxes_on_picture(self, boxes: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """Map boxes [N, 4] of (x1, y1, x2, y2) from the input's pixels to the picture's, clipped to the input."""
        corners: npt.NDArray[np.float64] = self.points_on_picture(boxes.reshape(-1, 2, 2)).reshape(-1, 4)
        return corners

    def points_on_picture(self, points: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
        """The same for points [..., 2] of (x, y)."""
        moved = (points.astype(np.float64) + self.corner) * np.divide(self.picture, self.full)
        clipped: npt.NDArray[np.float64] = np.clip(moved, 0, self.picture)
        return clipped

    def map_on_picture(self, class_map: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Map a class map [h, w] of the input to the picture [height, width], with `UNSEEN` outside the crop.

        Each pixel gets the class of the cell that contains its centre.
        """
        columns = self._cells(0, class_map.shape[1])
        rows = self._cells(1, class_map.shape[0])
        seen_columns, seen_rows = columns >= 0, rows >= 0
        placed = class_map[rows[seen_rows]][:, columns[seen_columns]]
        if placed.shape == (self.picture[1], self.picture[0]):
            return np.ascontiguousarray(placed)
        whole = np.full((self.picture[1], self.picture[0]), UNSEEN, np.uint8)
        # The visible part is one rectangle.
        whole[np.ix_(seen_rows, seen_columns)] = placed
        return whole

    def _cells(self, axis: int, cells: int) -> npt.NDArray[np.int64]:
        """For each pixel of the picture along an axis, its cell of `cells` in the input; -1 outside."""
        picture_px, full_px, window_px = self.picture[axis], self.full[axis], self.window[axis]
        centres = (np.arange(picture_px) + 0.5) * (full_px / picture_px) - self.corner[axis]
        found: npt.NDArray[np.int64] = np.floor(centres * (cells / window_px)).astype(np.int64)
        found[(centres < 0) | (centres >= window_px)] = -1
        np.minimum(found, cells - 1, out=found)  # rounding may exceed the last cell
        return found
