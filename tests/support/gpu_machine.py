"""A machine with GPUs that are not there: fake devices and libraries, and plans built by the real builder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from convoy.app.engines.cuda.device import find_devices
from convoy.app.engines.cuda.driver import Cuda
from convoy.app.engines.jobs import PlanRequest
from convoy.app.engines.machine import Library, Machine
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.plans import BuildOptions, Plan, PlanTarget
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.fake_onnxruntime import FakeRuntime
from tests.support.fake_tensorrt import RTX
from tests.support.tensorrt_play import FakeInput, Scenario
from tests.support.tensorrt_run import Runs


@dataclass
class GpuBench:
    """The fakes behind one machine; scripts may be changed before and while a model is loaded."""

    cuda: FakeCuda
    onnxruntime: FakeRuntime
    tensorrt: Runs
    machine: Machine
    rtx: Runs

    @staticmethod
    def of(*gpus: FakeGpu, rtx: bool = False) -> GpuBench:
        """`rtx`: TensorRT for RTX is installed, too."""
        cuda = FakeCuda(*gpus)
        bindings = Cuda(cuda)
        runtime, runs, runs_rtx = FakeRuntime(cuda), Runs(cuda), Runs(cuda, RTX)
        devices, unusable = find_devices(bindings)
        machine = Machine(devices, "", Library(runs.module()), Library(runtime), unusable=unusable)
        if rtx:
            machine = replace(machine, rtx=Library(runs_rtx.module()))
        return GpuBench(cuda, runtime, runs, machine, runs_rtx)

    def build(self, wish: PlanRequest, plan_cache: Path) -> None:
        """What the builder's child does, with the real builder and a library that plays its part."""
        self.build_for(wish.onnx, wish.key.target, wish.options, plan_cache, wish.device.properties.name)

    def build_for(
        self, onnx: Path, target: PlanTarget, options: BuildOptions, plan_cache: Path, device_name: str = ""
    ) -> Plan:
        """The same for whatever target, as `convoy build` does it ahead."""
        is_dynamic = options.profiles == "range"
        scratch = [4096] if is_dynamic else 4096
        body = {"onnx": str(onnx), "sizes": options.batch_sizes, "scratch": scratch, "dynamic": is_dynamic}
        kinds = {"int8": ("Int8",) * 3, "fp16": ("Half",) * 3, "fp32": ("Float",) * 3, "fp8": ("FP8",) * 3}
        scenario = Scenario(
            version=self.rtx.version if target.library == "tensorrt-rtx" else self.tensorrt.version,
            inputs=(FakeInput("images", (-1, 8, 8, 1)),),
            plan=json.dumps(body).encode(),
            data_types=kinds[options.precision],
        )
        job = BuildJob(onnx, plan_cache, options, target, device_name)
        return build_plan(job, scenario.module(), BuildWatch(lambda event: None))
