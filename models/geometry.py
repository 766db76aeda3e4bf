"""Where the network's input lies in the picture that it was made of, there and back.

Rule 9 of `images.py` in numbers: how large a picture is made, and what of it the crop keeps; and from that, boxes and
class maps of the input as ones of the picture. Sizes are (width, height) of the picture as a viewer shows it, which is
after its orientation was applied. Coordinates are of edges and not of pixels' centres: pixel i reaches from i to i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from convoy.models.spec import ImageSpec

Extent = tuple[int, int]
# In a class map: the network was not shown this pixel.
UNSEEN = 255


def full_size(size: Extent, image: ImageSpec) -> Extent:
    """What a picture of this size is resized to, before the crop."""
    if image.resize_mode == "exact":
        return image.width, image.height
    width, height = size
    if width <= height:
        return image.resize_px, int(image.resize_px * height / width)
    return int(image.resize_px * width / height), image.resize_px


def crop_corner(full: Extent, image: ImageSpec) -> Extent:
    """Left and top of the crop. torchvision's CenterCrop rounds halves to even, as Python does."""
    return round((full[0] - image.width) / 2), round((full[1] - image.height) / 2)


class ImagePlacement(NamedTuple):
    """A picture of size `picture` was resized to `full`, and the input is `window` of that, from `corner` on."""

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
        """Boxes [N, 4] of (x1, y1, x2, y2) in pixels of the input, in pixels of the picture; what is beyond its edges
        is cut off."""
        scale = np.divide(self.picture, self.full)
        moved = (boxes.astype(np.float64) + np.tile(self.corner, 2)) * np.tile(scale, 2)
        clipped: npt.NDArray[np.float64] = np.clip(moved, 0, np.tile(self.picture, 2))
        return clipped

    def map_on_picture(self, class_map: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A class map [h, w] that covers the input, as one of the picture [height, width], `UNSEEN` beside the crop.

        Each pixel has the class of the cell in which its centre lies.
        """
        columns = self._cells(0, class_map.shape[1])
        rows = self._cells(1, class_map.shape[0])
        seen_columns, seen_rows = columns >= 0, rows >= 0
        placed = class_map[rows[seen_rows]][:, columns[seen_columns]]
        if placed.shape == (self.picture[1], self.picture[0]):
            return np.ascontiguousarray(placed)
        whole = np.full((self.picture[1], self.picture[0]), UNSEEN, np.uint8)
        # What is seen is one rectangle.
        whole[np.ix_(seen_rows, seen_columns)] = placed
        return whole

    def _cells(self, axis: int, cells: int) -> npt.NDArray[np.int64]:
        """Of `cells` along an axis of the input, the one of each of the picture's pixels; -1 where there is none."""
        picture_px, full_px, window_px = self.picture[axis], self.full[axis], self.window[axis]
        centres = (np.arange(picture_px) + 0.5) * (full_px / picture_px) - self.corner[axis]
        found: npt.NDArray[np.int64] = np.floor(centres * (cells / window_px)).astype(np.int64)
        found[(centres < 0) | (centres >= window_px)] = -1
        np.minimum(found, cells - 1, out=found)  # rounding may reach beyond the last
        return found
