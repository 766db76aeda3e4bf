"""Drawings of what was found: pictures of any size, crowds, labels of any letters, and files of any kind."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from convoy.app.commands.drawing import drawn, write_drawing
from convoy.models.answers import (
    Box,
    Classification,
    ClassShare,
    Detection,
    Detections,
    Keypoint,
    Mask,
    Prediction,
    Segmentation,
)
from convoy.models.errors import JobError
from convoy.models.run_lengths import counts_between, counts_text
from tests.support.pictures import saved

LABELS = st.none() | st.text(max_size=100) | st.sampled_from(["cat", "straße", "猫", "two\nlines", "", "a" * 500])
SIDE = st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 900), st.integers(1, 900), st.lists(st.tuples(SIDE, SIDE, LABELS), max_size=9))
def test_boxes_in_any_picture(
    width: int, height: int, rows: list[tuple[tuple[float, float], tuple[float, float], str | None]]
) -> None:
    found = [
        Detection(number, label, 1 - number / 10, Box(x1 * width, y1 * height, x2 * width, y2 * height))
        for number, ((x1, x2), (y1, y2), label) in enumerate(rows)
    ]
    picture = Image.new("RGB", (width, height))
    made = drawn(picture, Detections("m", 1, tuple(found)))
    scale = made.width // width
    assert made.size == (width * scale, height * scale)
    assert max(made.size) >= 640
    assert picture.getcolors() == [(width * height, (0, 0, 0))], "the picture itself stays as it is"
    assert bool(np.asarray(made).any()) == bool(found)


def longest_run(pixels: np.ndarray, colour: list[int]) -> int:
    """The longest line of one colour in a row of pixels."""
    best = 0
    for row in (pixels == colour).all(axis=2):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row, [0]])))
        best = max([best, *(edges[1::2] - edges[::2]).tolist()])
    return best


def test_labels_stay_inside_the_picture_and_cover_no_better_one() -> None:
    """Each of three objects in one narrow box at the edge has its label, as long as in the middle of the picture."""
    edge, middle = Box(610, 0, 640, 480), Box(300, 100, 330, 300)
    names = ("cat", "dog", "cow")
    canvas = Image.new("RGB", (640, 480))
    crowd = tuple(Detection(number, name, 0.5, edge) for number, name in enumerate(names))
    crowded = np.asarray(drawn(canvas, Detections("m", 1, crowd)))
    for number, name in enumerate(names):
        alone = np.asarray(drawn(canvas, Detections("m", 1, (Detection(number, name, 0.5, middle),))))
        colour = alone[200, 300].tolist()
        run = longest_run(alone, colour)
        assert run > 45, "longer than the box is wide: it is the label"
        assert longest_run(crowded, colour) == run


def test_a_mask_covers_its_object_and_keypoints_are_dots() -> None:
    """Between the box's own lines and far from its label."""
    shape = np.zeros((480, 640), bool)
    shape[200:240, 100:500] = True
    counts = counts_between(np.flatnonzero(np.diff(shape.T.reshape(-1).astype(int), prepend=0)), shape.size)
    box = Box(100, 150, 500, 400)
    masked = Detection(1, "cat", 0.5, box, Mask(480, 640, counts_text(counts)))
    outlined = Detection(1, "cat", 0.5, box, polygons=[[100, 200, 500, 200, 500, 239, 100, 239]])
    canvas = Image.new("RGB", (640, 480))
    bare, one, other = (
        np.asarray(drawn(canvas, Detections("m", 1, (found,))))
        for found in (replace(masked, mask=None), masked, outlined)
    )
    inside = slice(160, 390), slice(110, 490)
    assert np.array_equal((one != bare).any(axis=2)[inside], shape[inside])
    assert np.array_equal((other != bare).any(axis=2)[inside], shape[inside])
    points = (Keypoint(300, 300, 0.9), Keypoint(400, 300, 0.1), Keypoint(200, 300))
    dotted = np.asarray(drawn(canvas, Detections("m", 1, (replace(masked, mask=None, keypoints=points),))))
    assert [bool((dotted != bare)[300, x].any()) for x in (300, 400, 200, 250)] == [True, False, True, False]
    damaged = Detection(1, "cat", 0.5, box, Mask(480, 640, "00"))
    with pytest.raises(JobError, match="a mask that cannot be read"):
        drawn(canvas, Detections("m", 1, (damaged,)))


def test_a_class_map_covers_its_classes_only() -> None:
    class_map = np.zeros((480, 640), np.uint8)
    class_map[200:300], class_map[300:400], class_map[400:] = 8, 15, 255
    classes = (ClassShare(0, "background", 0.4), ClassShare(8, "cat", 0.2), ClassShare(15, None, 0.2))
    picture = Image.new("RGB", (640, 480), (100, 100, 100))
    rows = np.asarray(drawn(picture, Segmentation("m", 1, class_map, classes, 0.2)))[:, 600].tolist()
    assert {tuple(row) for row in rows[:200] + rows[400:]} == {(100, 100, 100)}
    assert len({tuple(row) for row in rows[200:400]}) == 2
    assert rows[200] != rows[300] != rows[0]


def test_classes_are_listed_as_far_as_there_is_room() -> None:
    one = Classification("m", 1, (Prediction(3, "seven", 0.9),))
    many = Classification("m", 1, tuple(Prediction(number, f"class {number}", 0.01) for number in range(1000)))
    filled = [np.asarray(drawn(Image.new("RGB", (28, 28)), found)).any(axis=(1, 2)).sum() for found in (one, many)]
    assert 16 < filled[0] < 40
    assert filled[1] > 600


@pytest.mark.parametrize(
    ("mode", "options"),
    [("I;16", {}), ("CMYK", {"format": "JPEG"}), ("RGBA", {}), ("P", {}), ("1", {}), ("LA", {}), ("L", {})],
)
def test_pictures_of_every_mode_are_drawn_upright(tmp_path: Path, mode: str, options: dict[str, str]) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    file = io.BytesIO()
    Image.new(mode, (700, 900)).save(file, **{"format": "PNG", **options}, exif=turned)  # type: ignore[arg-type]
    write_drawing(tmp_path / "out.jpg", file.getvalue(), Detections("m", 1))
    with Image.open(tmp_path / "out.jpg") as made:
        assert (made.size, made.mode) == ((900, 700), "RGB")


def test_what_cannot_be_drawn_or_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot draw into the image"):
        write_drawing(tmp_path / "out.png", b"no picture", Detections("m", 1))
    wide = saved(Image.new("L", (17_000, 1)), "PNG")
    with pytest.raises(JobError, match=r"cannot write .*out\.webp"):
        write_drawing(tmp_path / "out.webp", wide, Detections("m", 1))
