"""The roofline: what the network needs and what this device offers.

Williams, Waterman & Patterson, "Roofline: an insightful visual performance model for multicore architectures", CACM
52(4), 2009. The need is counted while the runtime runs one sample, from the shapes in its profile: convolutions and
matrix products exactly, poolings and element-wise operators at one operation per element. The ceilings are measured
through the serving runtime with its threads: a large matrix product for arithmetic, and the sum of two arrays far
larger than most caches for memory (STREAM's Add; McCalpin, 1995).
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from convoy.app.engines.onnx_session import Level, new_session, session_options
from convoy.app.engines.onnxruntime import open_session
from convoy.export.variants.variant import OpenVariant
from convoy.models.bundle import Roofline
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
# The runtime fuses these into the operator before, or computes them in place.
_IN_PLACE = {"BatchNormalization", "Clip", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid"}


# What a network computes and moves for one sample. The runtime's profile has the real shapes of every operator, where
# shape inference stops at the first computed shape. Convolutions and matrix products are counted exactly, poolings and
# element-wise operators roughly, at one operation per element; renaming and rearranging data counts as no computation.


@dataclass(frozen=True, slots=True)
class Work:
    """For one sample: operations, and the bytes of all tensors between operators; for the network: the bytes of its
    weights.
    """

    flop: float
    activation_bytes: float
    weight_bytes: float


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator's run: the shapes that it read and wrote, and the bytes of its weights and outputs."""

    name: str
    kind: str
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    weight_bytes: int
    output_bytes: int


def count_work(path: Path, inputs: tuple[TensorSpec, ...], *, batched: bool = True) -> Work:
    """The work of a float graph; `inputs` are per-sample specs if `batched`, otherwise whole ones.

    Raises JobError if the runtime cannot run the graph on zeros.
    """
    first = (1,) if batched else ()
    arrays = {spec.name: np.zeros((*first, *spec.drawn_shape), spec.numpy_dtype) for spec in inputs}
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
        # Weights [M, C / group, kernel...]: each output sums over all but the first dimension.
        return float(written * math.prod(weights[1:]))
    if operator.kind == "Gemm":
        # (MK)(KN)(MN) is the square of MKN, whichever of them is transposed.
        return math.sqrt(math.prod(first) * math.prod(weights) * written)
    return float(written * first[-1])


def multiply_adds(path: Path, inputs: tuple[TensorSpec, ...]) -> dict[str, float]:
    """For one sample, by node name, the multiply-adds of each convolution and matrix product of a float graph.

    `inputs` are per-sample specs. Raises JobError if the runtime cannot run the graph on zeros.
    """
    arrays = {spec.name: np.zeros((1, *spec.drawn_shape), spec.numpy_dtype) for spec in inputs}
    found = _run_once(path, arrays, Level.ORT_DISABLE_ALL)
    return {operator.name: flop(operator) / 2 for operator in found if operator.kind in _PRODUCTS}


def flop(operator: Operator) -> float:
    """A multiply-add counts as two."""
    if operator.kind in _MOVES:
        return 0.0
    first, written = operator.inputs[0], sum(math.prod(shape) for shape in operator.outputs)
    if operator.kind in _PRODUCTS:
        return 2.0 * _multiplications(operator)
    return float(math.prod(first) if operator.kind in _READERS else written)


def _run_once(
    path: Path,
    arrays: dict[str, np.ndarray],
    # Folds constants, and batch normalisation into convolutions, but fuses nothing non-standard.
    level: Level = Level.ORT_ENABLE_BASIC,
) -> list[Operator]:
    with tempfile.TemporaryDirectory(prefix="convoy-work-") as folder:
        options = session_options(level=level)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        # Weights packed for a kernel would not be in the profile.
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


# Large enough for full speed, and small enough that one of many runs finds all cores free.
_MATRIX = 768
_ROWS_PER_THREAD = 384
_ARRAY_FLOATS = 16 << 20
_BUDGET_S = 2.0


def measure_roofline(fp32: OpenVariant, threads: int) -> Roofline:
    """The roofline of the fp32 graph on this CPU. Raises JobError if the runtime cannot run the probes."""
    work = count_work(fp32.path, fp32.engine.inputs, batched=fp32.engine.batched)
    gflop_per_s, int8_gop_per_s, gb_per_s = _ceilings(threads)
    return Roofline(
        device_fingerprint=fp32.engine.info.device_fingerprint,
        gflop_per_sample=work.flop / 1e9,
        mb_per_sample=work.activation_bytes / 1e6,
        weights_mb=work.weight_bytes / 1e6,
        device_gflop_per_s=gflop_per_s,
        device_gb_per_s=gb_per_s,
        device_int8_gop_per_s=int8_gop_per_s,
    )


@cache
def _ceilings(threads: int) -> tuple[float, float, float]:
    """The device's rates per second: 10^9 operations in float32 and in 8 bits, and 10^9 bytes.

    A multiply-add counts as two operations. Three probes run on `threads` threads for about two seconds, once per
    process. Raises JobError.
    """
    operations = 2.0 * _ROWS_PER_THREAD * threads * _MATRIX**2
    with tempfile.TemporaryDirectory(prefix="convoy-roofline-") as temporary:
        folder = Path(temporary)
        probes = (_matrix_product(folder, threads), _int8_product(folder, threads), _sum_of_arrays(folder, threads))
        float_s, int8_s, sum_s = _fastest_s(probes)
    return operations / float_s / 1e9, operations / int8_s / 1e9, 3 * 4 * _ARRAY_FLOATS / sum_s / 1e9


def _fastest_s(probes: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of the fastest run of each: a ceiling is what is reached undisturbed, so they run in turns."""
    for run in probes:
        run()
    fastest_s, end_s, rounds = [float("inf")] * len(probes), time.monotonic() + _BUDGET_S, 0
    while rounds < 3 or time.monotonic() < end_s:
        for index, run in enumerate(probes):
            started_s = time.perf_counter()
            run()
            fastest_s[index] = min(fastest_s[index], time.perf_counter() - started_s)
        rounds += 1
    return fastest_s


def _matrix_product(folder: Path, threads: int) -> Callable[[], None]:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((_ROWS_PER_THREAD * threads, _MATRIX)).astype(np.float32)
    weights = generator.standard_normal((_MATRIX, _MATRIX)).astype(np.float32)
    return _prepared(folder, threads, "MatMul", {"x": x}, {"w": weights}, np.zeros(x.shape, np.float32))


def _int8_product(folder: Path, threads: int) -> Callable[[], None]:
    # U8S8, as in the CPU's variant.
    generator = np.random.default_rng(0)
    x = generator.integers(0, 256, (_ROWS_PER_THREAD * threads, _MATRIX), dtype=np.uint8)
    weights = generator.integers(-64, 64, (_MATRIX, _MATRIX), dtype=np.int8)
    return _prepared(folder, threads, "MatMulInteger", {"x": x}, {"w": weights}, np.zeros(x.shape, np.int32))


def _sum_of_arrays(folder: Path, threads: int) -> Callable[[], None]:
    arrays = {name: np.ones(_ARRAY_FLOATS, np.float32) for name in ("x", "y")}
    return _prepared(folder, threads, "Add", arrays, {}, np.zeros(_ARRAY_FLOATS, np.float32))


def _prepared(
    folder: Path,
    threads: int,
    operator: str,
    inputs: dict[str, np.ndarray],
    constants: dict[str, np.ndarray],
    output: np.ndarray,
) -> Callable[[], None]:
    """A graph of one node, bound to existing memory; the result runs it once, into `output`."""

    def tensor(name: str, array: np.ndarray) -> Any:
        return onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = onnx.helper.make_graph(
        [onnx.helper.make_node(operator, [*inputs, *constants], ["z"])],
        operator,
        [tensor(name, array) for name, array in inputs.items()],
        [tensor("z", output)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    path = folder / f"{operator}.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    session = open_session(path, threads)
    binding = session.io_binding()
    for name, array in inputs.items():
        binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    binding.bind_output("z", "cpu", 0, output.dtype.type, output.shape, output.ctypes.data)

    def run() -> None:
        try:
            session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's errors share no base class
            raise JobError(f"ONNX Runtime cannot run {operator} to measure this device ({error})") from error
        # The memory is bound by address; these references keep it alive.
        _ = inputs, output

    return run
