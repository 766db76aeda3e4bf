"""Makes what tests/e2e/test_yolo_ultralytics.py compares: ONNX files of Ultralytics' exporter, and its own answers.

It runs inside an environment of its own (tests/yolo/environment.py), because Ultralytics is under the AGPL: nothing of
the project imports it. It needs no network and no downloaded weights. Everything follows from seeds.

    python tests/yolo/make_models.py FOLDER [--models yolov8n yolo11n ...] [--train-s 480]

FOLDER then holds:

- `pictures/NN.png` and `NN.jpg`: drawn pictures of odd sizes; one of the JPEGs is turned by its EXIF block
- `NAME.onnx`: as exported, with Ultralytics' metadata
- `NAME.npz`: `input` float32 [P, 3, S, S], the pictures as Ultralytics prepares them; `output0` (and `output1`), the
  raw outputs on them. For a detector without its own suppression also `candidates_NN` float32 [N, 6], (x1, y1, x2, y2,
  score, class) in pixels of the input, in the order of the anchors, before suppression, and `kept_NN`, those of their
  rows that remain after torchvision's `nms` of each class, best first
- `NAME.json`: per picture the answer of `YOLO("NAME.onnx").predict(rect=False)`: its `threshold`, which is lower for
  plain pictures, and its `boxes`, [x1, y1, x2, y2, score, class] in pixels of the picture; for a pose model also the
  `keypoints` of each box, [x, y, score]
- `NAME.masks.npz`, for a segmenting model: per picture `NN` bool [boxes, height, width], its masks with
  `retina_masks=True`, which are as large as the picture
- with `--train-s`, shapes-yolo11n, trained on drawn shapes; `shapes/`, their pictures and labels in YOLO's form; and
  `shapes-yolo11n.map.json`, its mean average precision there by `YOLO.val`
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="ultralytics-"))
os.environ["YOLO_AUTOINSTALL"] = "false"
os.environ["YOLO_OFFLINE"] = "true"

import cv2
import numpy as np
import onnxruntime
import torch
import torchvision
from PIL import ExifTags, Image, ImageDraw
from ultralytics import RTDETR, YOLO
from ultralytics.data.augment import LetterBox

SIDE_PX, TRAINED_PX = 320, 160
THRESHOLD, IOU_THRESHOLD, MAX_BOXES = 0.25, 0.7, 300
# On enlarged small pictures, which are plain, a network that has learned nothing finds little.
PLAIN_PX, PLAIN_THRESHOLD = 100, 0.12
# In a network that has learned nothing: the share of anchors whose best class reaches the threshold, in the median
# picture, and how far the best logit is above it.
SHARE_FOUND, MOST_LOGIT = 0.02, 4.0
# Over so many cells of 4 pixels, masks of such a network are smoothed.
SMOOTH_CELLS = 9
SHAPES = ("rectangle", "circle", "triangle")
# Width and height. The ends of the range, tall and wide, odd sides, the side of the input, less and more than it.
SIZES_PX = (
    (1, 1),
    (2, 3),
    (31, 33),
    (1, 90),
    (90, 1),
    (97, 61),
    (320, 320),
    (319, 321),
    (321, 319),
    (160, 320),
    (640, 480),
    (481, 641),
    (333, 999),
    (999, 333),
    (1500, 1000),
    (1000, 1500),
    (1500, 111),
    (123, 457),
    (641, 427),
    (50, 1500),
)
TURNED = 17
# The file's name: Ultralytics' description, and the options of its export.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "yolov8n": ("yolov8n.yaml", {}),
    "yolo11n": ("yolo11n.yaml", {}),
    "yolov5nu": ("yolov5n.yaml", {}),
    "yolov10n": ("yolov10n.yaml", {"nms": False}),
    "yolo26n": ("yolo26n.yaml", {"nms": False}),
    "yolo26n-anchors": ("yolo26n.yaml", {}),
    "yolo11n-seg": ("yolo11n-seg.yaml", {}),
    "yolo11n-pose": ("yolo11n-pose.yaml", {}),
    "yolo11n-seg-nms": ("yolo11n-seg.yaml", {"nms": True}),
    "yolo11n-pose-nms": ("yolo11n-pose.yaml", {"nms": True}),
    "yolo11n-obb": ("yolo11n-obb.yaml", {}),
    "yolo11n-cls": ("yolo11n-cls.yaml", {}),
    "yolo11n-dynamic": ("yolo11n.yaml", {"dynamic": True}),
    "yolo11n-nms": ("yolo11n.yaml", {"nms": True}),
    "yolo11n-nms-dynamic": ("yolo11n.yaml", {"nms": True, "dynamic": True}),
    "yolo11n-half": ("yolo11n.yaml", {"quantize": 16}),
    "rtdetr-l": ("rtdetr-l.yaml", {}),
}
SMALL = ("yolov8n", "yolov5nu", "yolov10n", "yolo11n-nms")
# Networks whose outputs are boxes and scores per anchor, [4 + C, K], to suppress.
RAW = ("yolov8n", "yolo11n", "yolov5nu", "yolo11n-dynamic", "yolo11n-half", "shapes-yolo11n")


def draw(width_px: int, height_px: int, seed: int) -> tuple[Image.Image, list[list[float]]]:
    """A picture of one to five shapes on noise, and its YOLO labels: class, then cx, cy, width, height as shares."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 96, (max(1, height_px // 4), max(1, width_px // 4), 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((width_px, height_px), Image.Resampling.BILINEAR)
    pen, labels = ImageDraw.Draw(picture), []
    for _ in range(random.integers(1, 6)):
        kind = int(random.integers(len(SHAPES)))
        wide, high = (int(max(1, side * random.uniform(0.12, 0.5))) for side in (width_px, height_px))
        if kind == 1:
            wide = high = min(wide, high)
        left, top = int(random.integers(0, width_px - wide + 1)), int(random.integers(0, height_px - high + 1))
        colour = tuple(int(one) for one in random.integers(110, 256, 3))
        box = [left, top, left + wide - 1, top + high - 1]
        if kind == 0:
            pen.rectangle(box, fill=colour)
        elif kind == 1:
            pen.ellipse(box, fill=colour)
        else:
            pen.polygon([(left, box[3]), (box[2], box[3]), (left + wide // 2, top)], fill=colour)
        centre = [(left + wide / 2) / width_px, (top + high / 2) / height_px]
        labels.append([kind, *centre, wide / width_px, high / height_px])
    return picture, labels


def draw_pictures(folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for place, (width_px, height_px) in enumerate(SIZES_PX):
        picture = draw(width_px, height_px, seed=place)[0]
        paths.append(folder / f"{place:02}.{'jpg' if place % 3 == 2 else 'png'}")
        if place == TURNED:
            exif = Image.Exif()
            exif[ExifTags.Base.Orientation] = 6  # to be shown a quarter turned to the right
            picture.transpose(Image.Transpose.ROTATE_90).save(paths[-1], exif=exif)
        else:
            picture.save(paths[-1])
    return paths


def draw_data_set(folder: Path, count: int = 200) -> Path:
    """A data set in YOLO's form, three quarters to train and a quarter to validate; its YAML."""
    for place in range(count):
        part = "val" if place % 4 == 3 else "train"
        random = np.random.default_rng(10_000 + place)
        width_px, height_px = (int(side) for side in random.integers(160, 321, 2))
        picture, labels = draw(width_px, height_px, seed=20_000 + place)
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True, exist_ok=True)
        picture.save(folder / "images" / part / f"{place:03}.png")
        lines = [" ".join([str(int(label[0])), *(f"{one:.6f}" for one in label[1:])]) for label in labels]
        (folder / "labels" / part / f"{place:03}.txt").write_text("\n".join(lines) + "\n")
    names = "\n".join(f"  {place}: {name}" for place, name in enumerate(SHAPES))
    path = folder / "data.yaml"
    path.write_text(f"path: {folder.resolve()}\ntrain: images/train\nval: images/val\nnames:\n{names}\n")
    return path


def prepared(paths: list[Path], side_px: int = SIDE_PX) -> np.ndarray:
    """The pictures as Ultralytics' predictor gives them to a network: float32 [P, 3, S, S], RGB, 0 to 1."""
    box = LetterBox((side_px, side_px), auto=False)
    boxed = np.stack([box(image=cv2.imread(str(path))) for path in paths])
    return np.ascontiguousarray(boxed[..., ::-1].transpose(0, 3, 1, 2)).astype(np.float32) / 255


def spread(network: torch.nn.Module, pictures: torch.Tensor) -> None:
    """Gives a network that has learned nothing something to find: statistics of its batch norms from the pictures, then
    weights and biases of the last convolutions of its head."""
    norms = [one for one in network.modules() if isinstance(one, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean
    network.train()
    with torch.no_grad():
        network(pictures)
    network.eval()
    for norm in norms:
        norm.momentum = 0.03
    head = list(network.children())[-1][-1]
    for part in ("", "one2one_"):
        classes, boxes = (getattr(head, part + name, None) for name in ("cv3", "cv2"))
        if classes is not None:
            with torch.no_grad():
                _scale_classes([one[-1] for one in classes], network, pictures)
                _scale_boxes([one[-1] for one in boxes], network, pictures)


def _scale_classes(lasts: list[torch.nn.Conv2d], network: torch.nn.Module, pictures: torch.Tensor) -> None:
    """Of each grid, so many anchors reach the threshold, and the best logit is MOST_LOGIT above it: scores that all
    round to 1 would leave the class to the last bit."""
    for last, values in zip(lasts, _values(lasts, network, pictures), strict=True):
        mean = values.mean((0, 2))
        best = (values - mean[:, None]).amax(1)
        middle = best.quantile(1 - SHARE_FOUND, dim=1).median()
        gain = MOST_LOGIT / (best.max() - middle)
        last.weight *= gain
        last.bias[:] = (last.bias - mean - middle) * gain + math.log(THRESHOLD / (1 - THRESHOLD))


def _scale_boxes(lasts: list[torch.nn.Conv2d], network: torch.nn.Module, pictures: torch.Tensor) -> None:
    """Sizes that differ a little, so that neighbours overlap and some suppress others."""
    for last, values in zip(lasts, _values(lasts, network, pictures), strict=True):
        gain = 0.5 / values.std(2).mean()
        last.weight *= gain
        last.bias[:] = (last.bias - values.mean((0, 2))) * gain


def _values(lasts: list[torch.nn.Conv2d], network: torch.nn.Module, pictures: torch.Tensor) -> list[torch.Tensor]:
    """The outputs [P, channels, cells] of these convolutions."""
    seen: list[torch.Tensor] = []
    hooks = [one.register_forward_hook(lambda _m, _i, out: seen.append(out.flatten(2))) for one in lasts]
    network(pictures)
    for hook in hooks:
        hook.remove()
    return seen


def untrained(description: str, pictures: np.ndarray) -> YOLO:
    torch.manual_seed(0)
    model = (RTDETR if "rtdetr" in description else YOLO)(description)
    if not any(kind in description for kind in ("rtdetr", "-cls")):
        spread(model.model, torch.from_numpy(pictures))
    if "-seg" in description:
        # Masks without a shape would be nothing but edges.
        prototypes = model.model.model[-1].proto
        smooth = [torch.nn.AvgPool2d(SMOOTH_CELLS, 1, SMOOTH_CELLS // 2, count_include_pad=False) for _ in range(2)]
        prototypes.cv3 = torch.nn.Sequential(prototypes.cv3, *smooth)
    return model


def trained(data: Path, seconds: float, folder: Path, start: str) -> YOLO:
    """YOLO11n from its description (or weights, `start`), trained for this long on a CPU."""
    schedule = {
        "epochs": 1000,
        "time": seconds / 3600,
        "warmup_epochs": 1,
        "batch": 16,
        "optimizer": "AdamW",
        "lr0": 2e-3,
    }
    pictures = {"data": str(data), "imgsz": TRAINED_PX, "mosaic": 0.5, "close_mosaic": 0, "workers": 0, "plots": False}
    place = {"project": str(folder), "name": "run", "exist_ok": True, "device": "cpu", "amp": False, "seed": 0}
    YOLO(start).train(**schedule, **pictures, **place, val=False, verbose=False)
    return YOLO(str(folder / "run" / "weights" / "last.pt"))


def export(model: YOLO, path: Path, side_px: int = SIDE_PX, **options: Any) -> None:
    # The exporter names the file after the description, so that it would replace another model's here.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder, contextlib.chdir(folder):
        Path(model.export(format="onnx", imgsz=side_px, device="cpu", **options)).resolve().replace(path)


def outputs_of(path: Path, pictures: np.ndarray) -> dict[str, np.ndarray]:
    """The file's raw outputs by name, one sample at a time, as a fixed batch of 1 needs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    entry = session.get_inputs()[0]
    names = [output.name for output in session.get_outputs()]
    rows = [session.run(names, {entry.name: one[None]}) for one in pictures]
    return {name: np.concatenate([row[place] for row in rows]) for place, name in enumerate(names)}


def candidates(output: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of one sample, [4 + C, K]: the candidates [N, 6] above the threshold, and the rows that suppression leaves."""
    rows = torch.from_numpy(output).T
    scores, classes = rows[:, 4:].max(1)
    is_above = scores > THRESHOLD
    rows, scores, classes = rows[is_above], scores[is_above], classes[is_above]
    corners = torchvision.ops.box_convert(rows[:, :4], "cxcywh", "xyxy")
    # Class by class: `batched_nms` moves the boxes of each class elsewhere, which rounds them.
    is_kept = torch.zeros(len(corners), dtype=torch.bool)
    for one in classes.unique():
        (of_class,) = torch.where(classes == one)
        is_kept[of_class[torchvision.ops.nms(corners[of_class], scores[of_class], IOU_THRESHOLD)]] = True
    kept = [row for row in scores.argsort(descending=True, stable=True).tolist() if is_kept[row]][:MAX_BOXES]
    found = torch.cat([corners, scores[:, None], classes[:, None].float()], 1)
    return found.numpy(), np.array(kept, np.int64)


def answers(path: Path, paths: list[Path], side_px: int = SIDE_PX) -> list[dict[str, Any]]:
    """Writes the masks beside, if there are any."""
    model = (RTDETR if "rtdetr" in path.stem else YOLO)(str(path))
    found, masks = [], {}
    for place, (one, size) in enumerate(zip(paths, SIZES_PX, strict=True)):
        threshold = PLAIN_THRESHOLD if max(size) <= PLAIN_PX else THRESHOLD
        choices = {"conf": threshold, "iou": IOU_THRESHOLD, "max_det": MAX_BOXES, "rect": False, "imgsz": side_px}
        (result,) = model.predict(str(one), **choices, retina_masks=True, device="cpu", verbose=False)
        found.append({"threshold": threshold, "boxes": result.boxes.data.tolist()})
        if result.keypoints is not None:
            found[-1]["keypoints"] = result.keypoints.data.tolist()
        if "-seg" in path.stem:
            none = np.zeros((0, *result.orig_shape), bool)
            masks[f"{place:02}"] = none if result.masks is None else result.masks.data.numpy().astype(bool)
    if masks:
        np.savez_compressed(path.with_suffix(".masks.npz"), **masks)
    return found


def record(path: Path, paths: list[Path], pictures: np.ndarray) -> None:
    values = outputs_of(path, pictures)
    if path.stem in RAW:
        for place, output in enumerate(values["output0"]):
            values[f"candidates_{place:02}"], values[f"kept_{place:02}"] = candidates(output)
    np.savez_compressed(path.with_suffix(".npz"), input=pictures, **values)
    if not any(kind in path.stem for kind in ("-obb", "-cls")):
        path.with_suffix(".json").write_text(json.dumps(answers(path, paths, pictures.shape[-1])))


def precision(path: Path, data: Path) -> None:
    """Writes the mean average precision of the file on the data set's validation part, all pictures letterboxed."""
    model = YOLO(str(path), task="detect")
    measured = model.val(
        data=str(data), imgsz=TRAINED_PX, batch=1, rect=False, device="cpu", plots=False, verbose=False
    )
    found = {"map50_95": float(measured.box.map), "map50": float(measured.box.map50)}
    path.with_suffix(".map.json").write_text(json.dumps(found))
    print(f"{path.stem}: {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="*", default=SMALL, choices=MODELS)
    parser.add_argument("--train-s", type=float, default=0, help="seconds to train shapes-yolo11n for")
    parser.add_argument("--train-from", default="yolo11n.yaml", help="a description, or weights to go on from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    paths = draw_pictures(folder / "pictures")
    pictures = prepared(paths)
    for name in options.models:
        began = time.monotonic()
        description, choices = MODELS[name]
        model = untrained(description, pictures)
        export(model, folder / f"{name}.onnx", **choices)
        record(folder / f"{name}.onnx", paths, pictures)
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    if options.train_s:
        model = trained(draw_data_set(folder / "shapes"), options.train_s, folder / "training", options.train_from)
        export(model, folder / "shapes-yolo11n.onnx", TRAINED_PX)
        record(folder / "shapes-yolo11n.onnx", paths, prepared(paths, TRAINED_PX))
        precision(folder / "shapes-yolo11n.onnx", folder / "shapes" / "data.yaml")


if __name__ == "__main__":
    main()
