"""Pictures of coloured squares with the boxes around them, in every form of annotations; and a network that finds them.

The network sees 32x32 pixels in cells of 8x8: the mean of red and of green in a cell are the scores of its two classes,
and the cell is the box. It is right if every square fills a cell.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

SIDE_PX, CELL_PX = 32, 8
CELLS = SIDE_PX // CELL_PX
CLASSES = ("red", "green")


@dataclass(frozen=True)
class Picture:
    """`squares` are (column, row, class) of cells; the picture has `scale` times the network's size."""

    squares: tuple[tuple[int, int, int], ...]
    scale: int = 2

    @property
    def side_px(self) -> int:
        return self.scale * SIDE_PX

    @property
    def boxes(self) -> list[tuple[int, int, int, int]]:
        size = self.scale * CELL_PX
        return [(x * size, y * size, (x + 1) * size, (y + 1) * size) for x, y, _ in self.squares]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.zeros((self.side_px, self.side_px, 3), np.uint8)
        for (x1, y1, x2, y2), (_, _, label) in zip(self.boxes, self.squares, strict=True):
            pixels[y1:y2, x1:x2, label] = 240
        Image.fromarray(pixels).save(path)


def pictures(count: int, seed: int = 0, most: int = 4) -> list[Picture]:
    """No two alike, each with 1 to `most` squares."""
    generator = np.random.default_rng(seed)
    found: dict[tuple[tuple[int, int, int], ...], Picture] = {}
    while len(found) < count:
        cells = generator.choice(CELLS * CELLS, generator.integers(1, most + 1), replace=False)
        squares = tuple((int(c % CELLS), int(c // CELLS), int(generator.integers(0, 2))) for c in cells)
        found.setdefault(squares, Picture(squares))
    return list(found.values())


def write_coco(root: Path, shown: Sequence[Picture], part: str = "val", *, ids: Sequence[int] = (3, 17)) -> Path:
    """`annotations/instances_PART.json` and `PART/*.png`; ids of categories have gaps, as COCO's."""
    images, boxes = [], []
    for number, picture in enumerate(shown):
        name = f"{part}-{number}.png"
        picture.save(root / part / name)
        images.append({"id": number + 100, "file_name": name, "width": picture.side_px, "height": picture.side_px})
        for (x1, y1, x2, y2), (_, _, label) in zip(picture.boxes, picture.squares, strict=True):
            own = {"image_id": number + 100, "category_id": ids[label], "iscrowd": 0, "area": (x2 - x1) * (y2 - y1)}
            boxes.append({**own, "id": len(boxes) + 1, "bbox": [x1, y1, x2 - x1, y2 - y1]})
    file = root / "annotations" / f"instances_{part}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    categories = [{"id": number, "name": name} for number, name in zip(ids, CLASSES, strict=True)]
    file.write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories}))
    return file


def write_yolo(root: Path, shown: Sequence[Picture], part: str = "val") -> None:
    """`images/PART` and `labels/PART`; every second object is a polygon."""
    for number, picture in enumerate(shown):
        picture.save(root / "images" / part / f"{part}-{number}.png")
        lines = []
        for place, (box, (_, _, label)) in enumerate(zip(picture.boxes, picture.squares, strict=True)):
            x1, y1, x2, y2 = (value / picture.side_px for value in box)
            polygon = f"{label} {x1} {y1} {x2} {y1} {x2} {y2} {x1} {y2}"
            centre = f"{label} {(x1 + x2) / 2} {(y1 + y2) / 2} {x2 - x1} {y2 - y1}"
            lines.append(polygon if place % 2 else centre)
        file = root / "labels" / part / f"{part}-{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("\n".join(lines) + "\n")


def write_voc(root: Path, shown: Sequence[Picture], part: str = "val") -> None:
    """`JPEGImages` (as PNG), `Annotations`, and the part in `ImageSets/Main`."""
    stems = []
    for number, picture in enumerate(shown):
        stem = f"{part}-{number}"
        stems.append(stem)
        picture.save(root / "JPEGImages" / f"{stem}.png")
        inside = "\n".join(
            f"<object><name>{CLASSES[label]}</name><difficult>0</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for (x1, y1, x2, y2), (_, _, label) in zip(picture.boxes, picture.squares, strict=True)
        )
        size = f"<size><width>{picture.side_px}</width><height>{picture.side_px}</height><depth>3</depth></size>"
        file = root / "Annotations" / f"{stem}.xml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"<annotation>\n{size}\n{inside}\n</annotation>\n")
    lists = root / "ImageSets" / "Main"
    lists.mkdir(parents=True, exist_ok=True)
    (lists / f"{part}.txt").write_text("\n".join(stems))


def write_masks(root: Path, shown: Sequence[Picture], part: str = "val") -> None:
    """`images/PART` and `masks/PART`: 0 is the background, 1 and 2 the classes; the first row of pixels is 255."""
    for number, picture in enumerate(shown):
        picture.save(root / "images" / part / f"{part}-{number}.png")
        mask = np.zeros((picture.side_px, picture.side_px), np.uint8)
        for (x1, y1, x2, y2), (_, _, label) in zip(picture.boxes, picture.squares, strict=True):
            mask[y1:y2, x1:x2] = label + 1
        mask[0] = 255
        file = root / "masks" / part / f"{part}-{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(file)


def write_box_finder(path: Path, gains: Sequence[float] = (1.0, 1.0), *, small: float = 1.0) -> Path:
    """float32 [N, 3, 32, 32] in 0..1 -> `boxes` [N, 16, 4] in pixels, `scores` [N, 16, 2]: the share of each colour in
    the cell, times its gain.

    A class with a gain below 0.05 is not found. With `small` below 1, green passes a tanh, where it is nearly linear,
    as values so much smaller than red's that 8 bits with one scale for both lose it.
    """
    mean = np.zeros((2, 3, CELL_PX, CELL_PX), np.float32)
    for label in range(2):
        mean[label, label] = 1 / CELL_PX**2
    mean[1] *= small
    back = np.diag([gains[0], gains[1] / small]).astype(np.float32)[..., None, None]
    corners = [
        (x * CELL_PX, y * CELL_PX, (x + 1) * CELL_PX, (y + 1) * CELL_PX) for y in range(CELLS) for x in range(CELLS)
    ]
    constants = {
        "mean": mean,
        "back": back,
        "corners": np.array([corners], np.float32),
        "shape": np.array([0, 2, -1]),
        "zero": np.array(0, np.float32),
        "axes": np.array([2]),
    }
    nodes = [
        helper.make_node("Conv", ["images", "mean"], ["means"], "means", strides=[CELL_PX, CELL_PX]),
        helper.make_node("Tanh" if small < 1 else "Identity", ["means"], ["between"], "between"),
        helper.make_node("Conv", ["between", "back"], ["grid"], "back"),
        helper.make_node("Reshape", ["grid", "shape"], ["rows"], "reshape"),
        helper.make_node("Transpose", ["rows"], ["scores"], "last", perm=[0, 2, 1]),
        # Boxes for each sample of the batch.
        helper.make_node("ReduceMean", ["scores", "axes"], ["one"], "one"),
        helper.make_node("Mul", ["one", "zero"], ["nought"], "nought"),
        helper.make_node("Add", ["nought", "corners"], ["boxes"], "boxes"),
    ]
    _save(path, nodes, constants, {"boxes": [CELLS**2, 4], "scores": [CELLS**2, 2]})
    return path


def write_segmenter(path: Path) -> Path:
    """float32 [N, 3, 32, 32] in 0..1 -> `map` [N, 3, 32, 32]: the background, red and green."""
    weights = np.array([[-0.5, -0.5, 0], [1, 0, 0], [0, 1, 0]], np.float32).reshape(3, 3, 1, 1)
    constants = {"weights": weights, "bias": np.array([0.25, 0, 0], np.float32)}
    nodes = [
        helper.make_node("Conv", ["images", "weights", "bias"], ["map"], "conv"),
    ]
    _save(path, nodes, constants, {"map": [3, SIDE_PX, SIDE_PX]})
    return path


def _save(path: Path, nodes: list, constants: dict[str, np.ndarray], outputs: dict[str, list[int]]) -> None:  # type: ignore[type-arg]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIDE_PX, SIDE_PX])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *shape]) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
