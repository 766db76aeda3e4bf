"""Class maps: the largest score of each pixel, run lengths that give the map back, and a PNG that Pillow opens."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from convoy.app.pictures.answering import MAX_RUNS, SegmentedPicture, palette_png, run_lengths, segmented
from convoy.models.errors import InvalidRequest, ModelFailed
from convoy.models.geometry import UNSEEN, ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import SegmentationOutput
from convoy.models.tensors import TensorBytes

maps = arrays(
    np.uint8, st.tuples(st.integers(1, 12), st.integers(1, 12)), elements=st.sampled_from([0, 1, 7, 254, 255])
)


def read(values: Any, activation: Any = "none", labels: tuple[str, ...] = (), size: Any = None) -> SegmentedPicture:
    """What is found in a picture of `size`, or of the size that the network takes."""
    array = np.asarray(values)
    dtype = {"f": f"FP{8 * array.itemsize}", "i": f"INT{8 * array.itemsize}", "u": f"UINT{8 * array.itemsize}"}
    image = ImageSpec.plain(array.shape[-2], array.shape[-1], 3, "uint8_nhwc")
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),)),
        *((TensorSpec("map", dtype[array.dtype.kind], array.shape),), 4, image, activation, labels),
        task="segment",
        segmentation=SegmentationOutput("map"),
    )
    placement = ImagePlacement.of(size or (image.width, image.height), image)
    return segmented(TensorBytes((1, *array.shape), memoryview(array.tobytes())), spec, placement)


def painted(size: list[int], counts: list[int]) -> np.ndarray:
    """The mask of COCO's uncompressed run lengths, by their definition."""
    pixels: list[bool] = []
    for index, count in enumerate(counts):
        pixels += [index % 2 == 1] * count
    return np.array(pixels).reshape(size[1], size[0]).T


@given(
    arrays(np.float32, st.tuples(st.integers(2, 30), st.integers(1, 9), st.integers(1, 9)), elements=st.integers(0, 9))
)
def test_the_largest_score_is_the_class_and_of_equals_the_lowest(scores: np.ndarray) -> None:
    assert read(scores).class_map.tolist() == scores.argmax(axis=0).tolist()


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_scores_of_any_float(dtype: Any) -> None:
    assert read(np.array([[[0.5, -3]], [[0.25, -2]]], dtype)).class_map.tolist() == [[0, 1]]


@pytest.mark.parametrize(("activation", "expected"), [("sigmoid", [[0, 1, 1]]), ("none", [[0, 0, 1]])])
def test_a_single_score_tells_two_classes(activation: Any, expected: list[list[int]]) -> None:
    found = read(np.array([[[-0.1, 0.1, 0.5]]], np.float32), activation, ("off", "on"))
    assert found.class_map.tolist() == expected


def test_classes_that_occur_are_named_with_their_share() -> None:
    found = read(np.array([[2, 2, 0, 9]], np.int64), labels=("sky", "sea", "sand"))
    assert [(one.class_id, one.label, one.share) for one in found.classes] == [
        (0, "sky", 0.25),
        (2, "sand", 0.5),
        (9, None, 0.25),
    ]
    assert found.unseen_share == 0


@pytest.mark.parametrize(("values", "wrong"), [([[0, -1]], "-1"), ([[255, 0]], "255"), ([[70_000, 3]], "70000")])
def test_a_class_that_no_map_can_hold_is_the_models_error(values: Any, wrong: str) -> None:
    with pytest.raises(ModelFailed, match=f"the model returned the class {wrong}"):
        read(np.array(values, np.int32))


def test_a_score_that_is_no_number_is_an_error() -> None:
    with pytest.raises(ModelFailed, match="NaN"):
        read(np.array([[[0.0, 1.0]], [[np.nan, 0.0]]], np.float32))


@given(maps)
def test_run_lengths_give_the_map_back(class_map: np.ndarray) -> None:
    classes = np.unique(class_map).tolist()
    back = np.full(class_map.shape, 3, np.uint8)
    for number, counts in zip(classes, run_lengths(class_map, classes), strict=True):
        assert sum(counts) == class_map.size
        assert all(count > 0 for count in counts[1:])
        back[painted(list(class_map.shape), counts)] = number
    assert back.tolist() == class_map.tolist()


def test_run_lengths_go_down_the_columns() -> None:
    assert run_lengths(np.array([[1, 0], [1, 1]], np.uint8), [0, 1]) == [[2, 1, 1], [0, 2, 1, 1]]


def test_noise_is_not_written_out() -> None:
    noise = (np.indices((1001, 1001)).sum(axis=0) % 2).astype(np.uint8)
    with pytest.raises(InvalidRequest, match=f"{noise.size} runs, more than the limit of {MAX_RUNS}.*ask for a PNG"):
        run_lengths(noise, [0, 1])


@given(maps)
def test_the_png_has_the_classes_as_its_pixels(class_map: np.ndarray) -> None:
    with Image.open(io.BytesIO(palette_png(class_map))) as image:
        assert image.format == "PNG"
        assert image.mode == "P"
        assert np.asarray(image).tolist() == class_map.tolist()


def test_the_colours_are_those_of_pascal_voc() -> None:
    with Image.open(io.BytesIO(palette_png(np.array([[0, 1, 2, 15, 20, UNSEEN]], np.uint8)))) as image:
        colours = np.asarray(image.convert("RGB"))[0].tolist()
    assert colours == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [192, 128, 128], [0, 64, 128], [224, 224, 192]]


def test_a_map_that_is_coarser_than_the_input_covers_the_picture() -> None:
    assert read(np.array([[1, 2], [3, 4]], np.uint8), size=(4, 6)).class_map.tolist() == [
        *[[1, 1, 2, 2]] * 3,
        *[[3, 3, 4, 4]] * 3,
    ]
