"""The report shows what the manifest says, escapes all of it, and needs nothing but itself."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from export_fixtures import IMAGE, make_quick, options, write_images, write_red_or_blue
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from report_fixtures import full_manifest

from convoy.app.engines.measure import limit, share_of_limit
from convoy.export import command
from convoy.export.data import ImageSet
from convoy.export.profiling.roofline import Operator, count_work, flop
from convoy.export.progress import SILENT
from convoy.export.proof.outcomes import Outcomes
from convoy.export.report.mistakes import MOST_IN_MATRIX, MOST_PICTURES, find_mistakes, picture_of
from convoy.export.report.page import render
from convoy.models.bundle import MANIFEST, REPORT, LatencyPoint, Mistakes, Roofline, open_bundle
from convoy.models.errors import BundleError
from convoy.models.samples import Sample, encode_png
from convoy.models.spec import TensorSpec

IMAGES = TensorSpec("images", "UINT8", IMAGE.tensor_shape)
ROOF = Roofline("here", gflop_per_sample=2, mb_per_sample=20, weights_mb=40, device_gflop_per_s=100, device_gb_per_s=10)
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """The page's tags, attributes and text; fails on a tag that is closed and not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def test_the_page_tells_the_whole_story():
    text = Page(render(full_manifest())).text
    for words in (
        "Accuracy against time",
        "Latency over batch size",
        "Throughput over batch size",
        "Recall per class",
        "Roofline",
        "48 of 60 operators in int8 (80 %)",
        "first.layer",
        "What int8-cpu.onnx loses with more layers kept",
        "2.25 to 2.44",
        "0.97",
        "ranges of int8-cpu.onnx entropy",
        "some-device / 2 threads",
        "ab" * 32,
    ):
        assert words in text, words


def test_the_page_is_whole_and_loads_nothing():
    page = Page(render(full_manifest()))
    assert page.open == []
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    attributes = {name for _, given in page.tags for name in given}
    assert not {"href", "srcset", "action"} & attributes
    sources = [given["src"] for _, given in page.tags if "src" in given]
    assert sources
    assert all(str(source).startswith("data:image/png;base64,") for source in sources)
    assert not [name for name in attributes if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", render(full_manifest()))


def test_what_cannot_be_seen_is_told():
    page = Page(render(full_manifest()))
    charts = [given for tag, given in page.tags if tag == "svg" and given.get("role") == "img"]
    said = [str(chart["aria-label"]).partition(". ") for chart in charts]
    assert len(said) == 6
    assert len({name for name, *_ in said}) == 6
    assert all(name and about for name, _, about in said)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_no_text_becomes_markup(text):
    odd = f"<script>alert(1)</script>&\"'{text}$title"
    manifest = full_manifest(label=odd, source=odd, reason=odd)
    page = Page(render(manifest))
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    assert page.text.count("<script>alert(1)</script>&\"'") >= 3


def test_little_that_is_known_makes_a_short_page():
    manifest = full_manifest()
    bare = replace(manifest.variants[0], accuracy=None, latency=None)
    page = Page(render(replace(manifest, variants=(bare,), roofline=None)))
    assert "Not verified: there are no labels" in page.text
    assert "Roofline" not in page.text
    assert "Speed" not in page.text


def test_the_report_is_in_the_bundle_and_one_changed_byte_is_refused(tmp_path, monkeypatch):
    make_quick(monkeypatch)
    data = str(write_images(tmp_path / "images"))
    exported = command.export_bundle(options(tmp_path, calibrate=data, evaluate=data))
    manifest = open_bundle(exported).manifest
    assert REPORT in manifest.files
    assert manifest.roofline.device_gflop_per_s > 0
    page = (exported / REPORT).read_text(encoding="utf-8")
    others = {name: record for name, record in manifest.files.items() if name != REPORT}
    assert page == render(replace(manifest, files=others))
    (exported / REPORT).write_text(page.replace("colours", "colors", 1), encoding="utf-8")
    with pytest.raises(BundleError, match=r"report.html"):
        open_bundle(exported)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "work"),
    [
        # The first convolution of ResNet: 118 million multiplications.
        ("Conv", [(1, 3, 224, 224), (64, 3, 7, 7)], (1, 64, 112, 112), 2 * 118_013_952),
        ("Conv", [(1, 32, 8, 8), (32, 1, 3, 3)], (1, 32, 8, 8), 2 * 9 * 32 * 64),
        ("ConvTranspose", [(1, 8, 4, 4), (8, 3, 2, 2)], (1, 3, 8, 8), 2 * 8 * 16 * 12),
        ("Gemm", [(1, 512), (1000, 512)], (1, 1000), 2 * 512_000),
        ("MatMul", [(1, 7, 512), (512, 9)], (1, 7, 9), 2 * 7 * 512 * 9),
        ("Relu", [(1, 8, 8)], (1, 8, 8), 64),
        ("GlobalAveragePool", [(1, 2, 8, 8)], (1, 2, 1, 1), 128),
        ("Reshape", [(1, 64)], (8, 8), 0),
    ],
)
def test_products_are_counted_exactly(kind, inputs, output, work):
    assert flop(Operator("", kind, tuple(inputs), (output,), 0, 0)) == work


def test_the_work_of_a_graph_is_that_of_one_sample(tmp_path):
    work = count_work(write_red_or_blue(tmp_path / "fp32.onnx"), (IMAGES,))
    scaling, conv, relu, pool, head = 2 * 192, 2 * 3 * 128, 128, 128, 8
    # The runtime may fold the scaling, which adds nothing here.
    assert work.flop in (scaling + conv + relu + pool + head, 192 + conv + relu + pool + head)
    assert work.weight_bytes >= 4 * (2 * 3 + 2 + 2 * 2 + 2)
    assert work.activation_bytes >= 192 + 4 * (128 + 2 + 2)


def test_the_limit_is_the_larger_of_arithmetic_and_memory_and_there_is_none_where_no_rate_was_measured():
    single = limit(ROOF, "fp32", 1)
    assert (single.least_ms, single.bound_by, single.flop_per_byte) == (20, "arithmetic", pytest.approx(2000 / 60))
    assert limit(ROOF, "fp32", 10).least_ms == 200
    narrow = limit(replace(ROOF, device_gb_per_s=1), "fp32", 1)
    assert (narrow.least_ms, narrow.bound_by) == (60, "memory")
    assert limit(ROOF, "int8", 1) is limit(ROOF, "fp16", 1) is None
    assert limit(replace(ROOF, device_int8_gop_per_s=400), "int8", 1).least_ms == 5
    assert share_of_limit(ROOF, "fp32", LatencyPoint(1, 40, 40, 40)) == 0.5


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
    assert (f"25 of {classes} classes" in words) == (classes > 25)  # of the recall only the worst


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
    assert "Wrong predictions" not in older.text


def test_an_export_tells_its_mistakes(tmp_path, monkeypatch):
    make_quick(monkeypatch)
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
