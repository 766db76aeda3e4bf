"""The driver layer: on a fake CUDA anywhere, and on the real device where there is one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda.device import Device, open_devices
from convoy.app.engines.cuda.driver import Cuda, CudaUnavailable, load_runtime
from convoy.app.engines.cuda.gather import NEVER_BYTES, Gather, measure_threshold
from convoy.app.engines.cuda.slots import DeviceSlot, Layout
from convoy.app.engines.parts import Part
from convoy.app.scheduling.slab import Slab
from convoy.models.spec import TensorSpec
from tests.support.fake_cuda import FakeCuda, FakeGpu

ROOT = Path(__file__).resolve().parents[2]
SAMPLES, SAMPLE_BYTES = 16, 150_528
IMAGES = TensorSpec("images", "UINT8", (SAMPLE_BYTES,))
# A network that does nothing: what was copied in is copied out.
ECHO = Layout.of([IMAGES], SAMPLES)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def runtime(request: pytest.FixtureRequest) -> Any:
    """The bindings: the module of CUDA, or a fake of it."""
    if request.param == "fake":
        fake = FakeCuda(FakeGpu(copy_ns=1000, copy_ns_per_byte=0.1))
        fake.is_library = True
        return fake
    try:
        open_devices()
    except CudaUnavailable as reason:
        pytest.skip(str(reason))
    return load_runtime()


@pytest.fixture
def device(runtime: Any) -> Device:
    found = Device(Cuda(runtime), 0) if isinstance(runtime, FakeCuda) else open_devices()[0][0]
    found.use()
    return found


@pytest.fixture
def slot(device: Device) -> Iterator[DeviceSlot]:
    one = DeviceSlot(device, ECHO, ECHO)
    yield one
    device.cuda.wait_for_stream(one.stream)
    one.close()


@pytest.fixture
def slab(device: Device) -> Iterator[Slab]:
    """Page-locked, as a server's is."""
    one = Slab(64 << 20)
    whole = one.reserve(one.capacity_bytes)
    assert whole is not None
    address = int(np.frombuffer(whole.view, np.uint8).__array_interface__["data"][0])
    device.cuda.pin(address, len(whole.view))
    one.free(whole.ref)
    yield one
    device.cuda.check_device()
    device.cuda.unpin(address)


def parts_in(slab: Slab, sizes: tuple[int, ...]) -> list[Part]:
    """Requests of so many random samples, each in a slot of its own."""
    chance, parts = np.random.default_rng(len(sizes)), []
    for samples in sizes:
        room = slab.reserve(samples * SAMPLE_BYTES)
        assert room is not None
        room.view[:] = chance.integers(0, 256, len(room.view), np.uint8).tobytes()
        parts.append(Part(samples, ((samples, SAMPLE_BYTES),), (room.view,), (), ()))
    return parts


def on_device(device: Device, slot: DeviceSlot, nbytes: int) -> bytes:
    """What lies in the slot's input, brought back by way of its staging."""
    device.cuda.wait_for_stream(slot.stream)
    device.cuda.copy_to_host(slot._host_in, slot.device_input(0), nbytes, slot.stream)
    device.cuda.wait_for_stream(slot.stream)
    return slot.staging(0)[:nbytes].tobytes()


@pytest.mark.parametrize("threshold_bytes", [0, NEVER_BYTES], ids=["copy engine", "host"])
@pytest.mark.parametrize("sizes", [(1,), (SAMPLES,), (1, 1, 1), (3, 1, 5), (1,) * SAMPLES])
def test_a_batch_arrives_whole_and_in_order(device, slot, slab, sizes, threshold_bytes) -> None:
    parts = parts_in(slab, sizes)
    Gather(device.cuda, threshold_bytes).copy_in(slot, parts)
    expected = b"".join(bytes(part.inputs[0]) for part in parts)
    assert on_device(device, slot, len(expected)) == expected


def test_memory_that_is_not_page_locked_goes_by_the_host(device, slot) -> None:
    parts = parts_in(Slab(8 << 20), (2, 3))
    Gather(device.cuda, 0).copy_in(slot, parts)
    expected = b"".join(bytes(part.inputs[0]) for part in parts)
    assert on_device(device, slot, len(expected)) == expected


def test_the_driver_takes_batched_copies(device, slot, slab) -> None:
    if device.cuda._batch_attributes is None:
        pytest.skip("these bindings are older than batched copies, or the driver refused one before")
    Gather(device.cuda, 0).copy_in(slot, parts_in(slab, (1, 2, 3)))
    device.cuda.wait_for_stream(slot.stream)
    assert device.cuda._batch_attributes is not None, "the driver refused cudaMemcpyBatchAsync"


def test_page_locking_twice_is_harmless(device, slab) -> None:
    room = slab.reserve(4096)
    assert room is not None
    address = int(np.frombuffer(room.view, np.uint8).__array_interface__["data"][0])
    device.cuda.pin(address, 4096)
    assert device.cuda.is_pinned(address, 4096)


def test_what_is_left_of_an_earlier_batch_is_cleared(device, slot, slab) -> None:
    Gather(device.cuda).copy_in(slot, parts_in(slab, (4,)))
    slot.clear_padding(1, 4)
    assert set(on_device(device, slot, 4 * SAMPLE_BYTES)[SAMPLE_BYTES:]) == {0}


def test_events_tell_the_order_and_the_time(device, slot, slab) -> None:
    cuda = device.cuda
    cuda.record(slot.begun, slot.stream)
    Gather(cuda).copy_in(slot, parts_in(slab, (SAMPLES,)))
    cuda.record(slot.copied_in, slot.stream)
    with device.turn(slot.stream, slot.computing, slot.computed):
        pass
    slot.copy_out(SAMPLES)
    cuda.record(slot.copied_out, slot.stream)
    cuda.wait_for_event(slot.copied_out)
    assert cuda.elapsed_ns(slot.begun, slot.copied_in) > 0
    assert cuda.elapsed_ns(slot.computing, slot.computed) >= 0
    assert cuda.elapsed_ns(slot.begun, slot.copied_out) >= cuda.elapsed_ns(slot.begun, slot.copied_in)


def test_copies_can_be_captured_and_replayed(device, slot, slab) -> None:
    cuda, parts = device.cuda, parts_in(slab, (2,))
    nbytes = parts[0].inputs[0].nbytes
    slot.staging(0)[:nbytes] = np.frombuffer(parts[0].inputs[0], np.uint8)
    graph = cuda.capture(slot.stream, lambda: slot.copy_staged_in(0, nbytes))
    assert set(on_device(device, slot, nbytes)) == {0}, "what is captured must not run"
    slot.staging(0)[:nbytes] = np.frombuffer(parts[0].inputs[0], np.uint8)
    cuda.launch_graph(graph, slot.stream)
    assert on_device(device, slot, nbytes) == bytes(parts[0].inputs[0])
    cuda.destroy_graph(graph)


def test_a_capture_that_is_abandoned_leaves_the_stream_usable(device, slot, slab) -> None:
    def give_up() -> None:
        slot.copy_staged_in(0, SAMPLE_BYTES)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        device.cuda.capture(slot.stream, give_up)
    parts = parts_in(slab, (1,))
    Gather(device.cuda).copy_in(slot, parts)
    assert on_device(device, slot, SAMPLE_BYTES) == bytes(parts[0].inputs[0])


def test_a_batch_may_be_waited_for_while_a_library_captures_in_another_thread(runtime, device, slot, slab) -> None:
    # ONNX Runtime captures so: for the whole process.
    captured = device.cuda.make_stream()
    parts, arrived = parts_in(slab, (2,)), []

    def serve() -> None:
        device.use()
        Gather(device.cuda).copy_in(slot, parts)
        device.cuda.record(slot.copied_in, slot.stream)
        device.cuda.wait_for_event(slot.copied_in)
        arrived.append(on_device(device, slot, 2 * SAMPLE_BYTES))

    (status,) = runtime.cudaStreamBeginCapture(captured, runtime.cudaStreamCaptureMode.cudaStreamCaptureModeGlobal)
    assert int(status) == 0
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    status, graph = runtime.cudaStreamEndCapture(captured)
    assert (int(status), arrived) == (0, [bytes(parts[0].inputs[0])])
    runtime.cudaGraphDestroy(graph)
    device.cuda.destroy_stream(captured)


def test_the_threshold_can_be_measured(device, slot) -> None:
    threshold = measure_threshold(device.cuda, slot, 0, SAMPLE_BYTES, SAMPLES)
    assert threshold == NEVER_BYTES or threshold % SAMPLE_BYTES == 0


def test_what_does_not_fit_is_refused_and_costs_nothing(device) -> None:
    before = device.cuda.free_bytes()
    with pytest.raises(EngineFailure, match="MiB must stay free"):
        device.check_room(1 << 50, "a giant")
    with pytest.raises(EngineFailure) as failure:
        device.cuda.allocate(1 << 50)
    assert failure.value.scope is FailureScope.MEMORY
    device.cuda.check_device()
    assert abs(device.cuda.free_bytes() - before) < 1 << 20


BREAK = """
from cuda.bindings import driver, nvrtc
from convoy.app.engines.batch import FailureScope, EngineFailure
from convoy.app.engines.cuda.device import open_devices

device = open_devices()[0][0]
device.use()
cuda = device.cuda
cuda.free(cuda.allocate(1 << 20))


def ask(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) > 1 else None


capability = device.properties.compute_capability.replace(".", "")
source = b'extern "C" __global__ void spoil() { *(volatile int *)8 = 1; }'
program = ask(nvrtc.nvrtcCreateProgram(source, b"spoil.cu", 0, [], []))
ask(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{capability}".encode()]))
# Machine code, because the driver may be too old for the compiler's PTX.
binary = b" " * ask(nvrtc.nvrtcGetCUBINSize(program))
ask(nvrtc.nvrtcGetCUBIN(program, binary))
module = ask(driver.cuModuleLoadData(binary))
kernel = ask(driver.cuModuleGetFunction(module, b"spoil"))
ask(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
try:
    cuda.check_device()
except EngineFailure as failure:
    assert failure.scope is FailureScope.DEVICE, failure
    print("broken:", failure)
else:
    raise AssertionError("the kernel did no harm")
try:
    device.ensure_works()
except EngineFailure as failure:
    assert failure.scope is FailureScope.DEVICE, failure
    assert device.lost
    print("lost:", failure)
"""


@pytest.mark.gpu
def test_a_broken_context_is_known_and_stays_so() -> None:
    """In a process of its own: it is not this one's context that breaks."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # its library is found at the first call
        pytest.skip(f"no NVRTC to make a harmful kernel with ({error})")
    done = subprocess.run([sys.executable, "-c", BREAK], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "broken: cudaDeviceSynchronize: an illegal memory access" in done.stdout
    assert "lost: " in done.stdout
