"""Single steps of the preprocessing, as the user says them."""

from __future__ import annotations

import pytest
from export_fixtures import options

from convoy.export.plan import make_plan
from convoy.export.sources.onnx_plain import is_plain
from convoy.models.errors import UsageError

ALL = {"preprocess": None, "input": None, "mean": "0.1,0.2,0.3", "std": "0.5", "resize": "40", "crop": "32x24"}
ALL |= {"interpolation": "bicubic"}


def test_they_change_what_the_recipe_says_and_leave_the_rest(tmp_path):
    plan = make_plan(options(tmp_path, preprocess="imagenet", input=None, mean="0.5", resize="300", crop="288"))
    image = plan.image
    assert (image.height, image.width, image.resize_px, image.mean) == (288, 288, 300, (0.5, 0.5, 0.5))
    assert (image.std, image.interpolation) == ((0.229, 0.224, 0.225), "bilinear")
    assert plan.preprocessing == "--preprocess imagenet --mean 0.5 --resize 300 --crop 288 (the user's)"


def test_they_are_a_recipe_of_their_own(tmp_path):
    image = make_plan(options(tmp_path, **ALL)).image
    assert (image.height, image.width, image.channels, image.resize_mode, image.resize_px) == (
        32,
        24,
        3,
        "shorter_side",
        40,
    )
    assert (image.mean, image.std, image.interpolation, image.antialias) == (
        (0.1, 0.2, 0.3),
        (0.5,) * 3,
        "bicubic",
        True,
    )
    straight = make_plan(options(tmp_path, **(ALL | {"resize": "32x24", "crop": None}))).image
    assert (straight.resize_mode, straight.height, straight.width) == ("exact", 32, 24)


def test_nothing_is_recorded_as_the_users_that_the_source_says(tmp_path):
    from dataclasses import replace

    from convoy.export.plan import _preprocessing
    from convoy.export.sources.image_changes import NOTHING_CHANGED

    assert _preprocessing(replace(options(tmp_path), preprocess=None), NOTHING_CHANGED) == ""


def test_an_onnx_file_of_whose_images_something_was_said_is_not_plain(tmp_path):
    assert is_plain(options(tmp_path, source="net.onnx", preprocess=None))
    assert not is_plain(options(tmp_path, source="net.onnx", preprocess=None, mean="0.5"))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"mean": None, "interpolation": None}, "in part only; pass --mean, --interpolation, too"),
        ({"crop": None}, "in part only; pass --crop, too"),
        ({"mean": "0.1,0.2"}, "is not one number per channel"),
        ({"mean": "red"}, "is not one number per channel"),
        ({"mean": "nan"}, "is not one number per channel"),
        ({"mean": "123.7,116.3,103.5"}, "divide it by 255"),
        ({"std": "0"}, "must be above 0"),
        ({"resize": "0"}, "is not a size in pixels"),
        ({"crop": "3x32x32"}, "is not a size in pixels"),
        ({"resize": "16"}, "resize_px 16 is below the crop 32x24"),
        ({"resize": "40x40"}, "leaves nothing to --crop"),
        ({"interpolation": "cubic"}, "use nearest, bilinear, bicubic, lanczos"),
        ({"input": "3x64x64"}, "--input says 3x64x64, the preprocessing 3x32x24"),
        ({"preprocess": "unit", "input": "3x8x8", "resize": None}, "--crop cuts nothing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, wrong, words):
    with pytest.raises(UsageError, match=words):
        make_plan(options(tmp_path, **(ALL | wrong)))
