"""Small ONNX models whose right answers are obvious."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Dims = Sequence[int | str]
ONNX_TYPES = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
    "BF16": TensorProto.BFLOAT16,
}


def add_sub(path: Path, dims: Dims = ("batch", 16)) -> Path:
    """Triton's example: INPUT0 + INPUT1 and INPUT0 - INPUT1 of INT32."""
    nodes = [
        helper.make_node("Add", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT1"]),
    ]
    inputs = [tensor("INPUT0", "INT32", dims), tensor("INPUT1", "INT32", dims)]
    outputs = [tensor("OUTPUT0", "INT32", dims), tensor("OUTPUT1", "INT32", dims)]
    return save(path, nodes, inputs, outputs)


def picky(path: Path) -> Path:
    """Adds a row of four, so that rows of one or four are answered, and others fail inside the model."""
    four = helper.make_tensor("row", TensorProto.FLOAT, [4], range(4))
    ends = [tensor("x", "FP32", ("batch", "size"))], [tensor("y", "FP32", ("batch", "any"))]
    return save(path, [helper.make_node("Add", ["x", "row"], ["y"])], *ends, [four])


def mean(path: Path) -> Path:
    """Subtracts the mean over dimension 0: every size looks dynamic, and yet rows depend on each other."""
    nodes = [
        helper.make_node("ReduceMean", ["x"], ["middle"], axes=[0], keepdims=1),
        helper.make_node("Sub", ["x", "middle"], ["y"]),
    ]
    return save(path, nodes, [tensor("x", "FP32", ("batch", 4))], [tensor("y", "FP32", ("batch", 4))])


def identity(path: Path, dtype: str = "FP32", dims: Dims = ("batch", "size")) -> Path:
    """Gives back what it gets."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    return save(path, nodes, [tensor("x", dtype, dims)], [tensor("y", dtype, dims)])


def nonzero(path: Path) -> Path:
    """Where its input is not zero: how large the answer is depends on what is asked."""
    nodes = [helper.make_node("NonZero", ["x"], ["y"])]
    return save(path, nodes, [tensor("x", "FP32", (6,))], [tensor("y", "INT64", (1, "count"))])


def every_other_row(path: Path) -> Path:
    """Gives back half of a batch, whatever it claims."""
    nodes = [helper.make_node("Slice", ["x", "first", "last", "axis", "step"], ["y"])]
    constants = [
        helper.make_tensor(name, TensorProto.INT64, (1,), [value])
        for name, value in (("first", 0), ("last", 1 << 30), ("axis", 0), ("step", 2))
    ]
    return save(path, nodes, [tensor("x", "FP32", ("batch", 4))], [tensor("y", "FP32", ("rows", 4))], constants)


# Of `varying`: rows of numbers beyond these make its answer shorter, or longer.
SHORTENS, LENGTHENS = 1e6, -1e6


def varying(path: Path, *, text: bool = False, gives: str = "FP32", columns: int | str = 10) -> Path:
    """Ten columns for rows of ten, as it declares; for some rows four, or twenty, whatever it declares.

    Its rows depend on each other only then. With `text` it takes strings, too, so that nothing of it can be bound;
    what it `gives` may be strings as well.
    """
    numbers = {"short": [4], "right": [10], "long": [20], "first": [0], "axis": [1]}
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in numbers.items()]
    limits = (("high", SHORTENS), ("low", LENGTHENS))
    constants += [helper.make_tensor(name, TensorProto.FLOAT, [], [value]) for name, value in limits]
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["largest"], keepdims=0),
        helper.make_node("ReduceMin", ["x"], ["smallest"], keepdims=0),
        helper.make_node("Greater", ["largest", "high"], ["shortens"]),
        helper.make_node("Less", ["smallest", "low"], ["lengthens"]),
        helper.make_node("Where", ["shortens", "short", "right"], ["some"]),
        helper.make_node("Where", ["lengthens", "long", "some"], ["count"]),
        helper.make_node("Concat", ["x", "x"], ["twice"], axis=1),
        helper.make_node("Cast", ["twice"], ["cast"], to=ONNX_TYPES[gives]),
        helper.make_node("Slice", ["cast", "first", "count", "axis"], ["y"]),
    ]
    inputs, outputs = [tensor("x", "FP32", ("batch", 10))], [tensor("y", gives, ("batch", columns))]
    if text:
        nodes.append(helper.make_node("Identity", ["text"], ["same"]))
        inputs.append(tensor("text", "BYTES", ("batch", 1)))
        outputs.append(tensor("same", "BYTES", ("batch", 1)))
    return save(path, nodes, inputs, outputs, constants)


def shift(path: Path, by: float) -> Path:
    """Adds a constant, so that an answer tells which model gave it."""
    constant = helper.make_node("Constant", [], ["by"], value_float=by)
    nodes = [constant, helper.make_node("Add", ["x", "by"], ["y"])]
    return save(path, nodes, [tensor("x", "FP32", ("batch", 4))], [tensor("y", "FP32", ("batch", 4))])


def halved(path: Path) -> Path:
    """Gives back what it gets by way of half precision, whose weights it has."""
    one = helper.make_tensor("one", TensorProto.FLOAT16, [1], [1.0])
    nodes = [
        helper.make_node("Cast", ["x"], ["half"], to=TensorProto.FLOAT16),
        helper.make_node("Mul", ["half", "one"], ["same"]),
        helper.make_node("Cast", ["same"], ["y"], to=TensorProto.FLOAT),
    ]
    return save(path, nodes, [tensor("x", "FP32", ("batch", 4))], [tensor("y", "FP32", ("batch", 4))], [one])


def in_halves(path: Path, dtype: str = "BF16", dims: Dims = ("batch", 4), *, mixes: bool = False) -> Path:
    """The mean over all but the batch, in and out in half precision; `mixes`: less the mean over the batch."""
    nodes = [helper.make_node("Cast", ["x"], ["wide"], to=TensorProto.FLOAT)]
    if mixes:
        nodes.append(helper.make_node("ReduceMean", ["wide"], ["middle"], axes=[0], keepdims=1))
        nodes.append(helper.make_node("Sub", ["wide", "middle"], ["known"]))
    axes = list(range(1, len(dims)))
    nodes.append(helper.make_node("ReduceMean", ["known" if mixes else "wide"], ["sum"], axes=axes, keepdims=0))
    nodes.append(helper.make_node("Cast", ["sum"], ["y"], to=ONNX_TYPES[dtype]))
    return save(path, nodes, [tensor("x", dtype, dims)], [tensor("y", dtype, (dims[0],))])


def lookup(path: Path, operator: str = "Gather") -> Path:
    """Four rows of a table of three, by numbers that nobody has checked."""
    table = helper.make_tensor("table", TensorProto.FLOAT, [3, 2], range(6))
    nodes = [
        helper.make_node("Cast", ["x"], ["rows"], to=TensorProto.INT64),
        helper.make_node(operator, ["table", "rows"], ["y"], name="y"),
    ]
    shape = (4, 1, 2) if operator == "Gather" else (4, 2)
    return save(path, nodes, [tensor("x", "INT32", (4, 1))], [tensor("y", "FP32", shape)], [table])


def last_column(path: Path) -> Path:
    """Taken by a number that is computed from the input's own size."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "one", "two"], ["columns"]),
        helper.make_node("Sub", ["columns", "one"], ["last"]),
        helper.make_node("Gather", ["x", "last"], ["y"], axis=1),
    ]
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], [n]) for name, n in (("one", 1), ("two", 2))]
    return save(path, nodes, [tensor("x", "FP32", ("batch", 4))], [tensor("y", "FP32", ("batch", 1))], constants)


def resized(path: Path, *, named: bool = True) -> Path:
    """Every pixel four times, by a size that is computed from the input's own, as an upsampling by size does."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], name="shape"),
        helper.make_node("Slice", ["shape", "zero", "two"], ["head"], name="slice"),
        helper.make_node("Concat", ["head", "target"], ["sizes"], name="concat", axis=0),
        helper.make_node(
            "Resize",
            ["x", "", "", "sizes"],
            ["y"],
            name="resize",
            mode="nearest",
            nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        ),
    ]
    if not named:
        for node in nodes:
            node.ClearField("name")
    numbers = {"zero": [0], "two": [2], "target": [8, 8]}
    constants = [helper.make_tensor(name, TensorProto.INT64, [len(n)], n) for name, n in numbers.items()]
    ends = [tensor("x", "FP32", ("batch", 3, 4, 4))], [tensor("y", "FP32", ("batch", 3, 8, 8))]
    return save(path, nodes, *ends, constants)


def convolutions(path: Path, end: str = "scores", dims: Dims = ("batch", 3, "height", "width")) -> Path:
    """A network of images of any height and width, with weights from a seed.

    `end` is "scores" [N, 5] behind a global pool, "maps" [N, 4, H, W]; "valid" likewise without padding, so that small
    images do not run; "squares", the same for height = width alone; "one_size" [N, 5], which runs at 64 x 64 alone.
    """
    generator = np.random.default_rng(11)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((generator.standard_normal(shape) / 4).astype(np.float32), name)

    constants = [weights("first", 8, 3, 3, 3)]
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["a"], ["b"]),
    ]
    if end in ("maps", "valid"):
        kernel = 3 if end == "maps" else 9
        constants.append(weights("last", 4, 8, kernel, kernel))
        nodes.append(helper.make_node("Conv", ["b", "last"], ["y"], "last", pads=[kernel % 9 // 3] * 4))
        shape: Dims = (dims[0], 4, "rows", "columns")
    elif end == "squares":
        nodes.append(helper.make_node("Transpose", ["b"], ["turned"], perm=[0, 1, 3, 2]))
        nodes.append(helper.make_node("Add", ["b", "turned"], ["y"]))
        shape = (dims[0], 8, "rows", "columns")
    else:
        pool = {"kernel_shape": [32, 32], "strides": [32, 32]}
        pooled = helper.make_node("GlobalAveragePool", ["b"], ["c"])
        nodes.append(pooled if end == "scores" else helper.make_node("AveragePool", ["b"], ["c"], **pool))
        nodes.append(helper.make_node("Flatten", ["c"], ["d"]))
        nodes.append(helper.make_node("Gemm", ["d", "last"], ["y"], "last"))
        constants.append(weights("last", 8 if end == "scores" else 32, 5))
        shape = (dims[0], 5)
    return save(path, nodes, [tensor("x", "FP32", dims)], [tensor("y", "FP32", shape)], constants)


def wide(path: Path, width: int = 1 << 20) -> Path:
    """Each row by itself, [batch, 1] to [batch, 1], with as many floats as `width` in between."""
    weights = numpy_helper.from_array(np.full((1, width), 1 / width, np.float32), "weights")
    axes = numpy_helper.from_array(np.array([1]), "axes")
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["between"]),
        helper.make_node("Abs", ["between"], ["positive"]),
        helper.make_node("ReduceSum", ["positive", "axes"], ["y"]),
    ]
    ends = [tensor("x", "FP32", ("batch", 1))], [tensor("y", "FP32", ("batch", 1))]
    return save(path, nodes, *ends, [weights, axes])


def tensor(name: str, dtype: str, dims: Dims) -> onnx.ValueInfoProto:
    """An input or an output."""
    return helper.make_tensor_value_info(name, ONNX_TYPES[dtype], list(dims))


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 13,
) -> Path:
    """The file of a model of these parts."""
    graph = helper.make_graph(nodes, path.parent.parent.name or "graph", inputs, outputs, constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path
