"""GPU engines for the contract: on a fake GPU anywhere, and on the real one where there is one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import Cuda
from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.machine import find_machine
from convoy.app.engines.onnxruntime_cuda import ConvolutionTuning, OnnxRuntimeCudaEngine
from convoy.app.engines.tensorrt import TensorRtEngine
from convoy.app.engines.tensorrt_library import RTX, TENSORRT, TensorRt, load_builder
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import find_gpu, resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.errors import JobError
from convoy.models.plans import BuildOptions
from convoy.models.spec import TensorSpec
from tests.support import fake_tensorrt
from tests.support.fake_cuda import FakeCuda
from tests.support.fake_onnxruntime import FakeRuntime
from tests.support.tensorrt_run import Runs, make_plan

Specs = tuple[TensorSpec, ...]


def onnxruntime_on_fake(
    model: Path, inputs: Specs, outputs: Specs, max_batch_size: int, *, poisoned: bool = False
) -> OnnxRuntimeCudaEngine:
    """ONNX Runtime's engine on a fake GPU; where `poisoned`, a batch with a number above 9 fails."""
    cuda = FakeCuda()
    runtime = FakeRuntime(cuda)
    if poisoned:
        runtime.spoils = _fail_above_nine
    return _onnxruntime(model, Device(Cuda(cuda), 0), runtime, inputs, outputs, max_batch_size)


def onnxruntime_on_gpu(model: Path, inputs: Specs, outputs: Specs, max_batch_size: int) -> OnnxRuntimeCudaEngine:
    machine = find_machine()
    if machine.onnxruntime.module is None or not machine.gpus:
        pytest.skip(machine.no_gpu or machine.onnxruntime.reason)
    return _onnxruntime(model, machine.gpus[0], machine.onnxruntime.module, inputs, outputs, max_batch_size)


def _onnxruntime(
    model: Path, device: Device, runtime: object, inputs: Specs, outputs: Specs, max_batch_size: int
) -> OnnxRuntimeCudaEngine:
    return OnnxRuntimeCudaEngine(
        model,
        device,
        runtime,
        inputs=inputs,
        outputs=outputs,
        batch_sizes=bucket_sizes(max_batch_size),
        batched=max_batch_size > 0,
        precision="fp32",
        tuning=ConvolutionTuning(),
    )


def tensorrt_on_fake(
    model: Path, inputs: Specs, outputs: Specs, max_batch_size: int, *, poisoned: bool = False, version: str = "11.4"
) -> TensorRtEngine:
    """TensorRT's engine on a fake GPU; where `poisoned`, a batch with a number above 9 fails."""
    cuda = FakeCuda()
    runs = Runs(cuda, version)
    if poisoned:
        runs.spoils = lambda arrays: any(bool((array > 9).any()) for array in arrays.values())
        # A graph's launch could not refuse it.
        runs.can_capture = False
    return TensorRtEngine(
        make_plan(model, bucket_sizes(max_batch_size), dynamic=version == fake_tensorrt.RTX),
        Device(Cuda(cuda), 0),
        runs.module(),
        inputs=inputs,
        outputs=outputs,
        batched=max_batch_size > 0,
    )


# The same of TensorRT for RTX: one profile for all sizes, kernels compiled in the contexts.
rtx_on_fake = partial(tensorrt_on_fake, version=fake_tensorrt.RTX)


def tensorrt_on_gpu(model: Path, inputs: Specs, outputs: Specs, max_batch_size: int) -> TensorRtEngine:
    """From a plan that is built here and now, by the real builder."""
    return _plan_on_gpu(TENSORRT, model, inputs, outputs, max_batch_size)


def rtx_on_gpu(model: Path, inputs: Specs, outputs: Specs, max_batch_size: int) -> TensorRtEngine:
    """The same with TensorRT for RTX: a portable plan, which is compiled here."""
    return _plan_on_gpu(RTX, model, inputs, outputs, max_batch_size)


def _plan_on_gpu(library: TensorRt, model: Path, inputs: Specs, outputs: Specs, max_batch_size: int) -> TensorRtEngine:
    machine = find_machine()
    found = machine.runs(library)
    if found.module is None or not machine.gpus:
        pytest.skip(machine.no_gpu or found.reason)
    try:
        trt, gpu = load_builder(library), find_gpu()
        options = BuildOptions("fp32", bucket_sizes(max_batch_size), profiles=library.profiles)
        target = resolve_target(library, trt, (), options, gpu)
        job = BuildJob(model, model.parent / "plans", options, target, gpu.name)
        plan = build_plan(job, trt, BuildWatch(lambda event: None))
    except JobError as error:
        pytest.skip(f"no plan of this model: {error}")
    return TensorRtEngine(
        plan,
        machine.gpus[0],
        found.module,
        inputs=inputs,
        outputs=outputs,
        batched=max_batch_size > 0,
    )


def _fail_above_nine(arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if (array > 9).any():
            raise RuntimeError(f"indices element of {name} out of bounds\nand a second line")
