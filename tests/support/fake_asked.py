"""The fakes as the proof's experiments need them: with the calls that no server makes.

What they answer proves nothing about a GPU; that an experiment comes to its end is what they are for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import onnxruntime

from tests.support.fake_cuda import FakeCuda, FakeGpu, Recording
from tests.support.fake_onnxruntime import FakeRuntime


class Asked(FakeCuda):
    """What experiments ask beyond what a server does; keeps every call's arguments."""

    cudaStreamCaptureMode = SimpleNamespace(
        cudaStreamCaptureModeGlobal=0, cudaStreamCaptureModeThreadLocal=1, cudaStreamCaptureModeRelaxed=2
    )
    cudaDeviceAttr = SimpleNamespace(cudaDevAttrComputeCapabilityMajor=75, cudaDevAttrComputeCapabilityMinor=76)

    def __init__(self, *gpus: FakeGpu) -> None:
        super().__init__(*gpus)
        self.used: dict[str, tuple[Any, ...]] = {}

    def _called(self, name: str, method: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.used[name] = args
        return super()._called(name, method, args)

    def _status_of_call(self, name: str, args: tuple[Any, ...]) -> int:
        return 0 if name in ("cudaDeviceReset", "cudaGetLastError") else super()._status_of_call(name, args)

    def cudaGetLastError(self) -> tuple[int]:
        return (self.sticky,)

    def cudaEventQuery(self, event: Any) -> tuple[int]:
        return (self.sticky,)

    def cudaEventCreateWithFlags(self, flags: int) -> tuple[int, Any]:
        return super().cudaEventCreateWithFlags(0)

    def cudaStreamBeginCapture(self, stream: Any, mode: int) -> tuple[int]:
        stream.recording = Recording(mode)
        return (0,)

    def cudaDeviceReset(self) -> tuple[int]:
        self.forget_everything()
        self.sticky = 0
        return (0,)


class AskedRuntime(FakeRuntime):
    """With the CPU's own sessions as well, against which experiments compare."""

    __file__ = __file__

    def InferenceSession(self, path: str, *given: Any, **options: Any) -> Any:
        if options.get("providers") == ["CPUExecutionProvider"]:
            return onnxruntime.InferenceSession(path, **options)
        return super().InferenceSession(path, *given, **options)
