"""An image as somebody gives it, for the decoder: the bytes of a file here, others elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod

from convoy.app.scheduling.slab import Slot
from convoy.models.geometry import Extent
from convoy.models.headers import Header, read_header
from convoy.models.images import decode_image_into, is_quickly_decoded, sniff
from convoy.models.spec import ImageSpec


class Picture(ABC):
    """An image as somebody gives it. `kind` is the decoder's word for it, `slots` are those that its bytes lie in."""

    kind: str
    slots: tuple[Slot, ...]

    @abstractmethod
    def header(self) -> Header | None:
        """What it says of its size; None for what is no image. Raises ImageError."""

    @abstractmethod
    def is_quick(self, image: ImageSpec) -> bool:
        """Whether decoding it surely takes less than handing it to another thread would."""

    @abstractmethod
    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        """Write the model's input. Any thread may call it. Returns the picture's upright width and height.

        Raises ImageError.
        """


class EncodedPicture(Picture):
    """The bytes of an image file."""

    def __init__(self, encoded: memoryview, slots: tuple[Slot, ...] = ()) -> None:
        self._encoded, self.slots = encoded, slots
        self.kind = sniff(encoded) or ""

    def header(self) -> Header | None:
        return read_header(self.kind, self._encoded) if self.kind else None

    def is_quick(self, image: ImageSpec) -> bool:
        return is_quickly_decoded(self.kind, self._encoded, image)

    def decode_into(self, image: ImageSpec, out: memoryview, max_pixels: int) -> Extent:
        return decode_image_into(self._encoded, image, out, max_pixels)
