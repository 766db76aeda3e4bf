"""What the fake TensorRT does when a plan is run: the CPU's own answers, given on a fake GPU's streams.

A plan made here names an ONNX file, its batch sizes and the scratch memory of each profile: one static profile per
size, or a dynamic one for all. Its context refuses what a real one refuses: a profile, a shape or an address that was
not set, scratch that is too small, another stream than the one it is captured on."""

from __future__ import annotations

import hashlib
import itertools
import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convoy.models.bundle import FileRecord
from convoy.models.plans import SCHEMA_VERSION, BuildOptions, Plan, PlanAudit, PlanKey, PlanRecord, PlanTarget
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_onnxruntime import cpu_session
from tests.support.fake_tensorrt import RTX, Plays, make_fake, new
from tests.support.rtx_run import Jit, config_plays, new_config

_TYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(int8)": "INT8",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "HALF",
    "tensor(float)": "FLOAT",
}


@dataclass
class Runs:
    """The script of the runtime. `takes_ns` is how long a batch of so many samples computes.

    `can_capture`: whether the library's work may be recorded as a graph; `refuses_while_capturing`: whether it
    says so by its return value alone. `spoils` may make an enqueue fail, with the inputs that it would see, when
    half of it is on the stream. `dtypes`, `shapes` and `profiles` are what a plan has instead of its model's,
    `run_shapes` what a context has whose inputs' shapes are set; `complaint` is what the log says when something is
    refused, and `contexts` how many contexts there may be. `while_capturing` is called where RTX captures by itself.
    `destroyed` tells what went, in order, and `steps` whose
    computing began and ended. `jit` is for RTX alone.
    """

    cuda: FakeCuda
    version: str = "11.4"
    takes_ns: Callable[[int], float] = lambda samples: 0.0
    can_capture: bool = True
    refuses_while_capturing: bool = False
    is_loadable: bool = True
    spoils: Callable[[dict[str, np.ndarray]], bool] | None = None
    distorts: Callable[[np.ndarray], np.ndarray] = lambda array: array
    dtypes: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    run_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    profiles: int | None = None
    while_capturing: Callable[[], None] = lambda: None
    complaint: str = "the plan is damaged"
    contexts: int | None = None
    destroyed: list[str] = field(default_factory=list)
    steps: list[tuple[str, int]] = field(default_factory=list)
    scratch_blocks: set[tuple[int, int]] = field(default_factory=set)
    jit: Jit = field(default_factory=Jit)

    def module(self) -> Any:
        """The fake library that plays this script."""
        return make_fake(self.version, _plays(self))


def make_plan(
    model: Path, batch_sizes: tuple[int, ...], *, scratch_bytes: Sequence[int] = (), dynamic: bool = False
) -> Plan:
    """A plan as `find_plan` gives it out, for the fake library; a `dynamic` one has a profile for all its sizes."""
    scratch_bytes = tuple(scratch_bytes) or (4096,) * (1 if dynamic else len(batch_sizes))
    body = {"onnx": str(model), "sizes": batch_sizes, "scratch": scratch_bytes, "dynamic": dynamic}
    data = json.dumps(body).encode()
    target = (
        PlanTarget("tensorrt-rtx", "1.7.1", ()) if dynamic else PlanTarget("tensorrt", "11.4.0", ("9.0",), "Fake GPU")
    )
    key = PlanKey("0" * 64, target, "0" * 64)
    record = PlanRecord(
        schema_version=SCHEMA_VERSION,
        key=key,
        options=BuildOptions("fp16", batch_sizes, profiles="range" if dynamic else "each"),
        plan=FileRecord(hashlib.sha256(data).hexdigest(), len(data)),
        scratch_bytes=scratch_bytes,
        audit=PlanAudit({"fp16": 1}, 0),
        build_s=1.0,
        device_name="Fake GPU",
        onnx_name=model.name,
        created_at="2026-01-01T00:00:00Z",
    )
    return Plan(model.with_suffix(".plan"), record, data)


def _plays(runs: Runs) -> Plays:
    plays = {**_engine_plays(runs), **_context_plays(runs)}
    if runs.version == RTX:
        plays |= config_plays(runs.jit, lambda thing: _complain(runs, thing))
    return plays


def _watch(runs: Runs, thing: Any, kind: str) -> Any:
    weakref.finalize(thing, runs.destroyed.append, kind).atexit = False
    return thing


def _engine_plays(runs: Runs) -> dict[tuple[str, str], Callable[..., Any]]:
    def construct(runtime: Any, logger: Any) -> None:
        runtime.state["logger"] = logger
        _watch(runs, runtime, "runtime")

    def deserialize(runtime: Any, serialized_engine: Any) -> Any:
        if not runs.is_loadable:
            return _complain(runs, runtime)
        body = json.loads(bytes(serialized_engine))
        if isinstance(body["scratch"], int):
            body["scratch"] = [body["scratch"]] * len(body["sizes"])
        sizes = body["sizes"]
        shapes = [(sizes[0], sizes[len(sizes) // 2], sizes[-1])] if body.get("dynamic") else [(n, n, n) for n in sizes]
        body["profiles"] = shapes
        session = cpu_session(body["onnx"])
        engine = new(runtime.module, "ICudaEngine", body=body, session=session, logger=runtime.state["logger"])
        if runs.cuda.allocate_for(engine, len(bytes(serialized_engine))) is None:
            runtime.state["logger"].log(runtime.module.ILogger.ERROR, "Requested size was 9 bytes.\nOut of memory")
            return None
        return _watch(runs, engine, "engine")

    def nodes(engine: Any) -> dict[str, Any]:
        session = engine.state["session"]
        return {node.name: node for node in (*session.get_inputs(), *session.get_outputs())}

    def shape(engine: Any, name: str) -> tuple[int, ...]:
        whole = tuple(size if isinstance(size, int) else -1 for size in nodes(engine)[name].shape)
        return runs.shapes.get(name, whole)

    def profile_shape(engine: Any, name: str, profile_index: int) -> list[tuple[int, ...]]:
        whole = shape(engine, name)
        return [(size, *whole[1:]) for size in engine.state["body"]["profiles"][profile_index]]

    def context(engine: Any, strategy: Any = None, runtime_config: Any = None) -> Any:
        config = runtime_config or (new_config(engine, strategy) if runs.version == RTX else None)
        allocation = strategy if config is None else config.state["allocation"]
        assert allocation is not None
        assert allocation.name == "USER_MANAGED"
        if runs.contexts is not None:
            runs.contexts -= 1
            if runs.contexts < 0:
                return _complain(runs, engine)
        # The real one holds a bare pointer to its engine.
        state = {"engine": weakref.proxy(engine), "config": config, "addresses": {}, "shapes": {}, "kernels": set()}
        made = _watch(runs, new(engine.module, "IExecutionContext", **state), "context")
        if len(engine.state["body"]["profiles"]) == 1:
            _choose_profile(made, 0)
        if runs.version == RTX:
            runs.jit.create(made)
        return made

    return {
        ("Runtime", "__init__"): construct,
        ("Runtime", "deserialize_cuda_engine"): deserialize,
        ("ICudaEngine", "num_io_tensors"): lambda engine: len(nodes(engine)),
        ("ICudaEngine", "get_tensor_name"): lambda engine, index: list(nodes(engine))[index],
        ("ICudaEngine", "get_tensor_dtype"): lambda engine, name: getattr(
            engine.module.DataType, runs.dtypes.get(name) or _TYPES[nodes(engine)[name].type]
        ),
        ("ICudaEngine", "get_tensor_shape"): shape,
        ("ICudaEngine", "num_optimization_profiles"): lambda engine: (
            runs.profiles or len(engine.state["body"]["profiles"])
        ),
        ("ICudaEngine", "get_tensor_profile_shape"): profile_shape,
        ("ICudaEngine", "get_device_memory_size_for_profile_v2"): lambda engine, profile_index: engine.state["body"][
            "scratch"
        ][profile_index],
        ("ICudaEngine", "create_execution_context"): context,
    }


def _complain(runs: Runs, thing: Any) -> None:
    thing.state["logger"].log(thing.module.ILogger.ERROR, runs.complaint)


def _context_plays(runs: Runs) -> dict[tuple[str, str], Callable[..., Any]]:
    def set_device_memory(context: Any, memory: int, size: int) -> None:
        runs.cuda.read(memory, size)
        context.state["scratch"] = (memory, size)
        runs.scratch_blocks.add((memory, size))

    def set_profile(context: Any, profile_index: int, stream_handle: int) -> bool:
        _choose_profile(context, profile_index)
        return True

    def set_shape(context: Any, name: str, shape: Any) -> bool:
        inputs = {node.name: node for node in context.state["engine"].state["session"].get_inputs()}
        is_batched = isinstance(inputs[name].shape[:1], list) and isinstance((inputs[name].shape or [1])[0], str)
        smallest, _, largest = context.state["profile"]
        if is_batched and not smallest <= shape[0] <= largest:
            return False
        if is_batched and shape[0] != context.state["size"]:
            context.state.update(size=shape[0], scratch_needed=context.state["scratch_of_profile"])
        context.state["shapes"][name] = tuple(shape)
        return True

    def tensor_shape(context: Any, name: str) -> tuple[int, ...]:
        if name in runs.run_shapes:
            return runs.run_shapes[name]
        session = context.state["engine"].state["session"]
        (node,) = [one for one in (*session.get_inputs(), *session.get_outputs()) if one.name == name]
        return tuple(size if isinstance(size, int) else context.state["size"] for size in node.shape)

    def set_address(context: Any, name: str, memory: int) -> bool:
        context.state["addresses"][name] = memory
        return True

    def execute(context: Any, stream_handle: int) -> bool:
        cuda, stream = runs.cuda, int(stream_handle)
        assert context.state["scratch"][1] >= context.state["scratch_needed"], "the scratch memory is too small"
        if cuda.capturing(stream):
            if runs.refuses_while_capturing:
                _complain(runs, context.state["engine"])
                return False
            if not runs.can_capture:
                cuda.spoil_capture(stream)
        if runs.version == RTX:
            smallest, _, largest = context.state["profile"]
            is_static, size = smallest == largest, context.state["size"]
            runs.jit.enqueue(context, size, is_static=is_static)
            if _lets_library_capture(context) and not cuda.capturing(stream) and not context.state.get("has_graph"):
                return capture(context, stream)
        first, second = halves(runs, context)
        cuda.enqueue(stream, first)
        if runs.spoils is not None and not cuda.capturing(stream):
            cuda.finish(stream)
            if runs.spoils(inputs_of(runs, context)):
                cuda.enqueue(stream, first)
                _complain(runs, context.state["engine"])
                return False
        cuda.enqueue(stream, second, runs.takes_ns(context.state["size"]))
        return True

    def capture(context: Any, stream: int) -> bool:
        """What TensorRT for RTX does in the first enqueue where it captures itself, for the whole process."""
        cuda = runs.cuda
        cuda.finish(stream)
        cuda.capture_for_all(stream)
        runs.while_capturing()
        for half in halves(runs, context):
            cuda.enqueue(stream, half)
        graph = cuda.captured(stream)
        if graph is None:
            context.state["engine"].state["logger"].log(
                context.state["engine"].module.ILogger.ERROR, "operation failed due to a previous error during capture"
            )
            return False
        context.state["has_graph"] = True
        cuda.launch(graph, stream)
        cuda.drop_graphs({None: graph})
        return True

    return {
        ("IExecutionContext", "set_device_memory"): set_device_memory,
        ("IExecutionContext", "set_optimization_profile_async"): set_profile,
        ("IExecutionContext", "set_input_shape"): set_shape,
        ("IExecutionContext", "get_tensor_shape"): tensor_shape,
        ("IExecutionContext", "set_tensor_address"): set_address,
        ("IExecutionContext", "execute_async_v3"): execute,
    }


def _lets_library_capture(context: Any) -> bool:
    return bool(context.state["config"].cuda_graph_strategy.name == "WHOLE_GRAPH_CAPTURE")


def _choose_profile(context: Any, index: int) -> None:
    body = context.state["engine"].state["body"]
    profile, scratch = body["profiles"][index], body["scratch"][index]
    context.state.update(profile=profile, size=profile[1], scratch_of_profile=scratch, scratch_needed=scratch)


_tokens = itertools.count(1)


def halves(runs: Runs, context: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A batch's work in two pieces: the first leaves something in the scratch memory that the second needs."""
    token, alive = next(_tokens), weakref.ref(context)

    def scratch() -> np.ndarray:
        assert alive() is not None, "the context was destroyed with work under way"
        return runs.cuda.read(context_scratch, 8).view(np.int64)

    context_scratch, _ = context.state["scratch"]

    def first() -> None:
        runs.steps.append(("begins", token))
        scratch()[0] = token

    def second() -> None:
        runs.steps.append(("ends", token))
        if scratch()[0] == token:
            _compute(runs, alive())
        # Else somebody else computed in the same memory meanwhile, and the outputs stay what they were.

    return first, second


def inputs_of(runs: Runs, context: Any) -> dict[str, np.ndarray]:
    addresses, session = context.state["addresses"], context.state["engine"].state["session"]
    return {
        node.name: _array(runs.cuda, addresses[node.name], _numpy_type(node), context.state["shapes"][node.name])
        for node in session.get_inputs()
    }


def _compute(runs: Runs, context: Any) -> None:
    session, addresses = context.state["engine"].state["session"], context.state["addresses"]
    feeds = {name: array.copy() for name, array in inputs_of(runs, context).items()}
    names = [node.name for node in session.get_outputs()]
    for name, array in zip(names, session.run(names, feeds), strict=True):
        np.copyto(_array(runs.cuda, addresses[name], array.dtype, array.shape), runs.distorts(array))


def _array(cuda: FakeCuda, address: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return cuda.read(address, nbytes).view(dtype).reshape(shape)


def _numpy_type(node: Any) -> np.dtype[Any]:
    names = {"tensor(float)": "f4", "tensor(float16)": "f2", "tensor(bool)": "?", "tensor(uint8)": "u1"}
    return np.dtype(names.get(node.type) or node.type[len("tensor(") : -1])
