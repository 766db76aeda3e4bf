"""Channels of very different ranges in 8 bits, in the files of both engines of CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from export_fixtures import answers as run
from onnx import TensorProto, helper, numpy_helper
from precision_fixtures import calibrated, residual
from test_equalize import IMAGES, UNBALANCED, WIDTH, chain, conv, saved, weights

from convoy.app.engines import cpu
from convoy.app.engines.base import run_arrays
from convoy.app.engines.onnx_session import new_session, session_options
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

SIZE_PX = 32
_DECADES = 3.0
_SOME = 48


class _Builder:
    """A graph under construction, run on some images after each convolution to see what scale its outputs have."""

    def __init__(self, images: np.ndarray, decades: float, top: float, seed: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._some = images[:: max(1, len(images) // _SOME)]
        # The gain of the largest channel, as a power of ten.
        self._top, self._decades = top, decades
        self._constants: dict[str, np.ndarray] = {
            "scale": np.full((1, 3, 1, 1), 1 / 127.5),
            "shift": np.full((1, 3, 1, 1), -1.0),
        }
        self._nodes = [
            helper.make_node("Transpose", ["images"], ["nchw"], "transpose", perm=[0, 3, 1, 2]),
            helper.make_node("Cast", ["nchw"], ["float"], "cast", to=TensorProto.FLOAT),
            helper.make_node("Mul", ["float", "scale"], ["scaled"], "scale_front"),
            helper.make_node("Add", ["scaled", "shift"], ["x"], "shift_front"),
        ]

    def conv(
        self,
        source: str,
        outputs: int,
        kernel: int = 1,
        *,
        stride: int = 1,
        depthwise: bool = False,
        even: bool = False,
    ) -> str:
        """A convolution whose inputs count alike whatever their scale, and whose outputs have gains unless `even`."""
        values = self.run(source, self._some)
        inputs, name = values.shape[1], f"conv{len(self._nodes)}"
        groups = inputs if depthwise else 1
        weight = self._draw.normal(size=(outputs, inputs // groups, kernel, kernel))
        spread = np.maximum(values.std(axis=(0, 2, 3)), 1e-6)
        weight /= spread.reshape(-1, 1, 1, 1) if depthwise else spread.reshape(1, -1, 1, 1)
        self._constants |= {f"{name}.w": weight, f"{name}.b": np.zeros(outputs)}
        attributes = {"pads": [kernel // 2] * 4, "strides": [stride] * 2, "group": groups}
        inside = [source, f"{name}.w", f"{name}.b"]
        self._nodes.append(helper.make_node("Conv", inside, [f"{name}.y"], name, **attributes))
        values = self.run(f"{name}.y", self._some)
        centre, spread = values.mean(axis=(0, 2, 3)), values.std(axis=(0, 2, 3))
        # The same for all of one width, so that what is added up has one scale.
        gains = np.random.default_rng(outputs).permutation(np.logspace(self._top - self._decades, self._top, outputs))
        gains = np.ones(outputs) if even else gains
        self._constants[f"{name}.w"] = weight * (gains / spread).reshape(-1, 1, 1, 1)
        offsets = self._draw.normal(size=outputs) * 0.5
        self._constants[f"{name}.b"] = gains * (offsets - centre / spread)
        return f"{name}.y"

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op.lower()}{len(self._nodes)}"
        self._nodes.append(helper.make_node(op, inputs, [f"{name}.y"], name, **attributes))
        return f"{name}.y"

    def silu(self, source: str) -> str:
        return self.add("Mul", source, self.add("Sigmoid", source))

    def hardswish(self, source: str) -> str:
        return self.add("HardSwish", source)

    def relu6(self, source: str) -> str:
        self._constants |= {"zero": np.array(0.0), "six": np.array(6.0)}
        return self.add("Clip", source, "zero", "six")

    def relu(self, source: str) -> str:
        return self.add("Relu", source)

    def classify(self, source: str, images: np.ndarray, labels: np.ndarray) -> onnx.ModelProto:
        """The whole network, with the ridge regression of the labels as its last layer."""
        flat = self.add("Flatten", self.add("AveragePool", source, kernel_shape=[2, 2], strides=[2, 2]))
        features = self.run(flat, images).astype(np.float64)
        spread = features.std(axis=0) + 1e-6
        whitened = np.c_[(features - features.mean(axis=0)) / spread, np.ones(len(features))]
        targets = 2.0 * np.eye(10)[labels] - 1
        normal = whitened.T @ whitened + 30.0 * np.eye(whitened.shape[1])
        solved = np.linalg.solve(normal, whitened.T @ targets)
        weight = solved[:-1] / spread[:, None]
        self._constants |= {"head.w": weight.T, "head.b": solved[-1] - features.mean(axis=0) @ weight}
        self._nodes.append(helper.make_node("Gemm", [flat, "head.w", "head.b"], ["logits"], "head", transB=1))
        return self._model("logits", ["batch", 10])

    def run(self, name: str, images: np.ndarray) -> np.ndarray:
        serialised = self._model(name, None).SerializeToString()
        session = new_session(serialised, session_options(threads=1))
        found: np.ndarray = session.run(None, {"images": images})[0]
        return found

    def _model(self, output: str, shape: list[int | str] | None) -> onnx.ModelProto:
        graph = helper.make_graph(
            self._nodes,
            "hard",
            [helper.make_tensor_value_info("images", TensorProto.UINT8, ["batch", SIZE_PX, SIZE_PX, 3])],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(v.astype(np.float32), name) for name, v in self._constants.items()],
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _separable(activation: Callable[[_Builder, str], str]) -> Callable[[_Builder], str]:
    def body(net: _Builder) -> str:
        stream = activation(net, net.conv("x", 24, 3, stride=2))
        for width, stride in ((32, 1), (48, 2), (64, 1), (96, 2)):
            channels = 24 if width == 32 else {48: 32, 64: 48, 96: 64}[width]
            stream = activation(net, net.conv(stream, channels, 3, stride=stride, depthwise=True))
            stream = activation(net, net.conv(stream, width))
        return stream

    return body


def _gated(net: _Builder) -> str:
    """SiLU with squeeze-and-excitation between linear bottlenecks, with additions."""
    stream = net.conv(net.silu(net.conv("x", 24, 3, stride=2)), 24)
    for stride, width in ((2, 48), (2, 64)):
        wide = net.silu(net.conv(stream, width))
        wide = net.silu(net.conv(wide, width, 3, stride=stride, depthwise=True))
        squeezed = net.silu(net.conv(net.add("GlobalAveragePool", wide), 16, even=True))
        wide = net.add("Mul", wide, net.add("Sigmoid", net.conv(squeezed, width, even=True)))
        skipped = net.conv(net.add("AveragePool", stream, kernel_shape=[2, 2], strides=[2, 2]), 32)
        stream = net.add("Add", skipped, net.conv(wide, 32))
    return net.silu(net.conv(stream, 96))


def _concatenated(net: _Builder) -> str:
    """Blocks that append what they compute to what they read, so that all is read together."""
    stream = net.relu(net.conv("x", 24, 3, stride=2))
    for block in range(4):
        grown = net.relu(net.conv(net.relu(net.conv(stream, 32)), 24, 3))
        stream = net.add("Concat", stream, grown, axis=1)
        if block % 2:
            stream = net.add("MaxPool", stream, kernel_shape=[2, 2], strides=[2, 2])
    return net.relu(net.conv(stream, 64))


HARD: dict[str, Callable[[_Builder], str]] = {
    "silu": _separable(_Builder.silu),
    "hardswish": _separable(_Builder.hardswish),
    "relu6": _separable(_Builder.relu6),
    "gated": _gated,
    "concat": _concatenated,
}


def write_hard_network(
    path: Path, name: str, images: np.ndarray, labels: np.ndarray, *, decades: float = _DECADES, seed: int = 1
) -> Path:
    """uint8 [N, 32, 32, 3] -> logits [N, 10] of the network of this name, fitted to these images."""
    # What ReLU6 cuts off must not be most of it.
    net = _Builder(images, decades, 0.3 if name == "relu6" else decades / 2, seed)
    onnx.save(net.classify(HARD[name](net), images, labels), path)
    return path


_EVERY = 3


def pixels(part: Part) -> tuple[np.ndarray, np.ndarray]:
    samples = load_digits().part(part)[:: 1 if part == "train" else _EVERY]
    return np.stack([sample.content for sample in samples]), np.array([sample.label for sample in samples])


def prepared(folder: Path, name: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """A hard network's graph, pictures that it has not seen, and what it says of them."""
    fp32 = write_hard_network(folder / "fp32.onnx", name, *pixels("train"))
    graph, (images, _) = prepare(fp32, folder / "prepared.onnx"), pixels("test")
    return graph, images, run(graph, images)


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
    graph, images, expected = prepared(tmp_path, name)
    known, _ = pixels("calibration")
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
    assert neither.reason == "selected with --precision, although: not faster"


def agreement(graph: Path, chunk: Chunk, images: np.ndarray, expected: np.ndarray) -> float:
    """The share of images that INT8 made of the graph answers as fp32 does."""
    ranges = collect(graph, [chunk], ["minmax"])
    quantize_for_cpu(Conversion(Calibration(graph, ranges), "minmax"), graph.with_name("int8.onnx"))
    return float((run(graph.with_name("int8.onnx"), images).argmax(1) == expected.argmax(1)).mean())


@pytest.mark.parametrize("name", HARD)
def test_int8_answers_as_fp32_does_where_channels_span_three_decades(tmp_path, name):
    graph, images, expected = prepared(tmp_path, name)
    known, labels = pixels("calibration")
    chunk = Chunk({"images": known}, labels, np.arange(len(labels)))
    levels = measure_levels(graph, channels_of(streams(onnx.load(graph).graph)), [chunk])
    balanced, _ = equalize(graph, levels, tmp_path / "equalised.onnx")
    assert np.allclose(run(balanced, images), expected, rtol=1e-4, atol=1e-5)
    assert agreement(graph, chunk, images, expected) < 0.5
    # Without dot products of 8 bits the sums of pairs saturate, whatever the scales.
    assert agreement(balanced, chunk, images, expected) > (0.8 if cpu.has_int8_dot_product() else 0.7)
