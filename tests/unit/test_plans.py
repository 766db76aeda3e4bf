"""Plans: what a key depends on, and that nothing unverified is ever handed out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from convoy.models.bundle import FileRecord
from convoy.models.errors import JobError, UsageError
from convoy.models.onnx_digest import external_data, onnx_digest
from convoy.models.plan_cache import find_plan
from convoy.models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Gpu,
    NoPlan,
    Plan,
    PlanAudit,
    PlanKey,
    PlanPaths,
    PlanRecord,
    plan_key,
    tensorrt_target,
)
from convoy.models.records import to_jsonable

H200 = Gpu("NVIDIA H200", "9.0")
OPTIONS = BuildOptions("fp16", (1, 8))


def key_of(onnx_sha256: str, version: str, gpu: Gpu, options: BuildOptions) -> PlanKey:
    """What TensorRT would build a file's plan under."""
    return plan_key(onnx_sha256, tensorrt_target(version, gpu, options), options)


KEY = key_of("a" * 64, "11.4.0.106", H200, OPTIONS)
DATA = b"an engine"


def stored(cache: Path, key: PlanKey = KEY, data: bytes = DATA) -> PlanPaths:
    """A plan in the cache, as the builder leaves it."""
    paths = PlanPaths.of(cache, key)
    paths.folder.mkdir(parents=True, mode=0o755)
    record = PlanRecord(
        schema_version=SCHEMA_VERSION,
        key=key,
        options=OPTIONS,
        plan=FileRecord(hashlib.sha256(data).hexdigest(), len(data)),
        scratch_bytes=(1, 8),
        audit=PlanAudit({"fp16": 3}, 1),
        build_s=1.5,
        device_name=H200.name,
        onnx_name="fp16.onnx",
        created_at="2026-11-21T00:00:00+00:00",
    )
    paths.plan.write_bytes(data)
    paths.record.write_text(json.dumps(to_jsonable(record)))
    paths.plan.chmod(0o644)
    paths.record.chmod(0o644)
    return paths


def reason(cache: Path, key: PlanKey = KEY) -> str:
    found = find_plan(cache, key)
    assert isinstance(found, NoPlan)
    return found.reason


def test_a_plan_that_is_whole_and_ours_is_found_with_its_bytes(tmp_path: Path) -> None:
    paths = stored(tmp_path)
    found = find_plan(tmp_path, KEY)
    assert isinstance(found, Plan)
    assert (found.path, found.data, found.record.key) == (paths.plan, DATA, KEY)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda p: p.plan.write_bytes(DATA[:-1]), "does not match the sha256"),
        (lambda p: p.plan.write_bytes(b"An engine"), "does not match the sha256"),
        (lambda p: p.plan.write_bytes(b"an enginf"), "does not match the sha256"),
        (lambda p: p.plan.unlink(), "no plan for compute capability 9.0 (NVIDIA H200) and TensorRT 11.4.0.106"),
        (lambda p: p.record.unlink(), "no plan with these build options"),
        (lambda p: p.record.write_text("{"), "cannot be read"),
        (lambda p: p.record.write_text("[]"), "cannot be read"),
        (lambda p: p.record.write_text(p.record.read_text().replace("[1, 8]", "[8, 1]")), "cannot be read"),
        (lambda p: p.record.write_text(p.record.read_text().replace("NVIDIA H200", "NVIDIA L4")), "was written for"),
        (lambda p: p.record.write_text(p.record.read_text().replace('n": 2', 'n": 9', 1)), "schema version 9"),
        (lambda p: p.plan.chmod(0o664), "other users may write it"),
        (lambda p: p.record.chmod(0o646), "other users may write it"),
        (lambda p: p.folder.chmod(0o777), "other users may write it"),
        (lambda p: (p.plan.rename(p.plan.with_name("x")), p.plan.symlink_to("x")), "is a link"),
        (lambda p: (p.plan.unlink(), os.mkfifo(p.plan, 0o600)), "is not a file"),
        (lambda p: (p.plan.unlink(), p.plan.mkdir(0o755)), "is not a file"),
    ],
)
def test_a_spoilt_entry_is_refused_with_its_reason(
    tmp_path: Path, spoil: Callable[[PlanPaths], object], expected: str
) -> None:
    spoil(stored(tmp_path))
    assert expected in reason(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["plan", "record", "folder"])
def test_what_belongs_to_another_user_is_never_run(tmp_path: Path, part: str) -> None:
    paths = stored(tmp_path)
    os.chown(getattr(paths, part), 65534, -1)
    assert "belongs to user 65534" in reason(tmp_path)


def test_an_empty_or_missing_cache_is_an_answer_not_an_error(tmp_path: Path) -> None:
    assert reason(tmp_path) == reason(tmp_path / "missing") == f"no plan for {KEY.target}"


def test_the_reason_names_what_there_is_instead(tmp_path: Path) -> None:
    stored(tmp_path)
    newer = dataclasses.replace(KEY, target=dataclasses.replace(KEY.target, version="11.5.0.1"))
    assert reason(tmp_path, newer).endswith("those in the cache are for trt11.4.0.106-sm9.0")
    other = key_of("a" * 64, "11.4.0.106", H200, BuildOptions("fp16", (1, 16)))
    assert "no plan with these build options" in reason(tmp_path, other)


@pytest.mark.parametrize(
    "other",
    [
        key_of("b" * 64, "11.4.0.106", H200, OPTIONS),
        key_of("a" * 64, "11.4.0.107", H200, OPTIONS),
        key_of("a" * 64, "11.4.0.106", Gpu("NVIDIA H200", "10.0"), OPTIONS),
        key_of("a" * 64, "11.4.0.106", Gpu("NVIDIA H100", "9.0"), OPTIONS),
        key_of("a" * 64, "11.4.0.106", H200, BuildOptions("fp32", (1, 8))),
        key_of("a" * 64, "11.4.0.106", H200, BuildOptions("fp16", (1, 8), workspace_mb=64)),
    ],
)
def test_everything_that_changes_a_plan_changes_its_place(tmp_path: Path, other: PlanKey) -> None:
    assert PlanPaths.of(tmp_path, other).plan != PlanPaths.of(tmp_path, KEY).plan


def test_a_key_cannot_lead_out_of_the_cache() -> None:
    with pytest.raises(ValueError, match="this is a bug"):
        key_of("../../etc", "11.4", H200, OPTIONS)


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_batch_sizes_must_ascend(sizes: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="must ascend"):
        BuildOptions("fp32", sizes)


def with_external_data(folder: Path, location: str) -> Path:
    onnx = pytest.importorskip("onnx")
    tensor = onnx.TensorProto(name="w", data_type=1, dims=[2], data_location=1)
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="offset", value="0")
    graph = onnx.helper.make_graph([], "g", [], [], initializer=[tensor])
    path = folder / "model.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    return path


@pytest.mark.parametrize("location", ["weights.data", "sub/" + "long" * 40 + ".data"])
def test_other_weights_beside_the_same_graph_are_another_model(tmp_path: Path, location: str) -> None:
    path = with_external_data(tmp_path, location)
    assert external_data(path) == (location,)
    weights = tmp_path / location
    weights.parent.mkdir(exist_ok=True)
    weights.write_bytes(b"\x00" * 8)
    before = onnx_digest(path)
    weights.write_bytes(b"\x01" * 8)
    assert onnx_digest(path) != before


@pytest.mark.parametrize("location", ["../weights.data", "/etc/hostname", "link.data"])
def test_external_data_outside_the_models_folder_is_refused(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "weights.data").write_bytes(b"12345678")
    (folder / "link.data").symlink_to(tmp_path / "weights.data")
    with pytest.raises(JobError, match="outside its folder"):
        onnx_digest(with_external_data(folder, location))


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"weights\.data.*missing"):
        onnx_digest(with_external_data(tmp_path, "weights.data"))
