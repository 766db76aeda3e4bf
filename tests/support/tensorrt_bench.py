"""A bench for the TensorRT builder: one model, one cache, virtual time, and the library that plays a scenario."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from convoy.app.engines.tensorrt_library import TENSORRT
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.plans import BuildEvent, BuildOptions, Gpu, Plan
from tests.support.tensorrt_play import Scenario

H200 = Gpu("NVIDIA H200", "9.0")


class Bench:
    def __init__(self, folder: Path, version: str) -> None:
        self.scenario = Scenario(version=version)
        self.onnx = folder / "fp16.onnx"
        self.onnx.write_bytes(b"a graph")
        self.cache = folder / "cache"
        self.options = BuildOptions("fp16", (1, 8))
        self.timing: Path | None = None
        self.limit_s: float | None = None
        self.now_s = 0.0
        self.while_waiting: Callable[[], None] = lambda: None
        self.events: list[BuildEvent] = []

    def build(self) -> Plan:
        return build_plan(self.job(), self.scenario.module(), self.watch())

    def job(self) -> BuildJob:
        module = self.scenario.module()
        target = resolve_target(TENSORRT, module, (), self.options, H200)
        return BuildJob(self.onnx, self.cache, self.options, target, H200.name, self.timing)

    def watch(self) -> BuildWatch:
        return BuildWatch(self.events.append, self.limit_s, lambda: self.now_s, self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.while_waiting()

    def spend(self, seconds: float) -> None:
        self.now_s += seconds

    def notes(self) -> list[str]:
        return [event.text for event in self.events if event.kind == "note"]

    def plans(self) -> list[str]:
        return sorted(path.suffix for path in self.cache.rglob("*") if path.suffix in (".plan", ".json"))
