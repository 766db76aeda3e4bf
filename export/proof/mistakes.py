"""Where is the reference wrong? The classes that it takes for each other, and the images that it is surest about.

Knows outcomes and how a picture of an image is made. Both are bounded in number and size, for they lie in the manifest.
"""

from __future__ import annotations

import base64
import io
from collections import Counter
from dataclasses import replace

import numpy as np
from PIL import Image

from convoy.export.data import ImageSet
from convoy.export.proof.outcomes import Outcomes
from convoy.models.bundle import Confusion, Mistake, Mistakes
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec

# All pairs of 20 classes.
MOST_CONFUSIONS = 380
MOST_PICTURES = 12
# At most 12 KB of pixels, which PNG makes smaller or hardly larger.
_LONGER_SIDE_PX = 64


def find_mistakes(outcomes: Outcomes, images: ImageSet) -> Mistakes:
    """The mistakes among the answers to `images`. Raises ImageError where one of them is no longer there."""
    wrong = np.flatnonzero(~outcomes.right)
    labels = images.labels
    pairs = Counter(zip(outcomes.labels[wrong].tolist(), outcomes.top1[wrong].tolist(), strict=True))
    # Most first; of equals in the order of the labels, so that it is the same each time.
    ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    surest = wrong[np.argsort(-outcomes.scores[wrong], kind="stable")][:MOST_PICTURES]
    return Mistakes(
        images=len(wrong),
        pairs=len(pairs),
        confusions=tuple(
            Confusion(labels[label], labels[answered], count) for (label, answered), count in ranked[:MOST_CONFUSIONS]
        ),
        most_confident=tuple(
            Mistake(
                label=labels[outcomes.labels[index]],
                answered=labels[outcomes.top1[index]],
                score=float(np.nan_to_num(outcomes.scores[index])),
                picture=picture_of(images.samples[outcomes.positions[index]].encoded(), images.image),
            )
            for index in surest
        ),
    )


def picture_of(encoded: bytes, image: ImageSpec) -> str:
    """The part of an image that the network sees, at most 64 pixels high and wide, as the base64 of a PNG.

    Raises ImageError.
    """
    pixels = preprocess(encoded, replace(image, front="uint8_nhwc"))
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    picture.thumbnail((_LONGER_SIDE_PX, _LONGER_SIDE_PX))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
