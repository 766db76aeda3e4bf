"""What hides behind what on a GPU, in virtual time: copies behind computing, and never computing behind computing."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest

from convoy.app.engines.batch import BatchResult
from convoy.app.engines.cuda.engine import CudaEngine
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.gpu_bench import KINDS, Batch, TwoEngines

COPY_NS = 8 * 2 * 64  # eight samples of two tensors of 64 bytes, a nanosecond each; as much back
COMPUTE_NS = 5000
BATCHES = 50


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(tmp_path: Path) -> TwoEngines:
    bench = TwoEngines(tmp_path, FakeCuda(FakeGpu(copy_ns_per_byte=1.0)))
    bench.onnxruntime.takes_ns = lambda samples, options: COMPUTE_NS
    bench.tensorrt.takes_ns = lambda samples: COMPUTE_NS
    return bench


def drive(engine: CudaEngine, batches: list[Batch]) -> list[BatchResult]:
    """The batches through all slots, each slot begun again as soon as its batch is finished."""
    free, flying, results = deque(engine._slots), deque(), []
    for batch in batches:
        if not free:
            slot, older = flying.popleft()
            results.append(engine._finish(slot, older.parts))
            free.append(slot)
        flying.append((free.popleft(), batch))
        engine._begin(flying[-1][0], batch.parts)
    results += [engine._finish(slot, older.parts) for slot, older in flying]
    assert all(batch.is_answered_by(result) for batch, result in zip(batches, results, strict=True))
    return results


def hidden_share(bench: TwoEngines, kind: str, slots: int) -> float:
    engine = bench.ready(kind, slots=slots)
    started_ns = bench.cuda.now_ns
    drive(engine, [bench.batch(8, seed=seed) for seed in range(BATCHES)])
    taken_ns = bench.cuda.now_ns - started_ns
    return 1 - (taken_ns - BATCHES * COMPUTE_NS) / (BATCHES * 2 * COPY_NS)


def test_two_slots_hide_nearly_all_copies_and_one_hides_none(bench: TwoEngines, kind: str) -> None:
    assert hidden_share(bench, kind, slots=2) > 0.8
    assert hidden_share(bench, kind, slots=1) == pytest.approx(0.0, abs=0.001)


def test_the_times_of_a_batch_are_the_devices(bench: TwoEngines, kind: str) -> None:
    engine = bench.ready(kind)
    alone, behind = drive(engine, [bench.batch(8), bench.batch(8)])
    assert alone.times.copy_in_ns == pytest.approx(COPY_NS, abs=2)
    assert alone.times.waited_ns == pytest.approx(0, abs=2)
    assert alone.times.compute_ns == pytest.approx(COMPUTE_NS, abs=2)
    assert alone.times.copy_out_ns >= COPY_NS - 2
    # The one copy engine first served the batch before it, and then that one computed.
    assert behind.times.copy_in_ns == pytest.approx(2 * COPY_NS, abs=2)
    assert behind.times.waited_ns == pytest.approx(COMPUTE_NS - COPY_NS, abs=2)
    assert behind.times.compute_ns == pytest.approx(COMPUTE_NS, abs=2)
