"""The report shows what the manifest says, escapes all of it, and needs nothing but itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from export_fixtures import IMAGE, fake_torch, make_quick, options, write_images, write_red_or_blue
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import full_manifest

from convoy.app.engines.limits import limit, share_of_limit
from convoy.export import command
from convoy.export.profiling.roofline import Operator, count_work, flop, measure_roofline
from convoy.export.report.page import render
from convoy.export.variants.precision import REFERENCE
from convoy.export.variants.variant import opened
from convoy.models.bundle import REPORT, LatencyPoint, Roofline, open_bundle
from convoy.models.errors import BundleError
from convoy.models.spec import ModelSpec, TensorSpec

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
    assert "Not verified on labels" in page.text
    assert "Roofline" not in page.text
    assert "Speed" not in page.text


def test_many_classes_are_cut_to_the_worst():
    page = Page(render(full_manifest(classes=1000))).text
    assert "25 of 1000 classes" in page


@pytest.fixture
def exported(tmp_path, monkeypatch):
    make_quick(monkeypatch)
    monkeypatch.setattr(command, "to_onnx", fake_torch)
    data = str(write_images(tmp_path / "images"))
    return command.export_bundle(options(tmp_path, calibrate=data, evaluate=data))


def test_the_report_is_in_the_bundle_and_one_changed_byte_is_refused(exported):
    manifest = open_bundle(exported).manifest
    assert REPORT in manifest.files
    assert manifest.roofline.device_gflop_per_s > 0
    page = (exported / REPORT).read_text(encoding="utf-8")
    others = {name: record for name, record in manifest.files.items() if name != REPORT}
    assert page == render(replace(manifest, files=others))
    (exported / REPORT).write_text(page.replace("colours", "colors", 1), encoding="utf-8")
    with pytest.raises(BundleError, match=r"report.html"):
        open_bundle(exported)


def test_products_are_counted_exactly():
    def operator(kind: str, *inputs: tuple[int, ...], output: tuple[int, ...]) -> Operator:
        return Operator("", kind, inputs, (output,), 0, 0)

    # The first convolution of ResNet: 118 million multiplications.
    assert flop(operator("Conv", (1, 3, 224, 224), (64, 3, 7, 7), output=(1, 64, 112, 112))) == 2 * 118_013_952
    assert flop(operator("Conv", (1, 32, 8, 8), (32, 1, 3, 3), output=(1, 32, 8, 8))) == 2 * 9 * 32 * 64
    assert flop(operator("ConvTranspose", (1, 8, 4, 4), (8, 3, 2, 2), output=(1, 3, 8, 8))) == 2 * 8 * 16 * 12
    assert flop(operator("Gemm", (1, 512), (1000, 512), output=(1, 1000))) == 2 * 512_000
    assert flop(operator("MatMul", (1, 7, 512), (512, 9), output=(1, 7, 9))) == 2 * 7 * 512 * 9
    assert flop(operator("Relu", (1, 8, 8), output=(1, 8, 8))) == 64
    assert flop(operator("GlobalAveragePool", (1, 2, 8, 8), output=(1, 2, 1, 1))) == 128
    assert flop(operator("Reshape", (1, 64), output=(8, 8))) == 0


def test_the_work_of_a_graph_is_that_of_one_sample(tmp_path):
    work = count_work(write_red_or_blue(tmp_path / "fp32.onnx"), (IMAGES,))
    scaling, conv, relu, pool, head = 2 * 192, 2 * 3 * 128, 128, 128, 8
    # The runtime may fold the scaling, which adds nothing here.
    assert work.flop in (scaling + conv + relu + pool + head, 192 + conv + relu + pool + head)
    assert work.weight_bytes >= 4 * (2 * 3 + 2 + 2 * 2 + 2)
    assert work.activation_bytes >= 192 + 4 * (128 + 2 + 2)


def test_a_roofline_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("convoy.export.profiling.roofline._BUDGET_S", 0)
    write_red_or_blue(tmp_path / REFERENCE.file)
    spec = ModelSpec("m", (IMAGES,), (TensorSpec("logits", "FP32", (2,)),), 2, IMAGE, "softmax", ("red", "blue"))
    with opened(spec, [REFERENCE], tmp_path) as (fp32,):
        roof = measure_roofline(fp32, threads=1)
        assert roof.device_fingerprint == fp32.engine.info.device_fingerprint
    assert roof.device_int8_gop_per_s is not None
    assert min(roof.device_gflop_per_s, roof.device_int8_gop_per_s, roof.device_gb_per_s) > 0


def test_the_limit_is_the_larger_of_arithmetic_and_memory():
    single, many = limit(ROOF, "fp32", 1), limit(ROOF, "fp32", 10)
    assert (single.least_ms, single.bound_by, single.flop_per_byte) == (20, "arithmetic", pytest.approx(2000 / 60))
    assert many.least_ms == 200
    narrow = limit(replace(ROOF, device_gb_per_s=1), "fp32", 1)
    assert (narrow.least_ms, narrow.bound_by) == (60, "memory")


def test_there_is_no_limit_where_the_rate_was_not_measured():
    assert limit(ROOF, "int8", 1) is None
    assert limit(ROOF, "fp16", 1) is None
    fast = limit(replace(ROOF, device_int8_gop_per_s=400), "int8", 1)
    assert fast.least_ms == 5
    assert share_of_limit(ROOF, "fp32", LatencyPoint(1, 40, 40, 40)) == 0.5
