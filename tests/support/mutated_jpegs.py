"""JPEGs of every kind that a plain decoder may meet, and what becomes of them when bytes are changed.

`python -m tests.support.mutated_jpegs SEED COUNT` decodes COUNT spoiled files in each way that there is, in little
memory, and prints those whose pixels or errors differ from Pillow's. Each is made from its seed and number alone.
"""

from __future__ import annotations

import io
import random
import resource
import sys
from pathlib import Path
from typing import Any, Literal
from unittest.mock import MagicMock, patch

import numpy as np
import simplejpeg
from PIL import Image

from convoy.models import images
from convoy.models.errors import ImageError
from convoy.models.jpeg import PlainJpeg, large_jpeg, plain_jpeg
from convoy.models.spec import ImageSpec

# As it comes, by Pillow alone, or whatever can be as what is large.
Way = Literal["usual", "pillow", "large"]
# Every source pixel counts: nothing is resized away.
WHOLE_PX = 16
SPEC = ImageSpec.plain(WHOLE_PX, WHOLE_PX, 3, "uint8_nhwc")
_MEMORY_BYTES = 512 << 20
_MARKERS = (*range(0xC0, 0xE3), 0xED, 0xEE, 0xFE, 0x00, 0x01, 0xFF)
_BODIES = (b"JFIF\0", b"JFIF\0\1\1\0\0\1\0\1\0\0", b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0")
_BODIES = (
    *_BODIES,
    b"ICC_PROFILE\0",
    b"ICC_PROFILE\0\1\1x",
    b"Adobe\0d\0\0\0\0\0",
    b"Adobe\0d\0\0\0\0\1",
    b"",
    b"\0" * 67,
)


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Smooth colours under noise, so that every frequency and the chroma count."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray((smooth + rng.integers(-20, 21, smooth.shape)).clip(0, 255).astype(np.uint8)).convert(mode)


def pillow_jpeg(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def other_jpeg(image: Image.Image, subsampling: str, quality: int = 85) -> bytes:
    """With a subsampling that Pillow does not write, such as 440."""
    return simplejpeg.encode_jpeg(np.asarray(image), quality, "RGB", subsampling)


def outcome(encoded: bytes, spec: ImageSpec = SPEC, way: Way = "usual", *, max_pixels: int = 100_000) -> bytes | str:
    """The sample's bytes, or the words of the error."""
    with patch.multiple(images, **_ways(way)):
        return usual_outcome(encoded, spec, max_pixels)


def usual_outcome(encoded: bytes, spec: ImageSpec, max_pixels: int) -> bytes | str:
    """The same as it comes, from any thread."""
    try:
        return images.preprocess(encoded, spec, max_pixels).tobytes()
    except ImageError as error:
        return str(error)


def _ways(way: Way) -> dict[str, Any]:
    def plain_if_large(*args: Any, any_metadata: bool = False) -> PlainJpeg | None:
        return plain_jpeg(*args, any_metadata=True) if any_metadata else None

    none = MagicMock(return_value=None)
    if way == "pillow":
        return {"decode_small_jpeg": none, "plain_jpeg": none}
    if way == "usual":
        return {"plain_jpeg": images.plain_jpeg}
    return {"decode_small_jpeg": none, "plain_jpeg": plain_if_large, "LARGE_PIXELS": 1}


def is_decoded_as_large(encoded: bytes, spec: ImageSpec = SPEC, *, max_pixels: int = 100_000) -> bool:
    """Whether the pixels were simplejpeg's, in memory that is used again."""
    found: list[Image.Image | None] = []

    def decode(*args: Any) -> Image.Image | None:
        found.append(large_jpeg(*args))
        return found[-1]

    with patch.object(images, "large_jpeg", decode):
        outcome(encoded, spec, "large", max_pixels=max_pixels)
    return found != [None] * len(found)


def sound_files() -> list[bytes]:
    colour, grey = picture(24, 17, 1), picture(19, 23, 2, "L")
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        pillow_jpeg(colour, subsampling=0),
        pillow_jpeg(colour, subsampling=2, optimize=True),
        pillow_jpeg(colour, subsampling=1, progressive=True),
        pillow_jpeg(colour, restart_marker_blocks=1, comment="a comment"),
        pillow_jpeg(colour, icc_profile=b"profile" * 20),
        pillow_jpeg(colour, exif=exif),
        pillow_jpeg(colour.convert("CMYK")),
        pillow_jpeg(grey),
        pillow_jpeg(grey, progressive=True),
        other_jpeg(colour, "440"),
    ]


def mutated(files: list[bytes], seed: int, number: int) -> bytes:
    draw = random.Random(f"{seed} {number}")
    data = bytearray(draw.choice(files))
    for _ in range(draw.choice((1, 1, 2, 3))):
        _mutate(data, draw, files)
    return bytes(data)


def _mutate(data: bytearray, draw: random.Random, files: list[bytes]) -> None:
    header_bytes = max(2, data.find(b"\xff\xda"))
    at = draw.randrange(2, draw.choice((header_bytes, len(data))) + 1)
    kind = draw.randrange(7)
    if kind < 2:
        data[at : at + 1] = bytes([draw.choice((0, 1, 2, 3, 255, draw.randrange(256)))])
    elif kind == 2:
        del data[at:]
    elif kind == 3:
        del data[at : at + draw.randint(1, 40)]
    elif kind == 4:
        body = draw.choice(_BODIES)
        data[at:at] = bytes([0xFF, draw.choice(_MARKERS)]) + (len(body) + 2).to_bytes(2) + body
    elif kind == 5:
        marks = [index for index in range(2, len(data) - 1) if data[index] == 0xFF and data[index + 1]]
        if marks:
            _spoil_segment(data, draw.choice(marks), draw)
    else:
        other = draw.choice(files)
        data[at:] = other[min(at, len(other) - 1) :]


def _spoil_segment(data: bytearray, mark: int, draw: random.Random) -> None:
    """Another marker, a wrong length, or the segment twice."""
    end = mark + 2 + int.from_bytes(data[mark + 2 : mark + 4])
    kind = draw.randrange(3)
    if kind == 0:
        data[mark + 1] = draw.choice(_MARKERS)
    elif kind == 1:
        data[mark + 2 : mark + 4] = max(0, end - mark - 2 + draw.randint(-3, 3)).to_bytes(4)[-2:]
    else:
        data[mark:mark] = data[mark:end]


def main(seed: int, count: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _MEMORY_BYTES,) * 2)
    files = sound_files()
    taken = large = wrong = 0
    for number in range(count):
        encoded = mutated(files, seed, number)
        taken += images.decode_small_jpeg(encoded, 100_000) is not None
        large += is_decoded_as_large(encoded)
        for spec in (SPEC, *_as_it_is(encoded)):
            here, as_large, there = (outcome(encoded, spec, way) for way in ("usual", "large", "pillow"))
            if not here == as_large == there:
                wrong += 1
                print(f"{seed} {number}: {_brief(here)}, as large {_brief(as_large)}, by Pillow {_brief(there)}")
    print(f"{count} files, {taken} decoded by simplejpeg, {large} as large ones, {wrong} differ")
    return 1 if wrong else 0


def _as_it_is(encoded: bytes) -> list[ImageSpec]:
    """What takes the file without resizing it, if it is not too large to be looked at twice."""
    plain = plain_jpeg(encoded)
    if plain is None or not 0 < plain.width * plain.height <= 100_000:
        return []
    channels: Literal[1, 3] = 1 if plain.channels == 1 else 3
    return [ImageSpec.plain(plain.height, plain.width, channels, "uint8_nhwc")]


def _brief(answer: bytes | str) -> str:
    return answer if isinstance(answer, str) else f"pixels {hash(answer):x}"


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
