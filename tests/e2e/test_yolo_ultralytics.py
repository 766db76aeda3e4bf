"""YOLOs as Ultralytics exports them, read and served here, beside Ultralytics' own answers to the same pictures.

How its `predict` (8.4) works, where that matters for the comparison:

- It reads a file with OpenCV, as BGR, with the EXIF orientation applied and alpha dropped; we composite alpha
  onto white. JPEGs decode to the same pixels, as both use libjpeg-turbo.
- A letterbox scales with cv2.INTER_LINEAR, both sides rounded, and pads with 114; of an odd padding the smaller half is
  left and above. `rect=True`, the default, pads to a multiple of the stride only if the file is dynamic.
- A box counts for its best class (`multi_label` is for validation only) if its score is above `conf` = 0.25; ours
  counts from 0.25 on.
- Suppression is torchvision's per class, at an IoU of `iou` = 0.7: boxes are moved by 7680 px times the class. Float32
  then rounds coordinates to 1/32 px at class 79, which can decide a close call. `max_det` = 300 remain.
- `scale_boxes` uses the rounded size and padding of the letterbox, and clips to the picture.
- Masks with `retina_masks=True` are as large as the picture: the prototypes are enlarged until the padding of the
  letterbox ends at a whole cell, which is cut off, and the rest is enlarged again, both times linearly; ours once.
  Masks are cut at the box, and boxes without a pixel are left out; ours have an empty mask.
- Keypoints are mapped to the picture and clipped as boxes are; the graph has applied the sigmoid to their scores.
- Exports with `nms=True` and end-to-end heads (YOLOv10, YOLO26) suppress nothing further; conf and iou of the graph are
  those of the export.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from scipy import ndimage
from scipy.optimize import linear_sum_assignment

from convoy.app.client.records import detection_of
from convoy.app.pictures.answering import detections
from convoy.export.sources.onnx_metadata import stated_model
from convoy.export.sources.preprocess import InputSize
from convoy.models.answers import Detection
from convoy.models.boxes import InputBoxes, find_boxes, suppressed
from convoy.models.bundle import read_manifest
from convoy.models.geometry import ImagePlacement
from convoy.models.images import preprocess
from convoy.models.spec import ImageSpec, ModelSpec, TensorSpec
from convoy.models.tasks import DetectionOutputs
from convoy.models.tensors import TensorBytes
from tests.support.quick_exports import measure_little
from tests.support.servers import Server, run_convoy, start_server
from tests.yolo.environment import make_models

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]

# Outputs to suppress; a head that needs no suppression; and one with it in the graph. yolov5nu is read as yolov8n is.
RAW, EXPORTED = ("yolov8n", "yolov5nu"), ("yolov8n", "yolov10n", "yolo11n-nms", "yolo11n-seg", "yolo11n-pose")
# With masks and keypoints. The last two are not served here, because their answers are read as the others' are.
SHAPED = ("yolo11n-seg", "yolo11n-pose", "yolo11n-seg-nms", "yolo11n-pose-nms")
MODELS = ("yolov8n", "yolov5nu", "yolov10n", "yolo11n-nms", *SHAPED)
SIDE_PX, THRESHOLD, IOU_THRESHOLD, MAX_BOXES = 320, 0.25, 0.7, 300
SAID = DetectionOutputs(
    "output0", layout="yolo_v8", threshold=THRESHOLD, iou_threshold=IOU_THRESHOLD, max_candidates=30_000, max_boxes=300
)


@dataclass(frozen=True)
class Theirs:
    """What Ultralytics made of one network: see tests/yolo/make_models.py."""

    folder: Path
    name: str

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.onnx"

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.file.with_suffix(".npz")) as archive:
            return dict(archive)

    @cached_property
    def answers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.file.with_suffix(".json").read_text())
        return found

    @cached_property
    def masks(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{self.name}.masks.npz") as archive:
            return dict(archive)

    @property
    def pictures(self) -> list[Path]:
        return sorted((self.folder / "pictures").iterdir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ultralytics")
    make_models(made, "--models", *MODELS)
    return made


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Files exported without an option."""
    store = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patches:
        measure_little(patches)
        for name in EXPORTED:
            done = run_convoy("export", str(folder / f"{name}.onnx"), "--store", str(store), timeout_s=400.0)
            assert done.returncode == 0, done.stdout + done.stderr
            assert read_manifest(store / name / "1").spec.task == "detect"
    with start_server(store=store) as server:
        yield server


@pytest.mark.parametrize("name", RAW)
def test_its_raw_outputs_have_the_same_candidates_and_boxes(folder: Path, name: str) -> None:
    theirs = Theirs(folder, name)
    suppressed_boxes = 0
    for place, output in enumerate(theirs.arrays["output0"]):
        candidates, kept = theirs.arrays[f"candidates_{place:02}"], theirs.arrays[f"kept_{place:02}"]
        best_first = candidates[(-candidates[:, 4]).argsort(kind="stable")]
        everything = ours(output, 30_000, iou_threshold=None)
        assert np.array_equal(everything.classes, best_first[:, 5].astype(int))
        np.testing.assert_allclose(everything.scores, best_first[:, 4], rtol=1e-4)
        np.testing.assert_allclose(everything.corners, best_first[:, :4], rtol=1e-4, atol=1e-3)
        rows = suppressed(best_first[:, :4], best_first[:, 5], IOU_THRESHOLD, MAX_BOXES)
        assert np.array_equal(best_first[rows], candidates[kept])
        found = ours(output, MAX_BOXES)
        np.testing.assert_allclose(found.corners, candidates[kept, :4], rtol=1e-4, atol=1e-3)
        suppressed_boxes += len(candidates) - len(kept) if len(kept) < MAX_BOXES else 0
    assert suppressed_boxes > 10, "what is compared here should happen"


def ours(output: np.ndarray, most: int, iou_threshold: float | None = IOU_THRESHOLD) -> InputBoxes:
    said = replace(SAID, iou_threshold=iou_threshold)
    return find_boxes({"output0": output}, said, "none", (SIDE_PX, SIDE_PX), THRESHOLD, most)


def test_its_letterbox_is_ours(folder: Path) -> None:
    theirs = Theirs(folder, MODELS[0])
    plain = ImageSpec.plain(SIDE_PX, SIDE_PX, 3, "uint8_nhwc")
    image = replace(plain, resize_mode="letterbox", interpolation="bilinear", antialias=False)
    for path, expected in zip(theirs.pictures, theirs.arrays["input"], strict=True):
        pixels = preprocess(path.read_bytes(), image).transpose(2, 0, 1)
        assert np.array_equal(pixels, np.rint(expected * 255).astype(np.uint8)), path.name


@pytest.mark.parametrize("name", EXPORTED)
def test_a_served_export_answers_as_its_predict(server: Server, folder: Path, name: str) -> None:
    theirs = Theirs(folder, name)
    answers = []
    with server.client() as client:
        for path, expected in zip(theirs.pictures, theirs.answers, strict=True):
            asked = {"threshold": expected["threshold"]}
            reply = client.post(f"/predictions/{name}", content=path.read_bytes(), params=asked)
            assert reply.status_code == 200, reply.text
            answers.append([detection_of(one) for one in reply.json()["detections"]])
    assert_same_answers(answers, theirs)


@pytest.mark.parametrize("name", SHAPED)
def test_its_raw_outputs_have_the_same_masks_and_keypoints(folder: Path, name: str) -> None:
    theirs = Theirs(folder, name)
    stated = stated_model(theirs.file, InputSize(3, SIDE_PX, SIDE_PX))
    assert stated is not None
    assert stated.detection is not None
    arrays = {output: theirs.arrays[output] for output in stated.detection.names}
    outputs = tuple(TensorSpec(output, "FP32", array.shape[1:]) for output, array in arrays.items())
    images = TensorSpec("images", stated.image.tensor_dtype, stated.image.tensor_shape)
    own: dict[str, Any] = {"task": "detect", "detection": stated.detection}
    spec = ModelSpec("m", (images,), outputs, 1, stated.image, "none", stated.labels, **own)
    answers = []
    for place, (path, expected) in enumerate(zip(theirs.pictures, theirs.answers, strict=True)):
        with Image.open(path) as opened:
            placement = ImagePlacement.of(ImageOps.exif_transpose(opened).size, stated.image)
        sample = {
            output: TensorBytes((1, *array.shape[1:]), memoryview(array[place].tobytes()))
            for output, array in arrays.items()
        }
        answers.append(detections(sample, spec, placement, expected["threshold"], None))
    assert_same_answers(answers, theirs)


def assert_same_answers(answers: list[list[Detection]], theirs: Theirs) -> None:
    """One box here for each box there: of its class, at most 1 px and a score of 0.001 away. One in 200 may be a close
    call: an IoU of 0.700002 is 0.7 after the rounding of Ultralytics' suppression. Their masks and keypoints agree."""
    found, overlaps = 0, []
    for place, (answered, expected) in enumerate(zip(answers, theirs.answers, strict=True)):
        if "-seg" in theirs.name:
            answered = [one for one in answered if one.mask is not None and one.mask.array().any()]
        mine = np.array([[*one.box, one.score, one.class_id] for one in answered]).reshape(-1, 6)
        wanted = np.array(expected["boxes"]).reshape(-1, 6)
        is_near = (np.abs(mine[:, None] - wanted[None]) / [1, 1, 1, 1, 1e-3, 0.5]).max(axis=2) <= 1
        rows, columns = linear_sum_assignment(~is_near)
        pairs = [(answered[row], column) for row, column in zip(rows, columns, strict=True) if is_near[row, column]]
        alone = len(mine) - len(pairs), len(wanted) - len(pairs)
        assert max(alone) <= len(wanted) // 200, f"{alone} of {len(wanted)} boxes are only here and only there"
        for one, column in pairs:
            if one.mask is not None:
                overlaps.append(overlap_but_at_edges(one.mask.array(), theirs.masks[f"{place:02}"][column]))
            if one.keypoints:
                points = np.array(expected["keypoints"][column])
                np.testing.assert_array_less(np.abs(np.array(one.keypoints) - points).max(axis=0), [1, 1, 1e-3])
        found += len(pairs)
    assert found > 500
    assert np.mean([overlap > 0.99 for overlap in overlaps] or [1]) > 0.97
    assert np.mean(overlaps or [1]) > 0.998


def overlap_but_at_edges(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The intersection over union. Pixels that differ are within a pixel of the input from an edge of either."""
    near_px = max(1, -(-max(theirs.shape) // SIDE_PX))
    edges = np.zeros_like(theirs)
    for mask in (mine, theirs):
        inner, outer = (
            change(mask, iterations=near_px) for change in (ndimage.binary_erosion, ndimage.binary_dilation)
        )
        edges |= outer & ~inner
    assert not ((mine != theirs) & ~edges).any()
    return float((mine & theirs).sum() / (mine | theirs).sum())
