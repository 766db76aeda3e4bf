"""The table of torchvision's models: it grows by rows, goes on where it stopped, and says what is missing."""

from __future__ import annotations

import json

import numpy as np
import pytest

from convoy.export.sources.torch_job import Description
from convoy.export.zoo_table import builder, proof, table
from convoy.export.zoo_table.proof import random_picture
from convoy.export.zoo_table.rows import BuilderCell, Table, ZooRow, read_table, write_table
from convoy.export.zoo_table.table import make_table, try_builder, try_model
from convoy.models.errors import JobError
from convoy.models.spec import ImageSpec

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


BUILT = (BuilderCell("fp16", True, 24.0, 0.21), BuilderCell("int8", True, 14.9, 0.66, warnings=("scales to fp32",)))
NO_MEMORY = BuilderCell("int8", False, why="the builder's process died of SIGKILL")


@pytest.fixture
def tried(monkeypatch):
    """The models that were tried, where torchvision has `small`, `middle` and `large`, and TensorRT is installed."""
    names: list[str] = []
    monkeypatch.setattr(builder, "library", lambda: "TensorRT for RTX 1.7")

    def one(name: str, threads: int) -> ZooRow:
        if name == "middle" and names.count("middle") == 0:
            names.append(name)
            raise KeyboardInterrupt
        names.append(name)
        return row_of(name).with_builder(BUILT)

    monkeypatch.setattr(table, "ask", lambda inquiry: Description(names=("small", "middle", "large")))
    monkeypatch.setattr(table, "try_model", one)
    return names


@pytest.fixture
def built(monkeypatch):
    """The models and precisions that the builder was shown; `middle` stops the first run and is too much in INT8."""
    asked: list[tuple[str, list[str]]] = []

    def build(name, threads, recipes):
        asked.append((name, [recipe.precision for recipe in recipes]))
        if asked[-1] not in asked[:-1] and name == "middle":
            raise KeyboardInterrupt
        cells = (BUILT[0], NO_MEMORY) if name == "middle" else BUILT
        return [cell for cell in cells if cell.precision in asked[-1][1]]

    monkeypatch.setattr(table, "try_builder", build)
    return asked


def row_of(name: str) -> ZooRow:
    return ZooRow(name, "8x8", True, True, 1e-6, 0.2, 0.03, fp32_ms=4.0, int8_ms=2.0)


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
    assert "| large | 8x8 | yes | yes (1e-06) | 0.2 | yes (0.03) | int8, 2.00 ms (2.00x) | fp16 24.0 MB 0.2 s; " in page
    assert "Not tried yet (0): none." in page


def test_only_the_named_models_are_tried(tmp_path, tried):
    assert [row.model for row in make_table(tmp_path, threads=1, only=["large"])] == ["large"]


def test_rows_without_the_builder_get_that_alone_and_before_what_was_never_tried(tmp_path, tried, built):
    half = row_of("middle").with_builder(BUILT[:1])
    former = Table("a machine", {"torch": "1"}, (row_of("small"), half, ZooRow("broken", "", exported=False)))
    write_table(former, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        list(make_table(tmp_path, threads=1))
    rest = make_table(tmp_path, threads=1)
    assert next(rest) == half.with_builder([NO_MEMORY])
    assert built == [("small", ["fp16", "int8"]), ("middle", ["int8"]), ("middle", ["int8"])]
    table = read_table(tmp_path)
    # Nothing was timed, so the times are still of the machine and tools that they were.
    assert (table.machine, table.tools, table.builder) == ("a machine", {"torch": "1"}, "TensorRT for RTX 1.7")
    assert [row.with_builder(()).fp32_ms for row in table.rows] == [4.0, 4.0, None]
    assert tried == []
    assert [row.model for row in rest] == ["large"]
    assert read_table(tmp_path).machine != "a machine"


def test_the_page_counts_what_was_built_and_names_what_was_refused(tmp_path, tried, built):
    write_table(Table("", {}, (row_of("small"), row_of("middle").with_builder((BUILT[0], NO_MEMORY)))), tmp_path)
    list(make_table(tmp_path, threads=1, only=["small"]))
    page = (tmp_path / "zoo-table.md").read_text()
    assert "TensorRT for RTX 1.7, without a GPU, builds 2 of 2 in fp16 and 1 of 2 in int8." in page
    assert "| fp16 24.0 MB 0.2 s; int8 NO |" in page
    assert "Not built:\n\n- middle, int8: the builder's process died of SIGKILL\n" in page
    assert 'The builder\'s warnings, with the number of plans: "scales to fp32" (1).' in page


def test_without_tensorrt_the_table_is_made_and_the_builder_is_left_for_later(tmp_path, tried, built, monkeypatch):
    monkeypatch.setattr(builder, "library", lambda: "")
    write_table(Table("", {}, (row_of("small"),), "TensorRT for RTX 1.6"), tmp_path)
    assert list(make_table(tmp_path, threads=1, only=["small"])) == []
    assert (built, read_table(tmp_path).builder) == ([], "TensorRT for RTX 1.6")


@pytest.mark.parametrize("error", [JobError("aten.x has no ONNX form"), MemoryError()])
def test_what_cannot_be_made_is_a_cell_that_says_why(monkeypatch, error):
    def refuse(inquiry: object) -> Description:
        raise error

    monkeypatch.setattr(proof, "ask", refuse)
    (cell,) = try_builder("resnet18", 1, table.BUILT_FILES[:1])
    assert (cell.precision, cell.accepted, cell.why) == ("fp16", False, str(error) or "not enough memory")


def test_what_cannot_be_exported_is_a_row_that_says_why(monkeypatch):
    def refuse(inquiry: object) -> Description:
        raise JobError("the operator aten.x has no ONNX form")

    monkeypatch.setattr(proof, "ask", refuse)
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
