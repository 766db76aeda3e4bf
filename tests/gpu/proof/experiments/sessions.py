"""ONNX Runtime's CUDA provider over cuda-python, as directly as it goes: a stream, memory, bindings, runs, times."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.gpu.proof.experiment import NotMeasurable
from tests.gpu.proof.experiments.cudart import NON_BLOCKING, TO_DEVICE, TO_HOST, Runtime
from tests.gpu.proof.experiments.networks import INPUT, OUTPUT

PROVIDER = "CUDAExecutionProvider"
# The provider captures a graph in its third run of an id.
CAPTURING_RUNS = 3
_PORTABLE = 1


def load_onnxruntime() -> Any:
    """The module, its libraries found. Raises NotMeasurable where it has no CUDA provider."""
    try:
        module: Any = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise NotMeasurable(f"onnxruntime does not load ({error})") from error
    if PROVIDER not in module.get_available_providers():
        raise NotMeasurable(f"this onnxruntime ({module.__version__}) has no {PROVIDER}; CARRY=DIR can bring one along")
    if hasattr(module, "preload_dlls"):
        # It prints what it does not find, and then the loader looks for itself.
        with contextlib.redirect_stdout(io.StringIO()):
            module.preload_dlls()
    return module


@dataclass(frozen=True, slots=True)
class Way:
    """The provider's options that are asked about; the rest is as the server has it."""

    tf32: bool = True
    nhwc: bool = True
    fuse_bias: bool = False
    graphs: bool = False
    search: str = "HEURISTIC"

    def __str__(self) -> str:
        return f"tf32 {self.tf32:d} nhwc {self.nhwc:d} fuse {self.fuse_bias:d} graphs {self.graphs:d}"

    def options(self, stream: Any) -> dict[str, str]:
        return {
            "device_id": "0",
            "user_compute_stream": str(int(stream)),
            "arena_extend_strategy": "kSameAsRequested",
            "cudnn_conv_algo_search": self.search,
            "cudnn_conv_use_max_workspace": "1",
            "prefer_nhwc": str(int(self.nhwc)),
            "use_tf32": str(int(self.tf32)),
            "fuse_conv_bias": str(int(self.fuse_bias)),
            "enable_cuda_graph": str(int(self.graphs)),
        }


@dataclass(frozen=True, slots=True)
class _Bound:
    """One batch size: memory on both sides, and ONNX Runtime's binding to it."""

    binding: Any
    options: Any
    device_in: int
    device_out: int
    host_out: int
    shape_out: tuple[int, ...]


class Session:
    """One session on a stream of its own; batch sizes are bound when they are first wanted."""

    def __init__(
        self, runtime: Runtime, ort: Any, model: Path, way: Way, *, may_use_cpu: bool = False, records: bool = False
    ) -> None:
        """Raises whatever ONNX Runtime does. `records`: which provider got which node can be asked afterwards."""
        self._runtime, self._ort, self._way = runtime, ort, way
        self._bound: dict[int, _Bound] = {}
        self.stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
        try:
            self.session: Any = self._opened(model, may_use_cpu, records)
        except Exception as error:  # onnxruntime's errors share no base class
            # Without its libraries, too, all that it complains of is nodes on the CPU.
            if may_use_cpu or self._opened(model, True, False).get_providers()[0] == PROVIDER:
                raise
            raise NotMeasurable(f"{PROVIDER} does not load; the experiment provider-loads says why") from error
        if self.session.get_providers()[0] != PROVIDER:
            raise NotMeasurable(f"{PROVIDER} does not load")
        self.session.disable_fallback()

    def _opened(self, model: Path, may_use_cpu: bool, records: bool) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if not may_use_cpu:
            options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        if records:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        providers = [(PROVIDER, self._way.options(self.stream))]
        return self._ort.InferenceSession(str(model), options, providers=providers, enable_fallback=0)

    def bind(self, samples: np.ndarray) -> int:
        """Put a batch on the device; gives its size, by which it is run."""
        runtime, (size, *_) = self._runtime, samples.shape
        (output,) = self.session.get_outputs()
        shape_out = (size, *output.shape[1:])
        nbytes_out = int(np.prod(shape_out)) * 4
        device_in, device_out = runtime.cudaMalloc(samples.nbytes), runtime.cudaMalloc(nbytes_out)
        staging = runtime.cudaHostAlloc(max(samples.nbytes, nbytes_out), _PORTABLE)
        ctypes.memmove(staging, samples.ctypes.data, samples.nbytes)
        runtime.copy(device_in, staging, samples.nbytes, TO_DEVICE, self.stream)
        runtime.cudaStreamSynchronize(self.stream)
        binding = self.session.io_binding()
        binding.bind_input(INPUT, "cuda", 0, np.float32, list(samples.shape), device_in)
        binding.bind_output(OUTPUT, "cuda", 0, np.float32, list(shape_out), device_out)
        options = self._ort.RunOptions()
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        if self._way.graphs:
            options.add_run_config_entry("gpu_graph_id", str(1 + len(self._bound)))
        self._bound[size] = _Bound(binding, options, device_in, device_out, staging, shape_out)
        return int(size)

    def run(self, size: int) -> None:
        """Give the device one batch of a bound size."""
        bound = self._bound[size]
        self.session.run_with_iobinding(bound.binding, bound.options)

    def finish(self) -> None:
        self._runtime.cudaStreamSynchronize(self.stream)

    def run_ms(self, size: int) -> float:
        """One run and the wait for it."""
        began_s = time.perf_counter()
        self.run(size)
        self.finish()
        return (time.perf_counter() - began_s) * 1e3

    def settle(self, size: int) -> float:
        """The runs after which a size is at its speed; gives the first one's time in ms."""
        first_ms, *_ = [self.run_ms(size) for _ in range(CAPTURING_RUNS)]
        return first_ms

    def median_ms(self, size: int, rounds: int) -> float:
        return median(self.run_ms(size) for _ in range(rounds))

    def answer(self, size: int, *, fresh: bool = True) -> np.ndarray:
        """float32, as the output's shape says. Where `fresh`, it is overwritten first: nothing old is taken for new."""
        bound, runtime = self._bound[size], self._runtime
        nbytes = int(np.prod(bound.shape_out)) * 4
        if fresh:
            runtime.cudaMemsetAsync(bound.device_out, 0xFF, nbytes, self.stream)
            self.run(size)
        runtime.copy(bound.host_out, bound.device_out, nbytes, TO_HOST, self.stream)
        runtime.cudaStreamSynchronize(self.stream)
        return np.frombuffer(ctypes.string_at(bound.host_out, nbytes), np.float32).reshape(bound.shape_out)

    def close(self) -> None:
        """The session first: it may have work on the stream. A stream whose capture went wrong may refuse."""
        bound, self._bound = list(self._bound.values()), {}
        self.session = None
        for one in bound:
            self._runtime.status("cudaFree", one.device_in)
            self._runtime.status("cudaFree", one.device_out)
            self._runtime.status("cudaFreeHost", one.host_out)
        self._runtime.status("cudaStreamDestroy", self.stream)


@contextmanager
def opened(runtime: Runtime, ort: Any, model: Path, way: Way, **given: Any) -> Iterator[Session]:
    session = Session(runtime, ort, model, way, **given)
    try:
        yield session
    finally:
        session.close()


def load_cpu_onnxruntime() -> Any:
    """Any build of it will do. Raises NotMeasurable."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise NotMeasurable(
            f"what answers are compared with is not here: onnxruntime does not load ({error})"
        ) from error


def on_cpu(ort: Any, model: Path, samples: np.ndarray, names: tuple[str, str] = (INPUT, OUTPUT)) -> np.ndarray:
    """The same by the CPU provider."""
    session = ort.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    (answer,) = session.run([names[1]], {names[0]: samples})
    return np.asarray(answer)


def relative_error(answer: np.ndarray, expected: np.ndarray) -> float:
    """||a - b|| / ||b||; 1e9 for what is not a number, which JSON has not."""
    error = float(np.linalg.norm(answer.astype(np.float64) - expected) / np.linalg.norm(expected.astype(np.float64)))
    return error if np.isfinite(error) else 1e9
