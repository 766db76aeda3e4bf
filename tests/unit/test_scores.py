from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from convoy.app.pictures.answering import best_classes, best_classes_of_batch
from convoy.models.activation import activate
from convoy.models.errors import ModelFailed
from convoy.models.spec import Activation, ModelSpec, TensorSpec


def spec(activation: Activation = "softmax", labels: tuple[str, ...] = ("a", "b", "c")) -> ModelSpec:
    return ModelSpec(
        "m", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (3,)),), 4, None, activation, labels
    )


def test_the_softmax_cannot_overflow() -> None:
    scores = activate(np.array([1e4, 1e4, -1e4], np.float32), "softmax")
    np.testing.assert_allclose(scores, [0.5, 0.5, 0.0])


def test_the_sigmoid_cannot_overflow() -> None:
    np.testing.assert_allclose(activate(np.array([-1e4, 0.0, 1e4], np.float32), "sigmoid"), [0.0, 0.5, 1.0])


def test_without_activation_scores_are_the_logits() -> None:
    assert [one.score for one in best_classes(np.array([1.0, 3.0, 2.0], np.float32), spec("none"), 3)] == [
        3.0,
        2.0,
        1.0,
    ]


def test_the_best_come_first_and_ties_by_class_number() -> None:
    best = best_classes(np.array([1.0, 2.0, 2.0], np.float32), spec(), 2)
    assert [(one.class_id, one.label) for one in best] == [(1, "b"), (2, "c")]


def classes(logits: list[float], top_k: int | None) -> list[int]:
    return [one.class_id for one in best_classes(np.array(logits, np.float32), spec("none"), top_k)]


LEVELS = st.sampled_from([-math.inf, -1.0, -0.0, 0.0, 0.5, 1.0, math.inf])


@given(st.lists(LEVELS, min_size=1, max_size=300), st.integers(1, 12))
def test_the_few_best_of_many_are_those_that_sorting_all_would_give(logits: list[float], top_k: int) -> None:
    every = classes(logits, None)
    assert every == sorted(range(len(logits)), key=lambda number: -logits[number])
    assert classes(logits, top_k) == every[:top_k]


@given(st.lists(LEVELS, min_size=100, max_size=120), st.integers(0, 99))
def test_one_that_is_no_number_is_found_among_many(logits: list[float], at: int) -> None:
    logits[at] = math.nan
    with pytest.raises(ModelFailed):
        classes(logits, 5)


def test_a_class_without_a_label_has_none() -> None:
    assert best_classes(np.array([0.0, 0.0, 9.0], np.float32), spec(labels=("a",)), 1)[0].label is None


def test_half_precision_logits_are_scored_in_float32() -> None:
    best = best_classes(np.array([60000.0, 0.0, 0.0], np.float16), spec(), 3)
    assert best[0].score == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [[np.nan, 0.0, 0.0], [np.inf, np.inf, 0.0]])
def test_a_score_that_is_no_number_is_the_models_failure(bad: list[float]) -> None:
    with pytest.raises(ModelFailed, match="the model produced NaN"):
        best_classes(np.array(bad, np.float32), spec(), 1)


def one_output(activation: Activation, labels: tuple[str, ...]) -> ModelSpec:
    return ModelSpec(
        "m", (TensorSpec("x", "FP32", (1,)),), (TensorSpec("y", "FP32", (1,)),), 4, None, activation, labels
    )


def test_a_threshold_leaves_out_what_scores_less_and_may_leave_nothing() -> None:
    logits = np.array([2.0, -1.0, 0.5], np.float32)
    assert [one.class_id for one in best_classes(logits, spec("sigmoid"), None, 0.5)] == [0, 2]
    assert [one.class_id for one in best_classes(logits, spec("sigmoid"), 1, 0.5)] == [0]
    assert best_classes(logits, spec("sigmoid"), None, 0.9) == []
    assert [one.class_id for one in best_classes(np.array([0.5, 0.2, 0.7]), spec("none"), None, 0.5)] == [2, 0]


@pytest.mark.parametrize("values", [3, 40])
def test_a_score_reaches_a_threshold_that_is_written_as_it_is(values: int) -> None:
    scores = np.zeros(values, np.float32)
    scores[1] = 0.7  # in float32 a little less
    assert [one.class_id for one in best_classes(scores, spec("none"), None, 0.7)] == [1]


def test_one_logit_is_one_score_or_with_two_labels_two() -> None:
    (only,) = best_classes(np.array([2.0], np.float32), one_output("sigmoid", ()), 5)
    assert (only.class_id, only.label, only.score) == (0, None, pytest.approx(0.8808, abs=1e-4))
    best = best_classes(np.array([-30.0], np.float32), one_output("sigmoid", ("cat", "dog")), 5)
    assert [(one.class_id, one.label) for one in best] == [(0, "cat"), (1, "dog")]
    ranked = best_classes_of_batch(np.array([[-30.0]], np.float32), one_output("sigmoid", ("cat", "dog")), 5)
    # One minus the other would be 0.
    assert ranked.scores[0, 1] == pytest.approx(9.357e-14, rel=1e-3)
    best = best_classes(np.array([0.75], np.float32), one_output("none", ("cat", "dog")), 5)
    assert [(one.label, one.score) for one in best] == [("dog", 0.75), ("cat", 0.25)]


@given(
    arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 40)), elements=st.floats(width=32)),
    st.sampled_from(["softmax", "sigmoid", "none"]),
    st.booleans(),
    st.integers(1, 50),
)
def test_a_batch_is_ranked_as_its_samples_are(
    outputs: np.ndarray, activation: Activation, is_binary: bool, top_k: int
) -> None:
    if is_binary:
        outputs = np.ascontiguousarray(outputs[:, :1])
    tensor = TensorSpec("y", "FP32", (outputs.shape[1],))
    own = ModelSpec("m", (TensorSpec("x", "FP32", (1,)),), (tensor,), 4, None, activation, ("a", "b"))
    with np.errstate(all="ignore"):
        ranked = best_classes_of_batch(outputs, own, top_k)
    for row, class_ids, scores, is_nan in zip(outputs, *ranked, strict=True):
        try:
            best = best_classes(row, own, top_k)
        except ModelFailed:
            assert is_nan
            continue
        assert not is_nan
        assert [one.class_id for one in best] == class_ids.tolist()
        assert [one.score for one in best] == scores.astype(np.float64).round(6).tolist()


@given(arrays(np.float32, 1000, elements=st.floats(-20, 20, width=32)))
def test_scores_have_six_decimals_and_keep_their_order_and_sum(logits: np.ndarray) -> None:
    scores = [one.score for one in best_classes(logits, spec(), None)]
    assert scores == [round(score, 6) for score in scores]
    assert scores == sorted(scores, reverse=True)
    assert math.fsum(scores) == pytest.approx(1.0, abs=1e-3)


class Output(NamedTuple):
    shape: tuple[int, ...]
    data: memoryview
