"""How a peer makes the network's input of a picture: Pillow, and torchvision's `Resize` and `CenterCrop` without torch.

Runs in a peer's own environment, as `peer_side` does, and in the comparison, which holds all answers against it.
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def decode(encoded: bytes, resize_px: int, crop_px: int) -> np.ndarray:
    """Encoded bytes to uint8 [crop_px, crop_px, 3]."""
    return to_pixels(Image.open(io.BytesIO(encoded)), resize_px, crop_px)


def to_pixels(image: Image.Image, resize_px: int, crop_px: int) -> np.ndarray:
    """Pillow reads a file's pixels only now."""
    image = image.convert("RGB")
    width, height = image.size
    shorter = min(width, height)
    # The longer side is truncated, as torchvision does; an image that has its size already is not sampled again.
    image = image.resize((resize_px * width // shorter, resize_px * height // shorter), Image.Resampling.BILINEAR)
    left, top = (round((side - crop_px) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + crop_px, top + crop_px)))
