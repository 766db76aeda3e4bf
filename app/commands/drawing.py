"""Draw what a model found into its picture: boxes with masks or keypoints, a class map, or the best classes as text.

Knows Pillow and the records of answers. Knows no servers and no command line.
"""

from __future__ import annotations

import colorsys
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from convoy.models.answers import Classification, ClassShare, Detection, Detections, Prediction, Segmentation
from convoy.models.errors import JobError, UsageError

# Text in a smaller picture would cover it. A narrow one is enlarged further, so that labels fit, up to a limit.
_LEAST_LONG_SIDE_PX, _LEAST_SHORT_SIDE_PX, _MOST_ENLARGED_PX = 640, 160, 4096
_LEAST_TEXT_PX = 16
_LINES_IN_BOX = 8
_OPACITY = 0.55
_LEAST_POINT_SCORE = 0.5
# Pairs of COCO's keypoints of a person, from 0: nose, eyes, ears, shoulders, elbows, wrists, hips, knees, ankles.
PERSON_POINTS = 17
PERSON_LIMBS = (
    *((0, 1), (0, 2), (1, 3), (2, 4)),
    *((5, 6), (5, 7), (7, 9), (6, 8), (8, 10)),
    *((5, 11), (6, 12), (11, 12), (11, 13), (13, 15), (12, 14), (14, 16)),
)
# Pillow's own font is ASCII only. Pillow finds these by name where a system has them.
_WIDE_FONTS = ("NotoSansCJK-Regular.ttc", "DejaVuSans.ttf", "Arial Unicode.ttf", "msyh.ttc")

_Colour: TypeAlias = tuple[int, int, int]
_Font: TypeAlias = ImageFont.FreeTypeFont | ImageFont.ImageFont


class _Area(NamedTuple):
    """A rectangle in pixels of the drawing; the right and lower edges are outside."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: _Area) -> bool:
        return (
            self.left < other.right and other.left < self.right and self.top < other.bottom and other.top < self.bottom
        )


def check_drawing(out: Path, images: Sequence[Path | bytes]) -> None:
    """Raise UsageError, with every mistake, if one of these images cannot be drawn into the file `out`."""
    mistakes = []
    if len(images) != 1:
        mistakes.append(f"--draw is for one image, not {len(images)}; pass one")
    suffix = out.suffix.lower()
    Image.init()
    if out.is_dir():
        mistakes.append(f"--draw {out} is a folder; pass a file in it, such as {out / 'drawn.jpg'}")
    elif Image.EXTENSION.get(suffix) not in Image.SAVE:
        kind = f"files that end in {suffix!r}" if suffix else "files without a suffix"
        mistakes.append(f"--draw cannot write {kind}; use .jpg, .png or .webp")
    if not out.parent.is_dir():
        mistakes.append(f"--draw {out} is in a folder that does not exist; create {out.parent}")
    if out.exists() and any(isinstance(one, Path) and one.exists() and one.samefile(out) for one in images):
        mistakes.append(f"--draw {out} would overwrite the image itself; choose another file")
    if mistakes:
        raise UsageError("; ".join(mistakes))


def write_drawing(out: Path, image: Path | bytes, found: Classification | Segmentation | Detections) -> None:
    """Draw into a copy of the image and write it. Raises JobError if the image or the file does not allow it."""
    try:
        with Image.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            picture = _upright_rgb(opened)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise JobError(f"cannot draw into the image ({error}); convert it to a smaller PNG or JPEG") from None
    try:
        drawn(picture, found).save(out)
    except (OSError, ValueError, KeyError) as error:
        raise JobError(f"cannot write {out} ({error}); choose another file with --draw") from None


def drawn(picture: Image.Image, found: Classification | Segmentation | Detections) -> Image.Image:
    """A drawing of what was found in an upright RGB picture. Small pictures are enlarged, so that text is legible."""
    match found:
        case Segmentation():
            picture = _blended(picture, found)
        case Detections():
            picture = _with_masks(picture, found.detections)
    scale = _scale(picture.size)
    canvas = picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    pen = _Pen(canvas, _texts(found))
    match found:
        case Detections():
            pen.boxes(found.detections, scale)
        case Segmentation():
            most_first = sorted(found.classes, key=lambda one: -one.share)
            pen.list([(_colour(one.class_id), f"{_name(one)} {100 * one.share:.1f} %") for one in most_first])
        case Classification():
            pen.list([(_colour(one.class_id), f"{_name(one)} {one.score:.3f}") for one in found.predictions])
    return canvas


def _scale(size: tuple[int, int]) -> int:
    """How many times a picture is enlarged."""
    short, long = sorted(size)
    for_short_side = min(math.ceil(_LEAST_SHORT_SIDE_PX / short), _MOST_ENLARGED_PX // long)
    return max(1, math.ceil(_LEAST_LONG_SIDE_PX / long), for_short_side)


class _Pen:
    """Draws on a canvas, with text and lines in proportion to it."""

    def __init__(self, canvas: Image.Image, texts: Iterable[str]) -> None:
        self._size = canvas.size
        self._draw = ImageDraw.Draw(canvas)
        self._text_px = max(_LEAST_TEXT_PX, round(math.sqrt(canvas.width * canvas.height) / 48))
        self._pad_px = max(2, self._text_px // 5)
        self._font = _font(self._text_px, texts)
        ascent, descent = self._font.getmetrics() if isinstance(self._font, ImageFont.FreeTypeFont) else (11, 3)
        self._line_px = ascent + descent + self._pad_px

    def boxes(self, found: Sequence[Detection], scale: int) -> None:
        """The best boxes on top, and a label for each where it hides no better label, as far as there is room."""
        places = [_Area(*(side * scale for side in one.box)) for one in found]
        width_px = max(2, self._text_px // 6)
        for one, place in reversed(list(zip(found, places, strict=True))):
            right, bottom = max(place.left, place.right - 1), max(place.top, place.bottom - 1)
            self._draw.rectangle((place.left, place.top, right, bottom), outline=_colour(one.class_id), width=width_px)
            self._keypoints(one, scale, width_px)
        texts = [self._fitted(_name(one), f" {one.score:.2f}") for one in found]
        taken: list[_Area] = []
        for place, text in zip(places, texts, strict=True):
            taken.append(self._free(place, self._width_px(text), taken))
        # The best label is drawn last, so it stays whole even in a crowd.
        for one, text, area in reversed(list(zip(found, texts, taken, strict=True))):
            if text:
                self._label(area, text, _colour(one.class_id))

    def _keypoints(self, one: Detection, scale: int, width_px: int) -> None:
        """The points with a score of at least one half, and the limbs between them if they are COCO's of a person."""
        places = {
            number: (point.x * scale, point.y * scale)
            for number, point in enumerate(one.keypoints)
            if point.score is None or point.score >= _LEAST_POINT_SCORE
        }
        limbs = PERSON_LIMBS if len(one.keypoints) == PERSON_POINTS else ()
        for first, second in limbs:
            if first in places and second in places:
                self._draw.line((places[first], places[second]), fill=_colour(one.class_id), width=width_px)
        for x, y in places.values():
            self._draw.circle((x, y), 1.5 * width_px, fill=_colour(one.class_id), outline="white")

    def list(self, rows: Sequence[tuple[_Colour, str]]) -> None:
        """Lines from the upper left corner down, as many as there is room for."""
        texts = [(colour, self._fitted(text, "")) for colour, text in rows]
        for number, (colour, text) in enumerate(texts[: max(1, self._size[1] // self._line_px)]):
            if text:
                top = number * self._line_px
                self._label(_Area(0, top, self._width_px(text), top + self._line_px), text, colour)

    def _free(self, place: _Area, width_px: float, taken: Sequence[_Area]) -> _Area:
        """Room for a label: above the box, below it, or a few lines down in it, and always inside the picture."""
        left = min(max(0.0, place.left), self._size[0] - width_px)
        inside = [place.top + line * self._line_px for line in range(_LINES_IN_BOX)]
        tops = (place.top - self._line_px, inside[0], place.bottom, *inside[1:])
        lowest = self._size[1] - self._line_px
        areas = [_Area(left, top, left + width_px, top + self._line_px) for top in tops if 0 <= top <= lowest]
        if not areas:  # the picture is lower than a box and its label
            top = min(max(0.0, place.top), max(0.0, lowest))
            areas = [_Area(left, top, left + width_px, top + self._line_px)]
        return next((area for area in areas if not any(area.overlaps(other) for other in taken)), areas[0])

    def _fitted(self, text: str, end: str) -> str:
        """The text and its end, with the text cut to the width of the picture; empty if nothing fits."""
        if self._width_px(text + end) <= self._size[0]:
            return text + end
        for length in range(len(text) - 1, -1, -1):
            if self._width_px(cut := text[:length].rstrip() + "…" + end) <= self._size[0]:
                return cut
        return ""

    def _width_px(self, text: str) -> float:
        return self._font.getlength(text) + 2 * self._pad_px

    def _label(self, area: _Area, text: str, colour: _Colour) -> None:
        self._draw.rectangle((area.left, area.top, area.right - 1, area.bottom - 1), fill=colour)
        position = area.left + self._pad_px, area.top + self._pad_px // 2
        self._draw.text(position, text, fill=_ink_on(colour), font=self._font)


def _upright_rgb(opened: Image.Image) -> Image.Image:
    """The picture as a viewer shows it, in RGB; what is transparent is white, as for the server."""
    upright = ImageOps.exif_transpose(opened)
    if upright.mode == "I" or upright.mode.startswith("I;16"):
        upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
    elif upright.has_transparency_data:
        layer = upright.convert("RGBA")
        upright = Image.new("RGB", layer.size, "white")
        upright.paste(layer, mask=layer.getchannel("A"))
    return upright.convert("RGB")


def _blended(picture: Image.Image, found: Segmentation) -> Image.Image:
    """The picture with its classes in colour; the background and what the network did not see stay as they are."""
    class_map = Image.fromarray(found.class_map).resize(picture.size, Image.Resampling.NEAREST)
    shown = {one.class_id for one in found.classes if not _is_background(one)}
    palette = [channel for number in range(256) for channel in _colour(number)]
    colours = class_map.copy()
    colours.putpalette(palette)
    opacity = class_map.point([round(255 * _OPACITY) if number in shown else 0 for number in range(256)])
    return Image.composite(colours.convert("RGB"), picture, opacity)


def _with_masks(picture: Image.Image, found: Sequence[Detection]) -> Image.Image:
    """The picture with the masks of objects in colour, the best on top."""
    masked = [one for one in found if one.mask is not None or one.polygons is not None]
    if not masked:
        return picture
    colours, opacity = picture.copy(), Image.new("L", picture.size)
    for one in reversed(masked):
        try:
            shape = _shape(one, picture.size)
        except ValueError as error:
            raise JobError(f"the server's answer has a mask that cannot be read: {error}") from None
        colours.paste(_colour(one.class_id), mask=shape)
        opacity.paste(round(255 * _OPACITY), mask=shape)
    return Image.composite(colours, picture, opacity)


def _shape(one: Detection, size: tuple[int, int]) -> Image.Image:
    """The mask of an object as an image in mode "1". Raises ValueError."""
    shape = Image.new("1", size)
    if one.mask is not None:
        shape.paste(Image.fromarray(one.mask.array()))
    pen = ImageDraw.Draw(shape)
    for outline in one.polygons or ():
        pen.polygon(outline, fill=1)
    return shape


def _is_background(one: ClassShare) -> bool:
    return one.label == "background" or (one.class_id == 0 and one.label is None)


def _name(one: Prediction | Detection | ClassShare) -> str:
    return f"class {one.class_id}" if one.label is None else " ".join(one.label.split())


def _texts(found: Classification | Segmentation | Detections) -> Iterable[str]:
    match found:
        case Detections():
            return map(_name, found.detections)
        case Segmentation():
            return map(_name, found.classes)
    return map(_name, found.predictions)


def _colour(class_id: int) -> _Colour:
    """Bright colours, far apart for neighbouring classes: the hue moves by the golden ratio."""
    red, green, blue = colorsys.hsv_to_rgb(class_id * 0.618034 % 1, 0.8, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


def _ink_on(colour: _Colour) -> str:
    """Black or white, whichever is easier to read, by the luma of ITU-R BT.601."""
    red, green, blue = colour
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "white"


def _font(text_px: int, texts: Iterable[str]) -> _Font:
    """A font that has the letters of the texts, if there is one."""
    if not all(map(str.isascii, texts)):
        for name in _WIDE_FONTS:
            try:
                return ImageFont.truetype(name, text_px)
            except OSError:
                continue
    return ImageFont.load_default(text_px)
