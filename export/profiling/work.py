"""How much a network computes and moves for one sample, counted while the runtime runs one.

The runtime's own profile tells the shapes that every operator really saw, where inference from the graph
gives up at the first computed shape. Convolutions and matrix products are counted exactly, poolings and
element-wise operators roughly, at one operation per element; what only renames or rearranges data computes
nothing. Knows operators and shapes, and nothing of devices.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.onnx_session import Level, new_session, session_options
from convoy.models.errors import JobError
from convoy.models.spec import TensorSpec

_TIMED = "_kernel_time"
_MOVES = {
    *("Cast", "Concat", "Constant", "ConstantOfShape", "DequantizeLinear", "Dropout", "Expand", "Flatten", "Gather"),
    *("Identity", "Pad", "QuantizeLinear", "Range", "Reshape", "Shape", "Slice", "Split", "Squeeze", "Transpose"),
    *("Unsqueeze", "Where"),
}
_READERS = {
    *("AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "MaxPool", "ReduceMax", "ReduceMean"),
    *("ReduceSum", "Softmax"),
}
_PRODUCTS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
# Runtimes compute these where they stand: in the operator before, or over its output.
_IN_PLACE = {"BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid"}


@dataclass(frozen=True, slots=True)
class Work:
    """Of one sample: operations, and the bytes of all tensors between operators; of the network: its weights'."""

    flop: float
    activation_bytes: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator's run: the shapes it read and wrote, and the bytes of its weights and of what it wrote."""

    name: str
    kind: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    weight_bytes: int
    output_bytes: int


def count_work(path: Path, inputs: tuple[TensorSpec, ...], *, batched: bool = True) -> Work:
    """The work of a float graph; `inputs` are per-sample specs if `batched`, else whole ones.

    Raises JobError where the runtime does not run the graph on zeros.
    """
    arrays = {}
    for spec in inputs:
        shape = spec.drawn_shape
        arrays[spec.name] = np.zeros((1, *shape) if batched else shape, spec.numpy_dtype)
    operators = _run_once(path, arrays)
    moved = sum(o.output_bytes for o in operators if o.kind not in _MOVES | _IN_PLACE)
    return Work(
        flop=sum(flop(operator) for operator in operators),
        activation_bytes=float(moved + sum(array.nbytes for array in arrays.values())),
        weight_bytes=float(sum(operator.weight_bytes for operator in operators)),
    )


def _multiplications(operator: Operator) -> float:
    first, weights, written = *operator.inputs[:2], math.prod(operator.outputs[0])
    if operator.kind == "ConvTranspose":
        return float(math.prod(first) * math.prod(weights[1:]))
    if operator.kind == "Conv":
        # Weights [M, C / group, kernel...]: each output sums over all but the first.
        return float(written * math.prod(weights[1:]))
    if operator.kind == "Gemm":
        # (MK)(KN)(MN) is the square of MKN, whichever of them is transposed.
        return math.sqrt(math.prod(first) * math.prod(weights) * written)
    return float(written * first[-1])


def multiply_adds(path: Path, inputs: tuple[TensorSpec, ...]) -> dict[str, float]:
    """Of one sample, by name of the node, for each convolution and matrix product of a float graph.

    `inputs` are per-sample specs. Raises JobError where the runtime does not run the graph on zeros.
    """
    arrays = {spec.name: np.zeros((1, *spec.drawn_shape), spec.numpy_dtype) for spec in inputs}
    found = _run_once(path, arrays, Level.ORT_DISABLE_ALL)
    return {operator.name: flop(operator) / 2 for operator in found if operator.kind in _PRODUCTS}


def flop(operator: Operator) -> float:
    """A multiplication and an addition are two."""
    if operator.kind in _MOVES:
        return 0.0
    first, written = operator.inputs[0], sum(math.prod(shape) for shape in operator.outputs)
    if operator.kind in _PRODUCTS:
        return 2.0 * _multiplications(operator)
    return float(math.prod(first) if operator.kind in _READERS else written)


def _run_once(
    path: Path,
    arrays: dict[str, np.ndarray],
    # Folds what is constant, and batch normalisation into convolutions, but fuses nothing beyond the standard.
    level: Level = Level.ORT_ENABLE_BASIC,
) -> list[Operator]:
    with tempfile.TemporaryDirectory(prefix="convoy-work-") as folder:
        options = session_options(level=level)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        # Weights that were packed for a kernel would not be in the profile.
        options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            session = new_session(path, options)
            session.run(None, arrays)
            profile = Path(session.end_profiling()).read_text(encoding="utf-8")
        except Exception as error:  # onnxruntime's errors share no base class
            raise JobError(f"ONNX Runtime cannot run {path.name} once to count its work ({error})") from error
    events = json.loads(profile)
    return [_operator(e) for e in events if e.get("cat") == "Node" and e["name"].endswith(_TIMED)]


def _operator(event: dict[str, Any]) -> Operator:
    arguments = event["args"]

    def shapes(key: str) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(shape) for tensor in arguments[key] for shape in tensor.values())

    return Operator(
        name=event["name"].removesuffix(_TIMED),
        kind=arguments["op_name"],
        inputs=shapes("input_type_shape") or ((),),
        outputs=shapes("output_type_shape"),
        weight_bytes=int(arguments["parameter_size"]),
        output_bytes=int(arguments["output_size"]),
    )
