"""ONNX files of detectors: one command makes a bundle whose boxes are those of the picture that was sent."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image
from rich.console import Console

import convoy
from convoy.export.command import run
from convoy.export.options import ExportOptions
from convoy.export.sources.onnx_metadata import stated_model
from convoy.export.sources.preprocess import InputSize
from convoy.models.bundle import Manifest, read_manifest
from convoy.models.errors import JobError, UsageError
from tests.support.detector_files import METADATA, SIDE, STRIDE, write_detector

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("measures_little")]
OF_YOLOV5 = {"stride": "8", "names": "['red', 'blue']"}
OF_SEG = METADATA | {"task": "segment"}
OF_POSE = METADATA | {"task": "pose", "kpt_shape": "[2, 3]"}
END_TO_END = METADATA | {"args": "{'nms': True}"}
PLAIN: dict[str, str] = {}
BGR = {
    **{"height": SIDE, "width": SIDE, "channels": 3, "mean": [0, 0, 0], "std": [1, 1, 1], "channel_order": "bgr"},
    **{"resize_mode": "letterbox", "interpolation": "bilinear", "antialias": False},
}


def exported(source: Path, store: Path, **options: Any) -> tuple[Manifest, str]:
    console = Console(file=io.StringIO(), width=300)
    folder = run(ExportOptions(str(source), store=store, max_batch=4, **options), console)
    return read_manifest(folder), console.file.getvalue()  # type: ignore[attr-defined]


def picture(size: tuple[int, int], *painted: tuple[tuple[int, int, int, int], str]) -> Image.Image:
    image = Image.new("RGB", size, (90, 90, 90))
    for box, colour in painted:
        image.paste(colour, box)
    return image


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[convoy.Engine]:
    folder = tmp_path_factory.mktemp("detectors")
    with pytest.MonkeyPatch.context() as patches:
        from tests.support.quick_exports import measure_little

        measure_little(patches)
        (folder / "bgr.json").write_text(json.dumps(BGR))
        for name, layout, metadata, batch, own in (
            ("v8", "yolo_v8", METADATA, 1, {}),
            ("any", "yolo_v8", METADATA, "batch", {}),
            ("v5", "yolo_v5", OF_YOLOV5, 1, {}),
            ("final", "end_to_end", END_TO_END, 1, {}),
            ("masks", "yolo_v8_seg", OF_SEG, 1, {}),
            ("points", "yolo_v8_pose", OF_POSE, 1, {}),
            ("told", "yolo_v8", PLAIN, 1, {"preprocess": "letterbox", "detection": Path("yolo_v8")}),
            ("bgr", "yolo_v8", METADATA, 1, {"preprocess": f"{folder}/bgr.json"}),
        ):
            write_detector(folder / f"{name}.onnx", layout, metadata, batch)
            exported(folder / f"{name}.onnx", folder / "store", **own)
    with convoy.Engine(folder / "store", engine="cpu") as opened:
        yield opened


@pytest.mark.parametrize("name", ["v8", "any", "v5", "final", "told", "masks", "points", "bgr"])
@pytest.mark.parametrize("size", [(64, 64), (400, 200), (90, 300), (20, 33)])
def test_boxes_are_where_the_picture_has_them(engine: convoy.Engine, name: str, size: tuple[int, int]) -> None:
    """Two cells of the network, painted where they are in the picture; the letterbox's grey has no colour. A network
    that takes BGR and gets red calls it blue.
    """
    ratio = SIDE / max(size)
    scaled = [round(side * ratio) for side in size]
    first = [-(-round((SIDE - side) / 2 - 0.1) // STRIDE) for side in scaled]  # the first whole cell of the picture

    def of_cell(column: int, row: int) -> tuple[int, ...]:
        edges = []
        for place, side, px in zip((column, row), scaled, size, strict=True):
            pad = round((SIDE - side) / 2 - 0.1)
            edges.append([round(((place + end) * STRIDE - pad) * px / side) for end in (0, 1)])
        return edges[0][0], edges[1][0], edges[0][1], edges[1][1]

    red, blue = of_cell(first[0], first[1]), of_cell(first[0] + 1, first[1] + 1)
    colours = ("blue", "red") if name == "bgr" else ("red", "blue")
    painted = zip((red, blue), colours, strict=True)
    found = engine.detect(name, picture(size, *painted), threshold=0.6)  # type: ignore[arg-type]
    labels = [None, None] if name == "told" else ["red", "blue"]
    assert sorted((one.class_id, one.label) for one in found.detections) == list(enumerate(labels))
    for one in found.detections:
        np.testing.assert_allclose(one.box, red if one.class_id == 0 else blue, atol=0.51)
        assert (one.mask is not None, len(one.keypoints)) == (name == "masks", 2 * (name == "points"))
        x1, y1, x2, y2 = one.box
        if one.mask is not None:
            rows, columns = np.nonzero(one.mask.array())
            corners = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            np.testing.assert_allclose(corners, one.box, atol=1 + 1 / ratio)
        for point, expected in zip(one.keypoints, (((x1 + x2) / 2, (y1 + y2) / 2, 0.75), (x1, y1, 0.25)), strict=False):
            np.testing.assert_allclose(point, expected, atol=0.51)


def test_one_command_says_what_it_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_detector(tmp_path / "yolo.onnx")
    manifest, _ = exported(tmp_path / "yolo.onnx", tmp_path / "store")
    spec, said = manifest.spec, manifest.spec.detection
    assert (spec.name, spec.labels, spec.activation, spec.task) == ("yolo", ("red", "blue"), "none", "detect")
    assert spec.image is not None
    assert said is not None
    assert (spec.image.resize_mode, spec.image.pad_value, spec.image.height) == ("letterbox", 114, SIDE)
    assert (said.layout, said.threshold, said.iou_threshold, said.max_boxes) == ("yolo_v8", 0.25, 0.7, 300)
    assert manifest.variants[0].serve


@pytest.mark.parametrize("option", [{}, {"detection": "{layout}"}])
@pytest.mark.parametrize(("layout", "metadata"), [("yolo_v8_seg", OF_SEG), ("yolo_v8_pose", OF_POSE)])
def test_masks_and_keypoints_are_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str, metadata: dict[str, str], option: dict[str, str]
) -> None:
    """By the file's metadata, or by the layout's name."""
    write_detector(tmp_path / "yolo.onnx", layout, metadata)
    own = {name: Path(text.format(layout=layout)) for name, text in option.items()}
    spec = exported(tmp_path / "yolo.onnx", tmp_path / "store", **own)[0].spec
    assert spec.detection is not None
    further = {"yolo_v8_seg": ("output1", ()), "yolo_v8_pose": (None, (2, 3))}[layout]
    assert (spec.detection.layout, spec.detection.prototypes, spec.detection.keypoints) == (layout, *further)
    assert spec.labels == ("red", "blue")
    plain = PLAIN if layout == "yolo_v8_seg" else {}
    if plain is PLAIN:  # without metadata, the name and the shapes tell
        write_detector(tmp_path / "plain.onnx", layout, PLAIN)
        named = {"detection": Path(layout), "preprocess": "letterbox"}
        told = exported(tmp_path / "plain.onnx", tmp_path / "store", **named)[0].spec.detection
        assert told is not None
        assert (told.prototypes, told.classes) == ("output1", None)


@pytest.mark.parametrize(
    "metadata",
    [METADATA | {"task": "pose"}, OF_POSE | {"kpt_shape": "[2, 4]"}, OF_POSE | {"kpt_shape": "__import__('os')"}],
)
def test_keypoints_of_another_form_leave_the_boxes(tmp_path: Path, metadata: dict[str, str]) -> None:
    file = write_detector(tmp_path / "yolo.onnx", "yolo_v8_pose", metadata)
    found = stated_model(file, InputSize(3, SIDE, SIDE))
    assert found is not None
    assert found.detection is not None
    assert (found.detection.layout, found.remark) == ("yolo_v8", "boxes without their keypoints")


def test_options_overrule_the_file(tmp_path: Path) -> None:
    file, labels = write_detector(tmp_path / "yolo.onnx"), tmp_path / "labels.txt"
    labels.write_text("warm\ncold\n")
    (tmp_path / "boxes.json").write_text('{"boxes": "output0", "layout": "yolo_v8", "threshold": 0.5}')
    own = {"labels": labels, "preprocess": "unit", "input": "3x64x64", "detection": tmp_path / "boxes.json"}
    spec = exported(file, tmp_path / "store", **own)[0].spec
    assert spec.labels == ("warm", "cold")
    assert spec.image is not None
    assert spec.detection is not None
    assert (spec.image.resize_mode, spec.detection.threshold, spec.detection.iou_threshold) == ("exact", 0.5, None)
    tensors = exported(file, tmp_path / "store", task="none")[0].spec
    assert (tensors.task, tensors.image) == ("none", None)


@pytest.mark.parametrize(
    ("layout", "metadata", "own", "words"),
    [
        ("yolo_v8", PLAIN, {}, r"(?s)like yolo_v8's.*--preprocess letterbox --detection yolo_v8 --labels labels.txt"),
        ("yolo_v5", PLAIN, {}, "(?s)like yolo_v5's.*--detection yolo_v5"),
        ("yolo_v8", METADATA | {"task": "obb"}, {}, "task 'obb', whose boxes are not supported; pass --task none"),
        ("yolo_v8", METADATA, {"detection": Path("yolo_v9")}, "pass yolo_v5, yolo_v8, yolo_v8_seg, yolo_v8_pose, end_"),
        ("yolo_v8", METADATA, {"detection": Path("yolo_v8_seg")}, "yolo_v8_seg has prototypes as a second output"),
        ("yolo_v8", METADATA, {"detection": Path("yolo_v8_pose")}, "has 0 values, which are no keypoints"),
        (
            "yolo_v8_pose",
            PLAIN,
            {"detection": Path("yolo_v8_pose"), "preprocess": "letterbox"},
            "scores of 1 classes, output0 has 7 values, which are no keypoints of 2 or 3 values; pass --labels, or",
        ),
        (
            "yolo_v8",
            METADATA,
            {"detection": Path("yolo_v5")},
            r"2 labels, but read as yolo_v5 output0 FP32 \[N, 6, 84\] has 79 classes",
        ),
        ("yolo_v8", METADATA, {"input": "3x32x32"}, "takes 3 channels of 64x64, the preprocessing gives 3 of 32x32"),
    ],
)
def test_what_cannot_be_known_is_asked_for(
    tmp_path: Path, layout: str, metadata: dict[str, str], own: dict[str, Any], words: str
) -> None:
    file = write_detector(tmp_path / "yolo.onnx", layout, metadata)
    with pytest.raises((UsageError, JobError), match=words) as caught:
        exported(file, tmp_path / "store", **own)
    assert "forward()" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_a_file_in_fp16_is_refused_before_any_work(tmp_path: Path) -> None:
    file = write_detector(tmp_path / "half.onnx")
    model = onnx.load(file)
    (first,) = [node for node in model.graph.node if "images" in node.input]
    casts = [
        onnx.helper.make_node("Cast", ["images"], ["halves"], to=onnx.TensorProto.FLOAT16),
        onnx.helper.make_node("Cast", ["halves"], ["rounded"], to=onnx.TensorProto.FLOAT),
    ]
    first.input[list(first.input).index("images")] = "rounded"
    for place, node in enumerate(casts):
        model.graph.node.insert(place, node)
    onnx.save(model, file)
    with pytest.raises(UsageError, match=r"half.onnx computes in FP16, .* export it with half=False"):
        exported(file, tmp_path / "store")


@pytest.mark.parametrize("names", ["", "{", "{0: 'red', 2: 'blue'}", "7", "__import__('os')", "(" * 100_000])
def test_names_that_are_none_leave_the_file_unknown(tmp_path: Path, names: str) -> None:
    file = write_detector(tmp_path / "yolo.onnx", metadata=METADATA | {"names": names})
    assert stated_model(file, InputSize(3, SIDE, SIDE)) is None
