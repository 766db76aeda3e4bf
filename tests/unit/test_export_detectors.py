"""torchvision's detectors in a graph of one shape, read by the server's decoder: what torchvision itself answers."""

from __future__ import annotations

import numpy as np
import pytest

from convoy.app.pictures.answering import detections
from convoy.models.errors import JobError
from convoy.models.geometry import ImagePlacement
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tensors import TensorBytes

torch = pytest.importorskip("torch")
torchvision = pytest.importorskip("torchvision")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
CLASSES, IMAGES = 5, 2


@pytest.mark.parametrize(("name", "px"), [("ssdlite320_mobilenet_v3_large", 320), ("retinanet_resnet50_fpn", 128)])
def test_what_is_left_of_overlaps_is_torchvisions(name, px):
    from convoy.export.sources.torch_child.detectors import as_detector, input_px
    from tests.support.torchvision_nets import THRESHOLD, detector, normalised

    images = torch.rand(IMAGES, 3, px, px, generator=torch.Generator().manual_seed(3))
    model = detector(name, CLASSES, images)
    assert input_px(model) == (px, px)
    batched = as_detector(model, name).eval()
    with torch.inference_mode():
        outputs = batched(normalised(model, images))
        theirs = model(list(images))
    image = ImageSpec.plain(px, px, 3, "uint8_nhwc")
    spec = ModelSpec(
        *("m", (TensorSpec("images", "UINT8", image.tensor_shape),)),
        tuple(TensorSpec(key, "FP32", tuple(one.shape[1:])) for key, one in outputs.items()),
        *(8, image, "none", ()),
        task="detect",
        detection=batched.detection,
    )
    for index, expected in enumerate(theirs):
        answers = {
            key: TensorBytes((1, *one.shape[1:]), memoryview(one[index].numpy().tobytes()))
            for key, one in outputs.items()
        }
        found = detections(answers, spec, ImagePlacement.of((px, px), image), THRESHOLD, None)
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
