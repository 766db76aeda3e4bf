"""What is asked of TensorRT for RTX rehearsed on a GPU that is not there.

The library's surface is the real one's and its runtime is played, so that what is asked for exists and comes to its
end; what a GPU answers is not known here.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from convoy.app.engines.machine import Library as Found
from convoy.app.engines.tensorrt_library import RTX, TensorRt
from tests.gpu.proof import kinds, parts, subjects
from tests.gpu.proof.budget import Budget
from tests.gpu.proof.experiment import NotMeasurable
from tests.gpu.proof.experiments import cudart, rtx, rtx_start
from tests.gpu.proof.experiments.rtx import Built
from tests.gpu.proof.grid import Opening
from tests.gpu.proof.parts_rtx import PART, RIVALS_PART, RTX_EXPERIMENTS
from tests.gpu.proof.subjects import ROOT, make_digits
from tests.gpu.proof.targets import DIGITS
from tests.support import fake_tensorrt
from tests.support.fake_asked import Asked
from tests.support.fake_cuda import FakeCuda, FakeGpu
from tests.support.gpu_machine import GpuBench
from tests.support.tensorrt_run import Runs, make_plan
from tests.unit.test_gpu_proof_experiments import rehearsed

# For `make test`: some seconds together.
pytestmark = pytest.mark.slow

SMALL = {"side": 32, "blocks": [1, 1, 1, 1], "width": 8, "classes": 10}
ROWS = {one.name: one for one in RTX_EXPERIMENTS}
KINDS = ["fp32", "fp16", "bf16", "int8", "fp8"]
FEW: Mapping[str, Mapping[str, Any]] = {
    "rtx-answers": {"kinds": KINDS, "sizes": [1, 2], **SMALL},
    "rtx-start": {"sizes": [1, 2], **SMALL},
    "rtx-specialisation": {"sizes": [1, 2], "rounds": 2, "settling_s": 0.002, **SMALL},
    "rtx-profiles": {"sizes": [1, 2], "rounds": 2, **SMALL},
    "rtx-graphs": {"sizes": [1, 2], "rounds": 2, **SMALL},
    "rtx-precisions": {"kinds": KINDS, "sizes": [1, 2], "rounds": 2, **SMALL},
    "rtx-naming": {"size": 2, "rounds": 2, **SMALL},
    "rtx-captures": {"size": 2, "rounds": 1, **SMALL},
    "rtx-contexts": {"sizes": [1, 2], "each": 3, **SMALL},
    "rtx-and-tensorrt": {"size": 2, **SMALL},
}
# The house's own, which have no library to be played.
ELSEWHERE = {"rtx-tests", "rtx-takeover", "rtx-resnet50", "rtx-mobilenet"}


class Played:
    """Both libraries on a fake GPU. `runs` are their scripts by --engine's names; `refused` are files' names."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.runs = {"rtx": Runs(cuda, fake_tensorrt.RTX), "tensorrt": Runs(cuda, "11.4")}
        self.modules = {name: runs.module() for name, runs in self.runs.items()}
        self.refused: set[str] = set()

    def load(self, library: TensorRt) -> Any:
        return self.modules[library.engine]

    def build(
        self, library: rtx.Library, onnx: Path, sizes: Any, profiles: Any = "range", capabilities: Any = ()
    ) -> Built:
        """Every kind answers as the fp32 file beside it does, where there is one."""
        if onnx.name in self.refused or "8.0" in capabilities:
            raise rtx.Refused("the model contains HW-specific datatypes")
        exact = onnx.with_name("fp32.onnx")
        plan = make_plan(exact if exact.exists() else onnx, tuple(sizes), dynamic=profiles == "range")
        return Built(plan.data, tuple(sizes), profiles, 0.1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Asked:
    fake = Asked(FakeGpu("Fake H200"))
    monkeypatch.setattr(cudart, "load_module", lambda: fake)
    return fake


@pytest.fixture
def played(cuda: Asked, monkeypatch: pytest.MonkeyPatch) -> Played:
    libraries = Played(cuda)
    monkeypatch.setattr(rtx, "load_builder", libraries.load)
    monkeypatch.setattr(rtx.Library, "build", lambda library, *args, **given: libraries.build(library, *args, **given))

    def in_this_process(bench: Any, sizes: list[int]) -> dict[str, float]:
        said = io.StringIO()
        with redirect_stdout(said):
            assert rtx_start.main([str(bench.folder), json.dumps(sizes)]) == 0
        found: dict[str, float] = json.loads(said.getvalue())
        return found

    monkeypatch.setattr(rtx_start, "_second_process", in_this_process)
    return libraries


def test_every_experiment_is_in_its_part_and_is_rehearsed() -> None:
    assert (*parts.of_part(PART), *parts.of_part(RIVALS_PART)) == RTX_EXPERIMENTS
    assert set(FEW) | ELSEWHERE == set(ROWS)


@pytest.mark.parametrize("name", FEW)
def test_it_comes_to_its_end_and_gives_everything_back(name: str, cuda: Asked, played: Played, tmp_path: Path) -> None:
    ran = rehearsed(tmp_path, ROWS[name], **FEW[name])
    judgement = ROWS[name].judged(ran)
    assert ran.figures
    assert "not complete" not in judgement.told, judgement.told
    # Where captures are disturbed, what was disturbed may be left behind.
    assert name == "rtx-captures" or cuda.live_device_blocks == 0


@pytest.mark.parametrize("name", FEW)
def test_without_a_driver_it_says_what_is_missing(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeCuda()
    fake.driver_status = 35
    monkeypatch.setattr(cudart, "load_module", lambda: fake)
    with pytest.raises(NotMeasurable, match="no usable NVIDIA driver"):
        rehearsed(tmp_path, ROWS[name], **FEW[name])


def test_without_the_library_it_says_how_to_bring_it(
    cuda: Asked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, RTX.module, None)
    with pytest.raises(NotMeasurable, match="CARRY=DIR"):
        rehearsed(tmp_path, ROWS["rtx-graphs"], **FEW["rtx-graphs"])


def test_what_is_refused_is_told_in_the_librarys_words_and_costs_its_own_row(played: Played, tmp_path: Path) -> None:
    played.refused = {"fp8.onnx"}
    row = ROWS["rtx-answers"]
    ran = rehearsed(tmp_path, row, **FEW[row.name])
    judgement = row.judged(ran)
    assert judgement.verdict == "otherwise"
    assert "resnet fp8 is refused (the model contains HW-specific datatypes)" in judgement.told
    assert "resnet int8: error as int8" in ran.figures


def test_a_plan_that_does_not_load_on_this_gpu_is_told(played: Played, tmp_path: Path) -> None:
    played.runs["rtx"].is_loadable = False
    played.runs["rtx"].complaint = "compute capability 9.0 is not supported"
    row = ROWS["rtx-answers"]
    judgement = row.judged(rehearsed(tmp_path, row, **FEW[row.name]))
    assert judgement.verdict == "otherwise"
    assert "compute capability 9.0 is not supported" in judgement.told


def test_a_wrong_answer_is_seen(played: Played, tmp_path: Path) -> None:
    played.runs["rtx"].distorts = lambda array: array * 1.2
    row = ROWS["rtx-answers"]
    judgement = row.judged(rehearsed(tmp_path, row, **FEW[row.name]))
    assert judgement.verdict == "otherwise"
    assert "too far off: resnet fp32" in judgement.told


def test_kernels_that_are_kept_are_taken_and_spoilt_ones_are_not(played: Played, tmp_path: Path) -> None:
    ran = rehearsed(tmp_path, ROWS["rtx-start"], **FEW["rtx-start"])
    assert ran.figures["cold: kernels are taken"] == 0
    assert ran.figures["warm: kernels are taken"] == ran.figures["second process: kernels are taken"] == 1
    assert ran.figures["second process: kernels grew by bytes"] == 0
    assert ran.figures["spoilt kernels are taken"] == 0


def test_graphs_that_nobody_can_capture_cost_their_own_row(played: Played, tmp_path: Path) -> None:
    played.runs["rtx"].can_capture = False
    row = ROWS["rtx-graphs"]
    ran = rehearsed(tmp_path, row, **FEW[row.name])
    assert "in a capture" in ran.facts["own: refused"]
    assert row.judged(ran).verdict == "otherwise"


def test_where_a_gpu_cannot_be_named_others_plans_are_tried(played: Played, tmp_path: Path) -> None:
    ran = rehearsed(tmp_path, ROWS["rtx-naming"], **FEW["rtx-naming"])
    assert ran.facts["this GPU"] == "9.0"
    assert ran.figures["it can be named"] == 0
    assert "8.0: refused" in ran.facts
    assert "8.9: ms" in ran.figures


def fake_build(job: Any, trt: Any, watch: Any) -> Any:
    plan = make_plan(job.onnx, job.options.batch_sizes, dynamic=job.options.profiles == "range")
    key = replace(plan.record.key, target=job.target)
    return replace(plan, record=replace(plan.record, key=key, options=job.options))


def test_the_benchmark_opens_it_as_a_server_does(tmp_path: Path) -> None:
    bench = GpuBench.of(FakeGpu("Fake H200", total_bytes=8 << 30))
    runs = Runs(bench.cuda, fake_tensorrt.RTX)
    machine = replace(bench.machine, rtx=Found(runs.module()))
    plans = tmp_path / "plans"
    plans.mkdir(mode=0o700)
    found = kinds.find_kinds(machine, plans, Budget(100.0), fake_build, kinds.torch_on_gpu)
    (kind,) = (one for one in found if one.name == "tensorrt-rtx")
    digits = make_digits(tmp_path, True)
    for graphs, slots in ((True, 2), (False, 1)):
        engine = kind.open(digits, Opening(DIGITS, kind.name, "fp16", graphs, slots), (1, 4))
        engine.warm_up()
        assert (engine.info.engine, engine.info.slots) == ("tensorrt-rtx", slots)
        captured = len(engine.info.batch_sizes) * slots
        assert not graphs or engine.graphs in (0, captured)  # type: ignore[attr-defined]
        engine.close()
    # All that was compiled the first time is there the next time.
    assert len(runs.jit.compiled) == len(set(runs.jit.compiled))
    assert runs.jit.from_cache
    assert [one.name for one in plans.iterdir()] == ["digits-fp16.kernels"]


@pytest.mark.slow
def test_engines_are_held_against_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GpuBench.of(FakeGpu("Fake H200", total_bytes=8 << 30))
    machine = replace(bench.machine, rtx=Found(Runs(bench.cuda, fake_tensorrt.RTX).module()))
    monkeypatch.setattr("convoy.app.engines.machine.find_machine", lambda: machine)
    monkeypatch.setattr(subjects, "torchvision_maker", lambda name: make_digits)
    monkeypatch.setattr(kinds, "build", fake_build)
    row = ROWS["rtx-resnet50"]
    ran = rehearsed(tmp_path, row, sizes=[1, 4], compiled_sizes=[1], rounds=2)
    assert {name.partition(" batch ")[0] for name in ran.figures} >= {
        *("tensorrt-rtx fp32", "tensorrt-rtx fp16", "tensorrt-rtx int8"),
        *("tensorrt fp16", "tensorrt int8", "onnxruntime-cuda fp16"),
    }
    assert ran.facts["torch.compile: not here"] == "torch sees no GPU"
    assert "of RTX's FP16 rate" in row.judged(ran).told


@pytest.mark.slow
def test_a_server_is_started_twice_on_one_plan_cache_and_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(GpuBench.of(FakeGpu("Fake H200")).machine, rtx=Found("a module"))
    monkeypatch.setattr("convoy.app.engines.machine.find_machine", lambda: machine)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    row = ROWS["rtx-takeover"]
    ran = rehearsed(tmp_path, row, engines="cpu", wait_s=0.1)
    assert ran.facts["cold: first"].startswith("onnxruntime-cpu")
    assert ran.figures["warm: failed"] == 0
    assert row.judged(ran).verdict == "otherwise"
