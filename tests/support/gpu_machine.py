"""A machine with GPUs that are not there: fake devices and libraries, and plans built by the real builder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from app.engines.cuda.device import Device
from app.engines.cuda.driver import Cuda
from app.engines.machine import Library, Machine
from app.gpu_jobs import PlanWish
from export.tensorrt.build import BuildJob, build_plan
from export.tensorrt.watch import BuildWatch
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.fake_onnxruntime import FakeRuntime
from tests.support.tensorrt_play import FakeInput, Scenario
from tests.support.tensorrt_run import Runs


@dataclass
class GpuBench:
    """The fakes behind one machine; scripts may be changed before and while a model is loaded."""

    cuda: FakeCuda
    onnxruntime: FakeRuntime
    tensorrt: Runs
    machine: Machine

    @staticmethod
    def of(*gpus: FakeGpu) -> GpuBench:
        cuda = FakeCuda(*gpus)
        bindings = Cuda(cuda)
        runtime, runs = FakeRuntime(cuda), Runs(cuda)
        devices = tuple(Device(bindings, index) for index in range(len(cuda.gpus)))
        return GpuBench(cuda, runtime, runs, Machine(devices, "", Library(runs.module()), Library(runtime)))

    def build(self, wish: PlanWish, plan_cache: Path) -> None:
        """What the builder's child does, with the real builder and a library that plays its part."""
        body = {"onnx": str(wish.onnx), "sizes": wish.options.batch_sizes, "scratch": 4096}
        kinds = {"int8": ("Int8",) * 3, "fp16": ("Half",) * 3, "fp32": ("Float",) * 3, "fp8": ("FP8",) * 3}
        scenario = Scenario(
            version=self.tensorrt.version,
            inputs=(FakeInput("images", (-1, 8, 8, 1)),),
            plan=json.dumps(body).encode(),
            data_types=kinds[wish.variant.precision],
        )
        job = BuildJob(wish.onnx, plan_cache, wish.options, wish.key.target, wish.device.properties.name)
        build_plan(job, scenario.module(), BuildWatch(lambda event: None))
