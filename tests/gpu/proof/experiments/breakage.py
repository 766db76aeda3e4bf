"""A kernel that breaks the device's context: what every call says then, and what a reset mends.

Each in a process of its own, which is the whole point.
"""

from __future__ import annotations

import ctypes
from typing import Any

from tests.gpu.proof.experiment import Bench, Judgement, NotMeasurable, Ran
from tests.gpu.proof.experiments.cudart import NON_BLOCKING, TO_HOST, Runtime, open_runtime

_SOURCE = b"""
extern "C" __global__ void address() { *(volatile int *)8 = 1; }
extern "C" __global__ void trap() { asm volatile("trap;"); }
extern "C" __global__ void misaligned(char *memory) { *(volatile int *)(memory + 1) = 1; }
"""
_NBYTES = 1 << 20
_MARK = 9
_PORTABLE = 1


def launch(runtime: Runtime, kind: str) -> None:
    """Give the device one of the kernels above. Raises NotMeasurable without a compiler."""
    try:
        from cuda.bindings import driver, nvrtc

        program = _asked(nvrtc.nvrtcCreateProgram(_SOURCE, b"spoil.cu", 0, [], []))
    except (ImportError, OSError, RuntimeError) as error:  # its library is found at the first call
        raise NotMeasurable(f"no NVRTC to make a harmful kernel with ({error})") from error
    major, minor = (
        runtime.cudaDeviceGetAttribute(getattr(runtime.module.cudaDeviceAttr, f"cudaDevAttrComputeCapability{part}"), 0)
        for part in ("Major", "Minor")
    )
    _asked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    # Machine code, because the driver may be too old for the compiler's PTX.
    binary = b" " * _asked(nvrtc.nvrtcGetCUBINSize(program))
    _asked(nvrtc.nvrtcGetCUBIN(program, binary))
    module = _asked(driver.cuModuleLoadData(binary))
    kernel = _asked(driver.cuModuleGetFunction(module, kind.encode()))
    memory = runtime.cudaMalloc(_NBYTES)
    given = ((memory,), (ctypes.c_void_p,)) if kind == "misaligned" else 0
    _asked(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, given, 0))


def _asked(answer: tuple[Any, ...]) -> Any:
    status, *values = answer
    if int(status):
        raise NotMeasurable(f"the harmful kernel cannot be made or launched ({status!r})")
    return values[0] if values else None


def after_bad_kernel(bench: Bench, kind: str) -> None:
    """Every call's status after the kernel, the reset's, and what works then."""
    runtime = open_runtime()
    stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
    event = runtime.cudaEventCreateWithFlags(0)
    runtime.cudaEventRecord(event, stream)
    bench.step(f"launching {kind}")
    launch(runtime, kind)
    calls: tuple[tuple[Any, ...], ...] = (
        ("cudaDeviceSynchronize",),
        ("cudaGetLastError",),
        ("cudaSetDevice", 0),
        ("cudaStreamSynchronize", stream),
        ("cudaEventQuery", event),
        ("cudaMemGetInfo",),
        ("cudaMalloc", _NBYTES),
        ("cudaDeviceSynchronize",),
    )
    for index, call in enumerate(calls):
        bench.step(f"broken: {call[0]}")
        bench.figure(f"broken, {index + 1}. {call[0]}", runtime.status(*call))
    for name, *given in (("cudaDeviceReset",), ("cudaSetDevice", 0), ("cudaDeviceSynchronize",)):
        bench.step(f"healing: {name}")
        bench.figure(f"healing, {name}", runtime.status(name, *given))
    bench.step("using the new context")
    bench.figure("healed", works(runtime))
    # Last: nobody promises that these come back.
    for name, old in (("cudaEventQuery", event), ("cudaStreamSynchronize", stream)):
        bench.step(f"a handle of the old context: {name}")
        bench.figure(f"old handle, {name}", runtime.status(name, old))
    bench.figure("healed after all", works(runtime))


def works(runtime: Runtime) -> bool:
    """Whether memory of the device can be had, written and read back."""
    try:
        stream = runtime.cudaStreamCreateWithFlags(NON_BLOCKING)
        memory, host = runtime.cudaMalloc(_NBYTES), runtime.cudaHostAlloc(_NBYTES, _PORTABLE)
        runtime.cudaMemsetAsync(memory, _MARK, _NBYTES, stream)
        runtime.copy(host, memory, _NBYTES, TO_HOST, stream)
        runtime.cudaStreamSynchronize(stream)
        return ctypes.string_at(host, _NBYTES) == bytes([_MARK]) * _NBYTES
    except Exception:  # CudaError, by whatever call
        return False


def judge_reset(ran: Ran) -> Judgement:
    """Every waiting call fails until the reset, and after it CUDA works in this process again."""
    broken = {name: code for name, code in ran.figures.items() if name.startswith("broken")}
    said = ", ".join(f"{name.partition('. ')[2]} {code:.0f}" for name, code in broken.items())
    is_known = ran.figures["broken, 1. cudaDeviceSynchronize"] != 0
    is_healed = ran.figures.get("healed") == 1
    old = ", ".join(f"{name} {code:.0f}" for name, code in ran.figures.items() if name.startswith("old handle"))
    ended = f"; then {ran.how} after: {ran.steps[-1]}" if ran.ended == "crashed" else ""
    told = f"broken: {said}; {'healed' if is_healed else 'not healed'} by the reset; {old}{ended}"
    return Judgement.of(is_known and is_healed and ran.ended == "done", told)
