"""torchvision's one-stage detectors as graphs of fixed shape: a batch of pictures to decoded boxes and their scores.

    images [N, 3, S, S], normalised  ->  boxes [N, K, 4], corners in pixels; scores [N, K, classes]

Their own `forward()` takes a list of pictures and returns a list of dicts of varying lengths, which cannot be batched.
Here everything up to the decoded boxes is in the graph, with anchors as constants of a fixed size, and the server
suppresses overlaps as `detection` declares. Two-stage detectors select regions in the middle of the network, so they
have no such form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision.models.detection.fcos import FCOS
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNet
from torchvision.models.detection.ssd import SSD

from convoy.models.errors import JobError
from convoy.models.tasks import DetectionOutputs


class Detector(nn.Module):
    """One of torchvision's detectors. `detection` says how its outputs become detections, as in torchvision.

    With `takes_pixels`, images have values in 0..1, as torchvision's own `forward()` takes them; otherwise they are
    normalised already.
    """

    def __init__(self, model: Any, *, takes_pixels: bool = False) -> None:
        super().__init__()
        self.model = model
        self.takes_pixels = takes_pixels
        self.is_ssd = isinstance(model, SSD)
        self.detection = DetectionOutputs(
            boxes="boxes",
            scores="scores",
            # The first class of SSD is the background; the others' are all objects.
            background=0 if self.is_ssd else None,
            # The server's default: below it, torchvision's detectors hardly ever mean an object.
            threshold=max(0.05, float(model.score_thresh)),
            iou_threshold=float(model.nms_thresh),
            max_candidates=10_000,
            max_boxes=int(model.detections_per_img),
        )

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """`images` float32 [N, 3, S, S] to boxes float32 [N, K, 4] and scores float32 [N, K, classes]."""
        if self.takes_pixels:
            prepare = self.model.transform
            mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (prepare.image_mean, prepare.image_std))
            images = (images - mean) / std
        features = self.model.backbone(images)
        maps = [features] if isinstance(features, torch.Tensor) else list(features.values())
        found = self.model.head(maps)
        height, width = int(images.shape[2]), int(images.shape[3])
        (anchors,) = self.model.anchor_generator(ImageList(images[:1], [(height, width)]), maps)
        logits, moved = found["cls_logits"], found["bbox_regression"]
        if isinstance(self.model, FCOS):
            # The geometric mean of class and centre-ness (Tian et al., 2020).
            scores = torch.sqrt(torch.sigmoid(logits) * torch.sigmoid(found["bbox_ctrness"]))
            return {"boxes": _by_sides(moved, anchors, height, width), "scores": scores}
        return {
            "boxes": _decoded(moved, anchors, self.model.box_coder, height, width),
            "scores": torch.softmax(logits, dim=-1) if self.is_ssd else torch.sigmoid(logits),
        }


def _by_sides(sides: torch.Tensor, anchors: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Corners [N, K, 4] in the picture, from the distances to the four sides in sizes of the anchors [K, 4]."""
    centres = (anchors[:, :2] + anchors[:, 2:]) / 2
    sizes = anchors[:, 2:] - anchors[:, :2]
    return _within(centres - sides[..., :2] * sizes, centres + sides[..., 2:] * sizes, height, width)


def _decoded(moved: torch.Tensor, anchors: torch.Tensor, coder: Any, height: int, width: int) -> torch.Tensor:
    """Corners [N, K, 4] in the picture, from the differences to the anchors [K, 4] (Girshick et al., 2014)."""
    sizes = anchors[:, 2:] - anchors[:, :2]
    centres = anchors[:, :2] + 0.5 * sizes
    moved = moved / torch.tensor(coder.weights)
    middle = moved[..., :2] * sizes + centres
    half = 0.5 * torch.exp(moved[..., 2:].clamp(max=coder.bbox_xform_clip)) * sizes
    return _within(middle - half, middle + half, height, width)


def _within(low: torch.Tensor, high: torch.Tensor, height: int, width: int) -> torch.Tensor:
    # Each coordinate has its own bound, and a clip takes one.
    x1, y1, x2, y2 = torch.cat([low, high], dim=-1).unbind(-1)
    corners = [x1.clamp(0, width), y1.clamp(0, height), x2.clamp(0, width), y2.clamp(0, height)]
    return torch.stack(corners, dim=-1)


def is_one_stage(model: Any) -> bool:
    """Whether it is a detector of torchvision that `Detector` takes."""
    return isinstance(model, SSD | RetinaNet | FCOS)


def refuse_two_stages(model: nn.Module, shown: str) -> None:
    """Raise JobError for a network that has a two-stage detector of torchvision in it."""
    found = next((type(one).__name__ for one in model.modules() if isinstance(one, GeneralizedRCNN)), None)
    if found is not None:
        raise JobError(
            f"{shown} is a {found}, which works in two stages: it cuts regions out of its own features, as many as it "
            "finds, and torch cannot export that to ONNX; train a detector of one stage, such as torchvision's "
            "ssdlite320_mobilenet_v3_large, retinanet_resnet50_fpn or fcos_resnet50_fpn, or a YOLO"
        )


def input_px(model: Any) -> tuple[int, int]:
    """Height and width of the pictures that the model makes: its fixed size, or a square of its shorter side."""
    transform = model.transform
    if transform.fixed_size is not None:
        width, height = transform.fixed_size
        return int(height), int(width)
    return int(transform.min_size[-1]), int(transform.min_size[-1])
