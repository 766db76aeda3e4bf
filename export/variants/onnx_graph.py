"""Helpers for ONNX graphs: which node makes a tensor, which nodes read it, what is unused."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.onnx_session import Level, new_session, session_options, unoptimised_session

# The first whose quantise-dequantise pairs support a scale per channel.
QDQ_OPSET = 13
# The front is arithmetic on bytes: rounding its results again would only lose precision.
_FRONT_OPS = frozenset({"Transpose", "Cast", "Mul", "Add"})


def front_nodes(graph: Any) -> list[str]:
    """The names of the nodes between the uint8 input and the network proper, in order.

    They are the chain from the input through operators of the front, each the only reader of the one before. Empty for
    a graph whose input is already float.
    """
    if graph.input[0].type.tensor_type.elem_type != onnx.TensorProto.UINT8:
        return []
    names: list[str] = []
    tensor = graph.input[0].name
    while True:
        # A node that only reads the number of images does not read them.
        readers = [node for node in graph.node if tensor in node.input and node.op_type != "Shape"]
        if len(readers) != 1 or readers[0].op_type not in _FRONT_OPS:
            return names
        names.append(readers[0].name)
        tensor = readers[0].output[0]


def prepare(fp32: Path, target: Path) -> Path:
    """Fold and fuse `fp32` for converters, and give every node its own name; returns `target`.

    Ranges are then measured where values will be rounded: batch normalisation is inside its convolution.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    with tempfile.TemporaryDirectory(prefix="convoy-folded-") as folder:
        raised = _raised(fp32, Path(folder) / f"raised-{target.name}")
        # Its own optimisation is off, because single optimisers in it cannot be disabled.
        folded = _folded(raised, Path(folder) / target.name)
        quant_pre_process(str(folded), str(target), skip_symbolic_shape=True, skip_optimization=True)
    model = onnx.load(str(target))
    _drop_copies_in_order(model)
    seen: set[str] = set()
    for index, node in enumerate(model.graph.node):
        if not node.name or node.name in seen:
            node.name = f"{node.name or node.op_type}_{index}"
        seen.add(node.name)
    onnx.save(model, str(target))
    return target


def _folded(fp32: Path, target: Path) -> Path:
    """`fp32` folded and fused by ONNX Runtime with standard operators, in `target`.

    Returns `target`, or `fp32` if that cannot be written.
    """
    options = session_options(level=Level.ORT_ENABLE_BASIC)
    options.optimized_model_filepath = str(target)
    try:
        new_session(fp32, options)
    except Exception:  # onnxruntime's errors share no base class
        # It runs all the same, and is only larger than a file that can be written.
        return fp32
    return target


def opset_of(model: Any) -> int:
    """The version of ONNX's own operators."""
    return next((int(entry.version) for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)


def _raised(fp32: Path, target: Path) -> Path:
    """The graph in an opset with scales per channel, written to `target`; `fp32` if it has one already, or cannot be
    converted.

    onnx's converter does not know every operator, so both graphs must give the same answers to noise.
    """
    if opset_of(onnx.load(str(fp32), load_external_data=False)) >= QDQ_OPSET:
        return fp32
    try:
        model = onnx.version_converter.convert_version(onnx.load(str(fp32)), QDQ_OPSET)
        onnx.save(model, str(target))
        return target if _answer_alike(fp32, target) else fp32
    except Exception:  # the converter's errors share no base class; callers report a missing opset themselves
        return fp32


def _answer_alike(fp32: Path, raised: Path, samples: int = 2) -> bool:
    """Whether two graphs of the same inputs give the same answers to noise, or cannot run because of dynamic sizes."""
    sessions = [unoptimised_session(path) for path in (fp32, raised)]
    generator, inputs = np.random.default_rng(0), {}
    for given in sessions[0].get_inputs():
        shape = [samples if index == 0 and not isinstance(dim, int) else dim for index, dim in enumerate(given.shape)]
        if not all(isinstance(dim, int) for dim in shape):
            return True
        if given.type == "tensor(uint8)":
            inputs[given.name] = generator.integers(0, 256, shape, np.uint8)
        elif given.type == "tensor(float)":
            inputs[given.name] = generator.standard_normal(shape, np.float32)
        else:
            return True
    before, after = (session.run(None, inputs) for session in sessions)
    return all(
        one.shape == other.shape and np.allclose(one, other, rtol=1e-3, atol=1e-4 * (1e-6 + np.abs(one).max(initial=0)))
        for one, other in zip(before, after, strict=True)
    )


def _drop_copies_in_order(model: Any) -> None:
    """Remove gathers of all values in their order, which the exporter writes for a pool's strides.

    Optimisers do not recognise them, and a runtime copies every value.
    """
    graph, makers, constants = model.graph, producers(model.graph), initializers(model.graph)
    found: dict[str, str] = {}
    for node in graph.node:
        flat = makers.get(node.input[0]) if node.op_type == "Gather" and attribute(node, "axis", 0) == 0 else None
        if flat is None or flat.op_type != "Reshape" or flat.input[1] not in constants:
            continue
        if array(constants[flat.input[1]]).tolist() == [-1] and node.input[1] in makers:
            found[node.output[0]] = flat.input[0]
    orders = {node.output[0]: node.input[1] for node in graph.node if node.output[0] in found}
    values = _computed(model, [*found.values(), *orders.values()]) if found else {}
    for name, source in found.items():
        order, before = values.get(orders[name]), values.get(source)
        if order is None or before is None or order.shape != before.shape:
            continue
        if np.array_equal(order.reshape(-1), np.arange(order.size)):
            rewire(graph, name, source)
    tidy(graph)


def _computed(model: Any, names: list[str], batch: int = 3) -> dict[str, np.ndarray]:
    """The values of tensors for `batch` black images; empty if the images' size is dynamic."""
    given = model.graph.input[0].type.tensor_type
    dims = [dim.dim_value for dim in given.shape.dim]
    if len(model.graph.input) != 1 or not all(dims[1:]):
        return {}
    wanted = sorted(set(names))
    copy = deepcopy(model)
    del copy.graph.output[:]
    copy.graph.output.extend(onnx.ValueInfoProto(name=name) for name in wanted)
    images = np.zeros([batch, *dims[1:]], onnx.helper.tensor_dtype_to_np_dtype(given.elem_type))
    session = new_session(copy.SerializeToString())
    return dict(zip(wanted, session.run(wanted, {model.graph.input[0].name: images}), strict=True))


def producers(graph: Any) -> dict[str, Any]:
    """The node that computes each tensor."""
    return {output: node for node in graph.node for output in node.output}


def consumers(graph: Any) -> dict[str, list[Any]]:
    """The nodes that read each tensor; empty for a missing tensor."""
    readers: dict[str, list[Any]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    return readers


def initializers(graph: Any) -> dict[str, Any]:
    """The constant tensors by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def constants(graph: Any) -> dict[str, Any]:
    """The constant tensors by name, including those of Constant nodes."""
    nodes = (node for node in graph.node if node.op_type == "Constant")
    return initializers(graph) | {node.output[0]: attribute(node, "value", None) for node in nodes}


def array(tensor: Any) -> np.ndarray:
    """A constant tensor's values."""
    values: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return values


def attribute(node: Any, name: str, default: Any) -> Any:
    """A node's attribute, or the operator's default."""
    for candidate in node.attribute:
        if candidate.name == name:
            return onnx.helper.get_attribute_value(candidate)
    return default


def rewire(graph: Any, old: str, new: str) -> None:
    """Let every reader of `old` read `new` instead."""
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == old:
                node.input[index] = new


def tidy(graph: Any) -> None:
    """Drop unused nodes, constants and annotations, and sort the nodes topologically."""
    wanted = {output.name for output in graph.output}
    by_output = producers(graph)
    pending, alive = list(wanted), set()
    while pending:
        node = by_output.get(pending.pop())
        if node is not None and node.output[0] not in alive:
            alive.add(node.output[0])
            pending.extend(name for name in node.input if name)
    nodes = [deepcopy(node) for node in _in_order(graph, [node for node in graph.node if node.output[0] in alive])]
    del graph.node[:]
    graph.node.extend(nodes)
    _keep(graph.initializer, {name for node in graph.node for name in node.input} | wanted)
    _keep(graph.value_info, {name for node in graph.node for name in node.output})


def _in_order(graph: Any, nodes: list[Any]) -> list[Any]:
    known = {tensor.name for tensor in (*graph.input, *graph.initializer)} | {""}
    ordered: list[Any] = []
    while nodes:
        waiting = []
        for node in nodes:
            if known.issuperset(node.input):
                ordered.append(node)
                known.update(node.output)
            else:
                waiting.append(node)
        assert len(waiting) < len(nodes), "the graph has a cycle; this is a bug"
        nodes = waiting
    return ordered


def _keep(field: Any, names: set[str]) -> None:
    """Drop the entries of other names, without copying the weights that stay."""
    for index in range(len(field) - 1, -1, -1):
        if field[index].name not in names:
            del field[index]
