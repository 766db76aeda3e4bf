"""What the proof of an export sees: faults of the runtime on noise, and detectors on pictures that show nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import SIZE_PX, make_quick
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.onnx_session import unoptimised_session
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.plan import ExportPlan
from convoy.export.rows import Rows, noise_of_both_signs
from convoy.export.sources.torch_job import Answered, TorchResult
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec, TensorSpec

FLOAT, BYTES = TensorProto.FLOAT, TensorProto.UINT8


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    make_quick(monkeypatch)


def write(path: Path, nodes, constants, outputs, given=("images", FLOAT, ["batch", 3, SIZE_PX, SIZE_PX])) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(*given)],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    return path


def write_padded(path: Path) -> Path:
    """A pad of zeros before a maximum, which no value of 0..1 tells from any other pad."""
    nodes = [
        helper.make_node("Pad", ["images", "pads", "zero"], ["padded"]),
        helper.make_node("MaxPool", ["padded"], ["largest"], kernel_shape=[2, 2], strides=[1, 1]),
        helper.make_node("Flatten", ["largest"], ["features"]),
    ]
    pads = np.array([0, 0, 0, 0, 0, 0, 1, 1])
    constants = {"pads": pads, "zero": np.float32(0)}
    return write(path, nodes, constants, {"features": ["batch", 3 * SIZE_PX * SIZE_PX]})


def export(tmp_path: Path, source: Path | str, **changes: object) -> Bundle:
    given = {"source": str(source), "name": "net", "store": tmp_path / "store", "max_batch": 4} | changes
    return open_bundle(export_bundle(ExportOptions(**given)))  # type: ignore[arg-type]


WAYS = {
    "as it is": {},
    "of pictures": {"preprocess": "unit", "front": "none", "task": "none"},
    "of tensors": {"calibrate": "data.npz", "precisions": "fp32"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_fault_of_the_runtime_that_no_picture_shows_is_seen(tmp_path, monkeypatch, way):
    """The same file is proved where the optimisation is left out, and refused where it is not."""
    network, changes = write_padded(tmp_path / "net.onnx"), dict(WAYS[way])
    if "calibrate" in changes:
        shown = np.random.default_rng(0).random((80, 3, SIZE_PX, SIZE_PX), np.float32)
        np.savez(tmp_path / "data.npz", images=shown)
        changes["calibrate"] = str(tmp_path / "data.npz")
    bundle = export(tmp_path, network, **changes)
    assert "on noise of both signs" in bundle.manifest.variants[0].reason
    monkeypatch.setattr("convoy.app.engines.onnx_session.WRONG_OPTIMIZERS", ())
    with pytest.raises(JobError, match=r"differs from (the original file|net.onnx in ONNX Runtime) by"):
        export(tmp_path, network, **changes)


@pytest.mark.parametrize("front", ["uint8_nhwc", "float_nchw"])
def test_noise_reaches_both_ends(front):
    image = ImageSpec(16, 12, 3, "exact", 16, "bilinear", True, (0.5,) * 3, (0.5,) * 3, front)
    spec = TensorSpec("images", image.tensor_dtype, image.tensor_shape)
    noise = noise_of_both_signs([spec], image)["images"]
    assert noise.dtype == spec.numpy_dtype
    assert noise.shape[1:] == spec.shape
    assert np.array_equal(noise, noise_of_both_signs([spec], image)["images"])
    low, high = (0, 255) if front == "uint8_nhwc" else (-2, 2)
    assert noise.min() <= low
    assert noise.max() >= high


def test_a_network_that_does_not_run_on_noise_is_proved_on_what_it_runs_on(tmp_path):
    nodes = [helper.make_node("Log", ["images"], ["logs"]), helper.make_node("Flatten", ["logs"], ["features"])]
    network = write(tmp_path / "net.onnx", nodes, {}, {"features": ["batch", 3 * SIZE_PX * SIZE_PX]})
    shown = 0.5 + np.random.default_rng(0).random((80, 3, SIZE_PX, SIZE_PX), np.float32)
    np.savez(tmp_path / "data.npz", images=shown)
    variant = export(tmp_path, network, calibrate=str(tmp_path / "data.npz"), precisions="fp32").manifest.variants[0]
    assert variant.max_relative_error < 1e-6


def write_detector(path: Path, bias: float, unit: float) -> Path:
    """images -> boxes [N, 16, 4] and scores [N, 16, 2], which are sigmoids."""
    weights = np.random.default_rng(4)
    constants = {
        "scale": np.full((1, 3, 1, 1), 1 / 255, np.float32),
        "w": weights.standard_normal((6, 3, 2, 2)).astype(np.float32) * 0.1,
        "b": np.array([0, 0, 0, 0, bias, bias], np.float32),
        "unit": np.float32(unit),
        "box": np.array([0, -1, 4]),
        "score": np.array([0, -1, 2]),
        "sizes": np.array([4, 2]),
    }
    nodes = [
        helper.make_node("Cast", ["images"], ["float"], to=FLOAT),
        helper.make_node("Transpose", ["float"], ["nchw"], perm=[0, 3, 1, 2]),
        helper.make_node("Mul", ["nchw", "scale"], ["scaled"]),
        helper.make_node("Conv", ["scaled", "w", "b"], ["found"], strides=[2, 2], kernel_shape=[2, 2]),
        helper.make_node("Transpose", ["found"], ["last"], perm=[0, 2, 3, 1]),
        helper.make_node("Split", ["last", "sizes"], ["moved", "logits"], axis=3),
        helper.make_node("Reshape", ["moved", "box"], ["rows"]),
        helper.make_node("Mul", ["rows", "unit"], ["boxes"]),
        helper.make_node("Reshape", ["logits", "score"], ["classes"]),
        helper.make_node("Sigmoid", ["classes"], ["scores"]),
    ]
    outputs = {"boxes": ["batch", 16, 4], "scores": ["batch", 16, 2]}
    return write(path, nodes, constants, outputs, ("images", BYTES, ["batch", SIZE_PX, SIZE_PX, 3]))


@pytest.mark.parametrize("task", ["detect", "none"])
@pytest.mark.parametrize(
    ("bias", "off_by", "output", "is_right"),
    [
        # Pictures that show nothing: rounding is as large as the scores.
        (-13.0, 1.8e-7, "scores", True),
        (-13.0, 3e-3, "scores", False),
        (0.0, 1.8e-7, "scores", True),
        (0.0, 3e-3, "scores", False),
        (-13.0, 3.0, "boxes", False),
    ],
)
def test_a_detector_is_judged_alike_whatever_the_pictures_show(
    tmp_path, monkeypatch, task, bias, off_by, output, is_right
):
    """torch is played: its answers are those of the graph, and one output is off by so much."""

    def played(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
        session = unoptimised_session(write_detector(folder / "model.onnx", bias, unit=8.0))

        def answered(rows: Rows) -> Rows:
            boxes, scores = session.run(["boxes", "scores"], dict(rows))
            own = {"boxes": boxes, "scores": scores}
            return {**own, output: own[output] + np.float32(off_by)}

        noise = noise_of_both_signs(plan.inputs, plan.image)
        return TorchResult(folder / "model.onnx", answered(samples), "0.0", noise=Answered(noise, answered(noise)))

    monkeypatch.setattr("convoy.export.command.to_onnx", played)
    (tmp_path / "net.py").write_text("def make():\n    raise NotImplementedError\n")
    size = {"preprocess": "unit", "input": f"3x{SIZE_PX}x{SIZE_PX}"}
    source = f"{tmp_path / 'net.py'}:make"
    if is_right:
        variant = export(tmp_path, source, task=task, **size).manifest.variants[0]
        assert variant.output_errors["scores"] < 1e-5
        return
    with pytest.raises(JobError, match=rf"{output} of the exported graph differs from torch by .*, allowed is 0\.0001"):
        export(tmp_path, source, task=task, **size)


def test_small_numbers_that_are_not_normalised_are_judged_by_their_size(tmp_path, monkeypatch):
    """A regression of hundredths has no scale of its own: a tenth off is wrong."""

    def played(plan: ExportPlan, samples: Rows, folder: Path) -> TorchResult:
        network = write_detector(folder / "model.onnx", -13.0, unit=1e-5)
        session = unoptimised_session(network)
        boxes, scores = session.run(["boxes", "scores"], dict(samples))
        return TorchResult(network, {"boxes": boxes * np.float32(1.1), "scores": scores}, "0.0")

    monkeypatch.setattr("convoy.export.command.to_onnx", played)
    (tmp_path / "net.py").write_text("def make():\n    raise NotImplementedError\n")
    with pytest.raises(JobError, match=r"boxes of the exported graph differs from torch by 0\.091"):
        export(tmp_path, f"{tmp_path / 'net.py'}:make", task="none", preprocess="unit", input="3x8x8")
