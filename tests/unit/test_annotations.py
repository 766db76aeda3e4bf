"""Boxes and masks as people have them: every form gives the same objects, and every mistake is said in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from convoy.models.annotations.reading import annotated_labels, is_annotated, load_annotated
from convoy.models.errors import JobError
from convoy.models.samples import Dataset, Objects, Sample
from tests.support.annotated_images import CLASSES, Picture, pictures, write_coco, write_masks, write_voc, write_yolo

TRAIN, VAL = pictures(5, seed=1), pictures(4, seed=2)
Writer = Callable[[Path], Path]


def both_parts(write: Callable[..., object]) -> Writer:
    def written(root: Path) -> Path:
        write(root, TRAIN, "train")
        write(root, VAL, "val")
        return root

    return written


def described_yolo(root: Path) -> Path:
    """As Roboflow leaves it: paths that begin with `../`, and a test part that does not exist."""
    for part, shown in (("train", TRAIN), ("val", VAL)):
        write_yolo(root / "flat", shown, part)
        (root / part).mkdir()
        (root / "flat" / "images" / part).rename(root / part / "images")
        (root / "flat" / "labels" / part).rename(root / part / "labels")
    lines = ["train: ../train/images", "val: ../val/images", "test: ../test/images", "nc: 2", "names: ['red', 'green']"]
    (root / "data.yaml").write_text("\n".join(lines))
    return root


def ultralytics_yolo(root: Path) -> Path:
    both_parts(write_yolo)(root)
    names = "names:\n  0: red\n  1: green\n"
    (root / "data.yaml").write_text(f"path: {root}\ntrain: images/train\nval: images/val\n{names}")
    return root / "data.yaml"


def roboflow_coco(root: Path) -> Path:
    """A file beside the images of each part, and the project as the first category."""
    for part, folder, shown in (("train", "train", TRAIN), ("val", "valid", VAL)):
        whole = json.loads(write_coco(root / "there", shown, part, ids=(1, 2)).read_text())
        for category in whole["categories"]:
            category["supercategory"] = "squares"
        whole["categories"].insert(0, {"id": 0, "name": "squares", "supercategory": "none"})
        (root / "there" / part).rename(root / folder)
        (root / folder / "_annotations.coco.json").write_text(json.dumps(whole))
    return root


def named_yolo(root: Path) -> Path:
    both_parts(write_yolo)(root)
    (root / "classes.txt").write_text("red\ngreen\n")
    return root


FORMS: dict[str, Writer] = {
    "coco": both_parts(write_coco),
    "coco by roboflow": roboflow_coco,
    "yolo": named_yolo,
    "yolo by roboflow": described_yolo,
    "yolo by ultralytics": ultralytics_yolo,
    "voc": both_parts(write_voc),
}


def loaded(source: Path, *, is_split: bool = True) -> Dataset:
    return load_annotated(str(source), most_calibrated=100, is_split=is_split)


def shown_in(sample: Sample, labels: tuple[str, ...]) -> set[tuple[float, ...]]:
    assert isinstance(sample.target, Objects)
    numbers = np.array([CLASSES.index(labels[number]) for number in sample.target.classes], float)
    return set(map(tuple, np.round(np.column_stack([sample.target.boxes, numbers]), 6).tolist()))


def wanted(picture: Picture) -> set[tuple[float, ...]]:
    return {(*map(float, box), float(label)) for box, (_, _, label) in zip(picture.boxes, picture.squares, strict=True)}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_boxes_classes_and_parts(tmp_path, form):
    source = FORMS[form](tmp_path)
    assert is_annotated(str(source))
    assert set(annotated_labels(str(source))) == set(CLASSES)
    data = loaded(source)
    for part, shown in (("calibration", TRAIN), ("test", VAL)):
        found = [frozenset(shown_in(one, data.labels)) for one in data.parts[part]]
        assert len(found) == len(shown)
        assert set(found) == {frozenset(wanted(one)) for one in shown}


def test_classes_are_matched_by_name_and_unknown_ones_are_all_named(tmp_path):
    data = loaded(FORMS["coco"](tmp_path))
    assert data.labels == CLASSES
    ordered = data.in_order_of(("background", "green", "lawn", "red"))
    for before, after in zip(data.parts["test"], ordered.parts["test"], strict=True):
        assert [(3, 1)[number] for number in before.target.classes] == after.target.classes.tolist()
    mapped = data.in_order_of(("lawn", "brick"), {"red": "brick", "green": "lawn"})
    assert {number for one in mapped.parts["test"] for number in one.target.classes.tolist()} == {0, 1}
    with pytest.raises(
        JobError, match=r"unknown to the model: red, green; rename or remove them, or map them .*--class-map"
    ):
        data.in_order_of(("cat", "dog"))


def test_data_without_parts_is_split_by_content_or_used_whole(tmp_path):
    whole = pictures(60)
    file = write_coco(tmp_path / "coco", whole)
    split = loaded(file)
    parts = {part: {one.sha256 for one in split.parts[part]} for part in ("calibration", "test")}
    assert not parts["calibration"] & parts["test"]
    assert len(parts["calibration"] | parts["test"]) == len(whole)
    assert 4 <= len(parts["test"]) <= 22
    assert {one.sha256 for one in loaded(tmp_path / "coco").parts["test"]} == parts["test"]
    assert len(loaded(file, is_split=False).parts["test"]) == len(whole)
    write_coco(tmp_path / "both", whole, "train")
    write_coco(tmp_path / "both", whole[:7], "val")
    assert len(load_annotated(str(tmp_path / "both"), most_calibrated=20, is_split=True).parts["calibration"]) == 20


def changed_coco(root: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = write_coco(root, VAL)
    whole = json.loads(file.read_text())
    change(whole)
    file.write_text(json.dumps(whole))
    return root


def many_mistakes(whole: dict[str, Any]) -> None:
    boxes = whole["annotations"]
    boxes[0]["bbox"], boxes[1]["bbox"], boxes[2]["category_id"] = [1, 2, 3], [1, 2, -3, 4], 99
    boxes[3]["image_id"] = 5
    whole["images"][1]["file_name"] = "gone.png"


def odd_names(whole: dict[str, Any]) -> None:
    for image, name in zip(whole["images"], ("x" * 5000, "a\0b", None, ""), strict=True):
        image["file_name"] = name


COCO_MISTAKES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "several": (
        many_mistakes,
        r"annotations\[0\] \(id 1\): bbox must be 4 numbers, got \[1, 2, 3\]; annotations\[1\] \(id 2\): bbox has a "
        r"negative size.*annotations\[2\] \(id 3\): there is no category 99; annotations\[3\] \(id 4\): there is no "
        r"image 5; images\[1\] \(id 101\): there is no image 'gone.png' in ",
    ),
    "odd names": (
        odd_names,
        r"images\[0\].*there is no image 'xxx.*images\[1\].*images\[2\].*must be text.*images\[3\]",
    ),
    "another size": (
        lambda whole: whole["images"][0].update(width=65),
        "image 100: the image is 64x64, and the annotations say 65x64",
    ),
    "outside": (
        lambda whole: whole["annotations"][0].update(bbox=[100, 0, 10, 10]),
        r"the box 100, 0, 110, 10 \(x1, y1, x2, y2\) is outside of the image of 64x64",
    ),
    "not COCO": (lambda whole: whole.pop("categories"), r"is not COCO's JSON with images, annotations and categories"),
}


@pytest.mark.parametrize("case", COCO_MISTAKES)
def test_mistakes_in_coco_are_named_by_record(tmp_path, case):
    change, message = COCO_MISTAKES[case]
    with pytest.raises(JobError, match=message):
        loaded(changed_coco(tmp_path, change))


def test_boxes_beyond_the_edge_are_clipped_and_those_without_an_area_left_out(tmp_path):
    def change(whole: dict[str, Any]) -> None:
        first = whole["images"][0]["id"]
        own = {"image_id": first, "category_id": 3, "iscrowd": 0}
        boxes = ([-5, -5, 20, 20], [60, 60, 10, 2], [5, 5, 0, 10])
        whole["annotations"] = [{**own, "id": number, "bbox": box} for number, box in enumerate(boxes)]
        whole["annotations"][1]["iscrowd"] = 1

    (sample,) = [
        one for one in loaded(changed_coco(tmp_path, change), is_split=False).parts["test"] if len(one.target.boxes)
    ]
    assert sample.target.boxes.tolist() == [[0, 0, 15, 15], [60, 60, 64, 62]]
    assert sample.target.is_crowd.tolist() == [False, True]


def test_mistakes_in_yolo_are_named_by_file_and_line(tmp_path):
    named_yolo(tmp_path)
    lines = ["0 0.5 0.5 0.2 0.2", "7 0.5 0.5 0.2 0.2", "0 0.5 0.5 0.2", "0 32 32 16 16", "red 0.5 0.5 0.2 0.2"]
    (tmp_path / "labels" / "val" / "val-0.txt").write_text("\n".join(lines))
    with pytest.raises(JobError) as caught:
        loaded(tmp_path)
    for message in (
        "val-0.txt, line 2: the class 7 is not from 0 to 1",
        "val-0.txt, line 3: there are 4 numbers, and a box has 5",
        "val-0.txt, line 4: coordinates must be from 0 to 1",
        "val-0.txt, line 5: 'red 0.5 0.5 0.2 0.2' has a word that is not a number",
    ):
        assert message in str(caught.value)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/nowhere\nnames: [red, green]\n")
    with pytest.raises(JobError, match=r"data.yaml: val is 'images/nowhere', and there is no .*; correct it"):
        loaded(tmp_path)
    (tmp_path / "data.yaml").write_text("train: images/train\nval: images/val\nnames: {0: red, 2: green}\n")
    with pytest.raises(JobError, match=r"data.yaml: names must be a list of class names, or numbers from 0 with names"):
        loaded(tmp_path)


def test_an_image_without_a_file_of_labels_has_no_objects_but_not_all_may(tmp_path):
    named_yolo(tmp_path)
    (tmp_path / "labels" / "val" / "val-0.txt").unlink()
    assert next(len(one.target.boxes) for one in loaded(tmp_path).parts["test"]) == 0
    for file in (tmp_path / "labels" / "val").iterdir():
        file.unlink()
    with pytest.raises(
        JobError, match=r"no image has a file of labels, such as .*val-0.txt; put labels/ beside images/"
    ):
        loaded(tmp_path)


def test_mistakes_in_voc_are_named_by_file_and_line_and_no_entity_is_read(tmp_path):
    write_voc(tmp_path, VAL)
    bombs = '<!DOCTYPE a [<!ENTITY b "ha">]><annotation><object><name>&b;</name></object></annotation>'
    (tmp_path / "Annotations" / "val-0.xml").write_text(bombs)
    (tmp_path / "Annotations" / "val-1.xml").write_text(
        "<annotation>\n<object><name>red</name>\n</object>\n<object></object></annotation>"
    )
    (tmp_path / "Annotations" / "val-2.xml").write_text("<annotation>")
    (tmp_path / "JPEGImages" / "val-3.png").unlink()
    with pytest.raises(JobError) as caught:
        loaded(tmp_path)
    for message in (
        "val-0.xml: the file has a document type",
        "val-1.xml, line 2: bndbox must be 4 numbers",
        "val-1.xml, line 4: the object has no name",
        "val-2.xml: it is not XML",
        "val-3.xml: there is no image val-3",
    ):
        assert message in str(caught.value)


def test_masks_fit_their_images(tmp_path):
    both_parts(write_masks)(tmp_path)
    data = loaded(tmp_path)
    assert [len(data.parts[part]) for part in ("calibration", "test")] == [5, 4]
    assert all(isinstance(one.target, Path) for one in data.parts["test"])
    masks = tmp_path / "masks" / "val"
    Image.new("RGB", (64, 64)).save(masks / "val-0.png")
    Image.new("L", (64, 32)).save(masks / "val-1.png")
    with pytest.raises(JobError, match=r"has RGB pixels; save class numbers .* is 64x32, and the image 64x64"):
        loaded(tmp_path)
    (masks / "val-2.png").unlink()
    with pytest.raises(JobError, match=r"val-2.png: there is no mask val-2.png; add or rename the files"):
        loaded(tmp_path)


def test_of_boxes_and_masks_in_one_folder_the_task_says_which_are_read(tmp_path):
    both_parts(write_masks)(tmp_path)
    both_parts(write_coco)(tmp_path)
    for prefers_masks in (False, True):
        data = load_annotated(str(tmp_path), most_calibrated=100, is_split=True, prefers_masks=prefers_masks)
        assert {isinstance(one.target, Path) for one in data.parts["test"]} == {prefers_masks}


def test_several_files_of_annotations_must_say_which_part_they_are(tmp_path):
    for name in ("a", "b"):
        write_coco(tmp_path, VAL).rename(tmp_path / "annotations" / f"instances_{name}.json")
    with pytest.raises(JobError, match=r"several files of annotations \(instances_a.json, instances_b.json\)"):
        is_annotated(str(tmp_path))


def test_folders_of_classes_and_built_in_data_are_not_annotated(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        Image.new("RGB", (4, 4)).save(tmp_path / label / "1.png")
    assert not any(map(is_annotated, (str(tmp_path), "digits", str(tmp_path / "gone"), "rows.npz")))


FILES = {
    "coco": "annotations/instances_val.json",
    "yolo": "labels/val/val-1.txt",
    "yolo by roboflow": "data.yaml",
    "voc": "Annotations/val-1.xml",
}


@pytest.mark.parametrize("form", FILES)
def test_whatever_a_file_of_annotations_holds_is_read_or_refused(tmp_path, form):
    """Bytes that are changed, left out or swapped for odd ones raise nothing but a JobError."""
    source = FORMS[form](tmp_path)
    file, generator = source / FILES[form], np.random.default_rng(5)
    content, refused = file.read_bytes(), 0
    odd = (
        b"",
        b"null",
        b"-1",
        b"1e999",
        b'"x"',
        b"[]",
        b"{}",
        b"\xff",
        b"\0",
        b"NaN",
        b"9" * 30,
        b"<!DOCTYPE a>",
        b"\n",
    )
    for _ in range(80):
        start = int(generator.integers(0, len(content)))
        end = start + int(generator.integers(0, 12))
        file.write_bytes(content[:start] + odd[generator.integers(0, len(odd))] + content[end:])
        try:
            loaded(source)
        except JobError:
            refused += 1
    assert refused > 10
