"""Where images come from, how they are split, what is drawn, and what is said when they are not there."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFont, features

from convoy.models.checkpoint import read_checkpoint_header
from convoy.models.datasets import (
    CIFAR10_LABELS,
    GLYPH_LABELS,
    is_flat_folder,
    load,
    load_cifar10,
    load_flat_folder,
    load_folder,
    load_glyphs,
    source_labels,
)
from convoy.models.errors import JobError, UsageError
from convoy.models.glyphs import faces
from convoy.models.glyphs.__main__ import main
from convoy.models.glyphs.drawing import CHARACTERS, draw
from convoy.models.glyphs.faces import FAMILIES, installed_faces
from convoy.models.glyphs.glyph_set import GlyphSet, drawn
from convoy.models.images import preprocess
from convoy.models.samples import PARTS, Dataset, Part, Sample, decode, encode_png, split_by_content
from convoy.models.spec import ImageSpec
from tests.support.stores import ROOT

TINY = ImageSpec(
    height=4,
    width=4,
    channels=3,
    resize_mode="exact",
    resize_px=4,
    interpolation="bilinear",
    antialias=True,
    mean=(0.5,) * 3,
    std=(0.5,) * 3,
    front="uint8_nhwc",
)


def pixels(seed: int, side_px: int = 4) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, (side_px, side_px, 3), np.uint8)


def sample(seed: int, label: int = 0) -> Sample:
    content = pixels(seed)
    return Sample(f"s{seed}", label, hashlib.sha256(content.tobytes()).hexdigest(), content)


def write_images(folder: Path, count: int, first_seed: int = 0) -> None:
    folder.mkdir(parents=True)
    for seed in range(first_seed, first_seed + count):
        (folder / f"{seed}.png").write_bytes(encode_png(pixels(seed)))


def hashes(dataset: Dataset, part: Part) -> set[str]:
    return {member.sha256 for member in dataset.parts[part]}


# --- the split


@given(st.lists(st.integers(0, 50), max_size=60), st.randoms())
def test_the_split_ignores_order_and_keeps_equal_images_together(seeds: list[int], random: Any) -> None:
    members = [sample(seed) for seed in seeds]
    shuffled = random.sample(members, len(members))
    once, again = split_by_content(members), split_by_content(shuffled)
    assert sum(len(part) for part in once.values()) == len(members)
    for part in PARTS:
        assert {m.sha256 for m in once[part]} == {m.sha256 for m in again[part]}
        assert {m.sha256 for m in once[part]}.isdisjoint(m.sha256 for p in PARTS if p != part for m in once[p])


# --- labels


def dataset_of(*labels: str) -> Dataset:
    """With one image of each in the training part alone."""
    members = [sample(seed, seed) for seed in range(len(labels))]
    return Dataset("d", labels, {"train": members, "calibration": [], "test": []})


def test_classes_that_do_not_match_and_parts_that_are_empty_are_named() -> None:
    with pytest.raises(JobError, match="classes unknown to the model: dog; rename or remove them, or map them"):
        dataset_of("cat", "dog").in_order_of(("cat", "horse"))
    with pytest.raises(JobError, match=r"no test images; add images or make the folder test/"):
        dataset_of("cat", "dog").part("test")


@pytest.mark.parametrize(
    ("own", "wanted", "known_as", "found"),
    [
        (("dog", "horse"), ("bird", "cat", "dog", "horse"), {}, [2, 3]),  # some of the model's classes
        # Called otherwise, and several are one.
        (("cat", "n02", "n03"), ("dog", "cat"), {"n02": "dog", "n03": "cat", "n99": "dog"}, [1, 0, 1]),
    ],
)
def test_a_data_sets_classes_are_found_among_the_models(own: Any, wanted: Any, known_as: Any, found: list[int]) -> None:
    matched = dataset_of(*own).in_order_of(wanted, known_as)
    assert matched.labels == wanted
    assert [member.label for member in matched.parts["train"]] == found


def test_imagenets_val_is_the_test_part_unless_there_is_one(tmp_path: Path) -> None:
    for part, first in (("train", 0), ("val", 40)):
        for index, label in enumerate(("cat", "dog")):
            write_images(tmp_path / part / label, 10, first + 10 * index)
    dataset = load_folder(tmp_path)
    assert (len(dataset.part("test")), len(dataset.part("train")) + len(dataset.part("calibration"))) == (20, 20)
    write_images(tmp_path / "test" / "cat", 3, 90)
    assert len(load_folder(tmp_path).part("test")) == 3


def test_an_unknown_source_is_a_usage_error() -> None:
    with pytest.raises(
        UsageError, match="no data set or folder 'digitz'; use one of digits, cifar10, glyphs, or a folder"
    ):
        load("digitz")


# --- decoding


def test_decoding_goes_through_the_one_preprocessing_and_reports_progress() -> None:
    report = Mock()
    part = decode([sample(1, 1), sample(2, 0)], TINY, report)
    assert np.array_equal(part.images[0], preprocess(encode_png(pixels(1)), TINY))
    assert part.labels.tolist() == [1, 0]
    assert part.skipped == ()
    assert report.mock_calls == [call(1, 2), call(2, 2)]


def test_few_broken_images_are_skipped_and_named_many_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    broken = Sample("broken.png", 0, "0" * 64, tmp_path / "broken.png")
    good = [sample(seed, label=1) for seed in range(99)]
    part = decode([broken, *good], TINY)
    assert part.skipped == ("broken.png",)
    assert part.images.shape == (99, 4, 4, 3)
    assert part.labels.tolist() == [1] * 99
    with pytest.raises(JobError, match=r"1 of 51 images cannot be read: broken.png; remove or repair"):
        decode([broken, *good[:50]], TINY)


# --- folders


def test_a_folder_of_classes_is_split_by_content(tmp_path: Path) -> None:
    write_images(tmp_path / "dog", 40)
    write_images(tmp_path / "cat", 40, first_seed=100)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    dataset = load(str(tmp_path))
    assert dataset.labels == ("cat", "dog")
    assert sum(len(dataset.parts[part]) for part in PARTS) == 80
    assert {member.label for member in dataset.part("train")} == {0, 1}
    assert dataset.part("test")[0].encoded().startswith(b"\x89PNG")


def test_a_missing_calibration_part_is_taken_from_train_alone(tmp_path: Path) -> None:
    for name, seed in (("cat", 0), ("dog", 1000)):
        write_images(tmp_path / "train" / name, 50, first_seed=seed)
        write_images(tmp_path / "test" / name, 5, first_seed=seed + 500)
    dataset = load_folder(tmp_path)
    assert len(dataset.part("train")) + len(dataset.part("calibration")) == 100
    assert len(dataset.part("test")) == 10
    assert hashes(dataset, "train").isdisjoint(hashes(dataset, "calibration"))


def test_an_empty_folder_says_what_belongs_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"cannot read the folder .*No such file"):
        load_folder(tmp_path / "gone")
    with pytest.raises(JobError, match=r"0 class folders, at least 2 are needed: <class>/<image>.jpg"):
        load_folder(tmp_path)
    write_images(tmp_path / "cat", 3)
    (tmp_path / "dog").mkdir()
    with pytest.raises(JobError, match="has no images of dog; add some or remove the folder"):
        load_folder(tmp_path)


# --- the built-in sources


@pytest.mark.slow
def test_the_digits_are_split_once_and_for_all() -> None:
    dataset = load("digits")
    assert [len(dataset.parts[part]) for part in PARTS] == [1208, 199, 390]
    # Bundles and checkpoints name these hashes: a change here means that they were trained on our test images.
    assert dataset.part_sha256("test") == "517234bdcfccab8d85506c137aae390d23f89999ad20a652554b9438f582f004"
    for part in PARTS:
        assert {member.label for member in dataset.parts[part]} == set(range(10))
        for other in PARTS:
            assert part == other or hashes(dataset, part).isdisjoint(hashes(dataset, other))


@pytest.mark.slow
def test_the_shipped_images_are_what_their_maker_writes() -> None:
    from tests.data.make_digits import ROOT, shipped_images

    for path, member in shipped_images().items():
        with Image.open(ROOT / path) as image:
            assert np.array_equal(np.asarray(image), member.content)


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch, images_per_file: int = 20) -> None:
    """The five training batches, the test batch and the names, as the original files are.

    torchvision knows the originals by their MD5; for the test it is told those of the small files.
    """
    from torchvision.datasets import CIFAR10

    folder = root / CIFAR10.base_folder
    folder.mkdir(parents=True)

    def write(name: str, content: dict[str, Any]) -> str:
        pickled = pickle.dumps(content, protocol=2)
        (folder / name).write_bytes(pickled)
        return hashlib.md5(pickled).hexdigest()

    def batch(name: str, seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        data = rng.integers(0, 256, (images_per_file, 3 * 32 * 32), np.uint8)
        labels = [index % 10 for index in range(images_per_file)]
        return [name, write(name, {"data": data, "labels": labels, "batch_label": name, "filenames": []})]

    trains = [batch(name, seed) for seed, (name, _) in enumerate(CIFAR10.train_list)]
    tests = [batch(name, 99) for name, _ in CIFAR10.test_list]
    names = write("batches.meta", {"label_names": list(CIFAR10_LABELS), "num_cases_per_batch": images_per_file})
    monkeypatch.setattr(CIFAR10, "train_list", trains)
    monkeypatch.setattr(CIFAR10, "test_list", tests)
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": names})


@pytest.mark.slow
def test_cifar10_is_read_from_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    dataset = load("cifar10", tmp_path)
    assert dataset.labels == CIFAR10_LABELS
    assert len(dataset.part("train")) + len(dataset.part("calibration")) == 100
    assert len(dataset.part("test")) == 20
    # The files hold planes: all red values, then green, then blue.
    first = np.random.default_rng(99).integers(0, 256, (20, 3 * 32 * 32), np.uint8)[0]
    assert np.array_equal(dataset.part("test")[0].content, first.reshape(3, 32, 32).transpose(1, 2, 0))


@pytest.mark.slow
def test_damaged_cifar10_that_cannot_be_fetched_says_what_to_unpack_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.datasets import CIFAR10

    write_cifar10(tmp_path, monkeypatch)
    (tmp_path / CIFAR10.base_folder / "data_batch_3").write_bytes(b"half a file")

    monkeypatch.setattr(CIFAR10, "download", Mock(side_effect=OSError("Name or service not known")))
    with pytest.raises(JobError, match=r"Name or service not known.*unpack cifar-10-python.tar.gz") as caught:
        load_cifar10(tmp_path)
    assert "\n" not in str(caught.value)


def test_pictures_without_classes_calibrate_but_for_the_test_part_or_lie_in_their_parts(tmp_path: Path) -> None:
    write_images(tmp_path / "pictures", 60)
    assert is_flat_folder(str(tmp_path / "pictures"))
    dataset = load_flat_folder(tmp_path / "pictures")
    assert (dataset.labels, len(dataset.parts["train"])) == ((), 0)
    calibration, test = (dataset.part(part) for part in ("calibration", "test"))
    assert len(calibration) + len(test) == 60
    assert len(calibration) > 3 * len(test) > 0
    assert {sample.label for sample in (*calibration, *test)} == {-1}
    for index, part in enumerate(("calibration", "test")):
        write_images(tmp_path / "parts" / part, 4 + index, first_seed=10 * index)
    assert is_flat_folder(str(tmp_path / "parts"))
    dataset = load_flat_folder(tmp_path / "parts")
    assert {part: len(samples) for part, samples in dataset.parts.items()} == {"train": 0, "calibration": 4, "test": 5}
    write_images(tmp_path / "parts" / "test" / "cats", 1, first_seed=30)
    assert not is_flat_folder(str(tmp_path / "parts"))
    assert not is_flat_folder("digits")


FEW = GlyphSet(training_images=2)
# What FreeType 2.14.3, which comes with the Pillow of constraints.txt, and the fonts there make of seed 0.
FREETYPE = "2.14.3"
DIGEST = "bdba87b39a0c3d7a3565368241bf823dd81d875a78e104f39790f3fd1b0dc1a2"


# --- faces


def test_no_family_and_no_file_is_on_both_sides_and_every_face_has_every_character() -> None:
    learned, tested = (installed_faces(is_test=is_test) for is_test in (False, True))
    assert {face.family for face in learned}.isdisjoint(face.family for face in tested)
    every = [hashlib.sha256(face.path.read_bytes()).hexdigest() for face in (*learned, *tested)]
    assert len(set(every)) == len(every) == 97
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for face in (*learned, *tested):
        font = ImageFont.truetype(str(face.path), 24, layout_engine=ImageFont.Layout.BASIC)
        nothing = bytes(font.getmask("\ufffe"))
        assert all(any(found) and found != nothing for found in (bytes(font.getmask(one)) for one in CHARACTERS))


def test_fonts_that_are_missing_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find = faces.importlib.util.find_spec
    monkeypatch.setattr(faces.importlib.util, "find_spec", lambda name: None if name == "font_lato" else find(name))
    with pytest.raises(JobError, match=r"not installed \(font-lato\); .*pip install .*\[glyphs\]"):
        installed_faces(is_test=False)


# --- drawing


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the few are kept."""
    folder = tmp_path_factory.mktemp("glyphs")
    load_glyphs(folder, FEW)
    return folder


def test_a_seed_means_the_same_bytes_everywhere(cache: Path) -> None:
    whole = hashlib.sha256()
    for part, images in drawn(FEW, cache).items():
        whole.update(part.encode() + images.tobytes())
    if features.version("freetype2") != FREETYPE:
        pytest.skip(f"the digest is of FreeType {FREETYPE}")
    assert whole.hexdigest() == DIGEST


def test_another_seed_part_or_size_draws_other_pictures_and_fewer_are_the_first_ones() -> None:
    some = installed_faces(is_test=True)[:3]
    many = draw("g", some, 200, 5, 0, 32, is_grey=False)
    assert many.shape == (200, 32, 32, 3)
    assert np.array_equal(many[:7], draw("g", some, 7, 5, 0, 32, is_grey=False))
    assert len({one.tobytes() for one in many}) == 200
    for seed, stream in ((6, 0), (5, 1)):
        assert not np.array_equal(many[:7], draw("g", some, 7, seed, stream, 32, is_grey=False))
    assert draw("g", some, 3, 5, 0, 64, is_grey=False).shape == (3, 64, 64, 3)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"px": 31}, "16 to 128 pixels per side, an even number, not 31"),
        ({"px": 256}, "not 256"),
        ({"training_images": 0}, "1 to 100000 training images of each character, not 0"),
        ({"seed": -1}, "seed of glyphs"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wanted: dict[str, int], message: str) -> None:
    with pytest.raises(JobError, match=message):
        GlyphSet(**wanted)


# --- the set


def test_glyphs_are_a_data_set_of_62_classes_in_the_order_of_folders(cache: Path) -> None:
    dataset = load("glyphs:2", cache)
    assert dataset.labels == GLYPH_LABELS == source_labels("glyphs:3") == source_labels("glyphs")
    assert list(GLYPH_LABELS) == sorted(GLYPH_LABELS)
    every = {part: {sample.sha256 for sample in samples} for part, samples in dataset.parts.items()}
    assert {part: len(found) for part, found in every.items()} == {"train": 2 * 62, "calibration": 62, "test": 62}
    assert len(set().union(*every.values())) == 4 * 62
    with pytest.raises(UsageError, match="no data set or folder 'glyphs:many'"):
        load("glyphs:many")


def test_what_was_drawn_is_kept_and_drawn_again_only_where_it_is_not_whole(tmp_path: Path, cache: Path) -> None:
    (kept,) = cache.iterdir()
    spoilt = Path(shutil.copy(kept, tmp_path))
    before = spoilt.stat()
    expected = load_glyphs(tmp_path, FEW).part_sha256("test")
    assert spoilt.stat().st_ino == before.st_ino
    spoilt.write_bytes(spoilt.read_bytes()[:-1])
    assert load_glyphs(tmp_path, FEW).part_sha256("test") == expected
    assert spoilt.read_bytes() == kept.read_bytes()


def test_a_folder_of_pictures_is_the_same_data_set(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "glyphs"), "--images", "2"]) == 0
    found, wanted = load_folder(tmp_path / "glyphs"), load_glyphs(cache, FEW)
    assert found.labels == wanted.labels
    for part in PARTS:
        for one, other in zip(found.part(part), wanted.part(part), strict=True):
            assert one.label == other.label
            assert np.array_equal(np.asarray(Image.open(one.content)), other.content)
    assert main([str(tmp_path / "glyphs"), "--images", "2"]) == 1
    assert "already exists; choose a new folder" in capsys.readouterr().err
    assert main([str(tmp_path / "odd"), "--px", "33"]) == 1


@pytest.mark.long
@pytest.mark.slow
def test_convoy_train_learns_glyphs(tmp_path: Path) -> None:
    out = tmp_path / "glyphs.safetensors"
    command = ["train", "glyphs:8", "--epochs", "1", "--out", str(out), "--data-root", str(tmp_path), "--seed", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "convoy", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    header = read_checkpoint_header(out)
    assert (header.dataset, header.labels) == ("glyphs:8", GLYPH_LABELS)
    assert {name: part.images for name, part in header.split.items()} == {
        "train": 8 * 62,
        "calibration": 62,
        "test": 3 * 62,
    }
