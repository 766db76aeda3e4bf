"""ONNX files made elsewhere: read safely, run for reference answers, and written, if large with external data.

An ONNX file may name other files as its weights. One that names a file outside its own folder is refused, because the
contents would become part of the graph.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.dimensions import Size
from convoy.app.engines.onnxruntime import first_line, open_original, open_session
from convoy.export.rows import Rows, count_of, joined, picked
from convoy.export.sources.torch_job import EXTERNAL_DATA, one_line
from convoy.export.variants.onnx_graph import attribute
from convoy.models.errors import JobError

# Pools with `ceil_mode`, whose last window exceeds the padding: write that padding out. Runtimes differ here: ONNX
# Runtime's blocked kernels count one window more than its plain ones if that window would begin in the padding.


def write_out_ceil(model: Any) -> None:
    """Change every such pool of known sizes, in place; others stay as they are."""
    graph = model.graph
    found = [
        node for node in graph.node if node.op_type in ("MaxPool", "AveragePool") and attribute(node, "ceil_mode", 0)
    ]
    if not found:
        return
    shapes = _shapes(model)
    for node in found:
        size = shapes.get(node.input[0], [])[2:]
        if not size or not all(size) or attribute(node, "auto_pad", b"NOTSET") != b"NOTSET":
            continue
        rank = len(size)
        kernel = list(attribute(node, "kernel_shape", [1] * rank))
        steps, holes = (list(attribute(node, name, [1] * rank)) for name in ("strides", "dilations"))
        pads = list(attribute(node, "pads", [0] * 2 * rank))
        spans = [hole * (length - 1) + 1 for hole, length in zip(holes, kernel, strict=True)]
        ends, counts = list(pads[rank:]), []
        for axis in range(rank):
            whole = size[axis] + pads[axis] + pads[rank + axis]
            windows = -(-(whole - spans[axis]) // steps[axis]) + 1
            if (windows - 1) * steps[axis] >= size[axis] + pads[axis]:
                windows -= 1
            ends[axis] += max(0, (windows - 1) * steps[axis] + spans[axis] - whole)
            starts = np.arange(windows) * steps[axis]
            counts.append(np.minimum(starts + spans[axis], whole) - starts)
        is_longer = ends != pads[rank:]
        is_counted = node.op_type == "AveragePool" and bool(attribute(node, "count_include_pad", 0))
        if is_longer and is_counted and any(hole != 1 for hole in holes):
            continue
        kept = [one for one in node.attribute if one.name not in ("ceil_mode", "pads")]
        del node.attribute[:]
        node.attribute.extend([*kept, onnx.helper.make_attribute("pads", [*pads[:rank], *ends])])
        if is_longer and is_counted:
            # Values beyond the padding must not count: each mean is over fewer values than the kernel has.
            factors = np.ones([1, 1, *[1] * rank])
            for axis, own in enumerate(counts):
                factors = factors * (kernel[axis] / own).reshape([-1 if i == axis + 2 else 1 for i in range(rank + 2)])
            output, name = node.output[0], f"{node.output[0]}.counts"
            graph.initializer.append(onnx.numpy_helper.from_array(factors.astype(np.float32), name))
            node.output[0] = f"{output}.means"
            product = onnx.helper.make_node("Mul", [node.output[0], name], [output], f"{node.name or output}.counted")
            graph.node.insert(list(graph.node).index(node) + 1, product)


def _shapes(model: Any) -> dict[str, list[int]]:
    """The known or inferred shapes of all tensors, with 0 for dynamic sizes."""
    with suppress(Exception):  # larger than a protobuf may be, or with operators that onnx does not know
        model = onnx.shape_inference.infer_shapes(model)
    declared = (*model.graph.input, *model.graph.value_info, *model.graph.output)
    return {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in declared}


# The limit for weights in the graph. A protobuf holds 2 GiB at most, and the graph itself takes some of it.
INLINE_BYTES = int(1.8 * (1 << 30))


def read(path: Path) -> Any:
    """The model with all of its weights in memory. Raises JobError if it is not ONNX, or reaches outside."""
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors share no base class with onnx's
        raise JobError(f"{path.name} cannot be read as ONNX ({one_line(str(error))}); export it again") from error
    if not model.graph.node:
        raise JobError(f"{path.name} has no nodes; it is not an ONNX model, or an empty one")
    for location in sorted({_location(tensor) for tensor in tensors(model.graph) if tensor.external_data}):
        _check_location(path, location)
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except Exception as error:
        raise JobError(f"the weights beside {path.name} cannot be read ({one_line(str(error))})") from error
    return model


def stated_size(model: Any) -> Size | None:
    """The image size in the file's metadata: `imgsz`, a side or [height, width], which Ultralytics writes."""
    said = next((entry.value for entry in model.metadata_props if entry.key == "imgsz"), "")
    try:
        sides = json.loads(said)
        height, width = (sides, sides) if isinstance(sides, int) else sides
        size = Size(operator.index(height), operator.index(width))
    except (ValueError, TypeError):
        return None
    # A larger one might not fit into memory.
    return size if 0 < min(size.height, size.width) <= max(size.height, size.width) <= 4096 else None


def tensors(graph: Any) -> Iterator[Any]:
    """Every tensor with values in the graph: initializers, attributes, and those of inner graphs."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for own in node.attribute:
            if own.HasField("t"):
                yield own.t
            yield from own.tensors
            for inner in (*([own.g] if own.HasField("g") else []), *own.graphs):
                yield from tensors(inner)


def _location(tensor: Any) -> str:
    return next((str(entry.value) for entry in tensor.external_data if entry.key == "location"), "")


def _check_location(path: Path, location: str) -> None:
    folder = path.parent.resolve()
    named = (folder / location).resolve()
    if Path(location).is_absolute() or not named.is_relative_to(folder):
        raise JobError(
            f"{path.name} takes weights from outside its folder ({one_line(location)!r}); do not use it, "
            "or save it again with its weights beside it"
        )
    if not named.is_file():
        raise JobError(f"{path.name} needs its weights in {location!r}, which is not beside it; copy that file, too")


def write(model: Any, path: Path) -> None:
    """Write the model, with weights of more than `INLINE_BYTES` in `EXTERNAL_DATA` beside it."""
    portable(model)
    if sum(len(tensor.raw_data) for tensor in tensors(model.graph)) <= INLINE_BYTES:
        path.write_bytes(model.SerializeToString())
        return
    # Saving appends to an existing file.
    (path.parent / EXTERNAL_DATA).unlink(missing_ok=True)
    copy = onnx.ModelProto()
    copy.CopyFrom(model)  # saving moves the weights out of the given model
    # Small tensors stay in the graph, where shape inference can read them.
    onnx.save_model(
        copy, str(path), save_as_external_data=True, location=EXTERNAL_DATA, size_threshold=min(1024, INLINE_BYTES)
    )


def portable(model: Any) -> Any:
    """Remove traces of the author from the model, in place, and use only what every runtime supports.

    Exporters note source lines with their paths on every node. They reveal folders, and take space.
    """
    write_out_ceil(model)
    graph = model.graph
    for item in (model, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        item.ClearField("metadata_props")
        item.ClearField("doc_string")
    for node in graph.node:
        for own in node.attribute:
            if node.op_type == "Einsum" and own.name == "equation":
                own.s = _in_small_letters(own.s.decode()).encode()
    return model


def _in_small_letters(equation: str) -> str:
    """The same product of tensors in lower case: TensorRT refuses capitals, which ONNX allows and torchvision's MaxViT
    uses.
    """
    letters = list(dict.fromkeys(filter(str.isalpha, equation)))
    # Without an arrow the result's order is that of the letters; and there are only 26 lower-case ones.
    if equation.islower() or "->" not in equation or len(letters) > len(ascii_lowercase):
        return equation
    return equation.translate(str.maketrans("".join(letters), ascii_lowercase[: len(letters)]))


# A file's answers are those of ONNX Runtime without graph optimisation, node by node: what serves is optimised, and the
# proof must find its faults. Files with fewer bits answer differently if their nodes are not fused, by as much as they
# round. They are run as they will serve, and only gross differences from the unoptimised run are refused.


def _rounding_of(model: Any) -> float:
    """How much the file's answers, ||a - b|| / ||b||, may differ between optimised and not.

    0 if it computes in 32 bits or more.
    """
    if _is_quantised(model):
        return 0.5
    return 0.05 if has_halves(model) else 0.0


def _is_quantised(model: Any) -> bool:
    quantising = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
    return any(node.op_type in quantising or node.op_type.startswith(("QLinear", "QGemm")) for node in model.graph.node)


def has_halves(model: Any) -> bool:
    """Whether the file computes in 16 bits anywhere."""
    halves = {onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}
    types = {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    types |= {tensor.data_type for tensor in tensors(model.graph)}
    casts = {a.i for node in model.graph.node if node.op_type == "Cast" for a in node.attribute if a.name == "to"}
    return bool((types | casts) & halves)


class DoesNotRunError(JobError):
    """The library's message on why it does not run."""


class Original:
    """A file whose answers are the reference. Raises BundleError.

    Its answers raise DoesNotRunError, and another JobError if graph optimisation changes them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._plain = open_original(path, cpu_budget())
        self._rounding = _rounding_of(read(path))
        self._optimised = open_session(path, cpu_budget()) if self._rounding else None
        self._names = [output.name for output in self._plain.get_outputs()]

    def answer(self, inputs: Rows) -> dict[str, np.ndarray]:
        """The outputs by name, in the file's order."""
        sessions = [self._plain] if self._optimised is None else [self._optimised, self._plain]
        try:
            answers, *others = [session.run(self._names, dict(inputs)) for session in sessions]
        except Exception as error:  # onnxruntime's errors share no base class
            raise DoesNotRunError(first_line(error)) from error
        for plain in others:
            self._check(answers, plain)
        return dict(zip(self._names, answers, strict=True))

    def one_by_one(self, samples: Rows) -> dict[str, np.ndarray]:
        """The answers to all samples, one at a time."""
        answers = [self.answer(picked(samples, slice(row, row + 1))) for row in range(count_of(samples))]
        try:
            return joined(answers)
        except ValueError as error:  # of shapes that differ between samples
            raise DoesNotRunError(first_line(error)) from error

    def _check(self, answers: Sequence[np.ndarray], plain: Sequence[np.ndarray]) -> None:
        for name, own, other in zip(self._names, answers, plain, strict=True):
            if own.dtype.kind == "f" and (error := _difference(own, other)) > self._rounding:
                raise JobError(
                    f"{self._path.name} answers otherwise in {name} when ONNX Runtime optimises its graph, by "
                    f"{error:.2g} of it: what would serve is not what the file means; export it again, in FP32"
                )


def _difference(answers: np.ndarray, expected: np.ndarray) -> float:
    usual = np.isfinite(expected) & np.isfinite(answers)
    own, other = (np.where(usual, one, 0).astype(np.float64).ravel() for one in (answers, expected))
    # Values near zero are only rounding.
    return float(np.linalg.norm(own - other) / max(float(np.linalg.norm(other)), 1e-2))
