"""Characters drawn from fonts: the same from a seed, tested on faces that nothing was learned from, kept once drawn."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFont, features

from convoy.models.checkpoint import read_checkpoint_header
from convoy.models.datasets import GLYPH_LABELS, load, load_folder, load_glyphs, source_labels
from convoy.models.errors import JobError, UsageError
from convoy.models.glyphs import faces
from convoy.models.glyphs.__main__ import main
from convoy.models.glyphs.drawing import CHARACTERS, draw
from convoy.models.glyphs.faces import FAMILIES, installed_faces
from convoy.models.glyphs.glyph_set import GlyphSet, drawn
from convoy.models.samples import PARTS
from tests.support.stores import ROOT

FEW = GlyphSet(training_images=2)
# What FreeType 2.14.3, which comes with the Pillow of constraints.txt, and the fonts there make of seed 0.
FREETYPE = "2.14.3"
DIGEST = "bdba87b39a0c3d7a3565368241bf823dd81d875a78e104f39790f3fd1b0dc1a2"


# --- faces


def test_no_family_and_no_file_is_on_both_sides() -> None:
    learned, tested = (installed_faces(is_test=is_test) for is_test in (False, True))
    assert {face.family for face in learned}.isdisjoint(face.family for face in tested)
    every = [hashlib.sha256(face.path.read_bytes()).hexdigest() for face in (*learned, *tested)]
    assert len(set(every)) == len(every) == 97
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_every_face_has_every_character() -> None:
    for face in (*installed_faces(is_test=False), *installed_faces(is_test=True)):
        font = ImageFont.truetype(str(face.path), 24, layout_engine=ImageFont.Layout.BASIC)
        nothing = bytes(font.getmask("\ufffe"))
        assert all(any(found) and found != nothing for found in (bytes(font.getmask(one)) for one in CHARACTERS))


def test_fonts_that_are_missing_are_named_with_what_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    find = faces.importlib.util.find_spec
    monkeypatch.setattr(faces.importlib.util, "find_spec", lambda name: None if name == "font_lato" else find(name))
    with pytest.raises(JobError, match=r"not installed \(font-lato\); pip install 'convoy-serve\[glyphs\]'"):
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
        ({"px": 31}, "16 to 128 pixels a side, an even number, not 31"),
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
    assert "is there already; name a new folder" in capsys.readouterr().err
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
