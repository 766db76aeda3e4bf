"""Plans built ahead by the real TensorRT for RTX, as a user and as a server has them: in a child, without a GPU."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from convoy.app.engines.cuda.engine import bucket_sizes
from convoy.app.engines.plan_builder import BuildOrder, PlanBuilder
from convoy.export.ahead import accepted
from convoy.export.progress import SILENT
from convoy.models.bundle import MANIFEST, open_bundle, read_manifest, seal
from convoy.models.onnx_digest import onnx_digest
from convoy.models.plan_cache import PlanQuery, search_plan
from convoy.models.plans import BuildOptions, Gpu, Plan, PlanBuild
from convoy.models.store import DEMO_STORE
from tests.support.servers import check_ended, run_convoy
from tests.support.stores import ROOT, StoreFolder

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

DEMO = DEMO_STORE / "digits" / "1"
FOR_GPUS = ("fp32.onnx", "fp16.onnx", "int8-trt.onnx", "fp8.onnx")


def convoy(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return run_convoy(*arguments, env={"CONVOY_PLAN_CACHE": str(cache)}, timeout_s=120)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A plan cache with all of the demo's plans, and what the command said."""
    cache = tmp_path_factory.mktemp("plans")
    done = convoy("build", "digits", cache=cache)
    assert done.returncode == 0, done.stderr
    return cache, done.stdout


def test_every_file_for_gpus_has_a_line_and_a_plan_that_is_not_built_again(built: tuple[Path, str]) -> None:
    cache, said = built
    lines = {line.split()[0]: line for line in said.splitlines() if "rtx" in line}
    assert tuple(lines) == FOR_GPUS
    assert all("portable" in line for line in lines.values())
    assert ("2 int8" in lines["int8-trt.onnx"], "1 fp8" in lines["fp8.onnx"]) == (True, True)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.plan")}
    assert len(before) == len(FOR_GPUS)
    assert convoy("build", "digits", cache=cache).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.plan")} == before


@pytest.mark.parametrize("gpu", [Gpu("NVIDIA A100", "8.0"), Gpu("NVIDIA L4", "8.9"), Gpu("NVIDIA H200", "9.0")])
def test_a_server_on_any_gpu_finds_them(built: tuple[Path, str], gpu: Gpu) -> None:
    import tensorrt_rtx

    wanted = BuildOptions("fp16", bucket_sizes(16), profiles="range")
    digest = onnx_digest(DEMO / "fp16.onnx")
    query = PlanQuery(digest, "tensorrt-rtx", tensorrt_rtx.__version__, gpu, wanted)
    found = search_plan(built[0], query)
    assert isinstance(found, Plan), found
    assert found.record.audit is not None
    assert found.record.audit.by_precision == {"fp16": 3}


def test_doctor_lists_them_and_says_who_can_build(built: tuple[Path, str]) -> None:
    diagnosis = json.loads(convoy("doctor", "--json", cache=built[0]).stdout)
    plans = diagnosis["plan_cache"]["plans"]
    assert sorted(plan["model"] for plan in plans) == sorted(FOR_GPUS)
    rtx, tensorrt = sorted(diagnosis["builders"], key=lambda one: one["library"] != "tensorrt-rtx")
    assert rtx["builds"]
    assert {"7.5", "8.9", "12.0"} <= set(rtx["targets"])
    assert (tensorrt["library"], tensorrt["builds"]) == ("tensorrt", False)


def test_a_refusal_names_the_layer_and_the_exit_code_is_1(tmp_path: Path) -> None:
    """A T4 gets no kernels for products in FP32 nor for convolutions in INT8. FP16 is built; FP8 is not even tried."""
    done = convoy("build", "digits", "--for", "t4", cache=tmp_path)
    words = ("int8-trt.onnx: refused by TensorRT for RTX", "0 of 3 computing layers run in int8", "fp8.onnx: not built")
    check_ended(done, 1, *words)
    assert re.search("^fp32.onnx: refused.*node_linear", done.stdout, re.MULTILINE)
    assert len(list(tmp_path.rglob("*.plan"))) == 1


def test_fp8_by_name_for_a_gpu_that_has_none_is_refused(tmp_path: Path) -> None:
    check_ended(
        convoy("build", "digits", "--for", "a100", "--precisions", "fp8", cache=tmp_path),
        1,
        "fp8_e4m3",
        "8.9 or later",
    )


def test_what_may_not_serve_is_built_and_its_refusal_counts_only_by_name(tmp_path: Path, store: StoreFolder) -> None:
    folder = store.add_digits()
    manifest = read_manifest(folder)
    variants = tuple(
        replace(variant, serve=False, reason="not verified")
        if variant.file in ("fp32.onnx", "int8-trt.onnx")
        else variant
        for variant in manifest.variants
    )
    (folder / MANIFEST).write_bytes(seal(replace(manifest, variants=variants)))
    given = ("build", "digits", "--store", str(store.root), "--for", "t4")
    check_ended(
        convoy(*given, cache=tmp_path),
        0,
        "fp32.onnx: refused by",
        "fp32.onnx: may not serve, whatever its plan (not verified)",
    )
    assert convoy(*given, "--precisions", "fp32", cache=tmp_path).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nosuch",), "there is no model 'nosuch'"),
        (("digits", "--for", "voodoo2"), "'voodoo2' is not a known GPU"),
        (("digits", "--for", "l4,h100"), "cannot be asked for compute capability 9.0"),
        (("digits", "--for", "portable,l4"), "portable alone"),
        (("digits", "--for", " "), "lists no GPUs"),
        (("digits", "--precisions", "int4"), "--precisions int4 is no precision"),
    ],
)
def test_a_wrong_call_exits_with_2_and_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = convoy("build", *arguments, cache=tmp_path)
    check_ended(done, 2, message)
    assert done.stderr.count("\n") == 1


def test_a_bare_model_cannot_be_built(tmp_path: Path, store: StoreFolder) -> None:
    store.add_add_sub()
    check_ended(convoy("build", "simple", "--store", str(store.root), cache=tmp_path), 2, "bare model")


def test_the_newest_version_is_built_and_a_broken_one_is_said(tmp_path: Path) -> None:
    for version in ("1", "2", "10"):
        shutil.copytree(DEMO, tmp_path / "digits" / version)
    (tmp_path / "digits" / "10" / "manifest.json").write_text("{}")
    check_ended(convoy("build", "digits", "--store", str(tmp_path), cache=tmp_path / "plans"), 1, "digits/10")
    assert not list(tmp_path.rglob("*.plan"))
    (tmp_path / "loop").symlink_to("loop")
    done = convoy("build", "loop", "--store", str(tmp_path), cache=tmp_path / "plans")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_whoever_cancels_leaves_neither_child_nor_plan(tmp_path: Path) -> None:
    async def scenario() -> None:
        is_building = asyncio.Event()

        def hear(progress: PlanBuild) -> None:
            if progress.phase == "Building engine":
                is_building.set()

        options = BuildOptions("int8", bucket_sizes(64), profiles="range")
        order = BuildOrder(DEMO / "int8-trt.onnx", tmp_path, options, library="tensorrt-rtx")
        building = asyncio.ensure_future(PlanBuilder(None).build(order, hear))
        await asyncio.wait_for(is_building.wait(), 60)
        building.cancel()
        with pytest.raises(asyncio.CancelledError):
            await building

    asyncio.run(scenario())
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]
    assert not list(tmp_path.rglob("*.plan"))


def broken_library(folder: Path) -> Path:
    """A folder of modules in which TensorRT for RTX is there and does not load."""
    package = folder / "broken" / "tensorrt_rtx"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        'raise OSError("/opt/lib/libtensorrt_rtx.so.1: cannot open shared object file")'
    )
    return package.parent


def test_a_library_that_does_not_load_is_one_line(tmp_path: Path) -> None:
    env = {**os.environ, "CONVOY_PLAN_CACHE": str(tmp_path), "PYTHONPATH": f"{broken_library(tmp_path)}:{ROOT}"}
    command = [sys.executable, "-m", "convoy", "build", "digits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, check=False)
    check_ended(done, 1, "TensorRT for RTX does not load (/opt/lib/libtensorrt_rtx.so.1")
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_a_builder_that_fails_of_itself_refuses_nothing(tmp_path: Path) -> None:
    """It says nothing of the file, so an export publishes what it would have published without a builder."""
    blocked = tmp_path / "a file"
    blocked.touch()
    variants = [replace(one, builder=None) for one in open_bundle(DEMO).manifest.variants]
    judged = accepted(variants, DEMO, 1, blocked, SILENT)
    assert [(one.serve, one.reason) for one in judged] == [(one.serve, one.reason) for one in variants]
    first, *others = [one.builder for one in judged if one.file in FOR_GPUS]
    assert first is not None
    assert not first.asked
    assert all(words in first.in_words for words in ("could not be asked", "the files after it were not tried"))
    assert str(tmp_path) not in first.in_words
    assert not any(others), "the next would end as the first"

    done = convoy("build", "digits", "--precisions", "fp32", cache=blocked)
    check_ended(done, 1, "failed")
    assert "refused" not in done.stdout
    assert f"the plan cache is {blocked}" in done.stdout


def test_why_a_builder_failed_names_no_folder_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{broken_library(tmp_path)}:{ROOT}")
    first, *_ = accepted(open_bundle(DEMO).manifest.variants, DEMO, 1, tmp_path / "plans", SILENT)
    assert first.builder is not None
    assert "(libtensorrt_rtx.so.1: cannot open" in first.builder.in_words
