"""A head of somebody else's, declared in a file: exported with its own names of outputs, and read as it is declared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from export_fixtures import make_quick
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.base import run_arrays
from convoy.app.pictures.answering import detections
from convoy.export.command import export_bundle
from convoy.export.options import ExportOptions
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import opened
from convoy.models.bundle import Bundle, open_bundle
from convoy.models.errors import JobError, UsageError
from convoy.models.geometry import ImagePlacement
from convoy.models.tensors import TensorBytes

HEAD = {
    "boxes": "loc",
    "scores": "conf",
    "anchors": [{"rows": 1, "columns": 2, "step_y_px": 8, "step_x_px": 4, "sizes_px": [[4, 6]]}],
    "anchor_weights": [10, 10, 5, 5],
    "background": 0,
    "threshold": 0.3,
    "iou_threshold": 0.5,
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    make_quick(monkeypatch)


HEADS = (("loc", 4), ("conf", 3))


def write_detector(path: Path) -> Path:
    """FP32 [N, 3, 8, 8] -> loc [N, 2, 4] and conf [N, 2, 3], by the mean of each colour alone."""
    generator = np.random.default_rng(5)
    constants = {
        "to_loc": generator.standard_normal((3, 8)).astype(np.float32),
        "to_conf": (4 * generator.standard_normal((3, 6))).astype(np.float32),
        "loc_shape": np.array([-1, 2, 4]),
        "conf_shape": np.array([-1, 2, 3]),
    }
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["means"]),
        helper.make_node("Flatten", ["means"], ["flat"]),
        helper.make_node("MatMul", ["flat", "to_loc"], ["flat_loc"]),
        helper.make_node("MatMul", ["flat", "to_conf"], ["flat_conf"]),
        helper.make_node("Reshape", ["flat_loc", "loc_shape"], ["loc"]),
        helper.make_node("Reshape", ["flat_conf", "conf_shape"], ["conf"]),
    ]
    graph = helper.make_graph(
        nodes,
        "detector",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, size]) for name, size in HEADS],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


def export(tmp_path: Path, head: object, **changes: object) -> Bundle:
    (tmp_path / "head.json").write_text(json.dumps(head))
    given = {"preprocess": "unit", "input": "3x8x8", "activation": "softmax", "precisions": "fp32", "max_batch": 4}
    options = ExportOptions(
        str(write_detector(tmp_path / "net.onnx")),
        "net",
        **({"detection": tmp_path / "head.json", "store": tmp_path / "store"} | given | changes),  # type: ignore[arg-type]
    )
    return open_bundle(export_bundle(options))


def test_boxes_are_read_as_the_file_says(tmp_path):
    bundle = export(tmp_path, HEAD)
    spec = bundle.manifest.spec
    assert (spec.task, spec.activation) == ("detect", "softmax")
    assert spec.image is not None
    pixels = np.random.default_rng(1).integers(0, 256, (1, 8, 8, 3), dtype=np.uint8)
    with opened(spec, [REFERENCE], bundle.folder) as (fp32,):
        arrays = run_arrays(fp32.engine, {"images": pixels})
    answers = {name: TensorBytes(array.shape, memoryview(array.tobytes())) for name, array in arrays.items()}
    found = detections(answers, spec, ImagePlacement.of((8, 8), spec.image), None, None)
    # By the formulas themselves: two anchors of 4 x 6 at (2, 4) and (6, 4).
    shares = np.exp(arrays["conf"][0]) / np.exp(arrays["conf"][0]).sum(1, keepdims=True)
    expected = []
    for row, centre in enumerate((2.0, 6.0)):
        dx, dy, dw, dh = arrays["loc"][0, row] / np.array([10, 10, 5, 5])
        x, y, width, height = centre + 4 * dx, 4 + 6 * dy, 4 * np.exp(dw), 6 * np.exp(dh)
        box = np.clip([x - width / 2, y - height / 2, x + width / 2, y + height / 2], 0, 8)
        expected += [(shares[row, number], number, box) for number in (1, 2) if shares[row, number] >= 0.3]
    expected.sort(key=lambda one: -one[0])
    assert [one.class_id for one in found] == [number for _, number, _ in expected] != []
    assert np.allclose([one.box for one in found], [box for *_, box in expected], atol=0.01)
    assert np.allclose([one.score for one in found], [share for share, *_ in expected], atol=1e-5)


@pytest.mark.parametrize(
    ("head", "changes", "words"),
    [
        ([], {}, r"--detection .*head.json: detection: .*; write it as in"),
        ({"boxes": "loc"}, {}, r"--detection .*scores.*; write it as in"),
        (HEAD | {"box_form": "corners"}, {}, r"box_form.*; write it as in"),
        (HEAD | {"threshold": 2}, {}, r"threshold must be from 0 to 1.*; write it as in"),
        (HEAD, {"task": "segment"}, "--detection says how boxes are read, and --task segment has none"),
        (HEAD, {"preprocess": None, "activation": "auto"}, "--detection is about images"),
        (
            HEAD,
            {"detection": Path("nosuch.json")},
            "--detection nosuch.json: No such file or directory; write it as in",
        ),
    ],
)
def test_what_is_wrong_with_the_file_is_named(tmp_path, head, changes, words):
    with pytest.raises(UsageError, match=words):
        export(tmp_path, head, **changes)


def test_what_does_not_fit_the_outputs_is_named(tmp_path):
    with pytest.raises(JobError, match=r"there is no output 'boxes' for the boxes; the model gives 'loc', 'conf'"):
        export(tmp_path, HEAD | {"boxes": "boxes"})
    assert not (tmp_path / "store").exists()
