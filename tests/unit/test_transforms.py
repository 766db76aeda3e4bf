"""Preparations of images as people have them: torchvision transforms, timm's and transformers' files, presets."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.export.sources.preprocess import PRESETS, ImageChanges, InputSize, preset, resolve_image
from convoy.export.sources.preprocess_file import read_preprocess_file
from convoy.export.sources.torch_job import Description
from convoy.export.sources.transforms import read_transform
from convoy.models.errors import JobError, UsageError
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec

FILE = """
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

BICUBIC = v1.InterpolationMode.BICUBIC
NORMALISE = v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
usual = v1.Compose([v1.Resize(40), v1.CenterCrop(32), v1.ToTensor(), NORMALISE])
wide = v1.Compose([v1.Resize((24, 48), interpolation=BICUBIC), v1.ToTensor(), v1.Normalize([0.5], [0.5])])
grey = v1.Compose([v1.Grayscale(), v1.Resize((28, 28)), v1.ToTensor(), v1.Normalize((0.1307,), (0.3081,))])
nested = v1.Compose([v1.Compose([v1.Resize([40])]), v1.CenterCrop([32, 24]), v1.ToTensor()])
new = v2.Compose([
    v2.Resize(40, interpolation=BICUBIC), v2.CenterCrop(32), v2.ToImage(),
    v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))])
in_255 = v2.Compose([
    v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.float32),
    v2.Normalize((120.0, 115.0, 100.0), (60.0, 57.0, 58.0))])
in_list = torch.nn.Sequential(v2.Resize((32, 32)), v2.ToImage(), v2.ToDtype(torch.uint8, scale=True),
    v2.ToDtype(torch.float32), v2.Normalize((120.0, 115.0, 100.0), (60.0, 57.0, 58.0)))
on_tensor = v2.Compose([v2.ToImage(), v2.Resize((24, 24), antialias=False), v2.ToDtype(torch.float32, scale=True)])
def build(size=32):
    return v1.Compose([v1.Resize(size + 8), v1.CenterCrop(size), v1.ToTensor()])

training = v1.Compose([v1.RandomResizedCrop(32), v1.ToTensor()])
twice = v1.Compose([v1.Resize((32, 32)), v1.ToTensor(), v1.Normalize([0.5], [0.5]), v1.Normalize([0.5], [0.5])])
three = v1.Compose([v1.Grayscale(3), v1.Resize((32, 32)), v1.ToTensor()])
odd = v1.Compose([v1.Resize(32), v1.Pad(2), v1.ToTensor()])
no_crop = v1.Compose([v1.Resize(32), v1.ToTensor()])
stretched = v1.Compose([v1.Resize((40, 40)), v1.CenterCrop(32), v1.ToTensor()])
only_tensor = v1.Compose([v1.ToTensor(), v1.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))])
def fails():
    raise OSError("no such disk")
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The user's file, read in this process: a child for each transform would import torch each time."""
    path = tmp_path / "data.py"
    path.write_text(FILE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        "convoy.export.sources.preprocess.ask",
        lambda inquiry: Description(transform=read_transform(Path(inquiry.file), inquiry.name)),
    )
    return path


def resolved(preprocess: str, size: InputSize | None = None, channels: int = 3) -> ImageSpec:
    changes = ImageChanges()
    return resolve_image(preprocess, size, None, None, "float32_nchw", "nothing known", changes, lambda _: channels)


def picture(mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (11, 16, 3), np.uint8)
    return Image.fromarray(pixels).resize((97, 61), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["usual", "wide", "grey", "nested", "new", "in_255", "in_list", "build(size=24)"])
def test_a_transform_prepares_images_as_torchvision_does(file, name):
    image = resolved(f"{file}:{name}")
    scope: dict = {}
    exec(FILE, scope)
    transform = eval(name, scope)
    encoded = io.BytesIO()
    picture().save(encoded, "png")
    ours = preprocess(encoded.getvalue(), image)
    theirs = np.asarray(transform(picture()))
    assert ours.shape == theirs.shape
    # A level of 8 bits, after normalisation.
    assert np.abs(ours - theirs).max() <= 1.01 / 255 / min(image.std)


@pytest.mark.slow
def test_the_file_is_read_in_a_child(tmp_path, forks_torch):
    path = tmp_path / "data.py"
    path.write_text(FILE)
    assert resolved(f"{path}:usual").resize_px == 40
    with pytest.raises(JobError, match="has no 'nothing'"):
        resolved(f"{path}:nothing")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("training", "RandomResizedCrop is a training step; pass the validation transform"),
        ("odd", "Pad is not supported"),
        ("twice", "Normalize occurs twice"),
        ("three", "num_output_channels=3 is not supported"),
        ("tf['val']", "is not the name of a function"),
        ("no_crop", r"Resize\(32\) alone gives images of many sizes; add CenterCrop"),
        ("stretched", "use Resize with one number"),
        ("only_tensor", "does not resize images; add a Resize, or pass --input"),
        ("fails", "fails failed: OSError: no such disk"),
        ("nothing", "has no 'nothing'"),
    ],
)
def test_a_transform_that_is_not_understood_is_refused(file, name, words):
    with pytest.raises((JobError, UsageError), match=words):
        resolved(f"{file}:{name}")


@pytest.mark.slow
def test_a_transform_without_a_resize_takes_the_size_of_the_input(file):
    image = resolved(f"{file}:only_tensor", InputSize(3, 20, 30))
    assert (image.height, image.width, image.resize_mode, image.mean) == (20, 30, "exact", (0.5, 0.5, 0.5))


def test_tensors_may_be_scaled_without_antialias(file):
    assert not resolved(f"{file}:on_tensor").antialias
    assert resolved(f"{file}:new").antialias


VIT = {
    "do_normalize": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "resample": 2, "size": 224, "feature_extractor_type": "ViTFeatureExtractor",
}  # fmt: skip
CLIP = {
    "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_processor_type": "CLIPImageProcessor", "image_mean": [0.48, 0.46, 0.41],
    "image_std": [0.27, 0.26, 0.28], "resample": 3, "rescale_factor": 1 / 255, "size": {"shortest_edge": 256},
}  # fmt: skip
CONVNEXT = {
    "crop_pct": 0.875, "do_normalize": True, "do_resize": True, "image_processor_type": "ConvNextImageProcessor",
    "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "resample": 3,
    "size": {"shortest_edge": 224},
}  # fmt: skip
TIMM = {"pretrained_cfg": {"input_size": [3, 224, 224], "crop_pct": 0.95, "interpolation": "bicubic",
                           "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}}  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (VIT, ("exact", 224, 224, "bilinear")),
        (CLIP, ("shorter_side", 256, 224, "bicubic")),
        (CONVNEXT, ("shorter_side", 256, 224, "bicubic")),
        (CONVNEXT | {"size": {"shortest_edge": 384}}, ("exact", 384, 384, "bicubic")),
        (VIT | {"size": {"height": 384, "width": 256}}, ("exact", 384, 384, "bilinear")),
        (TIMM, ("shorter_side", 235, 224, "bicubic")),
    ],
)
def test_files_of_timm_and_transformers_are_read(tmp_path, recipe, expected):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(recipe))
    image = read_preprocess_file(file, "uint8_nhwc")
    assert (image.resize_mode, image.resize_px, image.height, image.interpolation) == expected


def test_values_that_are_not_rescaled_have_their_mean_in_0_to_1(tmp_path):
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(VIT | {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3}))
    image = read_preprocess_file(file, "uint8_nhwc")
    assert image.mean == image.std == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (CLIP | {"do_center_crop": False}, "gives images of many sizes"),
        (CLIP | {"image_processor_type": "MobileViTImageProcessor"}, "the processor MobileViTImageProcessor"),
        (VIT | {"do_flip_channel_order": True}, "do_flip_channel_order: true is not supported"),
        (VIT | {"crop_pct": 0.9, "resample": 4}, "crop_pct, resample: 4 is not supported"),
        (VIT | {"do_resize": False}, "do_resize is false"),
        (TIMM["pretrained_cfg"] | {"crop_mode": "border"}, "crop mode 'border'"),
    ],
)
def test_what_has_no_counterpart_is_refused(tmp_path, recipe, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(recipe))
    with pytest.raises(UsageError, match=words):
        read_preprocess_file(file, "uint8_nhwc")


def test_yolox_is_bgr_in_0_to_255_in_the_upper_left_corner():
    image = preset("yolox", None, "float32_nchw")
    assert (image.resize_mode, image.pad_position, image.channel_order, image.height) == (
        *("letterbox", "top_left", "bgr"),
        640,
    )
    assert image.std == (1 / 255,) * 3


def test_presets_have_their_usual_sizes_or_ask_for_one():
    for name, recipe in PRESETS.items():
        if recipe.px is None:
            with pytest.raises(UsageError, match="pass --input"):
                preset(name, None, "uint8_nhwc")
        else:
            assert preset(name, None, "uint8_nhwc").height == recipe.px
        assert preset(name, InputSize(3, 64, 48), "uint8_nhwc").width == 48
