"""What a network's outputs are: read off its graph, seen in its answers, and refused where neither tells."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from convoy.app.engines.onnx_session import new_session
from convoy.export.proof.activation import decide, look_of, overruled
from convoy.export.proof.ending import Ending, read_ending
from convoy.models.errors import JobError

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
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def answers(path: Path) -> np.ndarray:
    session = new_session(path)
    images = np.random.default_rng(2).standard_normal((20, 4)).astype(np.float32)
    result: np.ndarray = session.run(None, {"x": images})[0]
    return result


@pytest.mark.parametrize(
    ("steps", "activation", "words"),
    [
        ([], "softmax", "MatMul, and the outputs of 20 images go beyond 0..1: logits"),
        ([("Relu", ["logits"], "y")], "softmax", "Relu"),
        ([("Tanh", ["logits"], "y")], "softmax", "Tanh"),
        ([("Add", ["logits", "one"], "y")], "softmax", "MatMul, Add"),
        ([("Softmax", ["logits"], "y")], "none", "Softmax, and the outputs of 20 images sum to one: they are prob"),
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
        ([("Sigmoid", ["logits"], "y")], "none", "the probability of each class by itself already"),
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
    decision = decide(read_ending(path), answers(path), real=True)
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
    with pytest.raises(JobError, match=r"cannot be told: .* with --activation softmax, sigmoid or none") as caught:
        decide(read_ending(path), answers(path), real=True)
    assert "\n" not in str(caught.value)
    said = overruled("sigmoid", read_ending(path), answers(path), real=True)
    assert said.activation == "sigmoid"
    assert "--activation sigmoid; without it: undecided" in said.reason


@pytest.mark.parametrize(
    ("steps", "activation"), [([], "sigmoid"), ([("Sigmoid", ["logits"], "y")], "none"), (WRITTEN_SIGMOID, "none")]
)
def test_one_output_is_a_logit_or_a_probability_and_never_a_softmax(tmp_path, steps, activation):
    path = network(tmp_path / "net.onnx", steps, classes=1)
    assert decide(read_ending(path), answers(path), real=True).activation == activation
    with pytest.raises(JobError, match="one output, whose softmax is always 1; pass --activation sigmoid or none"):
        overruled("softmax", read_ending(path), answers(path), real=True)
    soft = network(tmp_path / "soft.onnx", [("Softmax", ["logits"], "y")], classes=1)
    with pytest.raises(JobError, match="a softmax of one output is always the same"):
        decide(read_ending(soft), answers(soft), real=True)


def test_what_is_said_overrules_and_what_was_found_is_told(tmp_path):
    path = network(tmp_path / "net.onnx", [])
    decision = overruled("none", read_ending(path), answers(path), real=False)
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
