"""The table of torchvision's models: it grows by rows, goes on where it stopped, and says what is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from export import zoo_table
from export.sources.torch_job import Description
from export.zoo_page import Row, read_table
from export.zoo_table import make_table, random_picture, try_model
from models.errors import JobError
from models.spec import ImageSpec

IMAGE = ImageSpec(
    height=56,
    width=56,
    channels=3,
    resize_mode="exact",
    resize_px=56,
    interpolation="bilinear",
    antialias=True,
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
    front="uint8_nhwc",
)


@pytest.fixture
def tried(monkeypatch):
    """The models that were tried, where torchvision has `small`, `middle` and `large`."""
    names: list[str] = []

    def one(name: str, threads: int) -> Row:
        if name == "middle" and names.count("middle") == 0:
            names.append(name)
            raise KeyboardInterrupt
        names.append(name)
        return Row(name, "8x8", True, True, 1e-6, 0.2, 0.03, fp32_ms=4.0, int8_ms=2.0)

    monkeypatch.setattr(zoo_table, "ask", lambda inquiry: Description(names=("small", "middle", "large")))
    monkeypatch.setattr(zoo_table, "try_model", one)
    return names


def test_an_interrupted_table_goes_on_where_it_stopped(tmp_path, tried):
    with pytest.raises(KeyboardInterrupt):
        list(make_table(tmp_path, threads=1))
    assert [row.model for row in read_table(tmp_path).rows] == ["small"]
    assert "Not tried yet (2): middle, large." in (tmp_path / "zoo-table.md").read_text()
    assert [row.model for row in make_table(tmp_path, threads=1)] == ["middle", "large"]
    assert tried == ["small", "middle", "middle", "large"]
    assert list(make_table(tmp_path, threads=1)) == []
    page = (tmp_path / "zoo-table.md").read_text()
    assert "3 of 3 exported, 3 verified, 3 quantised." in page
    assert "| large | 8x8 | yes | yes (1e-06) | 0.2 | yes (0.03) | int8, 2.00 ms (2.00x) |" in page
    assert "Not tried yet (0): none." in page


def test_only_the_named_models_are_tried(tmp_path, tried):
    assert [row.model for row in make_table(tmp_path, threads=1, only=["large"])] == ["large"]


def test_what_cannot_be_exported_is_a_row_that_says_why(monkeypatch):
    def refuse(inquiry: object) -> Description:
        raise JobError("the operator aten.x has no ONNX form")

    monkeypatch.setattr(zoo_table, "ask", refuse)
    row = try_model("resnet18", threads=1)
    assert (row.exported, row.verified, row.why) == (False, False, "the operator aten.x has no ONNX form")
    assert row.fastest == "-"
    json.dumps(row.summary())


def test_pictures_are_the_same_each_time_and_differ_among_each_other():
    first, second = (random_picture(IMAGE, seed) for seed in (0, 1))
    np.testing.assert_array_equal(first, random_picture(IMAGE, 0))
    assert (first.shape, first.dtype) == ((56, 56, 3), np.uint8)
    # Averaged over a quarter of the picture, noise would be the same grey everywhere.
    assert np.abs(first[:28, :28].mean(axis=(0, 1)) - second[:28, :28].mean(axis=(0, 1))).max() > 10
