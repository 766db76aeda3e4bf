"""The proof's program on a GPU that is not there: what it finds, writes, drops and judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.app.engines.machine import Library
from convoy.models.plans import Plan
from convoy.models.records import to_jsonable
from tests.gpu.proof.agreement import Reference
from tests.gpu.proof.bare import Effort
from tests.gpu.proof.budget import Budget, Journal, NoTimeLeft
from tests.gpu.proof.findings import Findings
from tests.gpu.proof.grid import Extent
from tests.gpu.proof.program import Ways, prove
from tests.gpu.proof.records import Proof, TestRun, read_proof
from tests.gpu.proof.subjects import ROOT, NotMade, Subject, make_digits
from tests.gpu.proof.targets import DIGITS, ONNXRUNTIME, RESNET, TENSORRT, TORCH
from tests.support.fake_cuda import FakeGpu
from tests.support.gpu_machine import GpuBench
from tests.support.tensorrt_run import make_plan

GIB = 1 << 30


def few_digits(name: str) -> Any:
    """The demo under another name, with fewer pictures."""

    def make(folder: Path, with_int8: bool) -> Subject:
        digits = make_digits(folder, with_int8)
        spec = replace(digits.spec, name=name)
        return replace(digits, name=name, spec=spec, random=digits.random[:12], real=digits.real[:3])

    return make


def fake_plan(job: Any, trt: Any, watch: Any) -> Plan:
    plan = make_plan(job.onnx, job.options.batch_sizes)
    return replace(plan, record=replace(plan.record, options=job.options))


def no_torch() -> Any:
    raise NotMade("torch sees no GPU")


def quick(**given: Any) -> Ways:
    ways = Ways(
        run_tests=lambda limit_s: TestRun(3, 0, 1, 1.0, ("SKIPPED one",)),
        build_plan=fake_plan,
        find_torch=no_torch,
        makers={RESNET: few_digits(RESNET), DIGITS: few_digits(DIGITS)},
        extents=(Extent(RESNET, 4, True), Extent(DIGITS, 1, False)),
        sizes=(1, 4),
        effort=Effort(row_s=0.002, warm_up_s=0.0),
        http=False,
    )
    return replace(ways, **given)


@pytest.fixture
def bench() -> GpuBench:
    return GpuBench.of(FakeGpu("Fake H200", total_bytes=8 * GIB))


def run(bench: GpuBench, out: Path, ways: Ways, budget: Budget | None = None) -> Findings:
    budget = budget or Budget(1000.0)
    return prove(bench.machine, out, budget, Journal(budget, lambda line: None), ways)


@pytest.mark.slow
def test_everything_is_measured_judged_and_written(bench: GpuBench, tmp_path: Path) -> None:
    found = run(bench, tmp_path, quick()).proof()
    assert read_proof(tmp_path / "results" / "fake-h200.json") == found
    assert found.ended.startswith("complete in")
    assert {stage.name: stage.ended for stage in found.stages if "torch" not in stage.name} == dict.fromkeys(
        ["tests", f"network {RESNET}", f"network {DIGITS}", "in-process core", TENSORRT, ONNXRUNTIME], "done"
    )
    # The whole grid for one network (int8 only where there are kernels for it), one factor at a time for the other.
    whole = [row.setting for row in found.bare if row.setting.network == RESNET]
    assert len([one for one in whole if one.engine == TENSORRT]) == 2 * 3 * 2 * 2
    assert len([one for one in whole if one.engine == ONNXRUNTIME]) == 2 * 2 * 2 * 2
    others = [row.setting for row in found.bare if row.setting.network == DIGITS and row.setting.engine == TENSORRT]
    assert len(others) == 2 + 2 + 1 + 1
    assert {row.setting for row in found.core} == {row.setting for row in found.bare}
    assert all(row.images_per_s > 0 for row in (*found.bare, *found.core))
    assert [one.network for one in found.gatherings] == [RESNET, DIGITS]
    assert {one.pictures for one in found.agreements} == {"random", "real"}
    assert all(one.max_relative_error < 0.1 for one in found.agreements)


def test_what_is_missing_is_dropped_with_its_reason(bench: GpuBench, tmp_path: Path) -> None:
    machine = replace(
        bench.machine,
        tensorrt=Library(None, "TensorRT is not installed"),
        onnxruntime=Library(None, "this build of onnxruntime has no CUDAExecutionProvider"),
    )
    bench.machine = machine
    found = run(bench, tmp_path, quick(http=True)).proof()
    dropped = {one.what: one.reason for one in found.dropped}
    assert dropped[TENSORRT] == "TensorRT is not installed"
    assert dropped[ONNXRUNTIME] == "this build of onnxruntime has no CUDAExecutionProvider"
    assert dropped[TORCH] == "torch sees no GPU"
    assert dropped["over HTTP"].startswith("no engine that serves runs on this GPU")
    assert not found.bare
    assert {target.verdict for target in found.targets} == {"unproved"}
    assert next(target for target in found.targets if target.engine == TENSORRT).how == "TensorRT is not installed"
    page = (tmp_path / "gpu-proof.md").read_text()
    assert "this build of onnxruntime has no CUDAExecutionProvider" in page
    assert "**unproved**" in page


def test_a_network_that_cannot_be_made_costs_only_its_own_rows(bench: GpuBench, tmp_path: Path) -> None:
    def broken(folder: Path, with_int8: bool) -> Subject:
        raise NotMade("no torchvision")

    bench.machine = replace(bench.machine, onnxruntime=Library(None, "not here"))
    makers = {RESNET: broken, DIGITS: few_digits(DIGITS)}
    found = run(bench, tmp_path, quick(makers=makers)).proof()
    assert {row.setting.network for row in found.bare} == {DIGITS}
    assert any(one.what == f"network {RESNET}" and one.reason == "no torchvision" for one in found.dropped)


def test_without_time_the_rest_is_dropped_and_the_file_is_there(bench: GpuBench, tmp_path: Path) -> None:
    clock = iter(range(0, 10_000_000, 7))
    budget = Budget(600.0, lambda: float(next(clock)))
    found = run(bench, tmp_path, quick(), budget).proof()
    assert any("no time left" in one.reason for one in found.dropped)
    assert json.loads((tmp_path / "results" / "fake-h200.json").read_text()) == to_jsonable(found)


def test_a_run_that_is_killed_leaves_what_it_had_found(bench: GpuBench, tmp_path: Path) -> None:
    makers = {DIGITS: few_digits(DIGITS)}

    def killed_later() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(bench, tmp_path, quick(makers=makers, find_torch=killed_later))
    left = read_proof(tmp_path / "results" / "fake-h200.json")
    assert left.tests is not None
    assert left.ended == ""
    assert "the program was stopped before its end" in (tmp_path / "gpu-proof.md").read_text()


def test_a_failing_engine_costs_its_own_rows(bench: GpuBench, tmp_path: Path) -> None:
    def refuse(options: object) -> None:
        raise RuntimeError("cuDNN is not there")

    bench.onnxruntime.refuses = refuse
    found = run(bench, tmp_path, quick(makers={DIGITS: few_digits(DIGITS)})).proof()
    assert {row.setting.engine for row in found.bare} == {TENSORRT}
    assert any("cuDNN is not there" in one.reason for one in found.dropped)


def test_a_share_of_the_budget_ends_with_the_whole() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    now[0] = 70.0
    share = budget.share(50.0)
    assert (budget.left_s, share.left_s) == (30.0, 30.0)
    share.require(30.0, "a row")
    now[0] = 71.0
    with pytest.raises(NoTimeLeft, match="a row takes about 30 s, 29 s remain"):
        share.require(30.0, "a row")


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
ELSEWHERE = """
import sys
from pathlib import Path
from tests.unit.test_gpu_proof import DIGITS, GIB, RESNET, FakeGpu, GpuBench, few_digits, quick, run

makers = {RESNET: few_digits(RESNET)}
run(GpuBench.of(FakeGpu("Fake H200", total_bytes=8 * GIB)), Path(sys.argv[1]), quick(makers=makers, http=True))
"""
SERVER = ("fastapi", "uvicorn", "pydantic_settings", "orjson", "msgspec", "tritonclient", "multipart", "grpc_health")


def run_without(libraries: tuple[str, ...], folder: Path) -> Proof:
    """The program in a process, and with children, in which some libraries are not installed."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(libraries)))
    path = {"PYTHONPATH": f"{site}:{ROOT}"}
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(folder)], env={**os.environ, **path}, check=True, timeout=110)
    return read_proof(folder / "results" / "fake-h200.json")


@pytest.mark.slow
def test_without_the_servers_libraries_all_but_http_is_measured(tmp_path: Path) -> None:
    found = run_without(SERVER, tmp_path)
    dropped = {one.what: one.reason for one in found.dropped}
    assert "No module named" in dropped["over HTTP"]
    assert {row.setting for row in found.core} == {row.setting for row in found.bare}


@pytest.mark.slow
def test_without_metrics_and_terminals_the_engines_are_measured(tmp_path: Path) -> None:
    found = run_without((*SERVER, "prometheus_client", "typer", "rich", "grpc", "psutil", "torch"), tmp_path)
    dropped = {one.what: one.reason for one in found.dropped}
    assert dropped["in-process core"] == "No module named 'prometheus_client'"
    assert "No module named" in dropped["over HTTP"]
    assert not found.core
    assert {row.setting.engine for row in found.bare} == {TENSORRT, ONNXRUNTIME}


@pytest.mark.slow
def test_a_server_is_started_with_the_networks_bundle_and_asked(tmp_path: Path, monkeypatch: Any) -> None:
    from tests.gpu.proof import over_http

    digits, store = few_digits(RESNET)(tmp_path, False), tmp_path / "store"
    store.mkdir()
    over_http.publish_subject(digits, store, Reference())
    monkeypatch.setattr(over_http, "_CLIENTS", 2)
    server = over_http.Server(store, tmp_path / "plans", "cpu", None, 60.0)
    with pytest.raises(NotMade, match="chose the CPU"):
        over_http.measure_over_http(server, digits, tmp_path, 0.5)
    monkeypatch.setattr(over_http, "_served", lambda url, model: (ONNXRUNTIME, "fp32"))
    row = over_http.measure_over_http(server, digits, tmp_path, 1.0)
    assert row.failed == 0
    assert row.images_per_s > 0
    assert over_http.edge_counts()
