"""torchvision's detectors in a graph of one shape, read by the server's decoder: what torchvision itself answers."""

from __future__ import annotations

import numpy as np
import pytest

from convoy.app.edge.boxes import detections
from convoy.models.errors import JobError
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tensors import TensorBytes

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CLASSES, IMAGES = 5, 2


def built(name: str, px: int):
    """Without weights, but with scores that tell boxes apart, of which a hundred or so reach the threshold."""
    torch.manual_seed(3)
    size = {} if px == 320 else {"min_size": px, "max_size": px}
    model = torchvision.models.get_model(
        name, weights=None, weights_backbone=None, num_classes=CLASSES, score_thresh=0.6, **size
    ).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.momentum = None
            module.train()
    images = torch.rand(IMAGES, 3, px, px)
    with torch.inference_mode():
        model(list(images))
        for module in model.modules():
            module.eval()
        # Spread over the scores that a trained head gives.
        logits = model.head(_features(model, images))["cls_logits"]
    classifier = model.head.classification_head
    parts = classifier.module_list if hasattr(classifier, "module_list") else [classifier]
    heads = [[one for one in part.modules() if isinstance(one, torch.nn.Conv2d)][-1] for part in parts]
    with torch.no_grad():
        for head in heads:
            head.weight.mul_(2.5 / float(logits.std()))
            if head.bias is not None:
                head.bias.fill_(-1.0 if "retina" in name else 0.0)
    return model, images


def _features(model, images):
    mean, std = (torch.tensor(own).view(1, 3, 1, 1) for own in (model.transform.image_mean, model.transform.image_std))
    features = model.backbone((images - mean) / std)
    return list(features.values())


@pytest.mark.parametrize(("name", "px"), [("ssdlite320_mobilenet_v3_large", 320), ("retinanet_resnet50_fpn", 128)])
def test_what_is_left_of_overlaps_is_torchvisions(name, px):
    from convoy.export.sources.torch_child.detectors import as_detector, input_px

    model, images = built(name, px)
    assert input_px(model) == (px, px)
    detector = as_detector(model, name).eval()
    mean, std = (torch.tensor(own).view(1, 3, 1, 1) for own in (model.transform.image_mean, model.transform.image_std))
    with torch.inference_mode():
        outputs = detector((images - mean) / std)
        theirs = model(list(images))
    image = ImageSpec.plain(px, px, 3, "uint8_nhwc")
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),)),
        tuple(TensorSpec(key, "FP32", tuple(one.shape[1:])) for key, one in outputs.items()),
        *(8, image, "none", ()),
        task="detect",
        detection=detector.detection,
    )
    for index, expected in enumerate(theirs):
        answers = {
            key: TensorBytes((1, *one.shape[1:]), memoryview(one[index].numpy().tobytes()))
            for key, one in outputs.items()
        }
        found = detections(answers, spec, ImagePlacement.of((px, px), image), 0.6, None)
        assert len(found) == len(expected["boxes"]) > 10
        # Those of equal scores have no order of their own.
        mine = np.array([[one.class_id, *one.box, one.score] for one in found])
        exact = torch.cat([expected["labels"][:, None], expected["boxes"], expected["scores"][:, None]], 1).numpy()
        distances = np.abs(mine[:, None] - exact[None]).max(axis=2)
        assert sorted(distances.argmin(axis=1).tolist()) == list(range(len(exact)))
        assert distances.min(axis=1).max() < 0.02


def test_two_stages_cannot_be_batched():
    from convoy.export.sources.torch_child.detectors import as_detector

    with pytest.raises(JobError, match=r"torchvision:fasterrcnn_resnet50_fpn cannot be batched: .*; export ssdlite320"):
        as_detector(torch.nn.Identity(), "fasterrcnn_resnet50_fpn")
