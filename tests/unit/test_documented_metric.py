"""The metric for boxes that docs/export.md shows: in the process that runs a user's, on boxes whose score is known."""

from __future__ import annotations

import re

import numpy as np
import pytest

from convoy.export.proof.judging import metric_judge
from convoy.export.proof.outcomes import ScoredOutcomes
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from tests.support.stores import ROOT

pytestmark = pytest.mark.slow


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
