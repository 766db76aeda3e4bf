"""What both GPU engines do with memory, events and failures, on a fake GPU that forgives nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda import engine as cuda_engine
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.cuda.driver import CaptureDisturbed, Handle
from convoy.app.engines.cuda.engine import CudaEngine
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from tests.support.fake_cuda import ILLEGAL_ADDRESS, INVALID_VALUE, FakeCuda, FakeGpu
from tests.support.gpu_bench import KINDS, Batch, TwoEngines

GIVES_BACK = ("cudaFree", "cudaFreeHost", "cudaStreamDestroy", "cudaEventDestroy", "cudaGraphDestroy")


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    return TwoEngines(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# Memory


def test_batches_allocate_nothing_on_the_device(bench: TwoEngines, kind: str) -> None:
    engine = bench.ready(kind)
    bench.runs_right(engine, 1)
    allocations, live = bench.cuda.allocations, bench.cuda.live
    for samples in ((1,), (2, 1), (4, 4), (3,), (5, 1, 2)) * 5:
        assert bench.runs_right(engine, *samples)
    assert (bench.cuda.allocations, bench.cuda.live) == (allocations, live)


def attempt(bench: TwoEngines, kind: str) -> None:
    engine = bench.open(kind)
    try:
        engine.warm_up()
        assert bench.runs_right(engine, 1, 1)
    finally:
        engine.close()


def test_whichever_call_fails_nothing_is_kept(tmp_path: Path, kind: str) -> None:
    """Every call of opening, warming up, running and closing fails once."""
    bench = TwoEngines(tmp_path, max_batch_size=2)
    attempt(bench, kind)
    cuda = bench.cuda
    number, survived, messages = 0, set(), []
    while True:
        number += 1
        cuda.calls.clear()
        cuda.failed_call, cuda.fails_at = "", number
        try:
            attempt(bench, kind)
            survived.add(cuda.failed_call)
        except (EngineFailure, BundleError) as failure:
            messages.append(str(failure))
            assert cuda.failed_call in messages[-1]
        if not cuda.failed_call:
            break
        cuda.fails_at = None
        left = cuda.live
        if cuda.failed_call in (*GIVES_BACK, "cudaGraphExecDestroy"):
            # What could not be given back is all that is left; it is the fake's alone to forget it.
            assert left.total() == 1, (cuda.failed_call, left)
            cuda.forget_everything()
        assert cuda.live.total() == 0, (number, cuda.failed_call, left)
    assert number > 80
    assert not any("\n" in message for message in messages)
    # Without a graph and without its speed, or in closing; nothing else may pass in silence.
    own = {"cudaStreamBeginCapture", "cudaGraphInstantiate"} if kind == "tensorrt" else set()
    graphs = own | {"cudaStreamEndCapture"}  # a library's capture that broke is made again
    assert survived <= {
        "",
        "cudaSetDevice",
        "cudaDeviceSynchronize",
        "cudaMemcpyBatchAsync",
        "cudaGraphExecDestroy",
        *GIVES_BACK,
        *graphs,
    }


def test_without_room_the_engine_is_refused_and_says_how_much_it_lacks(tmp_path: Path, kind: str) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(FakeGpu(total_bytes=(256 << 20) + 200_000)), width=4096)
    with pytest.raises(
        EngineFailure, match=r"needs \d+ MiB on cuda:0 and 256 MiB must stay free, but \d+ MiB"
    ) as failed:
        bench.open(kind)
    assert failed.value.scope is FailureScope.MEMORY
    assert bench.cuda.live.total() == 0


def test_a_tensor_of_free_size_is_refused_by_name(bench: TwoEngines, kind: str) -> None:
    with pytest.raises(BundleError, match="'INPUT0' has no fixed size"):
        bench.open(kind, inputs=(TensorSpec("INPUT0", "INT32", (-1,)), bench.inputs[1]))


# Events: what is missing must show


def test_the_fake_computes_rightly_in_either_order(tmp_path: Path, kind: str) -> None:
    for interleaves in (False, True):
        bench = TwoEngines(tmp_path, FakeCuda(interleaves=interleaves))
        assert two_batches_at_once_are_right(bench, bench.ready(kind))


def at_once(
    bench: TwoEngines, engine: CudaEngine, batches: Sequence[Batch], meanwhile: Callable[[], None]
) -> list[bool]:
    """Which batches are answered rightly, of as many as the engine takes at once.

    All of them are on the device before any is waited for; `meanwhile` is called then, and the latest ends first.
    """
    wait, here, last = bench.bindings.wait_for_event, threading.local(), len(batches) - 1
    begun, ended = ([threading.Event() for _ in batches] for _ in (0, 1))

    def wait_in_turn(event: Handle) -> None:
        number = getattr(here, "number", None)  # of another thread, None
        if number is not None and not begun[number].is_set():
            begun[number].set()
            if number == last:
                meanwhile()
            else:
                assert ended[number + 1].wait(60)
        wait(event)

    def serve(number: int) -> bool:
        assert number == 0 or begun[number - 1].wait(60)
        here.number = number
        try:
            return batches[number].is_answered_by(engine.run(batches[number].parts))
        finally:
            ended[number].set()

    with patch.object(bench.bindings, "wait_for_event", wait_in_turn), ThreadPoolExecutor(len(batches)) as threads:
        return list(threads.map(serve, range(len(batches))))


def two_batches_at_once_are_right(bench: TwoEngines, engine: CudaEngine) -> bool:
    stale, batches = ([bench.batch(*one, seed=sum(one)) for one in both] for both in (((4, 3), (2, 4)), ((3, 1), (2,))))
    at_once(bench, engine, stale, nothing)  # else what is stale is right by chance
    return all(at_once(bench, engine, batches, nothing))


def nothing(*args: object) -> None:
    pass


def test_a_stream_that_does_not_wait_gives_wrong_answers(tmp_path: Path, kind: str) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(interleaves=True))
    engine = bench.ready(kind)
    bench.bindings.make_stream_wait = nothing  # type: ignore[method-assign]
    assert not two_batches_at_once_are_right(bench, engine)


def test_a_batch_that_finds_no_free_slot_spoils_none_that_is_under_way(bench: TwoEngines, kind: str) -> None:
    engine = bench.ready(kind)
    third, has_begun = bench.batch(3, seed=3), threading.Event()
    record = bench.bindings.record

    def note_the_third(event: Handle, stream: Handle) -> None:
        if threading.current_thread() is extra:
            has_begun.set()
        record(event, stream)

    def begin_a_third() -> None:
        extra.start()
        assert not has_begun.wait(0.2)

    third_is_right: list[bool] = []
    extra = threading.Thread(target=lambda: third_is_right.append(third.is_answered_by(engine.run(third.parts))))
    bench.bindings.record = note_the_third  # type: ignore[method-assign]
    batches = [bench.batch(3, seed=seed) for seed in range(engine.info.slots)]
    assert all(at_once(bench, engine, batches, begin_a_third))
    extra.join(60)
    assert third_is_right == [True]


@pytest.mark.parametrize("is_spoilt", [False, True])
def test_a_request_is_read_where_it_lies_until_its_answer_is_there(
    bench: TwoEngines, kind: str, monkeypatch: pytest.MonkeyPatch, *, is_spoilt: bool
) -> None:
    monkeypatch.setattr(cuda_engine, "measure_threshold", lambda *_: 0)  # the copy engine wins
    engine = bench.ready(kind)
    batch = bench.batch(3, seed=1)
    for array in batch.sources[0]:
        assert engine.page_lock(array.data.cast("B"))

    def spoil_it() -> None:
        batch.sources[0][0][:] = 0

    assert at_once(bench, engine, [batch], spoil_it if is_spoilt else nothing) == [not is_spoilt]


# Threads


# Captures beside others' work


def test_engines_are_opened_captured_and_closed_beside_each_other(tmp_path: Path) -> None:
    bench = TwoEngines(tmp_path, max_batch_size=4)
    serving, over = bench.ready("tensorrt"), threading.Event()

    def serve() -> Iterator[bool]:
        while not over.is_set():
            yield bench.runs_right(serving, 3)
            bench.device.settle(EngineFailure("a batch that failed"))

    def open_and_close(kind: str) -> Iterator[bool]:
        for _ in range(6):
            engine = bench.ready(kind)
            yield bench.runs_right(engine, 2, 1)
            engine.close()

    with ThreadPoolExecutor(5) as pool:
        served = pool.submit(lambda: all(serve()))
        opened = list(pool.map(lambda kind: all(open_and_close(kind)), (*KINDS, *KINDS)))
        over.set()
    assert opened == [True] * 4
    assert served.result()
    assert bench.cuda.broken_captures == 0


def test_a_spinning_core_is_spent_on_waiting_only_where_there_are_enough(tmp_path: Path, kind: str) -> None:
    for sleeps in (True, False):
        bench = TwoEngines(tmp_path)
        bench.device = Device(bench.bindings, 0, sleeps=sleeps)
        engine = bench.ready(kind)
        bench.cuda.spun = 0
        assert bench.runs_right(engine, 3)
        assert bench.cuda.spun == (0 if sleeps else 1)
        engine.close()


# Batches that meet somebody's capture


@pytest.mark.parametrize("status", [900, 901])
@pytest.mark.parametrize("call", ["cudaMemcpyAsync", "cudaEventRecord", "cudaEventSynchronize"])
def test_a_batch_that_met_a_capture_is_run_again_and_is_right(
    tmp_path: Path, kind: str, call: str, status: int
) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(interleaves=True))
    engine = bench.ready(kind)
    bench.cuda.fail(call, status)
    assert bench.runs_right(engine, 2, 1)
    bench.cuda.fail(call, INVALID_VALUE)
    with pytest.raises(EngineFailure, match=f"{call}: invalid argument"):
        engine.run(bench.batch(2, 1).parts)


def complain_of_a_capture(bench: TwoEngines, times: int) -> list[int]:
    """The next runs of ONNX Runtime fail because of a capture; gives the batches that it was asked for."""
    asked: list[int] = []

    def complain(arrays: dict[str, np.ndarray]) -> None:
        asked.append(1)
        if len(asked) <= times:
            raise RuntimeError(
                "CUDNN failure: CUDA failure 901: operation failed due to a previous error during capture"
            )

    bench.onnxruntime.spoils = complain
    return asked


@pytest.mark.parametrize("graphs", [True, False])
def test_a_library_that_met_a_capture_is_asked_once_more(bench: TwoEngines, graphs: bool) -> None:
    engine = bench.ready("onnxruntime", graphs=graphs)
    asked = complain_of_a_capture(bench, times=1)
    assert bench.runs_right(engine, 3, 2)
    assert len(asked) == 2


def test_a_batch_is_not_run_again_and_again(bench: TwoEngines) -> None:
    engine = bench.ready("onnxruntime")
    for _ in range(engine.info.slots):
        asked = complain_of_a_capture(bench, times=2)
        with pytest.raises(CaptureDisturbed) as failed:
            engine.run(bench.batch(3).parts)
        assert failed.value.scope is FailureScope.BATCH
        assert len(asked) == 2
    # It would wait for ever, had each of them kept its slot.
    assert bench.runs_right(engine, 3)


# Failures of a batch


def spoil(bench: TwoEngines, kind: str, how: Callable[[], None]) -> None:
    """Every batch with a number above 999 fails in the library's own way, or as `how` says."""

    def is_poisonous(arrays: dict[str, np.ndarray]) -> bool:
        found = any(bool((array > 999).any()) for array in arrays.values())
        if found:
            how()
        return found

    def raise_if_poisonous(arrays: dict[str, np.ndarray]) -> None:
        if is_poisonous(arrays):
            raise RuntimeError("Non-zero status code returned while running Gather node\nand a second line")

    bench.onnxruntime.spoils, bench.tensorrt.spoils = raise_if_poisonous, is_poisonous


def poisoned(bench: TwoEngines) -> list:
    batch = bench.batch(2, 1)
    batch.sources[1][0][0, 3] = 1000
    return batch.parts


def open_without_graphs(bench: TwoEngines, kind: str) -> CudaEngine:
    if kind == "onnxruntime":
        return bench.ready(kind, graphs=False)
    return bench.ready(kind, captures="nobody")


def test_a_batch_that_breaks_the_device_takes_every_engine_with_it(bench: TwoEngines, kind: str) -> None:
    def break_device() -> None:
        bench.cuda.sticky = ILLEGAL_ADDRESS

    spoil(bench, kind, break_device)
    engine, neighbour = open_without_graphs(bench, kind), bench.ready("tensorrt")
    with pytest.raises(EngineFailure, match="illegal memory access") as failed:
        engine.run(poisoned(bench))
    assert failed.value.scope is FailureScope.DEVICE
    for one in (engine, neighbour):
        with pytest.raises(EngineFailure) as failed:
            one.run(bench.batch(1).parts)
        assert failed.value.scope is FailureScope.DEVICE
        one.close()
    # Closing a library's session would have ended the process.
    assert bench.onnxruntime.terminated == 0
    with pytest.raises(EngineFailure) as failed:
        bench.device.ensure_works()
    assert failed.value.scope is FailureScope.DEVICE


def test_an_engine_that_nobody_asked_since_its_device_was_lost_is_not_closed(bench: TwoEngines, kind: str) -> None:
    idle = bench.ready(kind)
    live = bench.cuda.live
    bench.cuda.sticky = ILLEGAL_ADDRESS
    idle.close()
    del idle
    assert bench.cuda.live == live
    assert bench.onnxruntime.terminated == 0
    assert "illegal memory access" in bench.device.lost


def test_a_library_that_does_not_notice_is_told_by_the_device(bench: TwoEngines, kind: str) -> None:
    engine = bench.ready(kind)
    # Whatever the first call says, the device itself knows better.
    bench.cuda.fail("cudaEventSynchronize", INVALID_VALUE)
    bench.cuda.fail("cudaDeviceSynchronize", ILLEGAL_ADDRESS)
    with pytest.raises(EngineFailure, match=r"invalid argument .*; the device is lost: .*illegal memory") as failed:
        engine.run(bench.batch(2).parts)
    assert failed.value.scope is FailureScope.DEVICE


def test_a_failure_holds_nothing_of_a_closed_engine_when_it_is_gone(bench: TwoEngines, kind: str) -> None:
    spoil(bench, kind, nothing)
    engine = open_without_graphs(bench, kind)
    with pytest.raises(EngineFailure):
        engine.run(poisoned(bench))
    engine.close()
    del engine
    # No cycle of a failure and its own frames: memory on a GPU cannot wait for the garbage collector.
    assert bench.cuda.live.total() == 0


def test_locking_pages_of_memory_that_cannot_be_locked_is_no_failure(bench: TwoEngines, kind: str) -> None:
    engine, block = bench.ready(kind), np.zeros(4096, np.uint8)
    bench.cuda.fail("cudaHostRegister", 1)
    assert not engine.page_lock(block.data)
    assert engine.page_lock(block.data)
    assert engine.page_lock(block.data)


@pytest.mark.parametrize("after", ["open", "closed", "lost"])
def test_pages_that_were_unlocked_are_not_believed_to_be_locked(bench: TwoEngines, kind: str, after: str) -> None:
    engine, block = bench.ready(kind), np.zeros(4096, np.uint8)
    address = block.ctypes.data
    for _ in range(2):  # another block at the same address, which is locked and forgotten in the same way
        assert engine.page_lock(block.data)
        assert engine._cuda.is_pinned(address, 4096)
        if after == "closed":
            engine.close()
        if after == "lost":
            bench.cuda.sticky = ILLEGAL_ADDRESS
        engine.page_unlock(block.data)
        engine.page_unlock(block.data)
        assert not engine._cuda.is_pinned(address, 1)
        bench.cuda.sticky = 0
    assert bench.cuda.calls["cudaHostRegister"] == 2
    assert bench.cuda.calls["cudaHostUnregister"] == 2
