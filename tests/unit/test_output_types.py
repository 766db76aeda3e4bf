"""What a network's outputs are: read off its graph, seen in its answers, and said by the user of a detector."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from export_fixtures import answers, export, make_quick, save_graph
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.base import run_arrays
from convoy.app.pictures.answering import detections
from convoy.export.proof.activation import decide, look_of, overruled
from convoy.export.proof.ending import Ending, read_ending
from convoy.export.proof.judging import metric_judge
from convoy.export.proof.outcomes import ScoredOutcomes
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import opened
from convoy.models.bundle import Bundle
from convoy.models.errors import JobError, UsageError
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from convoy.models.tensors import TensorBytes
from tests.support.stores import ROOT

CLASSES = 3
Step = tuple[str, Sequence[str], str] | tuple[str, Sequence[str], str, dict[str, object]]
EXP_SHARES: list[Step] = [
    ("Exp", ["logits"], "e"),
    ("ReduceSum", ["e", "axis"], "sum", {"keepdims": 1}),
    ("Div", ["e", "sum"], "y"),
]
STABLE_SHARES: list[Step] = [
    ("ReduceMax", ["logits", "axis"], "top", {"keepdims": 1}),
    ("Sub", ["logits", "top"], "below"),
    ("Exp", ["below"], "e"),
    ("ReduceSum", ["e", "axis"], "sum", {"keepdims": 1}),
    ("Reciprocal", ["sum"], "inverse"),
    ("Mul", ["e", "inverse"], "y"),
]
LOG_SHARES: list[Step] = [
    ("Exp", ["logits"], "e"),
    ("ReduceSum", ["e", "axis"], "sum", {"keepdims": 1}),
    ("Log", ["sum"], "log"),
    ("Sub", ["logits", "log"], "y"),
]
LOG_SUM_EXP: list[Step] = [
    ("ReduceLogSumExp", ["logits", "axis"], "log", {"keepdims": 1}),
    ("Sub", ["logits", "log"], "y"),
]
WRITTEN_SIGMOID: list[Step] = [
    ("Neg", ["logits"], "minus"),
    ("Exp", ["minus"], "e"),
    ("Add", ["e", "one"], "more"),
    ("Div", ["one", "more"], "y"),
]


def network(path: Path, steps: Sequence[Step], classes: int = CLASSES) -> Path:
    """float32 [N, 4] -> a linear layer -> `logits` -> `steps` -> `y` [N, classes]."""
    generator = np.random.default_rng(1)
    constants = {
        "weight": 2 * generator.standard_normal((4, classes)).astype(np.float32),
        "axis": np.array([1]),
        "one": np.array(1, np.float32),
        "hundredth": np.array(0.01, np.float32),
        "zero": np.array(0, np.float32),
        "tiny": np.array(1e-6, np.float32),
        "row": np.array([-1, classes]),
        "column": np.array([-1, classes, 1]),
    }
    nodes = [helper.make_node("MatMul", ["x", "weight"], ["logits" if steps else "y"])]
    for kind, inputs, output, *attributes in steps:
        nodes.append(helper.make_node(kind, list(inputs), [output], **(attributes[0] if attributes else {})))
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )


def answered(path: Path) -> np.ndarray:
    return answers(path, np.random.default_rng(2).standard_normal((20, 4)).astype(np.float32))


@pytest.mark.parametrize(
    ("steps", "activation", "words"),
    [
        ([], "softmax", "MatMul, and the outputs of 20 images go beyond 0..1: logits"),
        ([("Relu", ["logits"], "y")], "softmax", "Relu"),
        ([("Tanh", ["logits"], "y")], "softmax", "Tanh"),
        ([("Add", ["logits", "one"], "y")], "softmax", "MatMul, Add"),
        ([("Softmax", ["logits"], "y")], "none", "Softmax, and the outputs of 20 images sum to one: these are prob"),
        ([("Softmax", ["logits"], "p"), ("Identity", ["p"], "y")], "none", "Softmax"),
        (
            [("Softmax", ["logits"], "p"), ("Reshape", ["p", "column"], "q"), ("Reshape", ["q", "row"], "y")],
            "none",
            "Softmax",
        ),
        (EXP_SHARES, "none", "a division by the sum"),
        (STABLE_SHARES, "none", "a product with the sum's reciprocal"),
        ([("LogSoftmax", ["logits"], "y")], "softmax", "a softmax of log-probabilities gives the probabilities"),
        (LOG_SHARES, "softmax", "a subtraction of the logarithm of a sum"),
        (LOG_SUM_EXP, "softmax", "logarithms that sum to one"),
        ([("Softmax", ["logits"], "p"), ("Log", ["p"], "y")], "softmax", "the logarithm of a softmax"),
        ([("LogSoftmax", ["logits"], "p"), ("Exp", ["p"], "y")], "none", "the powers of a log-softmax"),
        ([("Sigmoid", ["logits"], "y")], "none", "the probability of each class by itself"),
        (WRITTEN_SIGMOID, "none", "1 / (1 + exp(-x))"),
        ([("Softmax", ["logits"], "p"), ("Clip", ["p", "tiny", "one"], "y")], "none", "Softmax, Clip"),
        ([("Mul", ["logits", "hundredth"], "cool"), ("Softmax", ["cool"], "y")], "none", "Softmax"),
        ([("Div", ["logits", "hundredth"], "y")], "softmax", "MatMul, Div"),
        ([("Sigmoid", ["logits"], "p"), ("Mul", ["logits", "p"], "y")], "softmax", "logits"),
        (
            [("Softmax", ["logits"], "p"), ("Softmax", ["logits"], "q"), ("Mean", ["p", "q"], "y")],
            "none",
            "Softmax, Mean",
        ),
    ],
)
def test_graph_and_outputs_decide_together(tmp_path, steps, activation, words):
    path = network(tmp_path / "net.onnx", steps)
    decision = decide(read_ending(path), answered(path), real=True)
    assert decision.activation == activation
    assert words in decision.reason


@pytest.mark.parametrize(
    "steps",
    [
        # A bounded ReLU that stays within 0..1 looks like a sigmoid.
        [("Mul", ["logits", "hundredth"], "small"), ("Clip", ["small", "zero", "one"], "y")],
        [("Sigmoid", ["logits"], "p"), ("Mul", ["p", "hundredth"], "y")],
        # Shares along another axis than the classes'.
        [("Softmax", ["logits"], "y", {"axis": 0})],
        # Percent, the losses of training, and scores from -1 to 1.
        [("Softmax", ["logits"], "p"), ("Div", ["p", "hundredth"], "y")],
        [("Softmax", ["logits"], "p"), ("Div", ["p", "hundredth"], "q"), ("Clip", ["q", "one"], "y")],
        [("LogSoftmax", ["logits"], "p"), ("Neg", ["p"], "y")],
        [("Sigmoid", ["logits"], "p"), ("Log", ["p"], "y")],
        [("Neg", ["logits"], "minus"), ("Softplus", ["minus"], "p"), ("Neg", ["p"], "y")],
        [("Sigmoid", ["logits"], "p"), ("Add", ["p", "p"], "q"), ("Sub", ["q", "one"], "y")],
    ],
)
def test_where_neither_can_tell_the_option_is_named(tmp_path, steps):
    path = network(tmp_path / "net.onnx", steps)
    with pytest.raises(
        JobError, match=r"it is unclear whether .*; pass --activation softmax, sigmoid or none"
    ) as caught:
        decide(read_ending(path), answered(path), real=True)
    assert "\n" not in str(caught.value)
    said = overruled("sigmoid", read_ending(path), answered(path), real=True)
    assert said.activation == "sigmoid"
    assert "--activation sigmoid; without it: undecided" in said.reason


@pytest.mark.parametrize(
    ("steps", "activation"), [([], "sigmoid"), ([("Sigmoid", ["logits"], "y")], "none"), (WRITTEN_SIGMOID, "none")]
)
def test_one_output_is_a_logit_or_a_probability_and_never_a_softmax(tmp_path, steps, activation):
    path = network(tmp_path / "net.onnx", steps, classes=1)
    assert decide(read_ending(path), answered(path), real=True).activation == activation
    with pytest.raises(JobError, match="one output, and its softmax is always 1; pass --activation sigmoid or none"):
        overruled("softmax", read_ending(path), answered(path), real=True)
    soft = network(tmp_path / "soft.onnx", [("Softmax", ["logits"], "y")], classes=1)
    with pytest.raises(JobError, match="a softmax of one output is always 1"):
        decide(read_ending(soft), answered(soft), real=True)


def test_what_is_said_overrules_and_what_was_found_is_told(tmp_path):
    path = network(tmp_path / "net.onnx", [])
    decision = overruled("none", read_ending(path), answered(path), real=False)
    assert (decision.activation, decision.are_shares) == ("none", False)
    assert decision.reason.startswith("--activation none; without it: softmax, for the graph ends in MatMul")


@given(st.integers(2, 50), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_shares_and_their_logarithms_are_known_whatever_the_network(classes, count, seed):
    logits = 5 * np.random.default_rng(seed).standard_normal((count, classes))
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert look_of(shares.astype(np.float32)) == "shares"
    assert look_of(np.log(shares).astype(np.float32)) == "log_shares"
    assert look_of((shares * 0.9).astype(np.float32)) == "within_0_1"
    unknown = Ending("unknown", "If")
    assert decide(unknown, shares, real=True).activation == "none"
    assert decide(unknown, np.log(shares), real=True).activation == "softmax"


HEAD = {
    "boxes": "loc",
    "scores": "conf",
    "anchors": [{"rows": 1, "columns": 2, "step_y_px": 8, "step_x_px": 4, "sizes_px": [[4, 6]]}],
    "anchor_weights": [10, 10, 5, 5],
    "background": 0,
    "threshold": 0.3,
    "iou_threshold": 0.5,
}


@pytest.fixture
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
    return save_graph(
        path,
        nodes,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2, size]) for name, size in HEADS],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
        opset=17,
    )


def exported(tmp_path: Path, head: object, **changes: object) -> Bundle:
    (tmp_path / "head.json").write_text(json.dumps(head))
    given = {"preprocess": "unit", "input": "3x8x8", "activation": "softmax", "precisions": "fp32"}
    given |= {"detection": tmp_path / "head.json"}
    return export(tmp_path, write_detector(tmp_path / "net.onnx"), **(given | changes))


@pytest.mark.usefixtures("quick")
def test_boxes_are_read_as_the_file_says(tmp_path):
    bundle = exported(tmp_path, HEAD)
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


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("head", "changes", "words"),
    [
        ([], {}, r"--detection .*head.json: detection: .*; .*or write it as in"),
        ({"boxes": "loc"}, {}, r"--detection .*scores.*; .*or write it as in"),
        (HEAD | {"box_form": "corners"}, {}, r"box_form.*; .*or write it as in"),
        (HEAD | {"threshold": 2}, {}, r"threshold must be from 0 to 1.*; .*or write it as in"),
        (HEAD, {"task": "segment"}, "--detection is for detectors, but --task is segment"),
        (HEAD, {"preprocess": None, "activation": "auto"}, "--detection needs images"),
        (
            HEAD,
            {"detection": Path("nosuch.json")},
            "--detection nosuch.json: No such file or directory; .*or write it as in",
        ),
    ],
)
def test_what_is_wrong_with_the_file_is_named(tmp_path, head, changes, words):
    with pytest.raises(UsageError, match=words):
        exported(tmp_path, head, **changes)


@pytest.mark.usefixtures("quick")
def test_what_does_not_fit_the_outputs_is_named(tmp_path):
    with pytest.raises(JobError, match=r"there is no output 'boxes' for the boxes; the model gives 'loc', 'conf'"):
        exported(tmp_path, HEAD | {"boxes": "boxes"})
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_it_is_the_average_precision(tmp_path):
    page = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    shown = re.search(r"`scores\.py`, for `--metric scores\.py:average_precision`:\n\n```python\n(.*?)```", page, re.S)
    assert shown is not None
    (tmp_path / "scores.py").write_text(shown[1])
    image = ImageSpec.plain(64, 64, 3, "uint8_nhwc")
    outputs = (TensorSpec("boxes", "FP32", (3, 4)), TensorSpec("scores", "FP32", (3, 2)))
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),), outputs, 4, image, "none", ()),
        task="detect",
        detection=DetectionOutputs("boxes", "scores", iou_threshold=0.5),
    )
    boxes = np.array([[0, 0, 10, 10], [1, 0, 11, 10], [30, 30, 50, 50]], np.float32)
    scores = np.array([[0.9, 0], [0.8, 0], [0, 0.7]], np.float32)
    none = [0, 0, 0, 0, -1]
    targets = np.array(
        [
            [[0, 0, 10, 10, 0], [30, 30, 50, 50, 1]],  # both are found, and what overlaps has gone
            [[30, 30, 50, 50, 1], none],  # found, behind one that is wrong
            [[0, 0, 10, 10, 1], [30, 30, 50, 50, 0]],  # the classes are others
            [none, none],
        ],
        np.float32,
    )
    answers = {"boxes": np.stack([boxes] * 4), "scores": np.stack([scores, scores, scores, scores * 0])}
    with metric_judge((tmp_path / "scores.py", "average_precision"), spec) as judge:
        found = judge.judged(answers, answers, targets)
    assert isinstance(found, ScoredOutcomes)
    assert found.scores.tolist() == [1.0, 0.5, 0.0, 1.0]
