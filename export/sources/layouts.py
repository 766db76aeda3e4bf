"""Which outputs of a network a detection layout reads, and which layout their shapes suggest.

Detectors return more than boxes: the maps of their backbone, queries, the outputs of a second head. Knows names and
shapes, and neither torch nor ONNX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convoy.models.tasks import Layout

# With the batch dimension, -1 for a size that is not fixed, in the order in which the network returns them.
Shapes = Mapping[str, Sequence[int]]

# That YOLOs answer.
_MOST_BOXES = 300
_BOX_WORDS = ("box", "det")
_SCORE_WORDS = ("logit", "score", "class", "cls", "label")


def outputs_read(layout: Layout, shapes: Shapes) -> tuple[str, str | None]:
    """The names of the output with the boxes, and of another one: with the scores, or with the prototypes of masks.

    YOLOs return their boxes first. A DETR returns [N, K, 4] and [N, K, classes] in either order; with four classes only
    the names tell them apart.
    """
    first = next(iter(shapes))
    if layout == "yolo_v8_seg":
        return first, next((name for name, shape in shapes.items() if len(shape) == 4), None)
    if layout != "detr":
        return first, None
    listed = {name: shape for name, shape in shapes.items() if len(shape) == 3}
    boxes = _named([name for name, shape in listed.items() if shape[2] == 4], _BOX_WORDS)
    if boxes is None:
        return first, None
    queries = listed[boxes][1]
    return boxes, _named([name for name in listed if name != boxes and listed[name][1] == queries], _SCORE_WORDS)


def likely_layout(shapes: Shapes, height: int, width: int) -> Layout | None:
    """The layout that the outputs suggest for an input of this size, for advice; None for others.

    A YOLO has one box per cell of its three grids, or three; further outputs are the maps of its head, or prototypes of
    masks at a quarter of the size. Keypoints cannot be told from classes. A DETR calls its boxes so.
    """
    boxes, scores = outputs_read("detr", shapes)
    if scores is not None and all(word in boxes + scores for word in ("box", "logits")):
        return "detr"
    shape = next(iter(shapes.values()))
    if len(shape) != 3:
        return None
    cells = sum((height // stride) * (width // stride) for stride in (8, 16, 32))
    _, rows, columns = shape
    maps = [tuple(one[2:]) for one in shapes.values() if len(one) == 4]
    grids = [(height // stride, width // stride) for stride in (8, 16, 32)]
    has_prototypes = (height // 4, width // 4) in maps or (len(shapes) == 2 and bool(maps) and maps[0] not in grids)
    if columns == cells and rows > 4:
        return "yolo_v8_seg" if has_prototypes else "yolo_v8"
    if has_prototypes:
        return None
    if rows in (cells, 3 * cells) and columns > 5:
        return "yolo_v5"
    is_list = columns == 6 and (rows > 6 if len(shapes) == 1 else rows == _MOST_BOXES)
    return "end_to_end" if is_list else None


def _named(names: Sequence[str], words: Sequence[str]) -> str | None:
    """The first name with one of the words, or else the first."""
    return next((name for name in names if any(word in name.lower() for word in words)), next(iter(names), None))
