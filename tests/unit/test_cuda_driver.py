"""The calls that the house makes of CUDA: that they exist, what their errors mean, and what a device is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda import driver
from convoy.app.engines.cuda.captures import CaptureGate
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import CaptureDisturbed, Cuda, CudaUnavailable, probe_cuda
from tests.support.fake_cuda import (
    CONTEXT_IS_DESTROYED,
    ILLEGAL_ADDRESS,
    INSUFFICIENT_DRIVER,
    INVALID_VALUE,
    NO_DEVICE,
    OUT_OF_MEMORY,
    FakeCuda,
    FakeGpu,
)


def test_the_sticky_errors_are_those_of_the_real_bindings() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime")
    known = {int(error) for error in runtime.cudaError_t}
    assert known >= driver._STICKY
    texts = {code: runtime.cudaGetErrorName(runtime.cudaError_t(code))[1].decode() for code in driver._STICKY}
    assert texts[ILLEGAL_ADDRESS] == "cudaErrorIllegalAddress"
    # What a later call may well survive.
    harmless = ("MemoryAllocation", "InvalidValue", "ErrorNotReady", "StreamCapture", "HostMemory", "NotSupported")
    assert not [text for text in texts.values() if any(word in text for word in harmless)]


@pytest.mark.parametrize(
    ("status", "scope"),
    [
        (INVALID_VALUE, FailureScope.BATCH),
        (OUT_OF_MEMORY, FailureScope.MEMORY),
        (ILLEGAL_ADDRESS, FailureScope.DEVICE),
        (CONTEXT_IS_DESTROYED, FailureScope.DEVICE),
        (999, FailureScope.DEVICE),
    ],
)
def test_an_error_names_the_call_and_reaches_as_far_as_it_must(status: int, scope: FailureScope) -> None:
    fake = FakeCuda()
    fake.fail("cudaMalloc", status)
    with pytest.raises(EngineFailure, match=rf"cudaMalloc: .+ \(CUDA error {status}\)") as failed:
        Cuda(fake).allocate(100)
    assert failed.value.scope is scope


@pytest.mark.parametrize("status", [INSUFFICIENT_DRIVER, NO_DEVICE])
def test_without_a_driver_or_device_there_is_no_cuda(status: int) -> None:
    fake = FakeCuda()
    fake.driver_status = status
    with pytest.raises(CudaUnavailable, match="no usable NVIDIA driver: cudaGetDeviceCount: "):
        probe_cuda(fake)


def test_a_driver_without_devices_says_what_a_container_lacks() -> None:
    fake = FakeCuda()
    fake.gpus = ()
    with pytest.raises(CudaUnavailable, match="--gpus all"):
        probe_cuda(fake)


def test_bindings_that_are_missing_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CudaUnavailable, match=r"\[gpu\]"):
        driver.load_runtime()


def test_bindings_that_do_not_load_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(CudaUnavailable, match=r"libcudart\.so\.13.*\[gpu\]"):
        driver.load_runtime()


# Page-locked memory


# Captures


def test_a_thread_may_wait_while_a_library_captures_in_another() -> None:
    fake = FakeCuda()
    cuda = Cuda(fake)
    cuda.use(0)
    mine, captured, event = cuda.make_stream(), cuda.make_stream(), cuda.make_event()
    fake.capture_for_all(int(captured))

    def serve() -> None:
        cuda.use(0)
        cuda.wait_for_stream(mine)
        cuda.wait_for_event(event)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(serve).result()
    assert fake.captured(int(captured)) is not None


# Captures and what no capture survives


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.time, "sleep", lambda s: None)


DEVICE_WIDE = {
    "synchronise": lambda cuda, block: cuda.check_device(),
    "allocate and free": lambda cuda, block: cuda.free(cuda.allocate(100)),
    "allocate and free on the host": lambda cuda, block: cuda.free_host(cuda.allocate_host(100)),
    "lock pages": lambda cuda, block: cuda.pin(block.ctypes.data, 4096),
}


def in_a_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("what", DEVICE_WIDE)
def test_what_no_capture_survives_waits_for_its_end_and_on_other_devices_only_the_hosts_memory(
    what: str, device: int
) -> None:
    fake, block, done = FakeCuda(FakeGpu(), FakeGpu()), np.zeros(4096, np.uint8), threading.Event()
    cuda, threads = Cuda(fake), list[threading.Thread]()
    cuda.use(0)

    def other() -> None:
        cuda.use(device)
        DEVICE_WIDE[what](cuda, block)
        done.set()

    def captured() -> None:
        threads.append(in_a_thread(other))
        waits = device == 0 or "host" in what or "lock" in what
        # So long it would take a thread that did not wait; one that does is not there yet, however long this lasts.
        assert done.wait(0.05 if waits else 60) is not waits

    cuda.destroy_graph(cuda.capture(cuda.make_stream(), captured))
    (thread,) = threads  # nothing was tried again
    thread.join()
    assert done.is_set()
    assert fake.broken_captures == 0


def test_a_capture_that_somebody_came_into_is_made_again() -> None:
    fake = FakeCuda()
    cuda = Cuda(fake)
    cuda.use(0)
    stream, attempts, done = cuda.make_stream(), [], []

    def work() -> None:
        attempts.append(1)
        fake.enqueue(int(stream), lambda: done.append(1))
        if len(attempts) < 3:
            in_a_thread(lambda: fake.cudaDeviceSynchronize()).join()  # without the house's bindings
        if len(attempts) == 2:
            raise EngineFailure("the library noticed it by itself")

    graph = cuda.capture(stream, work)
    assert len(attempts) == 3
    cuda.launch_graph(graph, stream)
    cuda.wait_for_stream(stream)
    assert done == [1]


def test_attempts_to_capture_end() -> None:
    fake = FakeCuda()
    cuda = Cuda(fake)
    stream, attempts = cuda.make_stream(), []

    def work() -> None:
        attempts.append(1)
        fake.spoil_capture(int(stream))

    with pytest.raises(CaptureDisturbed, match=r"CUDA error 901"):
        cuda.capture(stream, work)
    assert len(attempts) == 3


@pytest.mark.parametrize("status", [900, 901])
def test_whoever_meets_a_capture_of_others_tries_again_and_nothing_is_broken(status: int, no_pauses: None) -> None:
    fake = FakeCuda()
    device = Device(Cuda(fake), 0)
    fake.fail("cudaDeviceSynchronize", status, status)
    device.ensure_works()
    fake.fail("cudaMalloc", status, status, status)
    address = device.cuda.allocate(100)
    fake.fail("cudaFree", status)
    device.cuda.free(address)
    assert fake.live.total() == 0
    fake.fail("cudaDeviceSynchronize", *[status] * 100)
    with pytest.raises(CaptureDisturbed) as failed:
        device.ensure_works()
    assert failed.value.scope is FailureScope.BATCH
    assert not device.lost


def test_a_failed_batch_beside_an_endless_capture_waits_at_least_for_its_own_streams(no_pauses: None) -> None:
    fake = FakeCuda()
    cuda = Cuda(fake)
    device, stream, done = Device(cuda, 0), cuda.make_stream(), []
    fake.enqueue(int(stream), lambda: done.append(1))
    fake.fail("cudaDeviceSynchronize", *[900] * 100)
    device.settle(EngineFailure("the library says: no"), stream)
    assert done == [1]


def until_captures_wait(gate: CaptureGate) -> None:
    while not gate._waiting:
        threading.Event().wait(0.001)


class Held:
    """A thread that is inside of a gate until it is told to leave."""

    def __init__(self, gate: CaptureGate) -> None:
        inside, self._left = threading.Event(), threading.Event()

        def hold() -> None:
            with gate.beside_others():
                inside.set()
                self._left.wait(60)

        self._thread = in_a_thread(hold)
        assert inside.wait(60)

    def leave(self) -> None:
        self._left.set()
        self._thread.join()


def capturing(gate: CaptureGate, order: list[str]) -> threading.Thread:
    """A thread whose capture waits for what is inside."""

    def capture() -> None:
        with gate.alone():
            order.append("capture")

    thread = in_a_thread(capture)
    until_captures_wait(gate)
    return thread


def entering(gate: CaptureGate, order: list[str]) -> threading.Thread:
    def enter() -> None:
        with gate.beside_others():
            order.append("newcomer")

    return in_a_thread(enter)


@pytest.mark.parametrize(
    ("patience_s", "within_s", "order"), [(60.0, 0.05, ["capture", "newcomer"]), (0.01, 60.0, ["newcomer", "capture"])]
)
def test_what_comes_after_a_waiting_capture_lets_it_go_first_but_not_for_ever(
    patience_s: float, within_s: float, order: list[str]
) -> None:
    gate, came = CaptureGate(patience_s), list[str]()
    held = Held(gate)
    threads = [capturing(gate, came), entering(gate, came)]
    threads[1].join(within_s)
    assert came == (["newcomer"] if order[0] == "newcomer" else [])
    held.leave()
    for thread in threads:
        thread.join()
    assert came == order


def test_who_is_inside_of_a_gate_waits_for_no_waiting_capture_of_any() -> None:
    gates, order = [CaptureGate(patience_s=60.0) for _ in range(2)], []
    others = Held(gates[1])
    captures: list[threading.Thread] = []

    def enter_both() -> None:
        with gates[0].beside_others():
            captures.extend(capturing(gate, order) for gate in gates)
            for gate in gates:
                with gate.beside_others():
                    order.append("inside")

    thread = in_a_thread(enter_both)
    thread.join(60)
    assert order[:2] == ["inside", "inside"]
    others.leave()
    for capture in captures:
        capture.join(60)
    assert order[2:] == ["capture", "capture"]


@pytest.mark.parametrize("index", [0, 1])
def test_a_capture_inside_of_any_devices_gate_is_a_bug(index: int) -> None:
    gates = CaptureGate(), CaptureGate()
    with gates[0].beside_others(), pytest.raises(RuntimeError, match="this is a bug"), gates[index].alone():
        pass


# A device's turns and its health


def test_a_device_that_is_lost_stays_lost_and_is_not_reset() -> None:
    fake, block = FakeCuda(), np.zeros(4096, np.uint8)
    cuda = Cuda(fake)
    device = Device(cuda, 0)
    device.ensure_works()
    assert not device.lost
    cuda.pin(block.ctypes.data, 4096)
    fake.sticky = ILLEGAL_ADDRESS
    for _ in range(2):
        with pytest.raises(EngineFailure, match="illegal memory access") as failed:
            device.ensure_works()
        assert failed.value.scope is FailureScope.DEVICE
        fake.sticky = 0  # whatever these bindings would say from now on
    assert "illegal memory access" in device.lost
