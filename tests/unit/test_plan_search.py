"""Which plan somebody who serves gets: for whom it may be, how large, and what is said where there is none."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.models.bundle import FileRecord, Precision
from convoy.models.plan_cache import PlanQuery, records_in, search_plan
from convoy.models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Gpu,
    LibraryName,
    NoPlan,
    Plan,
    PlanPaths,
    PlanRecord,
    PlanTarget,
    plan_key,
    tensorrt_target,
)
from convoy.models.records import to_jsonable

ONNX = "a" * 64
VERSION = "1.7.1.116"
L4 = Gpu("NVIDIA L4", "8.9")
RANGE = BuildOptions("fp16", (1, 2, 4, 8), profiles="range")


def target(*capabilities: str, library: LibraryName = "tensorrt-rtx", version: str = VERSION) -> PlanTarget:
    return PlanTarget(library, version, capabilities)


def stored(cache: Path, where: PlanTarget, options: BuildOptions = RANGE) -> PlanPaths:
    """A plan as the builder leaves it; its bytes are its target's name."""
    key = plan_key(ONNX, where, options)
    paths, data = PlanPaths.of(cache, key), str(where).encode()
    paths.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    file = FileRecord(hashlib.sha256(data).hexdigest(), len(data))
    record = PlanRecord(SCHEMA_VERSION, key, options, file, (), None, 0.2, "", "fp16.onnx", "2026-11-21T00:00:00+00:00")
    for path, raw in ((paths.plan, data), (paths.record, json.dumps(to_jsonable(record)).encode())):
        path.write_bytes(raw)
        path.chmod(0o644)
    return paths


def query(gpu: Gpu = L4, *, largest: int = 8, precision: Precision = "fp16", version: str = VERSION) -> PlanQuery:
    sizes = tuple(sorted({1, largest}))
    return PlanQuery(ONNX, "tensorrt-rtx", version, gpu, BuildOptions(precision, sizes, profiles="range"))


def found(cache: Path, asked: PlanQuery) -> PlanTarget:
    plan = search_plan(cache, asked)
    assert isinstance(plan, Plan), plan
    return plan.record.key.target


def reason(cache: Path, asked: PlanQuery) -> str:
    plan = search_plan(cache, asked)
    assert isinstance(plan, NoPlan), plan
    return plan.reason


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA A100", "8.0"), ("NVIDIA L4", "8.9"), ("NVIDIA H200", "9.0")])
@pytest.mark.parametrize("largest", [1, 5, 8, 64])
def test_a_portable_plan_for_larger_batches_is_anybodys(tmp_path: Path, name: str, capability: str, largest: int):
    stored(tmp_path, target(), replace(RANGE, batch_sizes=(1, 2, 64)))
    assert found(tmp_path, query(Gpu(name, capability), largest=largest)) == target()


def test_the_narrowest_wins_and_of_those_the_one_for_the_smallest_batches(tmp_path: Path):
    ways = [target(), target("8.0", "8.6", "8.9"), target("8.6", "8.9"), target("8.9")]
    for seen, where in enumerate(ways):
        stored(tmp_path, where, replace(RANGE, batch_sizes=(1, 64 >> seen)))
        assert found(tmp_path, query(largest=8)) == where
    stored(tmp_path, target("8.9"), replace(RANGE, batch_sizes=(1, 32)))
    plan = search_plan(tmp_path, query(largest=8))
    assert isinstance(plan, Plan)
    assert plan.record.options.batch_sizes == (1, 8)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (query(version="1.8.0.1"), "fp16 up to batch 8 for compute capability 8.9 and TensorRT for RTX 1.7.1.116"),
        (query(precision="int8"), "in int8"),
        (query(largest=16), "up to batch 16"),
    ],
)
def test_what_does_not_fit_is_not_found_and_told(tmp_path: Path, asked: PlanQuery, told: str):
    stored(tmp_path, target("8.9"))
    why = reason(tmp_path, asked)
    assert told in why
    assert "fp16 up to batch 8 for compute capability 8.9" in why, "what there is instead"


def test_each_size_that_is_wanted_needs_a_profile_where_each_has_its_own(tmp_path: Path):
    """A batch of two in a plan for one and 64 would cost as much as one of 64."""
    sparse = BuildOptions("fp16", (1, 64))
    stored(tmp_path, tensorrt_target("11.4.0.106", L4, sparse), sparse)
    wanted = BuildOptions("fp16", (1, 2, 4, 8))
    asked = PlanQuery(ONNX, "tensorrt", "11.4.0.106", L4, wanted)
    assert reason(tmp_path, asked)
    dense = BuildOptions("fp16", (1, 2, 4, 8, 16))
    stored(tmp_path, tensorrt_target("11.4.0.106", L4, dense), dense)
    plan = search_plan(tmp_path, asked)
    assert isinstance(plan, Plan)
    assert plan.record.options == dense


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.record.write_bytes(b"\xff\xfe{"),
        lambda p: p.record.write_text("[]"),
        lambda p: p.record.write_text(p.record.read_text().replace('"schema_version": 2', '"schema_version": 1')),
        lambda p: p.record.write_text(p.record.read_text().replace(f'"version": "{VERSION}"', '"version": "../../x"')),
        lambda p: p.record.write_text(p.record.read_text().replace("[1, 2, 4, 8]", "[]")),
        lambda p: p.record.chmod(0o666),
        lambda p: (p.record.unlink(), p.record.mkdir()),
        lambda p: (p.record.rename(p.folder / "aside"), p.record.symlink_to("aside")),
        lambda p: (p.record.unlink(), os.mkfifo(p.record)),
        lambda p: p.plan.write_bytes(b"an engine of somebody else's"),
        lambda p: p.plan.unlink(),
        lambda p: p.plan.chmod(0o622),
    ],
)
def test_a_spoilt_plan_is_passed_over_for_a_good_one_and_told_where_there_is_none(
    tmp_path: Path, spoil: Callable[[PlanPaths], object], caplog: pytest.LogCaptureFixture
):
    paths = stored(tmp_path, target("8.9"))
    spoil(paths)
    told = reason(tmp_path, query())
    assert paths.stem in told, "which file"
    assert "no plan for" in told, "and what is wanted"
    stored(tmp_path, target())
    with caplog.at_level("INFO"):
        assert found(tmp_path, query()) == target()
    assert paths.stem in caplog.text
    assert len(list(records_in(tmp_path))) == 2


def test_what_an_older_builder_made_of_the_same_options_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("convoy.models.plans.RECIPE", -1)
        stored(tmp_path, target("8.9"))
    assert reason(tmp_path, query()).endswith("TensorRT for RTX 1.7.1.116 by another version of the builder")
    stored(tmp_path, target())
    assert found(tmp_path, query()) == target()


CAPABILITIES = st.sampled_from(["7.0", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0", "12.1"])
GPUS = st.builds(Gpu, st.sampled_from(["NVIDIA L4", "NVIDIA H200"]), CAPABILITIES)


@given(GPUS, st.sets(CAPABILITIES, max_size=4), st.none() | st.sampled_from(["NVIDIA L4", "NVIDIA H200"]))
def test_a_target_covers_what_it_names_and_a_portable_one_all_since_ampere(
    gpu: Gpu, capabilities: set[str], name: str | None
):
    named = PlanTarget("tensorrt-rtx", VERSION, tuple(sorted(capabilities)), name if capabilities else None)
    if capabilities:
        assert named.covers(gpu) == (gpu.compute_capability in capabilities and name in (None, gpu.name))
        assert not (named.covers(gpu) and not replace(named, gpu_name=None).covers(gpu)), "a name only narrows"
    else:
        assert named.covers(gpu) == (float(gpu.compute_capability) >= 8.0)


@given(GPUS, GPUS)
def test_what_tensorrt_builds_on_one_gpu_is_for_others_of_its_name_or_else_of_its_capability(one: Gpu, other: Gpu):
    for options in (RANGE, replace(RANGE, hardware_compatibility="same_compute_capability")):
        built = tensorrt_target("11.4", one, options)
        assert built.covers(one)
        same = one == other if options is RANGE else one.compute_capability == other.compute_capability
        assert built.covers(other) == same
