"""Plans: what is taken from the cache, what is refused, and what is searched for a GPU."""

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
from convoy.models.errors import JobError, UsageError
from convoy.models.onnx_digest import external_data, onnx_digest
from convoy.models.plan_cache import PlanQuery, find_plan, records_in, search_plan
from convoy.models.plans import (
    SCHEMA_VERSION,
    BuildOptions,
    Gpu,
    LibraryName,
    NoPlan,
    Plan,
    PlanAudit,
    PlanKey,
    PlanPaths,
    PlanRecord,
    PlanTarget,
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


def stored(cache: Path, key: PlanKey = KEY, options: BuildOptions = OPTIONS, data: bytes = DATA) -> PlanPaths:
    """A plan in the cache, as the builder leaves it."""
    paths = PlanPaths.of(cache, key)
    paths.folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    record = PlanRecord(
        schema_version=SCHEMA_VERSION,
        key=key,
        options=options,
        plan=FileRecord(hashlib.sha256(data).hexdigest(), len(data)),
        scratch_bytes=(1, 8),
        audit=PlanAudit({"fp16": 3}, 1),
        build_s=1.5,
        device_name=H200.name,
        onnx_name="fp16.onnx",
        created_at="2026-11-21T00:00:00+00:00",
    )
    for path, raw in ((paths.plan, data), (paths.record, json.dumps(to_jsonable(record)).encode())):
        path.write_bytes(raw)
        path.chmod(0o644)
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
        (lambda p: p.plan.chmod(0o664), "other users can write to it"),
        (lambda p: p.record.chmod(0o646), "other users can write to it"),
        (lambda p: p.folder.chmod(0o777), "other users can write to it"),
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


def test_the_reason_names_what_there_is_instead(tmp_path: Path) -> None:
    assert reason(tmp_path) == reason(tmp_path / "missing") == f"no plan for {KEY.target}"
    stored(tmp_path)
    newer = replace(KEY, target=replace(KEY.target, version="11.5.0.1"))
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


def test_a_key_cannot_lead_out_of_the_cache_and_batch_sizes_ascend() -> None:
    with pytest.raises(ValueError, match="this is a bug"):
        key_of("../../etc", "11.4", H200, OPTIONS)
    for sizes in ((), (0, 1), (2, 1), (1, 1)):
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
    with pytest.raises(JobError, match=rf"{location}.*missing"):
        onnx_digest(path)
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


ONNX = "a" * 64
VERSION = "1.7.1.116"
L4 = Gpu("NVIDIA L4", "8.9")
RANGE = BuildOptions("fp16", (1, 2, 4, 8), profiles="range")


def target(*capabilities: str, library: LibraryName = "tensorrt-rtx", version: str = VERSION) -> PlanTarget:
    return PlanTarget(library, version, capabilities)


def search_stored(cache: Path, where: PlanTarget, options: BuildOptions = RANGE) -> PlanPaths:
    """A plan whose bytes are its target's name."""
    return stored(cache, plan_key(ONNX, where, options), options, str(where).encode())


def query(gpu: Gpu = L4, *, largest: int = 8, precision: Precision = "fp16", version: str = VERSION) -> PlanQuery:
    sizes = tuple(sorted({1, largest}))
    return PlanQuery(ONNX, "tensorrt-rtx", version, gpu, BuildOptions(precision, sizes, profiles="range"))


def found(cache: Path, asked: PlanQuery) -> PlanTarget:
    plan = search_plan(cache, asked)
    assert isinstance(plan, Plan), plan
    return plan.record.key.target


def search_reason(cache: Path, asked: PlanQuery) -> str:
    plan = search_plan(cache, asked)
    assert isinstance(plan, NoPlan), plan
    return plan.reason


@pytest.mark.parametrize(("name", "capability"), [("NVIDIA A100", "8.0"), ("NVIDIA L4", "8.9"), ("NVIDIA H200", "9.0")])
@pytest.mark.parametrize("largest", [1, 5, 8, 64])
def test_a_portable_plan_for_larger_batches_is_anybodys(tmp_path: Path, name: str, capability: str, largest: int):
    search_stored(tmp_path, target(), replace(RANGE, batch_sizes=(1, 2, 64)))
    assert found(tmp_path, query(Gpu(name, capability), largest=largest)) == target()


def test_the_narrowest_wins_and_of_those_the_one_for_the_smallest_batches(tmp_path: Path):
    ways = [target(), target("8.0", "8.6", "8.9"), target("8.6", "8.9"), target("8.9")]
    for seen, where in enumerate(ways):
        search_stored(tmp_path, where, replace(RANGE, batch_sizes=(1, 64 >> seen)))
        assert found(tmp_path, query(largest=8)) == where
    search_stored(tmp_path, target("8.9"), replace(RANGE, batch_sizes=(1, 32)))
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
    search_stored(tmp_path, target("8.9"))
    why = search_reason(tmp_path, asked)
    assert told in why
    assert "fp16 up to batch 8 for compute capability 8.9" in why, "what there is instead"


def test_each_size_that_is_wanted_needs_a_profile_where_each_has_its_own(tmp_path: Path):
    """A batch of two in a plan for one and 64 would cost as much as one of 64."""
    sparse = BuildOptions("fp16", (1, 64))
    search_stored(tmp_path, tensorrt_target("11.4.0.106", L4, sparse), sparse)
    wanted = BuildOptions("fp16", (1, 2, 4, 8))
    asked = PlanQuery(ONNX, "tensorrt", "11.4.0.106", L4, wanted)
    assert search_reason(tmp_path, asked)
    dense = BuildOptions("fp16", (1, 2, 4, 8, 16))
    search_stored(tmp_path, tensorrt_target("11.4.0.106", L4, dense), dense)
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
    paths = search_stored(tmp_path, target("8.9"))
    spoil(paths)
    told = search_reason(tmp_path, query())
    assert paths.stem in told, "which file"
    assert "no plan for" in told, "and what is wanted"
    search_stored(tmp_path, target())
    with caplog.at_level("INFO"):
        assert found(tmp_path, query()) == target()
    assert paths.stem in caplog.text
    assert len(list(records_in(tmp_path))) == 2


def test_what_an_older_builder_made_of_the_same_options_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr("convoy.models.plans.RECIPE", -1)
        search_stored(tmp_path, target("8.9"))
    assert search_reason(tmp_path, query()).endswith("TensorRT for RTX 1.7.1.116 by another version of the builder")
    search_stored(tmp_path, target())
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
