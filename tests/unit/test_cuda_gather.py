"""How a batch gets to a GPU: by the copy engine from where requests lie, or gathered by the host first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from convoy.app.engines.batch import EngineFailure, FailureScope
from convoy.app.engines.cuda import gather
from convoy.app.engines.cuda.engine import CudaEngine
from convoy.app.engines.cuda.gather import NEVER_BYTES
from tests.support.fake_cuda import ILLEGAL_ADDRESS, FakeCuda, FakeGpu
from tests.support.gpu_bench import KINDS, Batch, TwoEngines

ROW_BYTES = 64
OUTPUTS = 2  # each is one copy back


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    return TwoEngines(tmp_path)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ready(bench: TwoEngines, kind: str = "tensorrt", threshold_bytes: int = 0) -> CudaEngine:
    engine = bench.ready(kind)
    engine._gather.threshold_bytes = threshold_bytes
    bench.cuda.calls.clear()
    return engine


def pin(engine: CudaEngine, batch: Batch, *parts: int) -> Batch:
    for index in parts:
        for array in batch.sources[index]:
            assert engine.page_lock(array.data.cast("B"))
    return batch


def copies(bench: TwoEngines) -> tuple[int, int]:
    """Batched calls, and single copies to the device."""
    calls = bench.cuda.calls
    return calls["cudaMemcpyBatchAsync"], calls["cudaMemcpyAsync"] - OUTPUTS


def run(engine: CudaEngine, batch: Batch) -> None:
    assert batch.is_answered_by(engine.run(batch.parts))


@pytest.mark.parametrize(
    ("parts", "pinned", "expected"),
    [((2, 1, 3), (0, 1, 2), (2, 0)), ((5,), (0,), (0, 2)), ((2, 1, 3), (), (0, 2)), ((2, 1, 3), (0, 2), (0, 2))],
)
def test_the_copy_engine_takes_what_is_pinned_as_a_whole(
    bench: TwoEngines, kind: str, parts: tuple[int, ...], pinned: tuple[int, ...], expected: tuple[int, int]
) -> None:
    engine = ready(bench, kind)
    run(engine, pin(engine, bench.batch(*parts), *pinned))
    assert copies(bench) == expected


def test_each_input_goes_its_own_way(bench: TwoEngines) -> None:
    engine = ready(bench)
    batch = bench.batch(2, 1)
    for first, _ in batch.sources:
        engine.page_lock(first.data.cast("B"))
    run(engine, batch)
    assert copies(bench) == (1, 1)


def test_a_part_that_is_pinned_in_part_is_not_left_to_the_copy_engine(bench: TwoEngines) -> None:
    engine = ready(bench)
    batch = bench.batch(4, 1)
    pin(engine, batch, 1)
    for array in batch.sources[0]:
        engine.page_lock(array[:3].data.cast("B"))
    run(engine, batch)
    assert copies(bench) == (0, 2)


def test_parts_below_the_threshold_are_gathered_by_the_host(bench: TwoEngines) -> None:
    engine = ready(bench, threshold_bytes=2 * ROW_BYTES)
    run(engine, pin(engine, bench.batch(2, 3), 0, 1))
    assert copies(bench) == (2, 0)
    bench.cuda.calls.clear()
    run(engine, pin(engine, bench.batch(3, 1), 0, 1))
    assert copies(bench) == (0, 2)


def test_a_driver_without_batched_copies_is_asked_once(tmp_path: Path) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(batched_copies=False))
    engine = bench.open("tensorrt")
    engine.warm_up()
    assert bench.cuda.calls["cudaMemcpyBatchAsync"] == 1
    engine._gather.threshold_bytes = 0
    bench.cuda.calls.clear()
    for _ in range(3):
        run(engine, pin(engine, bench.batch(2, 1, 3), 0, 1, 2))
    assert copies(bench) == (0, 3 * 3 * 2 + (3 - 1) * OUTPUTS)


def test_a_batched_copy_that_finds_the_device_lost_is_not_tried_again(bench: TwoEngines) -> None:
    engine = ready(bench)
    bench.cuda.fail("cudaMemcpyBatchAsync", ILLEGAL_ADDRESS)
    with pytest.raises(EngineFailure, match="cudaMemcpyBatchAsync") as failed:
        engine.run(pin(engine, bench.batch(2, 1), 0, 1).parts)
    assert failed.value.scope is FailureScope.DEVICE
    assert copies(bench)[1] <= 0


# The threshold


@pytest.mark.parametrize(
    ("host_ns_per_byte", "samples"),
    # Eight samples in r copies cost r microseconds; gathered, one and what the host takes for 512 bytes.
    [(0.0, None), (1e-3, 8), (1.0, 8), (3.0, 4), (6.5, 2), (20.0, 1)],
)
def test_the_threshold_is_where_the_copy_engine_begins_to_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_ns_per_byte: float, samples: int | None
) -> None:
    bench = TwoEngines(tmp_path, FakeCuda(FakeGpu(copy_ns=1000.0)))
    host_ns = 0.0
    join = gather._join

    def slow_join(views: list[memoryview], target: np.ndarray) -> int:
        nonlocal host_ns
        nbytes = join(views, target)
        host_ns += nbytes * host_ns_per_byte
        return nbytes

    monkeypatch.setattr(gather, "_join", slow_join)
    clock = SimpleNamespace(perf_counter_ns=lambda: bench.cuda.now_ns + host_ns)
    monkeypatch.setattr(gather, "time", clock)
    expected = NEVER_BYTES if samples is None else samples * ROW_BYTES
    assert bench.ready("tensorrt")._gather.threshold_bytes == expected
