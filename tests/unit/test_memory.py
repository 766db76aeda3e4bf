"""How large a batch may be, with memory that is told and not there."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.app.engines.base import run_arrays
from convoy.app.engines.batch import EngineFailure
from convoy.app.engines.cpu import cpu_budget
from convoy.app.engines.memory import (
    MOST_SAMPLES,
    available_bytes,
    check_batch,
    give_back_freed,
    growing_sizes,
    peak_resident_bytes,
    resident_bytes,
    sample_bytes,
)
from convoy.app.engines.onnxruntime import OnnxRuntimeCpuEngine
from convoy.app.engines.staged import StagingBuffer
from convoy.models.errors import BundleError
from convoy.models.spec import TensorSpec
from tests.support import onnx_models

MIB = 1 << 20
IMAGE = TensorSpec("x", "UINT8", (1024, 1024))


def machine(tmp_path: Path, *, free_kib: int = 1 << 20, group: str = "0::/", **numbers: str) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {free_kib} kB\n")
    (proc / "self" / "cgroup").write_text(f"1:name=systemd:/x\n{group}\n")
    for path, text in numbers.items():
        file = cgroup / path.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return proc, cgroup


GROUPS = {
    "the least of the machine and every group around the process": (
        100 * MIB,
        {"group": "0::/pod/box", "pod__box__memory_DOT_max": "max", "pod__box__memory_DOT_current": "5",
         "pod__memory_DOT_max": str(300 * MIB), "pod__memory_DOT_current": str(250 * MIB),
         "pod__memory_DOT_stat": f"anon 1\ninactive_file {50 * MIB}\n"},
    ),
    "the older kind of group": (
        0,
        {"group": "4:memory:/box", "memory__box__memory_DOT_limit_in_bytes": str(64 * MIB),
         "memory__box__memory_DOT_usage_in_bytes": str(80 * MIB)},
    ),
    "the machine, without a group": (7 << 10, {"free_kib": 7}),
}  # fmt: skip


@pytest.mark.parametrize(("available", "told"), GROUPS.values(), ids=GROUPS)
def test_what_is_available(tmp_path: Path, available: int, told: dict[str, Any]) -> None:
    assert available_bytes(*machine(tmp_path, **told)) == available
    assert available_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_a_control_group_of_either_kind_limits_the_cores(
    tmp_path: Path, files: dict[str, str], cores: int | None
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert cpu_budget(tmp_path) == (cores or cpu_budget(tmp_path / "none"))


def test_strings_and_free_sizes_count_as_little() -> None:
    assert sample_bytes([TensorSpec("s", "BYTES", (3,)), TensorSpec("f", "FP32", (-1, 2)), IMAGE]) == 3 + 8 + MIB


@given(st.integers(1, 1 << 31), st.integers(0, 1 << 40))
def test_the_batch_that_is_named_as_the_largest_is_allowed_and_the_next_is_not(asked: int, free: int) -> None:
    def verdict(samples: int) -> str:
        try:
            check_batch([IMAGE], [], samples, lambda: free)
        except BundleError as error:
            return str(error)
        return ""

    words = verdict(asked)
    if not words:
        assert asked <= MOST_SAMPLES
        assert asked * MIB <= free
    elif "the tensors of one sample take 1.0 MiB" in words:
        assert verdict(1)
    else:
        room = int(words.rpartition("use at most ")[2].partition(",")[0])
        assert asked > room
        assert not verdict(room)
        assert verdict(room + 1)


class Pretended:
    """A process that grows with each batch as it is told, on a machine with so much memory."""

    def __init__(self, free: int, each: int, fixed: int = 0) -> None:
        self.free, self.each, self.fixed, self.used = free, each, fixed, 0

    def run(self, largest: int) -> list[int]:
        ran = []
        for size in growing_sizes(largest, available=lambda: self.free - self.used, resident=lambda: self.used):
            self.used = max(self.used, self.fixed + size * self.each)
            assert self.used <= self.free, "it would have been killed"
            ran.append(size)
        return ran


def test_a_batch_that_fits_by_far_is_run_after_a_few_small_ones_and_one_that_may_just_fit_in_steps() -> None:
    assert Pretended(8 << 30, MIB).run(64) == [1, 2, 4, 8, 64]
    assert Pretended(8 << 30, 0).run(1) == [1]
    assert Pretended(8 << 30, MIB).run(3) == [1, 2, 3]
    assert Pretended(1000 * MIB, 10 * MIB).run(64) == [1, 2, 4, 8, 16, 32, 64]


def test_one_that_does_not_fit_is_never_run_and_a_size_is_named_that_is() -> None:
    with pytest.raises(EngineFailure, match=r"max_batch_size 4096 is too large .* a sample takes 10\.0 MiB") as refused:
        Pretended(1000 * MIB, 10 * MIB).run(4096)
    room = int(str(refused.value).rpartition("use at most ")[2].partition(",")[0])
    assert 48 <= room <= 100
    Pretended(1000 * MIB, 10 * MIB).run(room)


@given(st.integers(1, 1 << 12), st.integers(0, 1 << 20), st.integers(0, 1 << 28))
def test_whatever_a_sample_costs_the_process_is_not_killed(largest: int, each_kib: int, fixed: int) -> None:
    process = Pretended(2 << 30, each_kib << 10, fixed)
    if process.fixed + process.each > process.free:
        return  # nothing is known before the first
    try:
        assert process.run(largest)[-1] == largest
    except EngineFailure as failure:  # as it may be, in words
        if "is too large" not in str(failure):
            raise


def test_an_engine_refuses_before_it_allocates(tmp_path: Path) -> None:
    model = onnx_models.identity(tmp_path / "m" / "1" / "model.onnx", "FP32", ("batch", 1 << 20))
    tensors = [TensorSpec(name, "FP32", (1 << 20,)) for name in ("x", "y")]
    with pytest.raises(BundleError, match="at most"):
        OnnxRuntimeCpuEngine(model, inputs=(tensors[0],), outputs=(tensors[1],), max_batch_size=(1 << 31) - 1,
                             precision="fp32", threads=1)  # fmt: skip


def test_models_that_do_not_run_hold_their_weights_and_share_what_lies_between(tmp_path: Path) -> None:
    """Each of them takes 64 MiB while it runs its largest batch."""
    one = TensorSpec("x", "FP32", (1,)), TensorSpec("y", "FP32", (1,))
    path = onnx_models.wide(tmp_path / "model.onnx")

    def opened() -> OnnxRuntimeCpuEngine:
        engine = OnnxRuntimeCpuEngine(
            path, inputs=one[:1], outputs=one[1:], max_batch_size=16, precision="fp32", threads=1
        )
        engine.warm_up()
        return engine

    engines = [opened()]
    before = resident_bytes()
    engines += [opened() for _ in range(4)]
    assert resident_bytes() - before < 128 * MIB
    for engine in engines:
        arrays = {"x": np.full((16, 1), 2.0, np.float32)}
        np.testing.assert_allclose(run_arrays(engine, arrays)["y"], np.full((16, 1), 2.0), rtol=1e-3)
        engine.close()


def test_a_run_of_zeros_takes_no_memory_for_strings() -> None:
    staging = StagingBuffer(IMAGE, 4 * MIB)
    tracemalloc.start()
    try:
        staging.clear((4, *IMAGE.shape))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_what_has_been_freed_goes_back_and_the_most_is_remembered() -> None:
    give_back_freed()  # harmless at any time
    peak = peak_resident_bytes()
    assert peak >= resident_bytes() > 0
    assert peak_resident_bytes(Path("nowhere")) == 0
