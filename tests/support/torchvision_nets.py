"""torchvision's networks for maps and boxes with random weights that answer something: not one class everywhere, and
some boxes above a threshold.

Imports torch when it is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import torchvision

# Below it a detector answers nothing; above it are about a hundred boxes.
THRESHOLD = 0.6


def segmenter(name: str, classes: int, images: torch.Tensor) -> Any:
    """A network in evaluation mode whose scores tell the pixels of such `images` apart, [N, 3, H, W]."""
    torch.manual_seed(3)
    model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=classes).eval()
    _settle(model, images)
    return model


def detector(name: str, classes: int, images: torch.Tensor) -> Any:
    """A network in evaluation mode for pictures as large as `images` [N, 3, px, px], in 0..1, of which it answers
    what scores `THRESHOLD` and more."""
    torch.manual_seed(3)
    px = images.shape[-1]
    size = {} if px == 320 else {"min_size": px, "max_size": px}
    model = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=classes, score_thresh=THRESHOLD, **size
    ).eval()
    _settle(model, list(images))
    with torch.inference_mode():
        # Spread over the scores that a trained head gives.
        logits = model.head(_features(model, images))["cls_logits"]
    classifier = model.head.classification_head
    parts = classifier.module_list if hasattr(classifier, "module_list") else [classifier]
    heads = [[one for one in part.modules() if isinstance(one, torch.nn.Conv2d)][-1] for part in parts]
    with torch.no_grad():
        for head in heads:
            head.weight.mul_(1.0 / float(logits.std()))
            if head.bias is not None:
                head.bias.fill_(-2.0 if "retina" in name else 0.0)
    return model


def normalised(model: Any, images: torch.Tensor) -> torch.Tensor:
    """As the detector itself does it, of [N, 3, H, W] in 0..1."""
    mean, std = (torch.tensor(own).view(1, 3, 1, 1) for own in (model.transform.image_mean, model.transform.image_std))
    return (images - mean) / std


def _settle(model: Any, images: Any) -> None:
    """Statistics of these images, so that values neither vanish nor explode on their way."""
    norms = [one for one in model.modules() if isinstance(one, torch.nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = None
        norm.train()
    with torch.inference_mode():
        model(images)
    for norm in norms:
        norm.eval()


def _features(model: Any, images: torch.Tensor) -> list[torch.Tensor]:
    return list(model.backbone(normalised(model, images)).values())
