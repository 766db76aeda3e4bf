"""Boxes from Pascal VOC's XML, as VOC itself, LabelImg and CVAT write it.

XML is read without entities and document types, which could make a small file endless.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from convoy.models.annotations.records import (
    Annotated,
    Annotation,
    BadAnnotation,
    Faults,
    Split,
    images_below,
    listed_labels,
    numbers,
    objects,
    read_text,
    shown,
)
from convoy.models.errors import JobError
from convoy.models.geometry import Extent

IMAGES, ANNOTATIONS = "JPEGImages", "Annotations"
_Row = tuple[list[float], str, bool]


def read_voc(root: Path) -> Annotated:
    """A folder with `JPEGImages/` and `Annotations/`, and perhaps `ImageSets/Main/{train,val,test}.txt`.

    Classes are those of `labels.txt`, or all names in alphabetical order. Raises JobError.
    """
    files = {file.stem: file for file in sorted((root / ANNOTATIONS).glob("*.xml"))}
    images = {image.stem: image for image in images_below(root / IMAGES)}
    faults = Faults(str(root))
    rows: dict[str, tuple[list[_Row], Extent | None]] = {}
    for stem, file in files.items():
        with faults.at(file.name):
            rows[stem] = _rows(file, faults)
            if stem not in images:
                raise BadAnnotation(f"there is no image {stem} in {root / IMAGES}")
    faults.refuse()
    labels = listed_labels([root]) or tuple(sorted({name for own, _ in rows.values() for _, name, _ in own}))
    numbered = {label: number for number, label in enumerate(labels)}
    unknown = sorted({name for own, _ in rows.values() for _, name, _ in own} - set(labels))
    if unknown:
        raise JobError(f"{root}: labels.txt lacks {', '.join(unknown)}; add a line for each")

    def annotation(stem: str) -> Annotation:
        own, size = rows[stem]
        boxes, classes = [box for box, _, _ in own], [numbered[name] for _, name, _ in own]
        target = objects(boxes, classes, [is_hard for _, _, is_hard in own])
        return Annotation(images[stem], target, files[stem].name, size)

    return Annotated(labels, {split: list(map(annotation, stems)) for split, stems in _parts(root, rows).items()})


def _parts(root: Path, known: Mapping[str, Any]) -> dict[Split, list[str]]:
    """The stems by part; all of them if there are no lists, or only one."""
    found: dict[Split, list[str]] = {}
    splits: tuple[Split, ...] = ("train", "val", "test")
    for split in splits:
        file = root / "ImageSets" / "Main" / f"{split}.txt"
        if file.is_file():
            # A test part often comes without annotations.
            stems = [line.split()[0] for line in read_text(file).splitlines() if line.strip()]
            found[split] = [stem for stem in stems if stem in known]
    found = {split: stems for split, stems in found.items() if stems}
    return found if len(found) > 1 else {"all": list(known)}


def _rows(file: Path, faults: Faults) -> tuple[list[_Row], Extent | None]:
    """Boxes with names, and whether they are difficult, which counts neither way; and the stated size."""
    root, lines = _parsed(file)
    rows: list[_Row] = []
    for element in root.iter("object"):
        with faults.at(f"{file.name}, line {lines[element]}"):
            name = (element.findtext("name") or "").strip()
            if not name:
                raise BadAnnotation("the object has no name")
            rows.append((_corners(element), name, (element.findtext("difficult") or "0").strip() == "1"))
    size = [_number(root.findtext(f"size/{side}")) for side in ("width", "height")]
    is_known = all(value and value > 0 and value.is_integer() for value in size)
    return rows, (int(size[0] or 0), int(size[1] or 0)) if is_known else None


def _corners(element: Element) -> list[float]:
    values = [_number(element.findtext(f"bndbox/{name}")) for name in ("xmin", "ymin", "xmax", "ymax")]
    x1, y1, x2, y2 = numbers(values, 4, "bndbox")
    if x2 < x1 or y2 < y1:
        raise BadAnnotation(f"bndbox {shown(values)} has xmax below xmin, or ymax below ymin")
    # VOC counts pixels from 1, and the box contains the last.
    return [x1 - 1, y1 - 1, x2, y2]


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _parsed(file: Path) -> tuple[Element, dict[Element, int]]:
    """The root element, and the line of every element. Raises BadAnnotation."""
    builder, lines = TreeBuilder(), {}
    parser = expat.ParserCreate()

    def start(name: str, attributes: dict[str, str]) -> None:
        lines[builder.start(name, attributes)] = parser.CurrentLineNumber

    def refuse(*_: object) -> NoReturn:
        raise BadAnnotation("the file has a document type, which could define entities; remove <!DOCTYPE ...>")

    parser.StartElementHandler = start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(file.read_bytes(), True)
    except OSError as error:
        raise BadAnnotation(f"it cannot be read: {error.strerror}") from error
    except expat.ExpatError as error:
        raise BadAnnotation(f"it is not XML: {error}") from error
    return builder.close(), lines
