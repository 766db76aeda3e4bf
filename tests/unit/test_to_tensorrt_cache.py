"""The builder's cache: plans, kernel times, locks, and what is left when something goes wrong."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from convoy.export.tensorrt.build import build_plan
from convoy.export.tensorrt.files import sole_builder
from convoy.models.errors import JobError, UsageError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import BuildOptions, Plan, PlanPaths, timing_cache_path
from tests.support.fake_tensorrt import VERSIONS
from tests.support.tensorrt_bench import Bench


@pytest.fixture(params=VERSIONS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(tmp_path, request.param)


@pytest.mark.parametrize("name", ["plan", "record"])
def test_a_spoilt_plan_is_built_anew_and_the_reason_told(bench: Bench, name: str) -> None:
    first = bench.build()
    getattr(PlanPaths.of(bench.cache, first.record.key), name).write_bytes(b"{}")
    assert bench.build().data == first.data
    assert bench.scenario.builds == 2
    assert any("does not match" in note or "cannot be read" in note for note in bench.notes())
    assert isinstance(find_plan(bench.cache, first.record.key), Plan)


def test_what_is_built_beside_a_server_is_bounded_and_its_kernel_times_are_kept_from_others(bench: Bench) -> None:
    built = bench.build()
    path = timing_cache_path(bench.cache, built.record.key)
    for workspace_mb, beside_mb, used_mb in ((None, 700, 700), (64, 700, 64), (800, 700, 700), (None, 0, 1)):
        bench.options = BuildOptions("fp16", (1, 4), workspace_mb)
        shutil.rmtree(PlanPaths.of(bench.cache, built.record.key).folder)
        bench.scenario.pools = {}
        job = dataclasses.replace(bench.job(), beside_mb=beside_mb)
        built = build_plan(job, bench.scenario.module(), bench.watch())
        assert bench.scenario.pools == {"WORKSPACE": used_mb << 20}
        assert bench.scenario.timing_in_use == b"+", "what others have timed is of use"
        assert path.read_bytes() == b"+"
        assert f"built beside a server, with {used_mb} MiB of workspace at most" in built.record.notes


def test_kernel_times_are_kept_and_used_again(bench: Bench) -> None:
    built = bench.build()
    path = timing_cache_path(bench.cache, built.record.key)
    assert path.read_bytes() == b"+"
    bench.options = dataclasses.replace(bench.options, batch_sizes=(1, 8, 16))
    bench.build()
    assert bench.scenario.timing_in_use == b"+"
    assert path.read_bytes() == b"++"


def test_kernel_times_of_another_device_are_left_aside(bench: Bench, tmp_path: Path) -> None:
    bench.timing = tmp_path / "elsewhere" / "times.cache"
    bench.timing.parent.mkdir()
    bench.timing.write_bytes(b"of another device")
    bench.timing.chmod(0o644)
    bench.scenario.takes_timing = lambda known: known == b""
    built = bench.build()
    assert bench.timing.read_bytes() == b"+"
    assert any("another TensorRT or device" in note for note in built.record.notes)


def test_kernel_times_that_others_may_write_are_not_used(bench: Bench, tmp_path: Path) -> None:
    bench.timing = tmp_path / "times.cache"
    bench.timing.write_bytes(b"not to be trusted")
    bench.timing.chmod(0o666)
    bench.build()
    assert bench.scenario.timing_in_use == b""


def test_a_second_builder_waits_and_takes_what_the_first_has_built(bench: Bench) -> None:
    first = bench.build()
    lock = os.open(PlanPaths.of(bench.cache, first.record.key).lock, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def finish_after_5_s() -> None:
        if bench.now_s > 5:
            fcntl.flock(lock, fcntl.LOCK_UN)

    bench.while_waiting = finish_after_5_s
    assert bench.build() == first
    assert bench.scenario.builds == 1
    assert "another builder is at work on this plan; waiting for it" in bench.notes()
    os.close(lock)


def test_waiting_for_another_builder_ends_with_the_time_limit(bench: Bench) -> None:
    first = bench.build()
    bench.limit_s = 60
    paths = PlanPaths.of(bench.cache, first.record.key)
    with sole_builder(bench.cache, paths, bench.watch()), pytest.raises(JobError, match="the build exceeded 60 s"):
        bench.build()


def test_what_a_killed_builder_left_is_cleared_away(bench: Bench) -> None:
    paths = PlanPaths.of(bench.cache, bench.build().record.key)
    leftover = paths.folder / f".writing-{paths.stem}-x"
    leftover.write_bytes(b"half an eng")
    bench.build()
    assert not leftover.exists()


def test_a_missing_model_is_a_wrong_call(bench: Bench) -> None:
    bench.onnx.unlink()
    with pytest.raises(UsageError, match="cannot be read"):
        bench.build()


def test_a_full_disk_leaves_no_plan_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convoy.export.tensorrt.files.os.fsync", full)
    with pytest.raises(JobError, match="is full"):
        bench.build()
    assert bench.plans() == []
    assert not list(bench.cache.rglob(".writing-*"))
