"""What the network needs and what this device gives: the two halves of a roofline.

Williams, Waterman & Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009. The need is counted by `convoy.export.profiling.work`. The ceilings are measured, not
read from a data sheet, through the runtime that serves and with its threads: a large matrix product for
arithmetic, and the sum of two arrays far larger than most caches for memory (STREAM's Add; McCalpin, 1995).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from convoy.app.engines.onnxruntime import open_session
from convoy.export.profiling.work import count_work
from convoy.export.variants.variant import OpenVariant
from convoy.models.bundle import Roofline
from convoy.models.errors import JobError

# A product so large that kernels run at full speed, so small that one of many runs finds all cores free.
_MATRIX = 768
_ROWS_PER_THREAD = 384
_ARRAY_FLOATS = 16 << 20
_BUDGET_S = 2.0
_FEWEST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device attains: 10^9 operations (of which a multiplication and an addition are two) and 10^9 bytes."""

    float_gflop_per_s: float
    int8_gop_per_s: float
    gb_per_s: float


def measure_roofline(fp32: OpenVariant, threads: int) -> Roofline:
    """The roofline of the fp32 graph on this CPU. Raises JobError where the runtime cannot run the probes."""
    work = count_work(fp32.path, fp32.engine.inputs, batched=fp32.engine.batched)
    ceilings = measure_ceilings(threads)
    return Roofline(
        device_fingerprint=fp32.engine.info.device_fingerprint,
        gflop_per_sample=work.flop / 1e9,
        mb_per_sample=work.activation_bytes / 1e6,
        weights_mb=work.weight_bytes / 1e6,
        device_gflop_per_s=ceilings.float_gflop_per_s,
        device_gb_per_s=ceilings.gb_per_s,
        device_int8_gop_per_s=ceilings.int8_gop_per_s,
    )


@cache
def measure_ceilings(threads: int) -> Ceilings:
    """Run the three probes on `threads` threads, for about two seconds, once in a process: they are the device's.

    Raises JobError.
    """
    operations = 2.0 * _ROWS_PER_THREAD * threads * _MATRIX**2
    with tempfile.TemporaryDirectory(prefix="convoy-roofline-") as temporary:
        folder = Path(temporary)
        probes = (_matrix_product(folder, threads), _int8_product(folder, threads), _sum_of_arrays(folder, threads))
        float_s, int8_s, sum_s = _fastest_s(probes)
    return Ceilings(operations / float_s / 1e9, operations / int8_s / 1e9, 3 * 4 * _ARRAY_FLOATS / sum_s / 1e9)


def _fastest_s(probes: Sequence[Callable[[], None]]) -> list[float]:
    """Seconds of each one's fastest run: a ceiling is what is attained undisturbed, so all share the quiet times."""
    for run in probes:
        run()
    fastest_s, end_s, rounds = [float("inf")] * len(probes), time.monotonic() + _BUDGET_S, 0
    while rounds < _FEWEST_ROUNDS or time.monotonic() < end_s:
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
    """A graph of one node, bound to memory that is there already; the result runs it once, into `output`."""
    import onnx
    from onnx import helper

    def tensor(name: str, array: np.ndarray) -> Any:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)

    graph = helper.make_graph(
        [helper.make_node(operator, [*inputs, *constants], ["z"])],
        operator,
        [tensor(name, array) for name, array in inputs.items()],
        [tensor("z", output)],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    path = folder / f"{operator}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
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
        # The memory is bound by its address; these keep it.
        _ = inputs, output

    return run
