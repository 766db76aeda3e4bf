"""Networks of several inputs and outputs, from ONNX and on arrays: proved by output, scored by a metric. No torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import export, make_quick, save_graph
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from convoy.app.engines.onnx_session import new_session
from convoy.models.errors import ConvoyError, JobError, UsageError
from tests.support.onnx_models import mean

ROWS, LENGTH = 60, 32
METRICS = """
    import numpy as np
    print("chatter between the frames")
    def close(outputs, targets):
        print("more of it")
        return -np.abs(outputs["size"][:, 0] - targets)
    def of_several(outputs, targets):
        return outputs["size"]
    def not_finite(outputs, targets):
        return np.where(targets > 0, np.nan, 1.0)
    def broken(outputs, targets):
        return outputs["no such output"]
    def dies(outputs, targets):
        import os
        os._exit(3)
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


def write_network(path: Path) -> Path:
    """signal FP32 [N, 2, 32] and kind INT64 [N] -> scores [N, 3], size [N, 1] and best INT64 [N]."""
    generator = np.random.default_rng(4)
    constants = {
        "kernel": generator.standard_normal((8, 2, 5)).astype(np.float32),
        "table": generator.standard_normal((4, 8)).astype(np.float32),
        "w": generator.standard_normal((8, 3)).astype(np.float32),
        "b": np.zeros(3, np.float32),
        "v": generator.standard_normal((8, 1)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["signal", "kernel"], ["c"], "conv", pads=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"], "relu"),
        helper.make_node("GlobalAveragePool", ["r"], ["p"], "pool"),
        helper.make_node("Flatten", ["p"], ["f"], "flatten"),
        helper.make_node("Gather", ["table", "kind"], ["e"], "look"),
        helper.make_node("Add", ["f", "e"], ["sum"], "add"),
        helper.make_node("Gemm", ["sum", "w", "b"], ["scores"], "head"),
        helper.make_node("Gemm", ["sum", "v"], ["size"], "other"),
        helper.make_node("ArgMax", ["scores"], ["best"], "argmax", axis=1, keepdims=0),
    ]
    return save_graph(
        path,
        nodes,
        [
            helper.make_tensor_value_info("signal", TensorProto.FLOAT, ["batch", 2, LENGTH]),
            helper.make_tensor_value_info("kind", TensorProto.INT64, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 3]),
            helper.make_tensor_value_info("size", TensorProto.FLOAT, ["batch", 1]),
            helper.make_tensor_value_info("best", TensorProto.INT64, ["batch"]),
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )


def arrays(**changes: np.ndarray | None) -> dict[str, np.ndarray]:
    """As people save them: doubles, and whole numbers of the machine's size."""
    generator = np.random.default_rng(0)
    signal, kind = generator.standard_normal((ROWS, 2, LENGTH)), generator.integers(0, 4, ROWS)
    found = {"signal": signal, "kind": kind, "targets": kind.astype(np.float32)} | changes
    return {name: array for name, array in found.items() if array is not None}


@pytest.fixture
def network(tmp_path) -> Path:
    return write_network(tmp_path / "net.onnx")


@pytest.fixture
def data(tmp_path) -> str:
    np.savez(tmp_path / "data.npz", **arrays())
    return str(tmp_path / "data.npz")


@pytest.fixture
def metrics(tmp_path) -> str:
    import textwrap

    (tmp_path / "metrics.py").write_text(textwrap.dedent(METRICS))
    return str(tmp_path / "metrics.py")


def test_every_precision_is_made_of_a_file_of_arrays_and_each_output_is_proved(tmp_path, network, data):
    bundle = export(tmp_path, network, calibrate=data)
    spec, reference = bundle.manifest.spec, bundle.manifest.variants[0]
    assert [(one.name, one.dtype, one.shape) for one in spec.inputs] == [
        ("signal", "FP32", (2, LENGTH)),
        ("kind", "INT64", ()),
    ]
    assert [(one.name, one.dtype, one.shape) for one in spec.outputs] == [
        ("scores", "FP32", (3,)),
        ("size", "FP32", (1,)),
        ("best", "INT64", ()),
    ]
    assert (spec.image, spec.task, spec.activation) == (None, "none", "none")
    precisions = {variant.precision for variant in bundle.manifest.variants}
    assert {"fp32", "fp16", "int8"} <= precisions
    for variant in bundle.manifest.variants:
        assert set(variant.output_errors) == {"scores", "size", "best"}
        assert variant.max_relative_error == max(variant.output_errors.values())
        assert 0 <= (variant.agreement or 0) <= 1
    assert "(scores 0, size 0, best 0) on 60 rows" in reference.reason
    assert "--task classify or multilabel if scores has class scores" in reference.reason
    int8 = bundle.manifest.variant("int8-cpu.onnx")
    assert not int8.serve
    assert "not verified on labels: is off from fp32 by" in int8.reason
    assert f"{100 * int8.output_errors['size']:.2g} % in size" in int8.reason
    assert "Largest error of each output" in (bundle.folder / "report.html").read_text()


def test_a_metric_of_the_users_decides_what_serves(tmp_path, network, data, metrics):
    bundle = export(tmp_path, network, calibrate=data, evaluate=data, metric=f"{metrics}:close", precisions="fp16,int8")
    fp32, fp16 = bundle.manifest.variants[0].accuracy, bundle.manifest.variant("fp16.onnx")
    assert fp32.metric == fp16.accuracy.metric == bundle.manifest.metric == "metrics.py:close"
    outputs = new_session(network)
    held_out = fp32.images
    assert 0 < held_out < ROWS
    assert bundle.manifest.provenance.evaluation.images == held_out
    assert bundle.manifest.provenance.calibration.images == ROWS - held_out
    every = arrays()
    own = outputs.run(["size"], {"signal": every["signal"].astype(np.float32), "kind": every["kind"]})[0][:, 0]
    scores = -np.abs(own - every["targets"])
    assert scores.min() <= fp32.top1 <= scores.max()
    assert fp16.accuracy.loss_points == pytest.approx(0, abs=1)
    assert f"points of metrics.py:close on {held_out} samples" in fp16.reason
    assert any("metrics.py:close is" in finding for finding in bundle.manifest.findings)


def test_targets_without_a_measure_let_nothing_serve(tmp_path, network, data):
    bundle = export(tmp_path, network, evaluate=data, calibrate=data, precisions="int8")
    assert "the targets of data.npz say nothing where the task is none; pass --metric" in (
        bundle.manifest.variants[0].reason
    )
    assert [variant.accuracy for variant in bundle.manifest.variants] == [None] * len(bundle.manifest.variants)
    assert not any(variant.serve for variant in bundle.manifest.variants[1:])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("of_several", r"metrics.py:of_several returned float32 \[\d+, 1\] for \d+ samples; it must return one number"),
        ("not_finite", "metrics.py:not_finite returned nan for sample .*; a score must be a finite number"),
        ("broken", r"metrics.py:broken failed: KeyError: 'no such output' \(line 1\d\)"),
        ("dies", "--metric metrics.py:dies ended its process"),
        ("missing", "metrics.py has no function 'missing'; it has close, of_several"),
    ],
)
def test_a_metric_that_is_wrong_is_one_line(tmp_path, network, data, metrics, function, words):
    with pytest.raises(JobError, match=words):
        export(tmp_path, network, evaluate=data, metric=f"{metrics}:{function}")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signal": np.zeros((ROWS, 2, LENGTH + 1))}, r"a sample of signal is \[2, 33\]"),
        ({"kind": np.zeros(ROWS)}, "'kind' is float64 .* the network takes INT64"),
        ({"kind": None, "sort": np.zeros(ROWS, np.int64)}, "there is signal, sort; rename the arrays"),
        ({"kind": np.zeros(3, np.int64)}, "one row per sample, but the file has signal 60, kind 3, targets 60"),
        ({"kind": np.array([None] * ROWS)}, "'kind' holds Python objects, which are not read"),
        ({"signal": np.full((ROWS, 2, LENGTH), np.nan)}, "'signal' contains NaN or infinity"),
        ({"labels": np.zeros(ROWS)}, "both targets and labels"),
    ],
)
def test_arrays_that_do_not_fit_say_what_to_do(tmp_path, network, changes, words):
    np.savez(tmp_path / "odd.npz", **arrays(**changes))
    with pytest.raises(JobError, match=words):
        export(tmp_path, network, calibrate=str(tmp_path / "odd.npz"))


def test_what_is_no_file_of_arrays_is_named(tmp_path, network):
    (tmp_path / "text.npz").write_text("no zip")
    with pytest.raises(JobError, match=r"text.npz cannot be read as .npz"):
        export(tmp_path, network, calibrate=str(tmp_path / "text.npz"))
    with pytest.raises(UsageError, match="there is no file"):
        export(tmp_path, network, calibrate=str(tmp_path / "nowhere.npz"))


def test_a_file_that_cannot_be_batched_says_so(tmp_path):
    mixing = mean(tmp_path / "mean.onnx")
    (given,) = new_session(mixing).get_inputs()
    np.savez(tmp_path / "x.npz", **{given.name: np.random.default_rng(0).random((8, *given.shape[1:])).astype("f4")})
    with pytest.raises(JobError, match=r"not batched: .* leave --calibrate and --evaluate out to serve it as it is"):
        export(tmp_path, mixing, calibrate=str(tmp_path / "x.npz"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metric": "metrics.txt:f", "evaluate": "x.npz"}, "--metric 'metrics.txt:f' is not understood"),
        ({"metric": "nowhere.py:f", "evaluate": "x.npz"}, "--metric 'nowhere.py:f': there is no file"),
        ({"metric": "METRICS:close", "calibrate": "x.npz"}, r"pass --evaluate FILE.npz with an array of targets"),
        ({"task": "guess", "calibrate": "x.npz"}, "--task 'guess' is unknown; use classify, multilabel, segment"),
    ],
)
def test_a_wrong_call_is_named(tmp_path, network, data, metrics, changes, words):
    given = {name: value.replace("METRICS", metrics).replace("x.npz", data) for name, value in changes.items()}
    with pytest.raises(UsageError, match=words):
        export(tmp_path, network, **given)


def write_pixel_network(path: Path, *, height: int = 8) -> Path:
    """FP32 [N, 3, 8, 8] -> `out` [N, 2, 8, 8], where red is above blue, and its negative `aux`."""
    pick = np.array([[1, 0, -1], [-1, 0, 1]], np.float32).reshape(2, 3, 1, 1)
    nodes = [
        helper.make_node("Conv", ["x", "pick"], ["out"], "conv"),
        helper.make_node("Neg", ["out"], ["aux"], "neg"),
    ]
    shape = ["batch", 2, height, 8]
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, height, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("out", "aux")],
        [numpy_helper.from_array(pick, "pick")],
    )


def pictures(count: int = 60) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def test_a_flat_folder_calibrates_and_tells_how_maps_agree(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, pixels in enumerate(pictures()):
        Image.fromarray(pixels).save(folder / f"{index}.png")
    bundle = export(
        tmp_path,
        write_pixel_network(tmp_path / "pixels.onnx"),
        preprocess="unit",
        task="segment",
        calibrate=str(folder),
        evaluate=str(folder),
        precisions="int8",
    )
    spec = bundle.manifest.spec
    assert spec.task == "segment"
    assert spec.segmentation.class_map == "out"
    for variant in bundle.manifest.variants:
        assert variant.accuracy is None
    int8 = bundle.manifest.variant("int8-cpu.onnx")
    assert 0.9 < (int8.agreement or 0) <= 1
    assert "not verified on labels: agrees with fp32 on" in int8.reason
    assert "% of the pixels of some samples" in int8.reason


def test_masks_in_a_file_of_arrays_are_scored_by_iou(tmp_path):
    shown = pictures()
    masks = (shown[..., 2] > shown[..., 0]).astype(np.uint8)
    masks[:, 0] = 255  # nobody labelled the upper row
    np.savez(tmp_path / "masks.npz", images=shown, targets=masks)
    network = write_pixel_network(tmp_path / "pixels.onnx")
    data = str(tmp_path / "masks.npz")
    bundle = export(
        tmp_path, network, preprocess="unit", task="segment", calibrate=data, evaluate=data, precisions="int8"
    )
    fp32 = bundle.manifest.variants[0].accuracy
    # Equal red and blue count as the first class in both.
    assert (fp32.metric, fp32.top1, fp32.set_metrics) == ("mean IoU per image", 1.0, {"mean IoU": 1.0})
    assert bundle.manifest.variant("int8-cpu.onnx").accuracy is not None
    np.savez(tmp_path / "wrong.npz", images=shown, targets=masks[:, :4])
    with pytest.raises(JobError, match=r"this task wants whole numbers \[8, 8\]; save them so, or pass --metric"):
        export(tmp_path, network, preprocess="unit", task="segment", evaluate=str(tmp_path / "wrong.npz"))


def test_maps_are_not_taken_for_a_segmentation_unasked(tmp_path):
    bundle = export(tmp_path, write_pixel_network(tmp_path / "pixels.onnx"), preprocess="unit")
    assert bundle.manifest.spec.task == "none"
    assert "--task segment if out has a class per pixel" in bundle.manifest.variants[0].reason
    with pytest.raises(JobError, match=r"--task classify wants scores \[N, classes\] as the first output, and out is"):
        export(tmp_path, write_pixel_network(tmp_path / "pixels.onnx"), preprocess="unit", task="classify")
    with pytest.raises(JobError, match=r"--task detect wants outputs that are called boxes \[N, K, 4\]"):
        export(tmp_path, write_pixel_network(tmp_path / "pixels.onnx"), preprocess="unit", task="detect")


def test_a_file_of_a_newer_ir_version_says_how_to_save_it(tmp_path, network):
    model = onnx.load(network)
    model.ir_version = 99
    network.write_bytes(model.SerializeToString())
    with pytest.raises(
        ConvoyError, match=r"IR version is 99, .*; save it with an older version: .* set model.ir_version"
    ):
        export(tmp_path, network)
