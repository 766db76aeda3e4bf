"""Anchors, box coding and suppression as a spec declares them are torchvision's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.models.detection._utils import BoxCoder
from torchvision.models.detection.anchor_utils import AnchorGenerator, DefaultBoxGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import _default_anchorgen
from torchvision.ops import batched_nms

from convoy.app.pictures.answering import detections
from convoy.models.boxes import anchor_boxes, suppressed
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import AnchorLevel, DetectionOutputs
from convoy.models.tensors import TensorBytes

WIDTH, HEIGHT = 320, 256
Generator = AnchorGenerator | DefaultBoxGenerator


def of_retinanet() -> tuple[Generator, list[tuple[int, int]], tuple[AnchorLevel, ...]]:
    grids = [(HEIGHT // stride, WIDTH // stride) for stride in (8, 16, 32, 64, 128)]
    levels = []
    for (rows, columns), base in zip(grids, _default_anchorgen().cell_anchors, strict=True):
        sizes = tuple((float(x2 - x1), float(y2 - y1)) for x1, y1, x2, y2 in base)
        levels.append(AnchorLevel(rows, columns, HEIGHT // rows, WIDTH // columns, sizes, offset=0.0))
    return _default_anchorgen(), grids, tuple(levels)


def of_ssdlite() -> tuple[Generator, list[tuple[int, int]], tuple[AnchorLevel, ...]]:
    generator = DefaultBoxGenerator([[2, 3] for _ in range(6)], min_ratio=0.2, max_ratio=0.95)
    grids = [(16, 20), (8, 10), (4, 5), (2, 3), (1, 2), (1, 1)]
    levels = []
    for (rows, columns), pairs in zip(grids, generator._wh_pairs, strict=True):
        sizes = tuple((float(w) * WIDTH, float(h) * HEIGHT) for w, h in pairs.clamp(0, 1))
        levels.append(AnchorLevel(rows, columns, HEIGHT / rows, WIDTH / columns, sizes))
    return generator, grids, tuple(levels)


@pytest.mark.parametrize("network", [of_retinanet, of_ssdlite])
def test_anchors_and_boxes(network) -> None:
    generator, grids, levels = network()
    images = ImageList(torch.zeros(1, 3, HEIGHT, WIDTH), [(HEIGHT, WIDTH)])
    (anchors,) = generator(images, [torch.zeros(1, 1, *grid) for grid in grids])
    mine = anchor_boxes(levels)
    corners = np.concatenate([mine[:, :2] - mine[:, 2:] / 2, mine[:, :2] + mine[:, 2:] / 2], axis=1)
    np.testing.assert_allclose(corners, anchors.numpy(), atol=1e-3)

    weights = (10.0, 10.0, 5.0, 5.0)
    deltas = torch.randn(len(anchors), 4, generator=torch.Generator().manual_seed(1))
    deltas[::50, 2:] += 40  # beyond what is let count
    theirs = BoxCoder(weights).decode_single(deltas, anchors).numpy()
    scores = np.linspace(1, 0.1, len(anchors), dtype=np.float32)
    said = DetectionOutputs(
        *("boxes", "scores"), anchors=levels, anchor_weights=weights, max_candidates=len(scores), max_boxes=len(scores)
    )
    image = ImageSpec.plain(HEIGHT, WIDTH, 3, "uint8_nhwc")
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),)),
        (TensorSpec("boxes", "FP32", deltas.shape), TensorSpec("scores", "FP32", scores.shape)),
        *(1, image, "none", ()),
        task="detect",
        detection=said,
    )
    answers = {
        "boxes": TensorBytes((1, *deltas.shape), memoryview(deltas.numpy().tobytes())),
        "scores": TensorBytes((1, *scores.shape), memoryview(scores.tobytes())),
    }
    found = detections(answers, spec, ImagePlacement.of((WIDTH, HEIGHT), image), None, None)
    clipped = theirs.clip(0, [WIDTH, HEIGHT] * 2)
    np.testing.assert_allclose([one.box for one in found], clipped, atol=0.02)
    assert len(found) == len(anchors)
    assert replace(said, anchors=()).check(spec.outputs) is None


def test_suppression() -> None:
    generator = torch.Generator().manual_seed(2)
    corners = torch.rand(1500, 2, generator=generator) * 200
    boxes = torch.cat([corners, corners + 5 + torch.rand(1500, 2, generator=generator) * 60], dim=1)
    scores = torch.rand(1500, generator=generator).sort(descending=True).values
    classes = torch.randint(0, 4, (1500,), generator=generator)
    for iou_threshold in (0.3, 0.5, 0.7):
        theirs = batched_nms(boxes, scores, classes, iou_threshold).tolist()
        assert suppressed(boxes.numpy(), classes.numpy(), iou_threshold, 1500).tolist() == theirs
