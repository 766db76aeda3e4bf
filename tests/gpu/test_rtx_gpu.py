"""Plans of TensorRT for RTX on a real GPU: what only fakes have shown elsewhere."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from convoy.app.engines.base import run_arrays
from convoy.app.engines.cuda.device import Device
from convoy.app.engines.machine import Machine, find_machine
from convoy.app.engines.tensorrt import Captures, TensorRtEngine
from convoy.app.engines.tensorrt_contexts import Kernels
from convoy.app.engines.tensorrt_library import RTX
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.bundle import Bundle, Precision, open_bundle
from convoy.models.gpus import FP8_SINCE, as_number
from convoy.models.plans import BuildOptions, Plan
from convoy.models.store import DEMO_STORE
from tests.support.quick_exports import logits_of

pytestmark = pytest.mark.gpu
SIZES = (1, 8, 32)


@pytest.fixture(scope="module")
def machine() -> Machine:
    found = find_machine()
    if not found.gpus or found.rtx.module is None:
        pytest.skip(found.no_gpu or found.rtx.reason)
    return found


@pytest.fixture(scope="module")
def demo() -> Bundle:
    return open_bundle(DEMO_STORE / "digits" / "1")


def build(machine: Machine, demo: Bundle, precision: Precision, cache: Path) -> Plan:
    gpu = machine.gpus[0].properties
    if precision == "fp8" and as_number(gpu.compute_capability) < as_number(FP8_SINCE):
        pytest.skip(f"{gpu.name} has no FP8")
    (variant,) = (v for v in demo.manifest.variants if v.precision == precision and v.file != "int8-cpu.onnx")
    options = BuildOptions(precision, SIZES, profiles=RTX.profiles)
    target = resolve_target(RTX, machine.rtx.module, (), options, None)
    job = BuildJob(demo.path(variant.file), cache, options, target, "")
    return build_plan(job, machine.rtx.module, BuildWatch(lambda event: None))


def opened(
    machine: Machine, demo: Bundle, plan: Plan, *, captures: Captures = "own", kernels: Path | None = None
) -> TensorRtEngine:
    spec, device = demo.manifest.spec, machine.gpus[0]
    engine = TensorRtEngine(
        plan,
        device,
        machine.rtx.module,
        inputs=spec.inputs,
        outputs=spec.outputs,
        batched=True,
        captures=captures,
        kernels=Kernels(kernels) if kernels is not None else None,
    )
    engine.warm_up()
    return engine


@pytest.fixture(scope="module")
def pictures() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (50, 32, 32, 3), np.uint8)


@pytest.fixture(scope="module")
def expected(demo: Bundle, pictures: np.ndarray) -> np.ndarray:
    return logits_of(demo, pictures)


def error(engine: TensorRtEngine, pictures: np.ndarray, expected: np.ndarray) -> float:
    """Over batches that are whole and batches that are padded."""
    parts = np.split(pictures, [1, 4, 12, 44])
    answers = np.concatenate([run_arrays(engine, {"images": part})["logits"] for part in parts])
    return float(np.linalg.norm(answers - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("precision", "most"), [("fp32", 1e-4), ("fp16", 1e-2), ("int8", 0.05), ("fp8", 0.12)])
@pytest.mark.parametrize("captures", ["own", "library", "nobody"])
def test_a_portable_plan_answers_as_the_cpu_does(
    machine: Machine,
    demo: Bundle,
    pictures: np.ndarray,
    expected: np.ndarray,
    tmp_path: Path,
    precision: Precision,
    most: float,
    captures: Captures,
) -> None:
    plan = build(machine, demo, precision, tmp_path)
    with closing(opened(machine, demo, plan, captures=captures)) as engine:
        assert error(engine, pictures, expected) < most
        assert engine.graphs == (len(SIZES) * engine.info.slots if captures == "own" else 0)


def test_what_was_compiled_is_kept_and_taken_by_the_next_engine(
    machine: Machine, demo: Bundle, pictures: np.ndarray, expected: np.ndarray, tmp_path: Path
) -> None:
    plan, kernels = build(machine, demo, "fp16", tmp_path), tmp_path / "demo.kernels"
    opened(machine, demo, plan, kernels=kernels).close()
    kept = kernels.read_bytes()
    assert kept
    with closing(opened(machine, demo, plan, kernels=kernels)) as again:
        assert error(again, pictures, expected) < 1e-2
    assert len(kernels.read_bytes()) == len(kept)


def test_spoilt_kernels_are_made_anew(machine: Machine, demo: Bundle, tmp_path: Path) -> None:
    plan, kernels = build(machine, demo, "fp16", tmp_path), tmp_path / "demo.kernels"
    kernels.write_bytes(b"rubbish" * 100)
    kernels.chmod(0o600)
    opened(machine, demo, plan, kernels=kernels).close()
    assert not kernels.read_bytes().startswith(b"rubbish")


def test_two_engines_of_one_plan_serve_at_once(
    machine: Machine, demo: Bundle, pictures: np.ndarray, expected: np.ndarray, tmp_path: Path
) -> None:
    plan = build(machine, demo, "fp16", tmp_path)
    with closing(opened(machine, demo, plan)) as one:
        with closing(opened(machine, demo, plan)) as other:
            assert max(error(engine, pictures, expected) for engine in (one, other, one)) < 1e-2
        assert error(one, pictures, expected) < 1e-2


def test_an_engine_gives_its_memory_back(machine: Machine, demo: Bundle, tmp_path: Path) -> None:
    device: Device = machine.gpus[0]
    plan = build(machine, demo, "fp16", tmp_path)
    opened(machine, demo, plan).close()  # what the library keeps for good
    device.use()
    before = device.cuda.free_bytes()
    for _ in range(5):
        opened(machine, demo, plan).close()
    assert before - device.cuda.free_bytes() < 64 << 20
