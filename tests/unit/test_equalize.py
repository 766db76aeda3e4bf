"""Channels of a stream are brought to one range where that is exact, and nothing is touched where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from export_fixtures import answers, save_graph
from onnx import TensorProto, helper, numpy_helper

from convoy.export.rows import Chunk
from convoy.export.variants.calibrate import observed
from convoy.export.variants.equalize import channels_of, equalize, measure_levels, scales_for
from convoy.export.variants.onnx_graph import prepare
from convoy.export.variants.streams import Stream, streams

WIDTH = 16
# Three decades, one channel silent.
UNBALANCED = np.geomspace(1e-2, 10, WIDTH) * (np.arange(WIDTH) != 5)
IMAGES = np.random.default_rng(2).normal(size=(6, 3, 8, 8)).astype(np.float32)


def conv(name: str, source: str, target: str, **attributes: Any) -> Any:
    """A node whose weight and bias are constants named after it."""
    return helper.make_node("Conv", [source, f"{name}.w", f"{name}.b"], [target], name, **attributes)


def weights(name: str, outputs: int, inputs: int, kernel: int = 1, gains: np.ndarray | float = 1) -> dict[str, Any]:
    draw = np.random.default_rng(len(name) + outputs + inputs)
    spread = np.broadcast_to(gains, outputs)
    return {
        f"{name}.w": draw.normal(size=(outputs, inputs, kernel, kernel)) * spread[:, None, None, None],
        f"{name}.b": draw.normal(size=outputs) * spread,
    }


def saved(path: Path, nodes: Sequence[Any], constants: Mapping[str, Any], outputs: Sequence[str] = ("y",)) -> Path:
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [
            numpy_helper.from_array(np.asarray(values, np.int64 if name == "shape" else np.float32), name)
            for name, values in constants.items()
        ],
    )


def chain(path: Path, between: Sequence[Any], constants: Mapping[str, Any] | None = None, **changes: Any) -> Path:
    """x -> conv `first` -> a, unbalanced; `between` makes b of a; b -> conv `last` -> y."""
    nodes = [conv("first", "x", "a"), *between, conv("last", "b", "y")]
    made = weights("first", WIDTH, 3, gains=UNBALANCED) | weights("last", 4, WIDTH) | dict(constants or {})
    return saved(path, nodes, made, **changes)


def linear(path: Path) -> Path:
    return chain(path, [conv("middle", "a", "b", group=1)], weights("middle", WIDTH, WIDTH))


def found_in(path: Path) -> tuple[Stream, ...]:
    return streams(onnx.load(path).graph)


def levels_of(path: Path) -> Mapping[str, list[float]]:
    return measure_levels(path, channels_of(found_in(path)), [Chunk({"x": IMAGES}, None, np.arange(len(IMAGES)))])


def equalised(path: Path) -> Path:
    target, scaled = equalize(path, levels_of(path), path.with_name("equalised.onnx"))
    assert bool(scaled) == (target != path)
    return target


def run(path: Path) -> np.ndarray:
    return answers(path, IMAGES)


def spread(levels: Sequence[float]) -> float:
    """How many times larger than the smallest channel that is not silent the largest is."""
    alive = [level for level in levels if level]
    return max(alive) / min(alive)


def tie(op: str) -> Any:
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]} if op.endswith("Pool") else {}
    return helper.make_node(op, ["a"], ["b"], op, **attributes)


def depthwise() -> Any:
    return conv("middle", "a", "b", group=WIDTH, pads=[1, 1, 1, 1])


def test_a_stream_between_two_convolutions_is_balanced_to_the_bit(tmp_path):
    path = linear(tmp_path / "fp32.onnx")
    stream = found_in(path)[0]
    assert (stream.tensors, stream.writers, stream.readers) == (("a",), ("first",), ("middle",))
    assert stream.count == stream.free.sum() == WIDTH
    before = levels_of(path)
    assert spread(before["a"]) > 500
    target = equalised(path)
    assert target != path
    after = levels_of(target)
    assert spread(after["a"]) < 2
    assert after["a"][5] == 0
    assert max(after["a"]) == max(before["a"])
    assert np.array_equal(run(target), run(path))
    assert {node.name for node in onnx.load(target).graph.node} == {"first", "middle", "last"}


def residual(path: Path, *, clipped: bool = True, gains: np.ndarray = UNBALANCED) -> Path:
    """Two residual blocks in a row, each of a wide convolution, an activation and a linear projection."""
    nodes, constants, stream = [], {}, "a"
    for block in range(2):
        wide, narrow, added = f"wide{block}", f"narrow{block}", f"a{block}" if block == 0 else "b"
        activation = helper.make_node("Clip", [wide, "low", "high"], [f"{wide}.c"], f"{wide}.clip")
        nodes += [
            conv(wide, stream, wide),
            activation if clipped else helper.make_node("Identity", [wide], [f"{wide}.c"], f"{wide}.same"),
            conv(narrow, f"{wide}.c", narrow),
            helper.make_node("Add", [stream, narrow], [added], f"add{block}"),
        ]
        # Each reader of the stream undoes its gains, as a trained network's would.
        undone = np.divide(1, gains, out=np.zeros(WIDTH), where=gains > 0)
        wide_weights = weights(wide, 32, WIDTH)
        wide_weights[f"{wide}.w"] *= undone[None, :, None, None]
        constants |= wide_weights | weights(narrow, WIDTH, 32, gains=gains)
        stream = added
    return chain(path, nodes, constants | {"low": 0, "high": 6})


def grouped(path: Path, outputs: int) -> Path:
    middle = [conv("middle", "a", "c", group=4), helper.make_node("Sigmoid", ["c"], ["b"], "sigmoid")]
    return chain(path, middle, weights("middle", outputs, WIDTH // 4) | weights("last", 4, outputs))


def concatenated(path: Path) -> Path:
    middle = [conv("other", "x", "o"), helper.make_node("Concat", ["a", "o"], ["b"], "concat", axis=1)]
    return chain(path, middle, weights("other", 4, 3, gains=0.05) | weights("last", 4, WIDTH + 4))


def pooled(path: Path, op: str, width: int, **attributes: Any) -> Path:
    """A classifier behind a flattened pool."""
    nodes = [
        conv("first", "x", "a"),
        helper.make_node(op, ["a"], ["p"], "pool", **attributes),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gemm", ["f", "head.w"], ["y"], "head", transB=1),
    ]
    return saved(path, nodes, weights("first", WIDTH, 3, gains=UNBALANCED) | {"head.w": np.ones((4, width))})


# Each with the writers and the readers of its streams.
NETWORKS: dict[str, tuple[Callable[[Path], Path], list[tuple[tuple[str, ...], tuple[str, ...]]]]] = {
    **{
        # What scales with its input belongs to the stream.
        op: (lambda path, op=op: chain(path, [tie(op)]), [(("first",), ("last",))])  # type: ignore[misc]
        for op in ("Relu", "LeakyRelu", "MaxPool", "AveragePool")
    },
    "depthwise": (
        lambda path: chain(path, [depthwise()], weights("middle", WIDTH, 1, 3, 1 / np.geomspace(1e-2, 10, WIDTH))),
        [(("first",), ("middle",)), (("middle",), ("last",))],
    ),
    "groups": (lambda path: grouped(path, WIDTH), [(("first",), ("middle",))]),
    "more groups": (lambda path: grouped(path, 2 * WIDTH), [(("first",), ("middle",))]),
    "concatenated": (concatenated, [(("first", "other"), ("last",))]),
    "global pool": (lambda path: pooled(path, "GlobalAveragePool", WIDTH), [(("first",), ("head",))]),
    "pool": (
        lambda path: pooled(path, "AveragePool", 4 * WIDTH, kernel_shape=[4, 4], strides=[4, 4]),
        [(("first",), ("head",))],
    ),
    # All that additions tie together is scaled as one.
    "residual": (
        residual,
        [
            (("first", "narrow0", "narrow1"), ("wide0", "wide1", "last")),
            (("wide0",), ("narrow0",)),
            (("wide1",), ("narrow1",)),
        ],
    ),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_channels_that_share_a_scale_are_balanced_to_the_bit(tmp_path, network):
    build, expected = NETWORKS[network]
    path = build(tmp_path / "fp32.onnx")
    found = found_in(path)
    assert [(stream.writers, stream.readers) for stream in found] == expected
    target = equalised(path)
    assert target != path
    after = levels_of(target)
    for stream in (one for one in found if not one.crossings):
        shared = np.zeros(stream.count)
        for name, places in stream.places.items():
            np.maximum.at(shared, places, after[name])
        assert spread(shared.tolist()) < 2
    assert np.array_equal(run(target), run(path))


CROSSED = {
    "SiLU": [helper.make_node("Sigmoid", ["a"], ["s"], "sigmoid"), helper.make_node("Mul", ["a", "s"], ["b"], "mul")],
    "Hardswish": [helper.make_node("HardSwish", ["a"], ["b"], "hardswish")],
    "Hardswish in two": [
        helper.make_node("HardSigmoid", ["a"], ["s"], "sigmoid", alpha=1 / 6),
        helper.make_node("Mul", ["s", "a"], ["b"], "mul"),
    ],
    "ReLU6": [helper.make_node("Clip", ["a", "low", "high"], ["b"], "clip")],
}


@pytest.mark.parametrize("activation", CROSSED)
def test_an_activation_that_is_not_homogeneous_is_crossed(tmp_path, activation):
    path = chain(tmp_path / "fp32.onnx", CROSSED[activation], {"low": 0, "high": 6})
    (stream,) = found_in(path)
    assert {"a", "b"} <= set(stream.tensors)
    target = equalised(path)
    chunk = Chunk({"x": IMAGES[:1]}, None, np.zeros(1, np.int64))
    after, before = (np.abs(next(iter(observed(one, [chunk], {"a"})))["a"]) for one in (target, path))
    assert spread(after.max(axis=(0, 2, 3)).tolist()) < spread(before.max(axis=(0, 2, 3)).tolist()) / 100
    assert np.allclose(run(target), run(path), rtol=1e-5, atol=1e-6)


UNSAFE = {
    "an operator that is not homogeneous reads it": [
        conv("middle", "a", "b"),
        helper.make_node("Tanh", ["a"], ["unread"], "tanh"),
    ],
    "a clip from below zero is between": [helper.make_node("Clip", ["a", "below", "high"], ["b"], "clip")],
    "it is flattened otherwise than channel by channel": [
        helper.make_node("Reshape", ["a", "shape"], ["b"], "reshape"),
    ],
    "a constant is added": [helper.make_node("Add", ["a", "many"], ["b"], "add")],
    "a channel of another width is spread over all": [
        conv("one", "x", "o"),
        helper.make_node("Add", ["a", "o"], ["b"], "add"),
    ],
    "the positions of a pool are read": [
        helper.make_node("MaxPool", ["a"], ["b", "where"], "pool", kernel_shape=[2, 2]),
        helper.make_node("Shape", ["where"], ["unread"], "shape"),
    ],
    "its reader has no constant weight": [
        helper.make_node("Relu", ["last.w"], ["computed"], "relu"),
        helper.make_node("Conv", ["a", "computed"], ["c"], "middle"),
        conv("four", "c", "d"),
        helper.make_node("Sigmoid", ["d"], ["b"], "sigmoid"),
    ],
}


@pytest.mark.parametrize("why", UNSAFE)
def test_a_stream_is_left_alone_where(tmp_path, why):
    constants = {"below": -6, "high": 6, "shape": [-1, WIDTH, 8, 8], "many": np.ones((1, WIDTH, 1, 1))}
    constants |= weights("middle", WIDTH, WIDTH) | weights("one", 1, 3) | weights("four", WIDTH, 4)
    path = chain(tmp_path / "fp32.onnx", UNSAFE[why], constants)
    assert not [stream for stream in found_in(path) if "a" in stream.tensors]


def test_an_output_of_the_graph_and_a_shared_weight_are_left_alone(tmp_path):
    middle = [conv("middle", "a", "b")]
    path = chain(tmp_path / "fp32.onnx", middle, weights("middle", WIDTH, WIDTH), outputs=("y", "a"))
    assert [stream.tensors for stream in found_in(path)] == [("b",)]
    twice = conv("middle", "a", "c")
    again = conv("middle", "c", "b")
    again.name = "again"
    path = chain(tmp_path / "fp32.onnx", [twice, again], weights("middle", WIDTH, WIDTH))
    assert found_in(path) == ()


def test_a_graph_with_inner_graphs_is_left_alone(tmp_path):
    path = linear(tmp_path / "fp32.onnx")
    graph = onnx.load(path).graph
    assert found_in(path)
    out = helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Identity", ["a"], ["inner"])], "branch", [], [out])
    graph.node.append(helper.make_node("If", ["which"], ["z"], "if", then_branch=branch, else_branch=branch))
    assert streams(graph) == ()


def test_a_balanced_network_is_handed_back_as_it_is(tmp_path):
    path = residual(tmp_path / "fp32.onnx", gains=np.geomspace(0.5, 2, WIDTH))
    assert found_in(path)
    assert equalised(path) == path
    assert not (tmp_path / "equalised.onnx").exists()


def test_scales_are_powers_of_two_with_a_limit():
    levels = np.array([8.0, 1.0, 0.3, 0.0, 1e-30])
    scales = scales_for(levels)
    assert scales.tolist() == [1, 8, 16, 1, 4096]
    assert scales_for(np.zeros(4)) is None
    assert scales_for(np.array([1.0, 1e-4, np.nan])) is None
    assert scales_for(np.array([1.0, 0.5, 0.25])) is None


@pytest.mark.parametrize("is_in_order", [True, False])
def test_a_gather_of_all_values_in_their_order_is_taken_out(tmp_path, is_in_order):
    """As PyTorch writes a pool whose result had the strides of channels-last."""
    nodes = [
        helper.make_node("Shape", ["x"], ["batch"], "shape", start=0, end=1),
        helper.make_node("Squeeze", ["batch"], ["n"], "squeeze"),
        helper.make_node("Range", ["zero", "n", "one"], ["range"], "range"),
        helper.make_node("Mul", ["range", "width"], ["starts"], "starts"),
        helper.make_node("Unsqueeze", ["starts", "one_axis"], ["column"], "unsqueeze"),
        helper.make_node("Add", ["column", "steps"], ["order"], "order"),
        conv("first", "x", "a"),
        helper.make_node("ReduceMean", ["a", "axes"], ["p"], "pool"),
        helper.make_node("Reshape", ["p", "flat"], ["values"], "flatten"),
        helper.make_node("Gather", ["values", "order"], ["g"], "gather", axis=0),
        helper.make_node("Reshape", ["g", "rows"], ["f"], "rows"),
        helper.make_node("Gemm", ["f", "head.w"], ["y"], "head", transB=1),
    ]
    steps = np.arange(WIDTH) if is_in_order else np.arange(WIDTH)[::-1].copy()
    integers = {"zero": 0, "one": 1, "width": WIDTH, "one_axis": [1, 2, 3], "steps": steps.reshape(1, -1, 1, 1)}
    integers |= {"axes": [2, 3], "flat": [-1], "rows": [-1, WIDTH]}
    constants = weights("first", WIDTH, 3, gains=UNBALANCED) | {"head.w": np.ones((4, WIDTH))}
    path = saved(tmp_path / "fp32.onnx", nodes, constants)
    model = onnx.load(path)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v, np.int64), k) for k, v in integers.items())
    onnx.save(model, path)
    prepared = prepare(path, tmp_path / "prepared.onnx")
    assert ("Gather" in {node.op_type for node in onnx.load(prepared).graph.node}) != is_in_order
    assert [stream.readers for stream in found_in(prepared)] == ([("head",)] if is_in_order else [])
    assert np.allclose(run(prepared), run(path), rtol=1e-6)
