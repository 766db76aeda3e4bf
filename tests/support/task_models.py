"""Bundles of tiny networks that segment and detect, whose right answers are obvious: colours, and fixed boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.onnx_session import new_session
from convoy.models.bundle import (
    CANARY,
    MANIFEST,
    SCHEMA_VERSION,
    Canary,
    FileRecord,
    Manifest,
    Provenance,
    Variant,
    canary_bytes,
    seal,
)
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs, SegmentationOutput
from tests.support import onnx_models

COLOURS = ("black", "red", "green", "blue")
_CANARY_SAMPLES = 8


def cropped(resize_px: int, height: int, width: int) -> ImageSpec:
    """Shorter side to so many pixels, then the crop; nearest, so that colours stay what they are."""
    plain = ImageSpec.plain(height, width, 3, "uint8_nhwc")
    return replace(plain, resize_mode="shorter_side", resize_px=resize_px, interpolation="nearest")


def stretched(height: int, width: int) -> ImageSpec:
    return replace(ImageSpec.plain(height, width, 3, "uint8_nhwc"), interpolation="nearest")


def add_colours(store: Path, name: str, image: ImageSpec, **own: Any) -> Path:
    """Segments: each pixel is the colour that it has most of, or black. A convolution of one pixel."""
    weights = np.array([[0, 0, 0], [1, -1, -1], [-1, 1, -1], [-1, -1, 1]], np.float32).reshape(4, 3, 1, 1)
    bias = np.array([60, 0, 0, 0], np.float32)
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["planes", "weights", "bias"], ["map"]),
    ]
    spec = ModelSpec(
        *(name, (TensorSpec("images", "UINT8", image.tensor_shape),)),
        *((TensorSpec("map", "FP32", (4, image.height, image.width)),), 8, image, "none", COLOURS),
        task="segment",
        segmentation=SegmentationOutput("map"),
    )
    return _bundle(store, replace(spec, **own), nodes, {"weights": weights, "bias": bias})


@dataclass(frozen=True, slots=True)
class FixedOutput:
    """What a detector answers to every picture."""

    name: str
    values: np.ndarray


def add_detector(
    store: Path,
    name: str,
    image: ImageSpec,
    said: DetectionOutputs,
    fixed: Sequence[FixedOutput],
    *,
    max_batch_size: int = 8,
    **own: Any,
) -> Path:
    """Detects the same in every picture. With `max_batch_size` 0 it takes one picture without a batch dimension."""
    batched = max_batch_size > 0
    nodes = [
        helper.make_node("Cast", ["images"], ["floats"], to=TensorProto.FLOAT),
        # Nothing, of each picture: what makes an answer depend on the picture.
        helper.make_node("ReduceMax", ["floats"], ["most"], axes=[1, 2, 3] if batched else [0, 1, 2], keepdims=0),
        helper.make_node("Mul", ["most", "none"], ["zero"]),
    ]
    constants: dict[str, np.ndarray] = {"none": np.array(0, np.float32)}
    for one in fixed:
        constants[f"fixed_{one.name}"] = one.values[None] if batched else one.values
        constants[f"form_{one.name}"] = np.array([-1, *[1] * one.values.ndim] if batched else [], np.int64)
        kind = TensorProto.FLOAT if one.values.dtype == np.float32 else TensorProto.INT64
        nodes += [
            helper.make_node("Reshape", ["zero", f"form_{one.name}"], [f"zero_{one.name}"]),
            helper.make_node("Cast", [f"zero_{one.name}"], [f"typed_{one.name}"], to=kind),
            helper.make_node("Add", [f"typed_{one.name}", f"fixed_{one.name}"], [one.name]),
        ]
    outputs = tuple(
        TensorSpec(one.name, "FP32" if one.values.dtype == np.float32 else "INT64", one.values.shape) for one in fixed
    )
    spec = ModelSpec(
        *(name, (TensorSpec("images", "UINT8", image.tensor_shape),), outputs, max_batch_size, image, "none", ()),
        task="detect",
        detection=said,
    )
    return _bundle(store, replace(spec, **own), nodes, constants)


def _bundle(store: Path, spec: ModelSpec, nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> Path:
    folder = store / spec.name / "1"
    batch = ["batch"] if spec.max_batch_size else []
    inputs, outputs = (
        [onnx_models.tensor(one.name, one.dtype, [*batch, *one.shape]) for one in side]
        for side in (spec.inputs, spec.outputs)
    )
    initializers = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    onnx_models.save(folder / "fp32.onnx", nodes, inputs, outputs, initializers)
    samples = [_CANARY_SAMPLES] if spec.max_batch_size else []
    given = {
        one.name: np.random.default_rng(1).integers(0, 256, (*samples, *one.shape), np.uint8) for one in spec.inputs
    }
    session = new_session(folder / "fp32.onnx")
    names = [one.name for one in spec.outputs]
    canary = Canary(given, dict(zip(names, session.run(names, given), strict=True)))
    (folder / CANARY).write_bytes(canary_bytes(canary))
    files = {
        file: FileRecord(hashlib.sha256(content).hexdigest(), len(content))
        for file in ("fp32.onnx", CANARY)
        for content in [(folder / file).read_bytes()]
    }
    variant = Variant("fp32.onnx", "fp32", "cpu", True, "the reference", 0.0, None, None)
    origin = Provenance("made for a test", None, None, None, {}, "2026-01-01T00:00:00+00:00")
    (folder / MANIFEST).write_bytes(seal(Manifest(SCHEMA_VERSION, spec, (variant,), files, origin)))
    return folder


def painted(segmentation: dict[str, Any]) -> np.ndarray:
    """The class map of an answer's run lengths, by what the page on the protocol says of them; 255 where none is."""
    whole = np.full((segmentation["height"], segmentation["width"]), 255, np.uint8)
    for one in segmentation["classes"]:
        assert one["rle"]["size"] == [segmentation["height"], segmentation["width"]]
        counts = one["rle"]["counts"]
        values = np.arange(len(counts)) % 2 == 1
        whole[np.repeat(values, counts).reshape(whole.shape, order="F")] = one["class_id"]
    return whole
