"""Networks of other libraries from a user's Python file, exported from the command line and asked for a picture.

The libraries are in environments of their own: see tests/yolo/environment.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from convoy.models.bundle import read_manifest
from tests.support import foreign_factories
from tests.support.pictures import saved
from tests.support.servers import start_server
from tests.support.stores import ROOT
from tests.yolo.environment import interpreter, ultralytics_python

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

OTHERS = ("segmentation-models-pytorch==0.6.0", "transformers==5.24.0")


@dataclass(frozen=True)
class Case:
    """A factory, the options that its network needs, and the outputs that remain.

    `layout` and `classes` are what a network of Ultralytics says of itself.
    """

    factory: str
    options: str
    outputs: tuple[str, ...]
    layout: str = ""
    classes: int = 0


CASES = (
    Case("yolo", "", ("output",), "yolo_v8", 3),
    Case("wrapped_segmenter", "", ("output0", "output1"), "yolo_v8_seg", 80),
    Case("unet", "--preprocess imagenet", ("output",)),
    Case("detr", "--preprocess imagenet --detection detr --activation softmax", ("logits", "pred_boxes")),
    Case("rtdetr", "--preprocess unit --detection detr --activation sigmoid", ("logits", "pred_boxes")),
    Case("fcos", "--preprocess unit", ("boxes", "scores")),
)


def python_for(factory: str) -> Path:
    if factory in ("yolo", "wrapped_segmenter", "oriented"):
        return ultralytics_python()
    return interpreter("other-libraries", OTHERS) if factory in ("unet", "detr", "rtdetr") else Path(sys.executable)


def export(factory: str, options: str, folder: Path, timeout_s: float = 600.0) -> subprocess.CompletedProcess[str]:
    """By the command, in the environment of the factory's library."""
    source = folder / "net.py"
    source.write_text(Path(foreign_factories.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    given = f"--name net --random-weights --input 3x128x128 --precisions fp32 --max-batch 4 {options}".split()
    command = [str(python_for(factory)), "-m", "convoy", "export", f"{source}:{factory}", *given]
    return subprocess.run(
        [*command, "--store", str(folder / "store")],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.parametrize("case", CASES, ids=[case.factory for case in CASES])
def test_a_network_of_another_library_is_served(tmp_path: Path, case: Case) -> None:
    done = export(case.factory, case.options, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    spec = read_manifest(tmp_path / "store" / "net" / "1").spec
    assert tuple(output.name for output in spec.outputs) == case.outputs
    assert spec.task == ("segment" if case.factory == "unet" else "detect")
    # transformers' RT-DETR has the number of images as a constant when torch exports it.
    assert spec.max_batch_size == (1 if case.factory == "rtdetr" else 4)
    if case.layout:
        assert spec.detection is not None
        assert spec.detection.layout == case.layout
        assert (spec.image.resize_mode, len(spec.labels)) == ("letterbox", case.classes)
    if case.factory == "detr":
        assert spec.detection is not None
        assert (spec.detection.background, spec.detection.boxes) == (3, "pred_boxes")
    noise = np.random.default_rng(0).integers(0, 256, (90, 120, 3), np.uint8)
    asked = "" if case.factory == "unet" else "?threshold=0.001"
    with start_server(store=tmp_path / "store") as server:
        answer = server.post(f"/predictions/net{asked}", content=saved(Image.fromarray(noise)))
        assert answer.status_code == 200, answer.text
        if case.factory == "unet":
            assert answer.json()["segmentation"]["classes"]
            return
        found = answer.json()["detections"]
        assert found
        assert all(0 <= one["box"]["x1"] <= one["box"]["x2"] <= 120 for one in found)
        allowed = set(range(case.classes or 4)) - {spec.detection.background}  # type: ignore[union-attr]
        assert {one["class_id"] for one in found} <= allowed
        assert ("mask" in found[0]) == (case.layout == "yolo_v8_seg")


def test_python_exports_a_network_of_ultralytics_without_options(tmp_path: Path) -> None:
    """The network in memory says as much of itself as its file."""
    script = (
        "import convoy\n"
        "from tests.support.foreign_factories import wrapped_segmenter\n"
        "made = wrapped_segmenter()\n"
        "made.overrides['imgsz'] = made.model.args['imgsz'] = 64\n"
        f"convoy.export(made, name='net', precisions='fp32', max_batch=2, store={str(tmp_path)!r}, progress=False)\n"
        "assert made.model.model[-1].export is False, 'the copy is changed, not the original'\n"
    )
    command = [str(ultralytics_python()), "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    spec = read_manifest(tmp_path / "net" / "1").spec
    assert spec.image is not None
    assert (spec.image.resize_mode, spec.image.height, len(spec.labels)) == ("letterbox", 64, 80)
    assert spec.detection is not None
    assert spec.detection.layout == "yolo_v8_seg"


def test_a_missing_layout_is_named_in_the_whole_command(tmp_path: Path) -> None:
    done = export("detr", "--preprocess letterbox", tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    command = done.stderr.rpartition("for example: ")[2]
    assert command.startswith("convoy export ")
    assert "--detection detr" in command
    assert not (tmp_path / "store" / "net").exists()


def test_oriented_boxes_are_refused_before_any_work(tmp_path: Path) -> None:
    done = export("oriented", "", tmp_path, timeout_s=60.0)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "net.py:oriented is for Ultralytics' task 'obb', whose boxes are not supported; pass --task none" in (
        " ".join(done.stderr.split())
    )


def test_two_stages_are_refused_at_once(tmp_path: Path) -> None:
    """torch alone would try for minutes."""
    done = export("two_stages", "--preprocess unit", tmp_path, timeout_s=60.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "net.py:two_stages is a FasterRCNN, which works in two stages" in done.stderr
