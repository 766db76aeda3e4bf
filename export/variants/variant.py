"""One variant under test: its file, and the engine that will serve it.

Every measurement opens the serving engine here. For an FP16, BF16 or FP8 file whose arithmetic this machine lacks, it
opens a twin that rounds every result as a GPU would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.base import Engine, run_arrays
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.jobs import Job, Place
from convoy.app.engines.machine import find_cpu
from convoy.app.engines.table import REFERENCE, Row
from convoy.export.rows import Rows
from convoy.export.variants.onnx_graph import array, attribute, initializers, tidy
from convoy.export.variants.pairs import from_fp8
from convoy.export.variants.precision import Recipe
from convoy.models.bundle import Variant
from convoy.models.spec import ModelSpec

# Their output is exactly one of their input values; and behind a dequantisation the kernel works on integers.
_EXACT = frozenset(
    {"Relu", "Clip", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split"}
    | {"Concat", "Gather", "Identity", "Pad", "QuantizeLinear", "DequantizeLinear", "Cast", "Constant"}
)


# The arithmetic of FP16, BF16 and FP8 files on a machine that lacks it. ONNX Runtime runs FP16 nodes on a CPU in FP32
# and removes the casts between them, so neither rounding nor overflow shows: 70,000 passes through such a node
# unharmed, but is infinity on a GPU. Here every result of an FP16 node is rounded by an explicit cast in the graph.
# Sums are in FP32, as in tensor cores. FP8 pairs become casts, too: ONNX Runtime 1.31 removes a ReLU before such a pair
# as if it were UINT8, so negative values pass, and does not load a file in which it has moved one over a MaxPool.


def write_rounding_twin(path: Path, target: Path) -> Path:
    """Write the FP32 graph to `target` that computes what the nodes of `path` would; returns `target`."""
    model = onnx.load(str(path))
    is_bf16 = any(tensor.data_type == onnx.TensorProto.BFLOAT16 for tensor in model.graph.initializer)
    # A BF16 file is typed as FP32, and computed in BF16 throughout.
    narrow = onnx.TensorProto.BFLOAT16 if is_bf16 else onnx.TensorProto.FLOAT16
    rounded = _tensors_of(model, onnx.TensorProto.FLOAT if is_bf16 else narrow)
    _widen(model.graph)
    for node in list(model.graph.node):
        if node.op_type not in _EXACT:
            _round_results(model.graph, node, rounded, narrow)
    _write_out_pairs_of_fp8(model.graph)
    tidy(model.graph)
    onnx.save(model, str(target))
    return target


def _tensors_of(model: Any, element_type: int) -> set[str]:
    """The names of all tensors of a type."""
    inferred = onnx.shape_inference.infer_shapes(model).graph
    return {
        info.name
        for info in (*inferred.value_info, *inferred.output)
        if info.type.tensor_type.elem_type == element_type
    }


def _widen(graph: Any) -> None:
    """Convert every FP16 constant and cast to FP32; a cast to FP16 becomes a round trip."""
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT16:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array(tensor).astype(np.float32), tensor.name))
    for node in list(graph.node):
        for own in node.attribute:
            if own.name == "value" and own.t.data_type == onnx.TensorProto.FLOAT16:
                own.t.CopyFrom(onnx.numpy_helper.from_array(array(own.t).astype(np.float32)))
        if node.op_type == "Cast" and any(a.name == "to" and a.i == onnx.TensorProto.FLOAT16 for a in node.attribute):
            inner = f"{node.output[0]}_in_half"
            graph.node.append(onnx.helper.make_node("Cast", [inner], [node.output[0]], to=onnx.TensorProto.FLOAT))
            node.output[0] = inner
    del graph.value_info[:]


def _write_out_pairs_of_fp8(graph: Any) -> None:
    """Turn each FP8 quantisation into a division and a cast, each dequantisation into a cast and a product."""
    constants = initializers(graph)
    for node in list(graph.node):
        zero = constants.get(node.input[2]) if len(node.input) > 2 else None
        if zero is None or zero.data_type != onnx.TensorProto.FLOAT8E4M3FN:
            continue
        (value, scale, _), (result,) = node.input, node.output
        inner = f"{result}_unscaled"
        if value in constants:
            values = from_fp8(array(constants[value]), array(constants[scale]), attribute(node, "axis", 1))
            graph.initializer.append(onnx.numpy_helper.from_array(values, result))
        elif node.op_type == "QuantizeLinear":
            graph.node.append(onnx.helper.make_node("Div", [value, scale], [inner]))
            # Saturating is the default, and explicit because the twin is wrong without it.
            cast = onnx.helper.make_node("Cast", [inner], [result], to=onnx.TensorProto.FLOAT8E4M3FN, saturate=1)
            graph.node.append(cast)
        else:
            graph.node.append(onnx.helper.make_node("Cast", [value], [inner], to=onnx.TensorProto.FLOAT))
            graph.node.append(onnx.helper.make_node("Mul", [inner, scale], [result]))
        graph.node.remove(node)


def _round_results(graph: Any, node: Any, names: set[str], narrow: int) -> None:
    for index, name in enumerate(node.output):
        if name not in names:
            continue
        exact, rounded = f"{name}_exact", f"{name}_rounded"
        node.output[index] = exact
        graph.node.append(onnx.helper.make_node("Cast", [exact], [rounded], to=narrow))
        graph.node.append(onnx.helper.make_node("Cast", [rounded], [name], to=onnx.TensorProto.FLOAT))


@dataclass(frozen=True, slots=True)
class OpenVariant:
    """A variant whose file exists; `engine` is open while the candidate is in use.

    `spec` is the model's, with the meaning of its outputs. `is_twin` means that the engine runs a graph that answers as
    another device would.
    """

    recipe: Recipe
    path: Path
    engine: Engine
    spec: ModelSpec
    is_twin: bool = False

    def answers(self, inputs: Rows) -> dict[str, np.ndarray]:
        """Every output [n, ...] for inputs [n, ...]; n is at most the engine's largest batch."""
        return run_arrays(self.engine, inputs)


@contextmanager
def opened(spec: ModelSpec, recipes: Sequence[Recipe], folder: Path) -> Iterator[tuple[OpenVariant, ...]]:
    """Open the engines of files in `folder`; close them at the end.

    A variant for another device runs here as its rounding twin, which answers as that device would. Raises
    BundleError for a file that the engine does not load.
    """
    with ExitStack() as stack:
        candidates = []
        for recipe in recipes:
            row, path = recipe.row, folder / recipe.file
            engine = (
                open_engine(spec, recipe, row, path)
                if row
                else open_engine(spec, recipe, REFERENCE, _twin(stack, path))
            )
            stack.callback(engine.close)
            if engine.warm_shapes() is not None:  # an engine of dynamic sizes measures the memory of a batch in it
                engine.warm_up()
            candidates.append(OpenVariant(recipe, path, engine, spec, is_twin=row is None))
        yield tuple(candidates)


@dataclass(frozen=True, slots=True)
class OtherEngines:
    """The result of `opened_elsewhere`. `refused` says, by file and library, why a variant is missing."""

    candidates: tuple[OpenVariant, ...]
    refused: Mapping[str, Mapping[str, str]]


@contextmanager
def opened_elsewhere(
    spec: ModelSpec, recipes: Sequence[Recipe], folder: Path, check: Callable[[OpenVariant], None] = lambda one: None
) -> Iterator[OtherEngines]:
    """The same files in the other engines of this machine's CPU, if they load there and pass the check.

    `check` raises JobError for one with wrong answers.
    """
    with ExitStack() as stack:
        found: list[OpenVariant] = []
        refused: dict[str, dict[str, str]] = {}
        for recipe in recipes:
            for row in recipe.other_rows:
                try:
                    engine = open_engine(spec, recipe, row, folder / recipe.file)
                    stack.callback(engine.close)
                    engine.warm_up()
                    candidate = OpenVariant(recipe, folder / recipe.file, engine, spec)
                    check(candidate)
                except Exception as error:  # whatever a library raises affects only its own figures
                    assert row.library is not None, "export measures every engine of a CPU; this is a bug"
                    # A manifest has no folders of this machine.
                    why = str(error).replace(f"{folder}/", "")
                    refused.setdefault(recipe.file, {})[row.library(find_cpu())] = why
                else:
                    found.append(candidate)
        yield OtherEngines(tuple(found), refused)


def open_engine(spec: ModelSpec, recipe: Recipe, row: Row, path: Path) -> Engine:
    """The row's engine for a variant's file on this CPU. Raises BundleError."""
    variant = Variant(path.name, recipe.precision, recipe.target, True, "", 0.0, None, None)
    of_model = (path.parent, spec, (variant,), None)
    job = Job(*of_model, spec.max_batch_size, "auto", find_cpu(), plan_cache=None, threads=cpu_budget())
    return row.open(job, variant, Place())


def _twin(stack: ExitStack, path: Path) -> Path:
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="convoy-twin-")))
    return write_rounding_twin(path, folder / path.name)
