"""What the reference answers wrongly is counted, pictured, and shown so that it fits on any page."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from export_fixtures import IMAGE, fake_torch, make_quick, options, write_images
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from report_fixtures import full_manifest
from test_export_report import Page

from convoy.export import command
from convoy.export.data import ImageSet
from convoy.export.progress import SILENT
from convoy.export.proof.outcomes import Outcomes
from convoy.export.report.mistakes import MOST_IN_MATRIX, MOST_PICTURES, find_mistakes, picture_of
from convoy.export.report.page import render
from convoy.models.bundle import MANIFEST, Mistakes, open_bundle
from convoy.models.samples import Sample, encode_png


def answered(labels: list[int], top1: list[int], scores: list[float] | None = None) -> Outcomes:
    count = len(labels)
    own = np.array(scores if scores is not None else [1.0] * count)
    given = np.array(labels, np.int64), np.array(top1, np.int64)
    return Outcomes(*given, np.ones(count, bool), np.zeros(count), own, np.arange(count))


def grey_images(count: int, classes: int) -> ImageSet:
    """Image n is of the grey value n."""
    samples = tuple(
        Sample(f"{index}.png", 0, str(index), np.full((8, 8, 3), index % 256, np.uint8)) for index in range(count)
    )
    return ImageSet("greys", samples, IMAGE, tuple(f"class {index}" for index in range(classes)))


def pixels_of(picture: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture))))


pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=60)


@given(pairs)
def test_every_wrong_answer_is_counted_and_the_surest_are_pictured(drawn):
    labels, top1, scores = (list(one) for one in zip(*drawn, strict=True))
    found = find_mistakes(answered(labels, top1, scores), grey_images(len(drawn), 4))
    wrong = [(f"class {label}", f"class {best}", score) for label, best, score in drawn if label != best]
    assert found.images == len(wrong)
    counts = Counter(pair[:2] for pair in wrong)
    assert {(one.label, one.answered): one.images for one in found.confusions} == counts
    assert found.pairs == len(counts)
    assert [one.images for one in found.confusions] == sorted(counts.values(), reverse=True)
    surest = sorted((score for *_, score in wrong), reverse=True)[:MOST_PICTURES]
    assert [one.score for one in found.most_confident] == surest
    for one in found.most_confident:
        index = int(pixels_of(one.picture)[0, 0, 0])
        label, best, score = drawn[index]
        assert (one.label, one.answered, one.score) == (f"class {label}", f"class {best}", score)


@pytest.mark.parametrize("front", ["uint8_nhwc", "none"])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_is_what_the_network_sees_before_normalisation(front, channels):
    image = replace(IMAGE, channels=channels, mean=(0.5,) * channels, std=(0.1,) * channels, front=front)
    colour = np.zeros((8, 8, 3), np.uint8)
    colour[..., 0] = 200
    seen = pixels_of(picture_of(encode_png(colour), image))
    assert seen.shape == ((8, 8) if channels == 1 else (8, 8, 3))
    assert int(seen.reshape(-1)[0]) == (60 if channels == 1 else 200)


def test_broken_images_do_not_shift_the_pictures(tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    images = grey_images(200, 2)
    samples = (Sample("broken.png", 0, "broken", broken), *images.samples)
    with SILENT.step("") as step:
        (chunk,) = replace(images, samples=samples).chunks(step, 1000)
    assert chunk.positions.tolist() == list(range(1, 201))
    answers = np.tile(np.float32([1, 0]), (200, 1))
    labels = np.zeros(200, np.int64)
    labels[77] = 1
    outcomes = Outcomes.of(answers, answers, labels, "softmax", chunk.positions)
    (one,) = find_mistakes(outcomes, replace(images, samples=samples)).most_confident
    assert int(pixels_of(one.picture)[0, 0, 0]) == 77
    assert one.score == pytest.approx(1 / (1 + np.exp(-1)))


@pytest.mark.parametrize(
    ("activation", "answers", "scores"),
    [
        ("softmax", [[0, np.log(3)], [1000, 0]], [0.75, 1]),
        ("sigmoid", [[0, np.log(3)], [-np.log(3), -5]], [0.75, 0.25]),
        ("sigmoid", [[np.log(3)], [-np.log(3)]], [0.75, 0.75]),
        ("none", [[0.2, 0.8], [0.9, 0.1]], [0.8, 0.9]),
        ("none", [[0.8], [0.1]], [0.8, 0.9]),
    ],
)
def test_a_score_is_that_of_the_best_class(activation, answers, scores):
    given = np.array(answers, np.float32)
    outcomes = Outcomes.of(given, given, np.zeros(2, np.int64), activation)
    assert outcomes.scores == pytest.approx(scores)


def page_of(classes: int, mistakes: Mistakes | None = None, **changes: object) -> Page:
    manifest = full_manifest(classes=classes)
    return Page(render(replace(manifest, mistakes=mistakes or manifest.mistakes, **changes)))  # type: ignore[arg-type]


def charts_named(page: Page, name: str) -> list[dict[str, str | None]]:
    return [given for tag, given in page.tags if tag == "svg" and str(given.get("aria-label")).startswith(name)]


def test_few_classes_are_a_matrix_with_every_count():
    page = page_of(3)
    (matrix,) = charts_named(page, "Confusion matrix")
    assert "cat as cat: 374" in str(matrix["aria-label"])
    assert "class 2 as cat: 26" in str(matrix["aria-label"])
    assert "26 of 400 images of cat are answered as class 1" in page.text
    # As wide as the page lets it be, and no wider than it is drawn.
    width = float(str(matrix["viewbox"]).split()[2])
    assert re.fullmatch(rf"max-width: {1.25 * width:.0f}px", str(matrix["style"]))


@pytest.mark.parametrize("classes", [MOST_IN_MATRIX + 1, 62, 1000])
def test_many_classes_are_the_most_confused_pairs(classes):
    page = page_of(classes)
    assert not charts_named(page, "Confusion matrix")
    words = " ".join(page.text.split())
    assert "Most confused class answered as images cat class 1 26" in words
    assert f"and {classes - 15:,} more pairs" in words


def test_the_most_confident_mistakes_are_shown_with_their_pictures():
    page = page_of(3)
    pictures = [given for tag, given in page.tags if tag == "img"]
    assert [one["alt"] for one in pictures] == ["an image of cat", "an image of class 1", "an image of class 2"]
    assert (pixels_of(str(pictures[0]["src"]).partition(",")[2]) == (255, 0, 0)).all()
    assert "answered as class 1 with 99.0 %" in " ".join(page.text.split())


def test_no_mistakes_are_said_and_no_labels_are_not_spoken_of():
    assert "None: fp32 is right on all of the 1,200 images." in page_of(3, Mistakes(0, 0, (), ())).text
    manifest = full_manifest()
    older = Page(render(replace(manifest, mistakes=None)))
    assert "What is answered wrongly" not in older.text


def test_an_export_tells_its_mistakes(tmp_path, monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(command, "to_onnx", fake_torch)
    data = write_images(tmp_path / "images")
    (data / "test" / "blue" / "0.png").replace(data / "test" / "red" / "odd.png")
    folder = command.export_bundle(options(tmp_path, evaluate=str(data)))
    found = open_bundle(folder).manifest.mistakes
    assert (found.images, found.pairs) == (1, 1)
    (one,) = found.most_confident
    assert (one.label, one.answered) == ("red", "blue")
    seen = pixels_of(one.picture).reshape(-1, 3)
    expected = np.asarray(Image.open(data / "test" / "red" / "odd.png")).reshape(-1, 3)
    assert (seen == expected).all()
    assert one.picture in (folder / "report.html").read_text()
    assert (folder / MANIFEST).stat().st_size < 100_000
