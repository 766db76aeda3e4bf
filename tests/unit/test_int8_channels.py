"""Channels of very different ranges in 8 bits, in the files of both engines of CPUs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from precision_fixtures import calibrated, residual, run
from test_equalize import IMAGES, UNBALANCED, WIDTH, chain, conv, saved, weights

from convoy.app.engines import cpu
from convoy.app.engines.base import run_arrays
from convoy.app.engines.openvino import OpenVinoEngine
from convoy.app.engines.select import choose_on_cpu
from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import Calibration, Conversion, collect
from convoy.export.variants.equalize import channels_of, equalize, level_inputs, measure_levels, read_channels
from convoy.export.variants.onnx_graph import array, initializers, prepare, producers
from convoy.export.variants.pairs import FOR_OPENVINO, gains_from_pairs
from convoy.export.variants.quantize import quantize_for_cpu
from convoy.export.variants.streams import streams
from convoy.models.bundle import Variant
from convoy.models.datasets import load_digits
from convoy.models.samples import Part
from convoy.models.spec import TensorSpec
from tests.support.hard_networks import HARD, write_hard_network

_EVERY = 3


def pixels(part: Part) -> tuple[np.ndarray, np.ndarray]:
    samples = load_digits().part(part)[:: 1 if part == "train" else _EVERY]
    return np.stack([sample.content for sample in samples]), np.array([sample.label for sample in samples])


def chunk_of(graph: Path, images: np.ndarray) -> Chunk:
    return Chunk({onnx.load(graph).graph.input[0].name: images}, None, np.arange(len(images)))


def levelled(graph: Path, images: np.ndarray) -> Path:
    channels = read_channels(onnx.load(graph).graph)
    target, added = level_inputs(
        graph, measure_levels(graph, channels, [chunk_of(graph, images)]), graph.with_name("l.onnx")
    )
    assert bool(added) == (target != graph)
    return target


def in_int8(graph: Path, images: np.ndarray) -> Path:
    target = graph.with_name("int8-openvino.onnx")
    assert (
        FOR_OPENVINO.quantize(Conversion(Calibration(graph, collect(graph, [chunk_of(graph, images)]))), target) == {}
    )
    return target


def answers(path: Path, images: np.ndarray) -> np.ndarray:
    given, got = onnx.load(path).graph.input[0], onnx.load(path).graph.output[0]
    dtype = "UINT8" if images.dtype == np.uint8 else "FP32"
    shape = run(path, images[:1]).shape[1:]
    engine = OpenVinoEngine(
        path,
        inputs=(TensorSpec(given.name, dtype, images.shape[1:]),),
        outputs=(TensorSpec(got.name, "FP32", shape),),
        max_batch_size=len(images),
        precision="int8",
        threads=1,
    )
    try:
        return run_arrays(engine, {given.name: images})[got.name]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "name", [name if name == "gated" else pytest.param(name, marks=pytest.mark.long) for name in HARD]
)
def test_it_answers_as_fp32_does_where_channels_span_three_decades(tmp_path: Path, name: str) -> None:
    fp32 = write_hard_network(tmp_path / "fp32.onnx", name, *pixels("train"))
    images, _ = pixels("test")
    known, _ = pixels("calibration")
    graph = prepare(fp32, tmp_path / "prepared.onnx")
    expected = run(graph, images)
    level = levelled(graph, known)
    assert np.allclose(run(level, images), expected, rtol=1e-4, atol=1e-5)

    def agreement(graph: Path) -> float:
        return float((answers(in_int8(graph, known), images).argmax(1) == expected.argmax(1)).mean())

    assert agreement(graph) < 0.7
    # Without dot products of 8 bits the sums of pairs saturate, whatever the scales.
    assert agreement(level) > (0.85 if cpu.has_int8_dot_product() else 0.55)


def test_pairs_stand_before_layers_only_and_weights_are_stored_in_8_bits(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Sigmoid", ["a"], ["gate"], "gate"),
        helper.make_node("Mul", ["a", "gate"], ["b"], "gated"),
    ]
    graph = prepare(chain(tmp_path / "silu.onnx", nodes), tmp_path / "prepared.onnx")
    file = onnx.load(in_int8(graph, IMAGES)).graph
    constants, makers = initializers(file), producers(file)
    for layer in (node for node in file.node if node.op_type == "Conv"):
        read, weight = (makers[name] for name in layer.input[:2])
        assert (read.op_type, weight.op_type) == ("DequantizeLinear", "DequantizeLinear")
        assert array(constants[weight.input[0]]).dtype == np.int8
        assert array(constants[read.input[2]]).dtype == np.uint8
    # Of the activation nothing is rounded before its product is whole.
    assert [node.op_type for node in file.node if node.op_type in ("Sigmoid", "Mul")] == ["Sigmoid", "Mul"]
    assert makers["gate"].input[0] == makers["b"].input[0] == "a"
    assert Counter(node.op_type for node in file.node)["QuantizeLinear"] == 2


def test_hardswish_is_one_operator_again(tmp_path: Path) -> None:
    graph = prepare(
        chain(tmp_path / "hs.onnx", [helper.make_node("HardSwish", ["a"], ["b"], "hs")]), tmp_path / "prepared.onnx"
    )
    assert "HardSigmoid" in {node.op_type for node in onnx.load(graph).graph.node}
    file = in_int8(graph, IMAGES)
    assert {"HardSwish"} == {node.op_type for node in onnx.load(file).graph.node} & {"HardSwish", "HardSigmoid", "Mul"}
    assert np.allclose(run(file, IMAGES), run(graph, IMAGES), atol=0.1 * np.abs(run(graph, IMAGES)).max())


def test_a_gate_of_its_own_stays_as_it_is(tmp_path: Path) -> None:
    between: list[Any] = [
        helper.make_node("GlobalAveragePool", ["a"], ["p"], "pool"),
        helper.make_node("HardSigmoid", ["p"], ["gate"], "gate", alpha=1 / 6, beta=0.5),
        helper.make_node("Mul", ["a", "gate"], ["b"], "gated"),
    ]
    graph = prepare(chain(tmp_path / "se.onnx", between), tmp_path / "prepared.onnx")
    ops = Counter(node.op_type for node in onnx.load(in_int8(graph, IMAGES)).graph.node)
    assert (ops["HardSigmoid"], ops["Mul"], ops["HardSwish"]) == (1, 1, 0)


def test_only_unbalanced_inputs_of_layers_are_levelled_and_a_skip_connection_is_not(tmp_path: Path) -> None:
    balanced = calibrated(residual(tmp_path / "fp32.onnx"), IMAGES).graph
    assert levelled(balanced, IMAGES) == balanced
    nodes = [
        conv("first", "x", "a"),
        conv("branch", "a", "c"),
        helper.make_node("Add", ["a", "c"], ["b"], "add"),
        conv("last", "b", "y"),
    ]
    made = weights("first", WIDTH, 3, gains=UNBALANCED) | weights("branch", WIDTH, WIDTH) | weights("last", 4, WIDTH)
    graph = prepare(saved(tmp_path / "skip.onnx", nodes, made), tmp_path / "prepared-skip.onnx")
    level = levelled(graph, IMAGES)
    assert [node.name for node in onnx.load(level).graph.node if node.op_type == "Mul"] == ["a.level"]
    file = onnx.load(in_int8(level, IMAGES)).graph
    # The sum reads the wide channels as they are: rounded in one range the small ones would be gone.
    (add,) = (node for node in file.node if node.op_type == "Add")
    assert add.input[0] == "a"


@pytest.mark.parametrize(("op", "gains"), [("Relu", False), ("HardSwish", True), ("Sigmoid", True), ("Tanh", True)])
def test_one_file_is_enough_where_all_between_layers_has_kernels_of_8_bits(
    tmp_path: Path, op: str, gains: bool
) -> None:
    graph = chain(tmp_path / "x.onnx", [helper.make_node(op, ["a"], ["b"], "between")])
    assert gains_from_pairs(onnx.load(graph).graph) is gains


def test_int8_by_name_is_whichever_file_may_serve() -> None:
    cpu = Variant("int8-cpu.onnx", "int8", "cpu", False, "not faster", 0.0, None, None)
    own = replace(cpu, file="int8-openvino.onnx", target="openvino", serve=True, reason="faster")
    assert choose_on_cpu((cpu, own), "int8", "here").variants == (own,)
    both = choose_on_cpu((replace(cpu, serve=True), own), "int8", "here")
    assert [variant.file for variant in both.variants] == ["int8-cpu.onnx", "int8-openvino.onnx"]
    neither = choose_on_cpu((cpu, replace(own, serve=False)), "int8", "here")
    assert neither.variants == (cpu,)
    assert neither.reason == "asked for by name, although: not faster"


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
