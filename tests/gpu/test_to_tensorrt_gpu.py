"""The TensorRT builder with the real library: what only fakes have shown elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.app.engines.tensorrt_library import TENSORRT, load_builder
from convoy.export.tensorrt.build import BuildJob, build_plan
from convoy.export.tensorrt.library import find_gpu, resolve_target
from convoy.export.tensorrt.watch import BuildWatch
from convoy.models.errors import JobError
from convoy.models.plan_cache import find_plan
from convoy.models.plans import BuildEvent, BuildOptions, Gpu, Plan

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def trt() -> Any:
    try:
        return load_builder(TENSORRT)
    except JobError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    try:
        return find_gpu()
    except JobError as error:
        pytest.skip(str(error))


def write_network(path: Path, half: bool, front: tuple[str, ...] = ()) -> Path:
    """Four convolutions in FP32 or FP16; `front` are operators over a uint8 input, in their order."""
    onnx = pytest.importorskip("onnx")
    helper, types = onnx.helper, onnx.TensorProto
    kind = types.FLOAT16 if half else types.FLOAT
    weights = [np.random.default_rng(i).standard_normal((32, c, 3, 3)) / 10 for i, c in enumerate((3, 32, 32, 32))]
    numbers = [w.astype(np.float16 if half else np.float32) for w in weights]
    constants = [onnx.numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(numbers)]
    nodes, last = [], "images"
    for index, operator in enumerate(front or ("Cast",)):
        given = {"to": kind} if operator == "Cast" else {"perm": [0, 3, 1, 2]}
        nodes.append(helper.make_node(operator, [last], [f"front{index}"], f"front{index}", **given))
        last = f"front{index}"
    for index in range(4):
        nodes.append(helper.make_node("Conv", [last, f"w{index}"], [f"c{index}"], f"conv{index}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"], f"relu{index}"))
        last = f"r{index}"
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["pooled"], "pool"))
    nodes.append(helper.make_node("Cast", ["pooled"], ["logits"], "out", to=types.FLOAT))
    shape = ["n", 32, 32, 3] if front else ["n", 3, 32, 32]
    inputs = [helper.make_tensor_value_info("images", types.UINT8 if front else types.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info("logits", types.FLOAT, ["n", 32, 1, 1])]
    graph = helper.make_graph(nodes, "convolutions", inputs, outputs, constants)
    path.write_bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    return path


def build(trt: Any, gpu: Gpu, onnx: Path, precision: str, watch: BuildWatch | None = None) -> Plan:
    options = BuildOptions(precision, (1, 8))  # type: ignore[arg-type]
    watch = watch or BuildWatch(lambda event: None)
    target = resolve_target(TENSORRT, trt, (), options, gpu)
    return build_plan(BuildJob(onnx, onnx.parent / "cache", options, target, gpu.name), trt, watch)


@pytest.mark.parametrize(("precision", "half"), [("fp32", False), ("fp16", True)])
def test_a_plan_is_built_proved_and_found_again(trt: Any, gpu: Gpu, tmp_path: Path, precision: str, half: bool) -> None:
    events: list[BuildEvent] = []
    onnx = write_network(tmp_path / "m.onnx", half)
    plan = build(trt, gpu, onnx, precision, BuildWatch(events.append))
    assert plan.record.audit.by_precision.get(precision, 0) >= 1
    assert len(plan.record.scratch_bytes) == 2
    assert find_plan(tmp_path / "cache", plan.record.key) == plan
    assert any(event.kind == "progress" and event.parent is not None for event in events)
    assert build(trt, gpu, onnx, precision).record == plan.record


def test_an_fp32_graph_does_not_pass_for_fp16(trt: Any, gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="computing layers run in fp16"):
        build(trt, gpu, write_network(tmp_path / "m.onnx", half=False), "fp16")


def test_the_time_limit_stops_a_real_build(trt: Any, gpu: Gpu, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="the build exceeded"):
        build(trt, gpu, write_network(tmp_path / "m.onnx", half=True), "fp16", BuildWatch(lambda event: None, 0.001))


def test_a_uint8_input_goes_straight_into_a_cast(trt: Any, gpu: Gpu, tmp_path: Path) -> None:
    build(trt, gpu, write_network(tmp_path / "m.onnx", half=True, front=("Cast", "Transpose")), "fp16")


def test_kernel_times_of_the_first_build_are_taken_by_the_second(trt: Any, gpu: Gpu, tmp_path: Path) -> None:
    onnx = write_network(tmp_path / "m.onnx", half=True)
    plan = build(trt, gpu, onnx, "fp16")
    plan.path.write_bytes(b"spoilt")
    again = build(trt, gpu, onnx, "fp16")
    assert not any("new one is begun" in note for note in again.record.notes)
