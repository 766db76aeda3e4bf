"""Sources of labelled images: scikit-learn's digits, CIFAR-10, drawn characters, or a folder of classes.

Turns each format into `convoy.models.samples`. The labels of built-in sources are known without torch or scikit-learn.
A source with its own split keeps it; the others are split by content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from convoy.models.checkout import pip_install
from convoy.models.errors import JobError, UsageError
from convoy.models.glyphs.drawing import CHARACTERS
from convoy.models.glyphs.glyph_set import GlyphSet, drawn
from convoy.models.image_files import IMAGE_SUFFIXES
from convoy.models.samples import PARTS, Dataset, Part, Pixels, Sample, some, split_by_content

DEFAULT_DATA_ROOT = Path.home() / ".cache" / "convoy" / "data"

DIGIT_LABELS = tuple("0123456789")
CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GLYPH_LABELS = tuple(CHARACTERS)
DIGIT_PX = 32
_ALL_GLYPHS = GlyphSet()
_VALIDATION = "val"


def load(source: str, data_root: Path | None = None) -> Dataset:
    """The data set that `source` names: `digits`, `cifar10`, `glyphs`, `glyphs:N`, or an image folder. Downloaded or
    drawn images are kept under `data_root`, or in the user's cache if that is None.

    Raises UsageError for an unknown source, and JobError if it is empty, incomplete or unreadable.
    """
    if source in _SOURCES:
        return _SOURCES[source](data_root or DEFAULT_DATA_ROOT)
    if number := _GLYPHS_OF_A_NUMBER.fullmatch(source):
        return load_glyphs(data_root or DEFAULT_DATA_ROOT, GlyphSet(training_images=int(number[1])), source)
    if Path(source).is_dir():
        return load_folder(Path(source))
    raise unknown_source(source)


def unknown_source(source: str) -> UsageError:
    """The error for a data set that does not exist."""
    return UsageError(f"there is no data set or folder {source!r}; use one of {', '.join(_SOURCES)}, or a folder")


def load_digits(data_root: Path = DEFAULT_DATA_ROOT) -> Dataset:
    """The 1,797 handwritten digits of scikit-learn, as 32x32 RGB images; `data_root` is not needed."""
    try:
        from sklearn.datasets import load_digits as sklearn_digits
    except ImportError as error:
        raise JobError(f"the digits come with scikit-learn, which is not installed; {pip_install('export')}") from error
    digits = sklearn_digits()
    samples = []
    for index, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        # Hash scikit-learn's pixels, so that no version of Pillow changes the split.
        sha256 = _sha256(image.astype(np.uint8).tobytes())
        samples.append(Sample(f"digit-{index:04}", int(label), sha256, digit_pixels(image)))
    return _checked(Dataset("digits", DIGIT_LABELS, split_by_content(samples)))


def digit_pixels(intensities: npt.NDArray[np.float64]) -> Pixels:
    """One digit, [8, 8] of ink from 0 to 16, as a 32x32 RGB image: white on black, smoothly enlarged."""
    small = Image.fromarray(np.rint(intensities * (255 / 16)).astype(np.uint8))
    return np.asarray(small.resize((DIGIT_PX, DIGIT_PX), Image.Resampling.BICUBIC).convert("RGB"))


def load_cifar10(data_root: Path = DEFAULT_DATA_ROOT) -> Dataset:
    """CIFAR-10 through torchvision, downloaded into `data_root` if necessary.

    Its test images are the test part; a tenth of its training images, by content, is for calibration.
    """
    try:
        from torchvision.datasets import CIFAR10
    except ImportError as error:
        raise JobError(f"cifar10 comes through torchvision, which is not installed; {pip_install('export')}") from error
    samples: dict[bool, list[Sample]] = {}
    for train in (True, False):
        try:
            source = CIFAR10(str(data_root), train=train, download=True)
        except (OSError, RuntimeError, EOFError) as error:
            raise JobError(
                f"cifar10 is not complete in {data_root} and cannot be downloaded ({' '.join(str(error).split())}); "
                f"unpack {CIFAR10.filename} from {CIFAR10.url} there"
            ) from error
        kind = "train" if train else "test"
        samples[train] = [
            Sample(f"{kind}-{index:05}", int(label), _sha256(pixels.tobytes()), pixels)
            for index, (pixels, label) in enumerate(zip(source.data, source.targets, strict=True))
        ]
    split = split_by_content(samples[True], test_percent=0)
    return Dataset("cifar10", CIFAR10_LABELS, {**split, "test": tuple(samples[False])})


def load_glyphs(data_root: Path = DEFAULT_DATA_ROOT, wanted: GlyphSet = _ALL_GLYPHS, name: str = "glyphs") -> Dataset:
    """Printed characters drawn from free fonts; the test images use faces that the other parts do not.

    They are drawn once and kept in `data_root`. Raises JobError if fonts are missing.
    """
    parts: dict[Part, Sequence[Sample]] = {
        part: tuple(
            Sample(f"{part}-{GLYPH_LABELS[label]}-{index:05}", label, _sha256(pixels.tobytes()), pixels)
            for label, pictures in enumerate(images)
            for index, pixels in enumerate(pictures)
        )
        for part, images in drawn(wanted, data_root).items()
    }
    return _checked(Dataset(name, GLYPH_LABELS, parts))


_SOURCES: dict[str, Callable[[Path], Dataset]] = {
    "digits": load_digits,
    "cifar10": load_cifar10,
    "glyphs": load_glyphs,
}
_LABELS = {"digits": DIGIT_LABELS, "cifar10": CIFAR10_LABELS, "glyphs": GLYPH_LABELS}
# This many training images of each character, and the other parts in proportion.
_GLYPHS_OF_A_NUMBER = re.compile(r"glyphs:([0-9]{1,6})")


def source_labels(source: str) -> tuple[str, ...] | None:
    """The labels of a built-in source, without loading it; None for a folder."""
    return _LABELS.get("glyphs" if _GLYPHS_OF_A_NUMBER.fullmatch(source) else source)


def load_folder(root: Path) -> Dataset:
    """`root/<class>/*.jpg`, split by content, or `root/{train,calibration,test}/<class>/*.jpg` as it is; `val` is
    another name of `test`.

    If only `calibration` is missing, it is taken out of `train`, by content. Classes are folder names in alphabetical
    order. Raises JobError if a folder cannot be read, there are fewer than two classes, or a class has no images.
    """
    folders, labels = _part_folders(root), folder_classes(root)
    if not folders:
        return _checked(Dataset(str(root), labels, split_by_content(_folder_samples(root, labels))))
    parts: dict[Part, Sequence[Sample]] = dict.fromkeys(PARTS, ())
    for part, folder in folders.items():
        parts[part] = tuple(_folder_samples(folder, labels))
    return _checked(Dataset(str(root), labels, _with_calibration(parts, folders)))


def is_flat_folder(source: str) -> bool:
    """Whether it is a folder of images without classes, directly in it or in its `calibration` and `test`."""
    root = Path(source)
    if not root.is_dir():
        return False
    folders = list(_part_folders(root).values()) or [root]
    entries = [entry for folder in folders for entry in _entries(folder)]
    return any(_is_picture(entry) for entry in entries) and not any(entry.is_dir() for entry in entries)


def load_flat_folder(root: Path) -> Dataset:
    """`root/*.jpg` or `root/{train,calibration,test}/*.jpg`; the samples have no label (-1).

    Nothing is trained on images without labels, so for the first form everything outside the test part, by content, is
    for calibration; the second is split as in `load_folder`. Raises JobError if a folder cannot be read.
    """
    folders = _part_folders(root)
    if not folders:
        split = split_by_content(_flat_samples(root))
        rest = (*split["train"], *split["calibration"])
        return Dataset(str(root), (), {"train": (), "calibration": rest, "test": split["test"]})
    parts: dict[Part, Sequence[Sample]] = dict.fromkeys(PARTS, ())
    parts |= {part: tuple(_flat_samples(folder)) for part, folder in folders.items()}
    return Dataset(str(root), (), _with_calibration(parts, folders))


def _flat_samples(folder: Path) -> list[Sample]:
    return [Sample(path.name, -1, _file_sha256(path), path) for path in _entries(folder) if _is_picture(path)]


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and path.is_file()


def _with_calibration(parts: Mapping[Part, Sequence[Sample]], given: Collection[str]) -> dict[Part, Sequence[Sample]]:
    """If only `calibration` is missing, take it out of `train`."""
    if "calibration" in given:
        return dict(parts)
    return {**split_by_content(parts["train"], test_percent=0), "test": parts["test"]}


def folder_classes(root: Path) -> tuple[str, ...]:
    """The classes of an image folder, numbered as by `load_folder`. Raises JobError if there are fewer than two."""
    return _class_names(list(_part_folders(root).values()) or [root])


def _part_folders(root: Path) -> dict[Part, Path]:
    """`val/` is the test part if there is no `test/`, as in ImageNet's layout."""
    folders = {part: root / part for part in PARTS}
    validation = root / _VALIDATION
    # A class may have that name; its folder contains images.
    if not folders["test"].is_dir() and validation.is_dir() and any(entry.is_dir() for entry in _entries(validation)):
        folders["test"] = validation
    return {part: folder for part, folder in folders.items() if folder.is_dir()}


def _class_names(folders: Sequence[Path]) -> tuple[str, ...]:
    names = {entry.name for folder in folders for entry in _entries(folder) if entry.is_dir()}
    if len(names) < 2:
        raise JobError(f"{folders[0]} has {len(names)} class folders, at least 2 are needed: <class>/<image>.jpg")
    return tuple(sorted(names))


def _folder_samples(folder: Path, labels: Sequence[str]) -> list[Sample]:
    return [
        Sample(str(path.relative_to(folder)), index, _file_sha256(path), path)
        for index, label in enumerate(labels)
        if (folder / label).is_dir()
        for path in _entries(folder / label)
        if path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise JobError(
            f"cannot read the folder {folder}: {error.strerror}; check the path and its permissions"
        ) from error


def _checked(dataset: Dataset) -> Dataset:
    present = {sample.label for samples in dataset.parts.values() for sample in samples}
    empty = [label for index, label in enumerate(dataset.labels) if index not in present]
    if empty:
        raise JobError(f"data set {dataset.name} has no images of {some(empty)}; add some or remove the folder")
    return dataset


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise JobError(f"cannot read {path}: {error.strerror}; check the file and its permissions") from error
