"""Networks whose channels span three decades, across SiLU, Hardswish, ReLU6, gates and concatenations, in INT8."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from precision_fixtures import run

from convoy.app.engines import cpu
from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import Calibration, Conversion, collect
from convoy.export.variants.equalize import channels_of, equalize, measure_levels
from convoy.export.variants.onnx_graph import prepare
from convoy.export.variants.quantize import quantize_for_cpu
from convoy.export.variants.streams import streams
from convoy.models.datasets import load_digits
from convoy.models.samples import Part
from tests.support.hard_networks import HARD, write_hard_network

_EVERY = 3


def pixels(part: Part) -> tuple[np.ndarray, np.ndarray]:
    # The classifier has hundreds of weights to fit; to see what INT8 does fewer images are enough.
    samples = load_digits().part(part)[:: 1 if part == "train" else _EVERY]
    return np.stack([sample.content for sample in samples]), np.array([sample.label for sample in samples])


def agreement(graph: Path, chunk: Chunk, images: np.ndarray, expected: np.ndarray) -> float:
    """The share of images that INT8 made of the graph answers as fp32 does."""
    ranges = collect(graph, [chunk], ["minmax"])
    quantize_for_cpu(Conversion(Calibration(graph, ranges), "minmax"), graph.with_name("int8.onnx"))
    return float((run(graph.with_name("int8.onnx"), images).argmax(1) == expected.argmax(1)).mean())


@pytest.mark.parametrize("name", HARD)
def test_int8_answers_as_fp32_does_where_channels_span_three_decades(tmp_path, name):
    fp32 = write_hard_network(tmp_path / "fp32.onnx", name, *pixels("train"))
    images, _ = pixels("test")
    known, labels = pixels("calibration")
    chunk = Chunk({"images": known}, labels, np.arange(len(labels)))
    graph = prepare(fp32, tmp_path / "prepared.onnx")
    expected = run(graph, images)
    levels = measure_levels(graph, channels_of(streams(onnx.load(graph).graph)), [chunk])
    balanced, _ = equalize(graph, levels, tmp_path / "equalised.onnx")
    assert np.allclose(run(balanced, images), expected, rtol=1e-4, atol=1e-5)
    assert agreement(graph, chunk, images, expected) < 0.5
    # Without dot products of 8 bits the sums of pairs saturate, whatever the scales.
    assert agreement(balanced, chunk, images, expected) > (0.8 if cpu.has_int8_dot_product() else 0.7)
