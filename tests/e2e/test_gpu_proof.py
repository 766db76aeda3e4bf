"""The GPU proof starts on a machine that has what a GPU machine has and nothing else, and keeps to its budget."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.proof import __main__ as proof
from tests.support.servers import wait_until
from tests.support.stores import ROOT


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / proof.RESULTS).read_text().splitlines()]


def begin(out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.gpu.proof", "--dry-run", "--out", str(out), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_every_step_starts_without_what_such_a_machine_lacks(tmp_path: Path) -> None:
    said, _ = (child := begin(tmp_path)).communicate(timeout=140)
    assert child.returncode == 0, f"{said}\n{(tmp_path / proof.LOG).read_text()[-5000:]}"
    found = lines(tmp_path)
    assert {line["step"] for line in found} == {one.function for steps in proof.VISITS.values() for one in steps}
    passed = {line["step"] for line in found if line["verdict"] == "pass"}
    assert passed == {line["step"] for line in found}
    assert {line["verdict"] for line in found} == {"pass", "measured"}


def test_the_dry_run_has_no_module_that_such_a_machine_lacks(tmp_path: Path) -> None:
    python, env = proof._environment(tmp_path, [], is_dry=True)
    code = "import importlib.util as u, json, sys; print(json.dumps([n for n in sys.argv[1:] if u.find_spec(n)]))"
    lacking = ("tensorrt", "tensorrt_rtx", "openvino", "tritonclient", "hypothesis", "httpx", "torchvision", "timm")
    there = ("torch", "numpy", "onnxruntime", "pytest", "onnx")
    # Without the carried wheels the server's libraries are missing, too.
    for paths, expected in ((env["PYTHONPATH"], {*there, "fastapi", "pydantic"}), (str(ROOT), {*there})):
        done = subprocess.run(
            [python, "-c", code, *there, *lacking, "fastapi", "pydantic"],
            *(), env={**env, "PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert set(json.loads(done.stdout)) == expected


HANGS = """
import os, subprocess, sys, time
from pathlib import Path
def hangs(report):
    report.check("before", "this line", "this line", True)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(os.environ["PROOF_CHILD"]).write_text(str(child.pid))
    time.sleep(600)
def works(report):
    report.check("after", "this line", "this line", True)
"""


def test_a_step_that_hangs_costs_its_own_time_and_nothing_that_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are ended, what it had found is kept, and the next step runs."""
    package = tmp_path / "tests" / "gpu" / "proof"
    shutil.copytree(Path(proof.__file__).parent, package)
    with (package / "steps.py").open("a") as file:
        file.write(HANGS)
    monkeypatch.setenv("PROOF_CHILD", str(tmp_path / "child"))
    monkeypatch.setattr(proof, "ROOT", tmp_path)
    steps = (proof.Step("hangs", 6.0), proof.Step("works", 60.0))
    monkeypatch.setattr(proof, "VISITS", {1: steps, 2: ()})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    assert proof.main(["--out", str(out), "--limit-s", "120"]) == 1
    found = {(line["step"], line["check"]): line["verdict"] for line in lines(out)}
    assert found == {
        ("hangs", "before"): "pass",
        ("hangs", "end"): "fail",
        ("hangs", "took"): "measured",
        ("works", "after"): "pass",
        ("works", "took"): "measured",
    }
    pid = int((tmp_path / "child").read_text())
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or _is_dead(pid), "the step's child ends")


def _is_dead(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_steps_for_which_no_time_is_left_are_said_not_to_have_run(tmp_path: Path) -> None:
    assert proof.main(["--out", str(tmp_path), "--limit-s", "6", "--dry-run"]) == 1
    assert {line["verdict"] for line in lines(tmp_path)} == {"not run"}
    assert len(lines(tmp_path)) == sum(map(len, proof.VISITS.values()))


def test_the_steps_of_a_visit_fit_into_its_budget() -> None:
    assert sum(step.limit_s for step in proof.VISITS[1]) <= 540
    assert sum(step.limit_s for step in proof.VISITS[2]) <= 240


def test_an_unknown_step_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        proof.main(["--out", str(tmp_path), "--only", "machin"])
    assert ended.value.code == 2
    assert "no step is called machin; there are captures, convolutions" in capsys.readouterr().err
