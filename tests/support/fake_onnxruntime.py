"""onnxruntime with a CUDA provider that is played: the CPU's own answers, given on a fake GPU's streams.

Sessions take the CUDA provider's options, bindings take addresses of the fake device's memory, and a run only
puts work on the stream that the options name.

Graphs are as the real provider has them: a thread's own, captured within its first run of an id and for the whole
process, replayed with the addresses of that run whatever binding comes later. The library makes that run twice
by itself: once plainly, for the memory, and once for the graph.

So are convolutions, of which every node counts as one: a session keeps the plans of its last batch size and makes new
ones for another, but not where a graph is replayed; and without TF32 no plan for tensor cores is taken, whatever the
precision. And so is the placing of nodes: what computes with sizes goes to the CPU. A session that is closed on a
broken device ends the process, which is counted.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from tests.support.fake_cuda import FakeCuda, Graph

PROVIDERS = ("CUDAExecutionProvider", "CPUExecutionProvider")
Arrays = Mapping[str, np.ndarray]
# What the real one says of every node that it leaves to the CPU, and of every file where it did not load.
NODES_ON_CPU = (
    "[ONNXRuntimeError] : 1 : FAIL : This session contains graph nodes that are assigned to the default CPU EP, but "
    "fallback to CPU EP has been explicitly disabled by the user."
)
NO_GRAPH_CAPTURE = (
    "[ONNXRuntimeError] : 1 : FAIL : This session cannot use the graph capture feature as requested by the user as all "
    "compute graph nodes have not been partitioned to the CUDAExecutionProvider"
)
NOT_RECORDED = (
    "[ONNXRuntimeError] : 1 : FAIL : 1Session configuration entry 'session.record_ep_graph_assignment_info' must be "
    'set to "1" to retrieve EP graph assignment information.'
)
# Plain runs of a graph id on a thread, before it is captured in the same call.
PLAIN_RUNS = 1


class Fail(Exception):
    """onnxruntime's own exceptions derive from nothing else."""


@dataclass
class FakeRuntime:
    """The module. The script first, then what was asked.

    `takes_ns` is how long a batch of so many samples computes under the provider's options. `refuses` may
    raise when a session is opened, `spoils` when a run is launched, with the inputs that it would see.
    `while_capturing` is called in every capture. `loads` False: the provider's libraries are missing.
    `plan_ns` is what it takes to make plans for another batch size, and `plan_builds` how often that was done;
    `without_tensor_cores` is how many times longer everything takes then. `lacking` are operators without a kernel on
    a GPU. `terminated` counts sessions that took the process with them.
    """

    cuda: FakeCuda
    providers: tuple[str, ...] = PROVIDERS
    loads: bool = True
    takes_ns: Callable[[int, Mapping[str, str]], float] = lambda samples, options: 0.0
    refuses: Callable[[Mapping[str, str]], None] = lambda options: None
    spoils: Callable[[Arrays], None] | None = None
    while_capturing: Callable[[], None] = lambda: None
    plan_ns: float = 0.0
    plan_builds: int = 0
    without_tensor_cores: float = 1.0
    lacking: frozenset[str] = frozenset()
    terminated: int = 0
    sessions: weakref.WeakSet[FakeSession] = field(default_factory=weakref.WeakSet)
    opened: list[dict[str, str]] = field(default_factory=list)
    captures: Counter[tuple[int, str]] = field(default_factory=Counter)

    __version__ = ort.__version__
    SessionOptions = ort.SessionOptions
    RunOptions = ort.RunOptions

    def session_goes(self) -> None:
        self.terminated += bool(self.cuda.sticky)

    def get_available_providers(self) -> list[str]:
        return list(self.providers)

    def InferenceSession(
        self,
        path: str,
        options: ort.SessionOptions,
        providers: list[tuple[str, dict[str, str]]],
        enable_fallback: int = 1,
    ) -> FakeSession:
        ((name, provider_options),) = providers
        assert name == "CUDAExecutionProvider"
        placed = placement(path, self.lacking) if self.loads else []
        on_cpu = [node for provider, node in placed if provider != name]
        if _has(options, "session.disable_cpu_ep_fallback") and (on_cpu or not self.loads):
            raise Fail(NODES_ON_CPU)
        if provider_options["enable_cuda_graph"] == "1" and any(node.op_type in self.lacking for node in on_cpu):
            raise Fail(NO_GRAPH_CAPTURE)
        try:
            self.refuses(provider_options)
            session = FakeSession(self, path, provider_options)
            if _has(options, "session.record_ep_graph_assignment_info"):
                session.placed = placed
        except RuntimeError as error:
            if not enable_fallback:
                raise
            # The real one prints the error and tries the CPU, which is what the options forbid.
            raise ValueError("Conflicting session configuration: fallback to CPU EP is disabled") from error
        self.opened.append(dict(provider_options))
        self.sessions.add(session)
        return session


class FakeSession:
    def __init__(self, runtime: FakeRuntime, path: str, options: Mapping[str, str]) -> None:
        self._runtime = runtime
        self._session = cpu_session(path)
        self.options = dict(options)
        self.can_fall_back = True
        self._graphs: dict[tuple[int, str], Graph] = {}
        self._plain_runs: Counter[tuple[int, str]] = Counter()
        self._planned_for: int | None = None
        self.placed: list[tuple[str, Any]] | None = None
        weakref.finalize(self, runtime.session_goes).atexit = False
        if runtime.loads and runtime.cuda.allocate_for(self, Path(path).stat().st_size) is None:
            raise RuntimeError("CUDA failure 2: out of memory ; GPU=0 ; expr=cudaMalloc((void**)&p, size);")
        weakref.finalize(self, runtime.cuda.drop_graphs, self._graphs).atexit = False

    def disable_fallback(self) -> None:
        self.can_fall_back = False

    def get_providers(self) -> list[str]:
        return list(self._runtime.providers if self._runtime.loads else PROVIDERS[1:])

    def get_provider_graph_assignment_info(self) -> list[SimpleNamespace]:
        if self.placed is None:
            raise Fail(NOT_RECORDED)
        return [SimpleNamespace(ep_name=provider, get_nodes=lambda node=node: [node]) for provider, node in self.placed]

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def io_binding(self) -> FakeBinding:
        return FakeBinding()

    def run_with_iobinding(self, binding: FakeBinding, options: ort.RunOptions) -> None:
        assert not self.can_fall_back
        assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
        cuda, stream = self._runtime.cuda, self._stream
        if self._runtime.spoils is not None:
            cuda.finish(stream)
            self._runtime.spoils(self._inputs(binding))
        if self.options["enable_cuda_graph"] == "1":
            self._run_with_graph(binding, options.get_run_config_entry("gpu_graph_id"))
        else:
            self._enqueue(binding)

    @property
    def _stream(self) -> int:
        return int(self.options["user_compute_stream"])

    def _run_with_graph(self, binding: FakeBinding, graph_id: str) -> None:
        key = threading.get_ident(), graph_id
        if graph_id == "-1":
            self._enqueue(binding)
            return
        if key not in self._graphs:
            while self._plain_runs[key] < PLAIN_RUNS:
                self._plain_runs[key] += 1
                self._enqueue(binding)
            self._graphs[key] = self._captured(binding)
            self._runtime.captures[key] += 1
        self._runtime.cuda.launch(self._graphs[key], self._stream)

    def _captured(self, binding: FakeBinding) -> Graph:
        cuda = self._runtime.cuda
        cuda.finish(self._stream)
        cuda.capture_for_all(self._stream)
        try:
            self._runtime.while_capturing()
            self._enqueue(binding)
        except BaseException:
            cuda.drop_graphs({None: cuda.captured(self._stream)})
            raise
        graph = cuda.captured(self._stream)
        if graph is None:
            raise RuntimeError(
                "CUDA failure 901: operation failed due to a previous error during capture ; GPU=0 ; "
                "expr=cudaStreamEndCapture(stream_, &graph_);"
            )
        return graph

    def _enqueue(self, binding: FakeBinding) -> None:
        samples = next((bound.shape[0] for bound in binding.inputs.values() if bound.shape), 1)
        session, runtime = weakref.ref(self), self._runtime
        takes_ns = runtime.takes_ns(samples, self.options)
        if self.options.get("use_tf32", "1") == "0":
            takes_ns *= runtime.without_tensor_cores
        if samples != self._planned_for:
            self._planned_for = samples
            runtime.plan_builds += 1
            takes_ns += runtime.plan_ns

        def compute() -> None:
            alive = session()
            assert alive is not None, "the session was released with work under way"
            alive._compute(binding)

        runtime.cuda.enqueue(self._stream, compute, takes_ns)

    def _inputs(self, binding: FakeBinding) -> dict[str, np.ndarray]:
        return {name: bound.array(self._runtime.cuda) for name, bound in binding.inputs.items()}

    def _compute(self, binding: FakeBinding) -> None:
        # Copies: the CPU must not see memory that a later batch overwrites.
        feeds = {name: array.copy() for name, array in self._inputs(binding).items()}
        for (name, bound), array in zip(
            binding.outputs.items(), self._session.run(list(binding.outputs), feeds), strict=True
        ):
            if bound.shape != array.shape:
                raise RuntimeError(
                    f"The output OrtValue provided for output '{name}' of node '' (Slice) has shape {bound.shape} but "
                    f"the computed output shape for this run is {array.shape}."
                )
            np.copyto(bound.array(self._runtime.cuda), array)


def _has(options: ort.SessionOptions, entry: str) -> bool:
    try:
        return bool(options.get_session_config_entry(entry) == "1")
    except RuntimeError:  # the entry was not made
        return False


def placement(path: str, lacking: frozenset[str]) -> list[tuple[str, SimpleNamespace]]:
    """Each node's provider: the CPU for what has no kernel on a GPU, and for what computes with sizes from Shape on."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    constants, on_host, placed = {one.name for one in graph.initializer}, set[str](), []
    for node in graph.node:
        known = on_host | constants
        from_sizes = any(name in on_host for name in node.input) and all(name in known for name in node.input)
        if node.op_type in ("Shape", "Size") or from_sizes:
            on_host.update(node.output)
        is_there = node.op_type not in lacking and not set(node.output) & on_host
        told = SimpleNamespace(name=node.name, domain=node.domain, op_type=node.op_type)
        placed.append((PROVIDERS[0] if is_there else PROVIDERS[1], told))
    return placed


def cpu_session(path: str) -> ort.InferenceSession:
    """Who computes in the place of a GPU."""
    return _cpu_session(path, Path(path).stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _cpu_session(path: str, mtime_ns: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class _Bound:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    address: int

    def array(self, cuda: FakeCuda) -> np.ndarray:
        nbytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        return cuda.read(self.address, nbytes).view(self.dtype).reshape(self.shape)


class FakeBinding:
    def __init__(self) -> None:
        self.inputs: dict[str, _Bound] = {}
        self.outputs: dict[str, _Bound] = {}

    def bind_input(self, name: str, kind: str, device: int, dtype: Any, shape: list[int], address: int) -> None:
        assert kind == "cuda"
        self.inputs[name] = _Bound(np.dtype(dtype), tuple(shape), address)

    def bind_output(self, name: str, kind: str, device: int, dtype: Any, shape: list[int], address: int) -> None:
        assert kind == "cuda"
        self.outputs[name] = _Bound(np.dtype(dtype), tuple(shape), address)
